"""The process that writes, as the training process sees it: started, and looked after."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hookstats.records.ring import Ring

# A file beside the script, or in the directory where it was started, may have the name of a module of Python's own,
# such as random.py: nothing is imported before the path is clean.
_CODE = """
import sys
_, path, *arguments = sys.argv
sys.path[:] = path.splitlines()
from hookstats.records.writer import main
main(*arguments)
"""


def _import_path() -> list[str]:
    """Return where this process finds its modules, Python's own first."""
    own = os.path.dirname(os.__file__)
    found = map(os.path.abspath, sys.path)
    return sorted(found, key=lambda path: not (path.startswith(own) and "-packages" not in path))


class WriterProcess:
    """A process of `hookstats.records.writer`, which outlives the one that trains until the ring is empty.

    tell: is given what the user should know. It is started again once, if it has died after it had done something.
    """

    def __init__(
        self, folder: Path, attempt: int, wake: int, judges: Mapping[str, Any], tell: Callable[[str, str], object]
    ) -> None:
        """folder: of the rank. wake: an eventfd that it polls. judges: rules and sinks, for JSON."""
        self._folder = folder
        self._wake = wake
        self._arguments = [str(attempt), str(wake), json.dumps(judges)]
        self._tell = tell
        self._process: subprocess.Popen[bytes] | None = None
        self._was_restarted = False
        self._judged_at_start = 0

    @property
    def pid(self) -> int | None:
        """The process number of the writer; None: it was not started."""
        return None if self._process is None else self._process.pid

    @property
    def returncode(self) -> int | None:
        """None: it runs, as far as `wait` and `look_after` have seen, or was not started."""
        return None if self._process is None else self._process.returncode

    def look_after(self, ring: Ring) -> None:
        """Starts it where it does not run. OSError for what it said before it ended; RuntimeError if it ends twice."""
        if ring.failed:
            raise OSError(ring.failure)
        if self._process is None:
            return self._start(ring)
        status = self._process.poll()
        if status is None or (status == 0 and ring.closed):  # all is done, and was seen between two looks
            return
        if ring.failed:
            raise OSError(ring.failure)
        if ring.judged == self._judged_at_start and self._was_restarted:
            raise RuntimeError(f"the writer ended twice with {status}, see {self._folder / 'writer.log'}")
        self._was_restarted = True
        self._tell("writer", f"the writer of {self._folder} ended with {status}; a new one goes on where it stopped")
        self._start(ring)

    def _start(self, ring: Ring) -> None:
        self._judged_at_start = ring.judged
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "ARROW_DEFAULT_MEMORY_POOL": "system",  # and large pieces go back to the system when they are freed
            "MALLOC_MMAP_THRESHOLD_": "262144",
        }
        with open(self._folder / "writer.log", "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE, "\n".join(_import_path()), self._folder, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=environment,
                pass_fds=[self._wake],
                start_new_session=True,
            )

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, or so long."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
