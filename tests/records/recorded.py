"""Steps made of their numbers, and a process without torch that records them, to be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from hookstats.numbers.blocks import COUNTERS, Drained, Layout, Part, Row
from hookstats.numbers.fields import FIELDS, ExponentBins, Site, Skipped, histogram_shape
from hookstats.records.places import started_at

ROOT = Path(__file__).parents[2]  # tests.conftest imports torch
SITES = 40
_CODE = """
import os, sys, time
import hookstats
from tests.records.recorded import drained
directory, steps, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
recording = hookstats.record(directory, ring_bytes=int(sys.argv[4]))
recording.begin({"rank": 0, "model": "made of numbers"})
log = os.open(sys.argv[6], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
first = int(sys.argv[5])
end = time.monotonic() + 120  # it does not outlive a test that failed for long
for step in range(first, first + steps):
    if time.monotonic() > end:
        break
    dropped = 0 if recording._ring is None else recording._ring.dropped
    recording.take(drained(step))
    if recording._ring is not None and recording._ring.dropped == dropped and not recording._stopped:
        os.write(log, b"%d\\n" % step)
    recording.findings()
    time.sleep(pause)
assert "torch" not in sys.modules
recording.close()
os.write(log, b"closed\\n")
"""


def layout(totals_only: bool, sites: int = SITES) -> Layout:
    """Sites of 1 and of 16 channels, one after another."""
    rows, offset = [], 0
    for number in range(sites):
        channels = 16 if number % 3 == 0 and not totals_only else 1
        bins = 0 if totals_only else histogram_shape(ExponentBins(), channels)[0]
        part = Part(0, offset, channels, bins)
        offset += part.size
        keeps, tensor = number % 3 == 0 and not totals_only, ("output", "grad_output")[number % 2]
        rows.append(Row(Site(f"layers.{number}", tensor), (part,), keeps, -1 if keeps else None, False))
    return Layout([0], rows, ExponentBins())


_LAYOUTS = {(totals, sites): layout(totals, sites) for totals in (False, True) for sites in (SITES, SITES + 2)}


def drained(step: int) -> Drained:
    """Always the same for a number; every fourth has channels; from 50 on there are two sites more."""
    where = _LAYOUTS[step % 4 > 0, SITES + 2 * (step >= 50)]
    draw = np.random.default_rng(step)
    block = np.zeros(where.sizes[0], np.int64)
    for number, row in enumerate(where.rows):
        part = row.parts[0]
        memory = block[part.offset : part.offset + part.size]
        fields = len(FIELDS) * part.channels
        memory[:fields] = draw.normal(3, 1, fields).view(np.int64)
        memory[: part.channels] = np.full(part.channels, 100.0).view(np.int64)
        memory[fields : fields + COUNTERS] = number % 7 > 0, number
        memory[fields + COUNTERS :] = draw.integers(0, 9, part.bins)
    rows = len(where.rows)
    scale = 8.0 if step % 5 == 0 else None
    overflowed = None if scale is None else step % 10 == 0
    hidden, readings = np.arange(rows) % 14 == 0, np.zeros(rows, np.int64)
    made = Drained(where, [block], step, 1.7e9 + step, {"loss": 1 / (1 + step)}, scale, overflowed, hidden, readings)
    if step % 6 == 0:
        made.skipped = {Site("layers.0", "output"): Skipped("a reason", 3 if step % 12 == 0 else None)}
    return made


def each(step: Any) -> list[Any]:
    """A rule, in a module without torch, as a writer imports it: of each step it says that it is one."""
    return [step.finding(f"step {step.number}", None, 1.0, 0.0, "critical", "This is a step.")]


def even(step: Any) -> list[Any]:
    """Another one."""
    return [step.finding("even", None, 1.0, 0.0, "note", "This step is even.")] if step.number % 2 == 0 else []


def start(
    directory: Path,
    steps: int = 1_000_000,
    pause: float = 0.0,
    ring_bytes: int = 1 << 20,
    first: int = 0,
    log: Path | None = None,
) -> subprocess.Popen[bytes]:
    """The process that records."""
    arguments = [str(directory), str(steps), str(pause), str(ring_bytes), str(first), str(log or f"{directory}.log")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", _CODE, *arguments], cwd=ROOT, env=environment)


def taken(directory: Path) -> list[int]:
    """The steps that the process knows to be in the ring, or beyond."""
    log = Path(f"{directory}.log")
    lines = log.read_text().split() if log.exists() else []
    return [int(line) for line in lines if line != "closed"]


def wait_for(condition: object, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, f"waited {seconds} s"
        time.sleep(0.005)


def writers(directory: Path) -> list[int]:
    """The processes that write into a directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"hookstats.records.writer" in words and any(word.startswith(os.fsencode(directory)) for word in words):
            found.append(int(path.parent.name))
    return found


def stop(pid: int) -> None:
    """No thread of it runs when this returns, until SIGCONT; the signal alone is not that yet."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: all(_state(thread) in "TZ" for thread in Path(f"/proc/{pid}/task").iterdir()))


def _state(thread: Path) -> str:
    try:
        return (thread / "stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return "Z"  # it has ended


def kill(pid: int) -> None:
    """It runs no more when this returns."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # of our own: until its last thread has ended
    except ChildProcessError:
        wait_for(lambda: started_at(pid) is None)
