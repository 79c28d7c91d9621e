"""A run on disk as it grows: its latest steps, its findings, and whether somebody still records it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hookstats._locks import is_locked
from hookstats.numbers.fields import Array, Site
from hookstats.numbers.snapshot import Snapshot
from hookstats.records.attempts import attempts_in, is_training, open_attempts, path_of, read_attempt
from hookstats.records.endings import is_death
from hookstats.records.errors import NO_STEP, Damaged, RunError
from hookstats.records.findings import read_findings
from hookstats.records.parts import list_parts
from hookstats.records.places import explain_missing_run, rank_folder, ring_of, runs_below
from hookstats.records.run import Run, load
from hookstats.rules import SEVERITIES, Finding

_NEW = 30.0  # seconds
WINDOW = 48  # steps of a sparkline, and of a site's own past


class RunState(NamedTuple):
    """The state of a recording. ``kind``: "waiting", "recording", "ended" or "died"."""

    kind: str
    sentence: str


class Worst(NamedTuple):
    """A site, the worse the higher: first those with findings, then those far from their own past."""

    site: Site
    rms: list[float]  # over the window, NaN where it was silent
    change: float  # the latest, over the median of those before
    severity: str | None  # of its gravest finding in the window


class Measured(NamedTuple):
    """The part of a step that is kept: a Snapshot holds the whole run as it was at that look."""

    step: int
    scalars: Mapping[str, float]
    earlier_scalars: Mapping[int, Mapping[str, float]]


class Followed:
    """A rank's folder, read again and again."""

    def __init__(self, path: str | Path, rank: int = 0) -> None:
        """The run may begin later. ValueError where it never can: the path is a file, or has runs below it."""
        self.path = Path(path)
        self.folder = rank_folder(self.path, rank)
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{path}: expected the directory of a run, got a file")
        if not any(self.path.glob("rank=*")) and runs_below(self.path):
            raise ValueError(explain_missing_run(self.path))
        self._rank = rank
        self._at = 0  # bytes of findings.jsonl that were read
        self.run: Run | None = None  # as it was at the last look
        self.findings: list[Finding] = []
        self.steps: deque[Measured] = deque(maxlen=WINDOW)
        self._rms: deque[dict[Site, float]] = deque(maxlen=WINDOW)

    def look(self) -> tuple[list[Snapshot], list[Finding]]:
        """Return what is new: steps, at most those of a window, and findings."""
        found, self._at = read_findings(self.folder, self._at)
        self.findings += found
        if not list_parts(self.folder).begun:
            return [], found
        self.run = run = load(self.path, ranks=self._rank)
        seen = self.steps[-1].step if self.steps else -1
        if run.steps and run.steps[-1] < seen:  # an attempt that was resumed from an earlier step
            self.steps.clear()
            self._rms.clear()
            seen = -1
        numbers = [step for step in run.steps[-WINDOW:] if step > seen]
        snapshots = []
        for step in numbers:
            with suppress(RunError):  # a file with its rows cannot be read
                snapshots.append(run[step])
        self.steps.extend(Measured(each.step, each.scalars, each.earlier_scalars) for each in snapshots)
        self._rms.extend(dict(zip(each.order, _rms(each).tolist(), strict=True)) for each in snapshots)
        return snapshots, found

    def state(self) -> RunState:
        open_now = open_attempts(self.folder)
        if open_now:
            return self._describe_open(open_now[-1])
        if not self.folder.is_dir():
            others = ", ".join(sorted(each.name for each in self.path.glob("rank=*")))
            there = f"{self.path} has only {others}" if others else f"there is no run in {self.path} yet"
            return RunState("waiting", f"waiting for {self.folder.name}: {there}")
        attempts = attempts_in(self.folder)
        if not attempts and _is_new(self.folder):
            return RunState("waiting", "nothing is recorded yet")
        if not attempts:
            return RunState("ended", f"{self.folder}: {NO_STEP}; no process records into it")
        last = attempts[-1]
        ended = str(last.ended)
        dropped = f"; {last.dropped} steps found no room and are missing" if last.dropped else ""
        if is_death(ended):
            return RunState("died", f"training {ended}{dropped or '; all that it had measured is in the record'}")
        how = f", {ended.removeprefix('ended: ').removeprefix('closed: ')}" if ":" in ended else ""
        return RunState("ended", f"the run has ended{how}{dropped}")

    def _describe_open(self, number: int) -> RunState:
        path = path_of(self.folder, number)
        left = f"hookstats recover {self.path}"
        try:
            attempt = read_attempt(self.folder, number)
        except FileNotFoundError:
            return RunState("waiting", "nothing is recorded yet")
        except Damaged:
            if is_training(self.folder, number, None) or self._is_written() or _is_new(path):
                return RunState("recording", f"a process records it, but {path.name} cannot be read")
            return RunState(
                "died", f"{path.name} cannot be read, and no process records it; what it left is written by: {left}"
            )
        if attempt.ended is not None:  # it has ended meanwhile
            return self.state()
        pid, runs = attempt.pid, is_training(self.folder, number, attempt)
        if runs:
            return RunState("recording", f"process {pid} records it")
        if attempt.host and not attempt.is_of_this_machine:
            return RunState(
                "recording", f"process {pid} on {attempt.host} records it, or did: that cannot be seen from here"
            )
        if self._is_written():
            return RunState("recording", f"the training process {pid} has ended; what it left is being written")
        if number not in open_attempts(self.folder):  # the writer has finished meanwhile
            return self.state()
        if not ring_of(self.folder, number, attempt.ring).exists() and number not in list_parts(self.folder).begun:
            never = "monitor.step() was never called, or it died before its first step was kept"
            return RunState("died", f"the training process {pid} has ended, and nothing of it is recorded: {never}")
        return RunState("died", f"the training process {pid} died; what its last steps left is written by: {left}")

    def _is_written(self) -> bool:
        """Tell whether another process holds the folder's lock: a writer that is not done."""
        with suppress(OSError), open(self.folder / "lock") as file:
            return is_locked(file.fileno())
        return False

    def values(self, name: str, most: int) -> list[float]:
        """A scalar in all steps of the window, measured or not; of more than `most`, averages over equal parts."""
        found: list[float] = []
        for step in self.steps:
            found += [each[name] for each in [*step.earlier_scalars.values(), step.scalars] if name in each]
        return [float(part.mean()) for part in np.array_split(found, most) if len(part)]

    def find_worst(self, most: int) -> list[Worst]:
        """Sites of the latest step, the worst first."""
        if not self.steps:
            return []
        first = self.steps[0].step
        gravest: dict[Site, int] = {}
        for finding in self.findings:
            if finding.site is not None and finding.step >= first:
                rank = SEVERITIES.index(finding.severity)
                gravest[finding.site] = max(rank, gravest.get(finding.site, -1))
        found = []
        for site in self._rms[-1]:
            rms = [step.get(site, float("nan")) for step in self._rms]
            past = np.array([value for value in rms[:-1] if np.isfinite(value)])
            # A bias is 0 until it is trained: after one step of zeros there is nothing yet to compare with.
            usual = float(np.median(past)) if past.any() or len(past) > 1 else rms[-1]
            with np.errstate(all="ignore"):
                change = 1.0 if rms[-1] == usual else float(np.float64(rms[-1]) / usual)
            grade = gravest.get(site)
            found.append(Worst(site, rms, change, None if grade is None else SEVERITIES[grade]))
        return sorted(found, key=_rank_badness, reverse=True)[:most]


def _is_new(path: Path) -> bool:
    """Tell whether a folder, or a file that is empty, has just been made."""
    with suppress(FileNotFoundError):
        told = path.stat()
        return (path.is_dir() or told.st_size == 0) and abs(time.time() - told.st_mtime) < _NEW
    return True


def _rank_badness(worst: Worst) -> tuple[int, float]:
    grade = -1 if worst.severity is None else SEVERITIES.index(worst.severity)
    is_finite = np.isfinite(worst.rms[-1]) and np.isfinite(worst.change)
    return grade, abs(float(np.log(max(worst.change, 1e-30)))) if is_finite else float("inf")


def _rms(snapshot: Snapshot) -> Array:
    """``[fired]``: infinite where a value is not finite, which is worse than any rms."""
    totals = snapshot.totals
    bad = totals.nans + totals.posinfs + totals.neginfs > 0
    return np.where(bad, np.inf, totals.rms)
