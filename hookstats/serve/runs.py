"""The runs below a directory, and what a line of an index says of each. No path is ever made of what somebody asks."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hookstats.numbers.fields import Array
from hookstats.records.errors import RunError
from hookstats.records.places import runs_below
from hookstats.records.run import load
from hookstats.report.loading import load_recorded
from hookstats.report.record import Recorded
from hookstats.report.reducing import edges
from hookstats.terminal.following import Followed, RunState

_OFTEN = 1.0  # seconds: a run is looked at no more often, however many look
_POINTS = 120  # of a sparkline
_ORDER = ("deleted", "torn", "unreadable", "recording", "died", "waiting", "ended")  # what is told of two runs
_BROKEN = ("deleted", "torn", "unreadable")

Mark = tuple[tuple[str, int, int], ...]


class Summary(NamedTuple):
    """A run as a line of the index.

    changed: seconds since the epoch; loss: at most 120 averages of equal parts, NaN where a part holds a value that is
    not finite; findings: by severity.
    """

    name: str
    state: RunState
    changed: float
    model: str = ""
    step: int | None = None
    loss: tuple[float, ...] = ()
    last_loss: float | None = None
    findings: tuple[tuple[str, int], ...] = ()
    ranks: int = 0


class Watched:
    """A run that is looked at, without a file of it ever being written."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self._lock = threading.Lock()
        self._looked = -_OFTEN
        self._state = RunState("waiting", "")
        self._mark: Mark = ()

    def look(self) -> tuple[RunState, Mark]:
        """Return the run's state, and a mark that changes as soon as more was written; at most a second old."""
        with self._lock:
            if time.monotonic() - self._looked >= _OFTEN:
                self._mark = _mark(self.path / "rank=0")
                try:
                    self._state = Followed(self.path).state() if self.path.exists() else unreadable(self.path)
                except (ValueError, OSError) as error:
                    self._state = unreadable(self.path, error)
                self._looked = time.monotonic()
            return self._state, self._mark

    def load_recorded(self) -> Recorded:
        """Rank 0 of it. ValueError where nothing was measured yet; RunError, OSError as for `hookstats.load`."""
        run = load(self.path)
        if not run.steps:
            raise ValueError("nothing was measured yet")
        return replace(load_recorded(run), name=self.name)

    def summary(self) -> Summary:
        """Return a summary that is at most a second old. Whatever is wrong with the run stands in it."""
        state, mark = self.look()
        if state.kind not in _BROKEN:
            try:
                return _summary(self.path, mark)._replace(name=self.name, state=state)
            except FileNotFoundError:
                pass  # nothing is recorded yet
            except (ValueError, OSError) as error:  # torn meanwhile
                state = unreadable(self.path, error)
        return Summary(self.name, state, find_last_change(mark))


@lru_cache(maxsize=1000)
def _summary(path: Path, mark: Mark) -> Summary:
    """Summarise a run as it was when it had this mark, but for its name and its state."""
    run = load(path)
    settings = run.attempts[-1]["settings"] if run.attempts else {}
    scalars = run.scalars  # each look at it reads the files
    names, values, steps = (scalars[name].to_pylist() for name in ("name", "value", "step"))
    loss = np.array([value for name, value in zip(names, values, strict=True) if name == "loss"])
    counts = Counter(finding.severity for finding in run.findings)
    return Summary(
        "",
        RunState("waiting", ""),
        find_last_change(mark),
        model_of(settings),
        max([*run.steps[-1:], *steps[-1:]], default=None),
        tuple(_averages(loss).tolist()),
        loss.tolist()[-1] if len(loss) else None,
        tuple((name, counts[name]) for name in ("critical", "warning", "note") if counts[name]),
        sum(1 for each in path.glob("rank=*") if each.is_dir()),
    )


def _mark(folder: Path) -> Mark:
    """Names, times and sizes of what lies in a rank's folder; a folder's time is that of its newest part."""
    found = []
    with suppress(OSError), os.scandir(folder) as entries:
        for each in entries:
            if not each.name.startswith(("ring", "lock")):  # which change while nothing is to be seen yet
                with suppress(OSError):
                    told = each.stat(follow_symlinks=False)
                    found.append((each.name, told.st_mtime_ns, told.st_size))
    return tuple(sorted(found))


def find_last_change(mark: Mark) -> float:
    """Return when a run changed last, in seconds since the epoch."""
    return max((time for _, time, _ in mark), default=0) / 1e9


def merge_states(runs: Sequence[Watched]) -> RunState:
    """Return the state of one run, or of two that are shown on one page."""
    states = [run.look()[0] for run in runs]
    kind = min((state.kind for state in states), key=_ORDER.index)
    if len(states) == 1:
        return states[0]
    return RunState(kind, "; ".join(f"{run.name}: {state.sentence}" for run, state in zip(runs, states, strict=True)))


def model_of(settings: object) -> str:
    """Return the name of the model in an attempt's settings; "" if there is none."""
    model = settings.get("model", "") if isinstance(settings, dict) else ""
    return str(model.get("class", "") if isinstance(model, dict) else model)


def unreadable(path: Path, error: Exception | None = None) -> RunState:
    if not path.exists():
        return RunState("deleted", "the run was deleted")
    kind = "torn" if isinstance(error, RunError) else "unreadable"
    return RunState(kind, f"the run cannot be read: {str(error)[:500]}")


def _averages(values: Array) -> Array:
    """Average at most so many equal parts; NaN where a part holds a value that is not finite."""
    if not len(values):
        return values
    begin = edges(len(values), _POINTS)
    known = np.where(np.isfinite(values), values, np.nan)
    result: Array = np.add.reduceat(known, begin) / np.diff(begin, append=len(values))
    return result


class Runs:
    """The runs at and below a directory, by an id that is made here and tells nothing."""

    def __init__(self, directory: Path) -> None:
        """ValueError where it is no directory."""
        if not directory.is_dir():
            raise ValueError(
                f"{directory}: expected a directory of runs, got {'a file' if directory.exists() else 'none'}"
            )
        self.directory = directory.resolve()
        self._known: dict[str, Watched] = {}
        self._lock = threading.Lock()
        self._found = -_OFTEN

    def find(self) -> dict[str, Watched]:
        """Return runs by id. Deleted ones stay until the server ends, so that their pages can say so."""
        with self._lock:
            if time.monotonic() - self._found >= _OFTEN:
                for path in runs_below(self.directory):
                    name = str(path.relative_to(self.directory))
                    name = self.directory.name if name == "." else name
                    id = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
                    if id not in self._known:
                        self._known[id] = Watched(path, name)
                self._found = time.monotonic()
            return dict(self._known)

    def get(self, id: str) -> Watched | None:
        """Return a run that was found before."""
        with self._lock:
            return self._known.get(id)
