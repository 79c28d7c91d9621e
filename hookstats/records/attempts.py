"""An attempt: a process that recorded into a rank's folder, and how that ended, in ``a0003.json``.

The process writes it when it begins, and the writer once more when the attempt has ended. While it has not, the process
holds a lock on it.
"""

from __future__ import annotations

import os
import re
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hookstats._locks import Lock, is_locked
from hookstats.records import files
from hookstats.records.endings import Signals
from hookstats.records.errors import Damaged
from hookstats.records.parts import list_parts
from hookstats.records.places import RING, local_folder

_NAME = re.compile(r"a(\d{4,9})\.json")
_ANY = re.compile(r"a(\d{4,9})\D.*|ring\.(\d{4,9})")


@dataclass(frozen=True)
class Attempt:
    """``ended``: None, "closed", or a sentence: "died: RuntimeError: ...", "ended: without detach". See `is_death`."""

    attempt: int
    settings: dict[str, Any] = field(default_factory=dict)
    begun: float = 0.0  # seconds since the epoch
    ended: str | None = None
    dropped: int = 0  # steps for which the ring had no room
    ring: str = ""  # its path
    noted: str = ""  # the file in which a signal is noted, see `Signals`
    host: str = ""
    boot: str = ""  # see `machine`
    pid: int = 0
    started: int | None = None  # see `read_start_time`
    rules: list[dict[str, Any]] = field(default_factory=list)  # see `rule_to_json`

    def write(self, folder: Path) -> None:
        files.write_json(path_of(folder, self.attempt), vars(self))

    @property
    def is_of_this_machine(self) -> bool:
        return self.host == socket.gethostname() or self.boot == _boot() != ""


def path_of(folder: Path, attempt: int) -> Path:
    return folder / f"a{attempt:04d}.json"


def read_attempt(folder: Path, attempt: int) -> Attempt:
    """FileNotFoundError without a file; Damaged where it is not what was written."""
    path = path_of(folder, attempt)
    body = files.read_json(path)
    try:
        found = Attempt(**body)
    except TypeError as error:
        raise Damaged(path, f"expected an attempt, got {error}") from None
    if found.attempt != attempt:
        raise Damaged(path, f"expected the attempt of its name, got {found.attempt}")
    return found


def attempts_in(folder: Path) -> list[Attempt]:
    """Return all attempts that left something, ascending. Of one whose file is damaged, only the number is known."""
    with_steps = {name.attempt for parts in list_parts(folder).counting.values() for name in parts}
    found = []
    for number in sorted({*_numbers(folder), *with_steps}):
        try:
            found.append(read_attempt(folder, number))
        except (FileNotFoundError, Damaged):
            if number in with_steps:
                found.append(Attempt(number, ended="its file cannot be read"))
    return found


def open_attempts(folder: Path) -> list[int]:
    """Return the attempts that have not ended. One whose file is damaged is among them: nobody knows."""
    found = []
    for number in sorted(_numbers(folder)):
        with suppress(FileNotFoundError):
            try:
                if read_attempt(folder, number).ended is None:
                    found.append(number)
            except Damaged:
                found.append(number)
    return found


def next_attempt(folder: Path) -> int:
    """A number that no file has, whatever became of it."""
    names = (path.name for path in (*folder.glob("*"), *folder.glob("*/*")))
    return 1 + max((int(match[1] or match[2]) for text in names if (match := _ANY.fullmatch(text))), default=0)


def _numbers(folder: Path) -> set[int]:
    with suppress(FileNotFoundError, NotADirectoryError):
        return {int(match[1]) for text in os.listdir(folder) if (match := _NAME.fullmatch(text))}
    return set()


def begin_attempt(folder: Path, settings: dict[str, Any], rules: list[dict[str, Any]]) -> tuple[Attempt, Lock, Signals]:
    """Take the number of a new attempt, say what others must know of it, and hold the lock that shows that it lives."""
    number = next_attempt(folder)
    while True:
        try:
            os.close(os.open(path_of(folder, number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            break
        except FileExistsError:
            number += 1
    pid = os.getpid()
    ring = str(local_folder(folder, number) / f"{RING}{number:04d}")
    here = machine()
    signals = Signals.begin(folder / f"a{number:04d}.sigterm")
    own = Attempt(
        number,
        settings,
        time.time(),
        ring=ring,
        noted=str(signals.path),
        pid=pid,
        started=read_start_time(pid),
        rules=rules,
        host=here["host"],
        boot=here["boot"],
    )
    own.write(folder)
    return own, Lock(os.open(path_of(folder, number), os.O_RDWR | files.NO_LINK)), signals


def end_attempt(folder: Path, attempt: Attempt, ended: str, dropped: int, told: dict[str, Any]) -> Attempt:
    """Say how it ended, and in its settings what is known since."""
    done = replace(attempt, ended=ended, dropped=dropped, settings={**attempt.settings, **told})
    done.write(folder)
    return done


def is_training(folder: Path, number: int, attempt: Attempt | None) -> bool:
    """Tell whether the process of an attempt lives. attempt: what its file says; None: it cannot be read."""
    if attempt and attempt.is_of_this_machine and attempt.started == read_start_time(attempt.pid) is not None:
        return True
    try:
        file = os.open(path_of(folder, number), os.O_RDONLY | files.NO_LINK)
    except OSError:
        return False
    try:
        return is_locked(file)
    finally:
        os.close(file)


def machine() -> dict[str, str]:
    """Return what tells this machine from others: its name, and what its kernel drew when it started.

    A container has a name of its own, and another one each time it is made anew; its kernel is that of its machine.
    """
    return {"host": socket.gethostname(), "boot": _boot()}


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def read_start_time(pid: int) -> int | None:
    """Return when a process started, in ticks since the machine did: a later one differs. None: it is gone."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if told[0] in "ZX" else int(told[19])  # one that its parent has not asked for runs no more
    except (OSError, ValueError, IndexError):
        return None
