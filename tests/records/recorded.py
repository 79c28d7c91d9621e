"""Steps made of their numbers, and a process without torch that records them, to be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from hookstats.numbers.fields import FIELDS, ExponentBins, Site, Skipped, histogram_shape
from hookstats.numbers.frame import Sites, StepFrame
from hookstats.rules import Finding, Memory, Step, rule
from tests.frames import Measured, frame_of

ROOT = Path(__file__).parents[2]  # tests.conftest imports torch
SITES = 40
_CODE = """
import os, signal, sys, time
import hookstats
from tests.records.recorded import measured
directory, steps, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
recording = hookstats.record(directory, ring_bytes=int(sys.argv[4]))
recording.begin({"rank": 0, "model": "made of numbers"})
log = os.open(sys.argv[6], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
first, stops = int(sys.argv[5]), set(map(int, sys.argv[7].split()))
for step in range(first, first + steps):
    if time.process_time() > 60:  # it does not outlive a test that failed for long
        break
    dropped = 0 if recording._ring is None else recording._ring.dropped
    recording.take(measured(step))
    if recording._ring is not None and recording._ring.dropped == dropped and not recording._stopped:
        os.write(log, b"%d\\n" % step)
    else:
        os.write(log, b"lost\\n")
    recording.findings()
    if step in stops:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(pause)
assert "torch" not in sys.modules
recording.close()
os.write(log, b"closed\\n")
"""


_SITES: dict[tuple[bool, int], Sites] = {}  # of a step of totals or not, and of so many sites


def measured(number: int, seed: int | None = None) -> StepFrame:
    """Always the same for a number; every fourth has channels; from 50 on there are two sites more.

    seed: a step whose content it has, with another number.
    """
    step = number if seed is None else seed
    totals_only, sites = step % 4 > 0, SITES + 2 * (step >= 50)
    draw, made = np.random.default_rng(step), []
    for i in range(sites):
        keeps = i % 3 == 0 and not totals_only
        channels = 16 if keeps else 1
        state = draw.normal(3, 1, (len(FIELDS), channels))
        state[0] = 100.0
        counts = None if totals_only else draw.integers(0, 9, histogram_shape(ExponentBins(), channels))
        site = Site(f"layers.{i}", ("output", "grad_output")[i % 2])
        made.append(Measured(site, state, counts, i % 7 > 0, keeps, -1 if keeps else None))
    scale = 8.0 if step % 5 == 0 else None
    frame = frame_of(
        made,
        ExponentBins(),
        _SITES.get((totals_only, sites)),
        step,
        time=1.7e9 + step,
        scalars={"loss": 1 / (1 + step)},
        grad_scale=scale,
        overflowed=None if scale is None else step % 10 == 0,
        hidden=np.arange(sites) % 14 == 0,
    )
    _SITES[totals_only, sites] = frame.sites
    if step % 6 == 0:
        frame.skipped = {Site("layers.0", "output"): Skipped("a reason", 3 if step % 12 == 0 else None)}
    frame.step = number
    return frame.drop_hidden()


def keep(
    directory: Path,
    attempts: Mapping[int, Sequence[StepFrame]],
    rank: int = 0,
    commit_each: int = 3,
    merge: bool = False,
    settings: Mapping[str, Any] = MappingProxyType({"model": "small"}),
) -> None:
    """Write attempts as a writer does. merge: its files meanwhile, too."""
    from hookstats.records.store import Store

    store = Store(directory / f"rank={rank}")
    for attempt, frames in attempts.items():
        store.begin(attempt, {**settings, "rank": rank})
        for count, frame in enumerate(frames, start=1):
            store.add(frame)
            if count % commit_each == 0:
                store.commit(count)
                while merge and store.merge():
                    pass
        store.finish(attempt)
    store.close()


def merge(directory: Path) -> int:
    """Merge the files of rank 0 as far as they are; return how often."""
    from hookstats.records.store import Store

    store, merged = Store(directory / "rank=0"), 0
    while store.merge():
        merged += 1
    return merged


@rule()
def counting(step: Step, memory: Memory) -> list[Finding]:
    """Say of each step how many came before it."""
    memory["steps"] = memory.get("steps", 0) + 1
    return [step.finding(f"counting-{step.number}", None, memory["steps"], 0.0, "note", "")]


def each(step: Any) -> list[Any]:
    """A rule, in a module without torch, as a writer imports it: of each step it says that it is one."""
    return [step.finding(f"step {step.number}", None, 1.0, 0.0, "critical", "This is a step.")]


def start(
    directory: Path,
    steps: int = 1_000_000,
    pause: float = 0.0,
    ring_bytes: int = 1 << 20,
    first: int = 0,
    log: Path | None = None,
    stops: Iterable[int] = (),
    before: Iterable[str] = (),
) -> subprocess.Popen[bytes]:
    """The process that records. stops: steps after which it stops itself, until `go_on`; before: a command with which
    it is started.
    """
    arguments = [str(directory), str(steps), str(pause), str(ring_bytes), str(first), str(log or f"{directory}.log")]
    arguments.append(" ".join(map(str, stops)))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen([*before, sys.executable, "-c", _CODE, *arguments], cwd=ROOT, env=environment)


def taken(directory: Path) -> list[int]:
    """The steps that the process knows to be in the ring, or beyond."""
    return [int(line) for line in _logged(directory) if line.isdigit()]


def lost(directory: Path) -> int:
    """Count the steps the process has seen left out, for want of room or since recording stopped."""
    return _logged(directory).count("lost")


def _logged(directory: Path) -> list[str]:
    log = Path(f"{directory}.log")
    return log.read_text().split() if log.exists() else []


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Until it holds. seconds: after which nobody believes that it ever will, also on a machine that is busy."""
    end = time.monotonic() + seconds
    while not condition():
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
        if b"hookstats.records.writer" in b"".join(words[:4]) and any(
            word.startswith(os.fsencode(directory)) for word in words
        ):
            found.append(int(path.parent.name))
    return found


def stop(pid: int) -> None:
    """No thread of it runs when this returns, until `go_on`; the signal alone is not that yet."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: _are(pid, "TZX"))


def go_on(process: subprocess.Popen[bytes]) -> None:
    """After a step at which it stops itself, when it has come there."""
    wait_for(lambda: _are(process.pid, "T") or process.poll() is not None)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGCONT)


def kill(*pids: int) -> None:
    """In this order. None of them runs when this returns."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # of our own: until its last thread has ended
        except ChildProcessError:
            wait_for(lambda pid=pid: _are(pid, "ZX"))  # type: ignore[misc]


def kill_all(process: subprocess.Popen[bytes], directory: Path, draw: np.random.Generator | None = None) -> None:
    """A training process and its writers, at one moment, in any order.

    All stop first: a writer does not finish what a training process has left, nor does that start another writer.
    """
    pids = [process.pid, *writers(directory)]
    for pid in pids:
        stop(pid)
    kill(*(pids if draw is None else draw.permutation(pids).tolist()))


def _are(pid: int, states: str) -> bool:
    """Return whether all threads of a process are in one of these states. One that has ended is in any."""
    try:
        return all(_state(thread) in states for thread in Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return True


def _state(thread: Path) -> str:
    try:
        return (thread / "stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return "Z"
