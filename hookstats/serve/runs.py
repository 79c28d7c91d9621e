"""The runs below a directory, and what a line of an index says of each. No path is ever made of what somebody asks."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hookstats.numbers.fields import Array
from hookstats.records import manifest
from hookstats.records.errors import RunError
from hookstats.records.places import rank_folder, runs_below, watch
from hookstats.records.run import load
from hookstats.report.reducing import edges
from hookstats.terminal.following import Followed, State

_OFTEN = 1.0  # seconds: a run is looked at no more often, however many look
_POINTS = 120  # of a sparkline
_REST = 20.0  # times as long as a line of the index took, it is not made again
_DELETED = State("deleted", "the run was deleted")
_ORDER = ("deleted", "torn", "unreadable", "recording", "died", "waiting", "ended")  # what is told of two runs
_BROKEN = ("deleted", "torn", "unreadable")


@dataclass(frozen=True)
class Summary:
    """A run as a line of the index.

    changed: seconds since the epoch; loss: at most 120 averages of equal parts, NaN where a part holds a value that is
    not finite; findings: by severity.
    """

    name: str
    state: State
    model: str = ""
    step: int | None = None
    loss: tuple[float, ...] = ()
    last_loss: float | None = None
    findings: tuple[tuple[str, int], ...] = ()
    ranks: int = 0
    changed: float = 0.0


class Watched:
    """A run that is looked at: what is read of it is read once, until it has changed."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self._lock = threading.Lock()
        self._looked = -_OFTEN
        self._watched = -_OFTEN
        self._rested = 0.0  # when a line of the index may be made again
        self._state: tuple[State, float] | None = None
        self._followed = Followed(path)
        self._followed_mark: object = None  # of the manifest that it has
        self._read: tuple[object, Summary] | None = None

    def mark(self) -> tuple[int, ...]:
        """Another one as soon as more was written: of the manifest, and of the findings, their size and time."""
        found: list[int] = []
        for name in ("manifest.json", "findings.jsonl"):
            try:
                told = (self.path / "rank=0" / name).stat()
            except OSError:
                found += [0, 0, 0]
            else:
                found += [told.st_mtime_ns, told.st_size, told.st_ino]
        return tuple(found)

    def watch(self) -> None:
        """Says to whoever records it that somebody looks, so that it is written sooner."""
        with self._lock:
            now = time.monotonic()
            if self._look()[0].kind == "recording" and now - self._watched >= _OFTEN:
                self._watched = now
                watch(rank_folder(self.path, 0))

    def told(self) -> tuple[State, float]:
        """How the run is, and when it changed last, in seconds since the epoch; at most a second old."""
        with self._lock:
            return self._look()

    def summary(self) -> Summary:
        """At most a second old; older where it takes long to read. Whatever is wrong with the run stands in it."""
        with self._lock:
            state, changed = self._look()
            if state.kind in _BROKEN:
                return Summary(self.name, state, changed=changed)
            mark, began = self.mark(), time.monotonic()
            if self._read is None or (self._read[0] != mark and began >= self._rested):
                try:
                    self._read = (mark, self._summarised(mark))
                except (ValueError, OSError) as error:  # deleted or torn meanwhile
                    return Summary(self.name, unreadable(self.path, error), changed=changed)
                now = time.monotonic()
                self._rested = now + _REST * (now - began)
            return replace(self._read[1], state=state, changed=changed)

    def _look(self) -> tuple[State, float]:
        if self._state is None or time.monotonic() - self._looked >= _OFTEN:
            self._state = self._looked_at()
            self._looked = time.monotonic()
        return self._state

    def _looked_at(self) -> tuple[State, float]:
        mark = self.mark()
        changed = max(mark[0], mark[3]) / 1e9
        if not self.path.exists():
            return _DELETED, 0.0
        try:
            followed = self._followed
            if self._followed_mark != mark:
                followed.manifest = manifest.read(followed.folder, followed.manifest) if mark[0] else None
                self._followed_mark = mark
            return followed.state(), changed
        except (ValueError, OSError) as error:
            self._read = self._followed_mark = None
            return unreadable(self.path, error), mark[0] / 1e9

    def _summarised(self, mark: tuple[int, ...]) -> Summary:
        ranks = sum(1 for each in self.path.glob("rank=*") if each.is_dir())
        waiting = State("waiting", "nothing is recorded yet")
        if not mark[0]:
            return Summary(self.name, waiting, ranks=ranks)
        run = load(self.path)
        settings = run._attempts[-1].settings if run._attempts else {}
        table = run.scalars
        names, values = table["name"].to_pylist(), table["value"].to_pylist()
        loss = np.array([value for name, value in zip(names, values, strict=True) if name == "loss"])
        counts = Counter(finding.severity for finding in run.findings)
        step = max([*run.steps[-1:], *table["step"].to_pylist()[-1:]], default=None)
        return Summary(
            self.name,
            waiting,
            model_of(settings),
            step,
            tuple(_averages(loss).tolist()),
            loss.tolist()[-1] if len(loss) else None,
            tuple((name, counts[name]) for name in ("critical", "warning", "note") if counts[name]),
            ranks,
        )


class Both:
    """Two runs that are looked at, as one."""

    def __init__(self, first: Watched, second: Watched) -> None:
        self.runs = (first, second)
        self.name = f"{first.name} and {second.name}"
        self.path = first.path

    def mark(self) -> tuple[int, ...]:
        return self.runs[0].mark() + self.runs[1].mark()

    def watch(self) -> None:
        for run in self.runs:
            run.watch()

    def told(self) -> tuple[State, float]:
        states, changed = zip(*(run.told() for run in self.runs), strict=True)
        kind = min((state.kind for state in states), key=_ORDER.index)
        sentence = "; ".join(f"{run.name}: {state.sentence}" for run, state in zip(self.runs, states, strict=True))
        return State(kind, sentence), max(changed)


def model_of(settings: object) -> str:
    """The name of the model in an attempt's settings; "" where there is none."""
    model = settings.get("model", "") if isinstance(settings, dict) else ""
    return str(model.get("class", "") if isinstance(model, dict) else model)


def unreadable(path: Path, error: Exception) -> State:
    if not path.exists():
        return _DELETED
    kind = "torn" if isinstance(error, RunError) else "unreadable"
    return State(kind, f"the run cannot be read: {str(error)[:500]}")


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
        """By id; those that are gone since stay, until the server ends, so that their pages can say so."""
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
        """One that was found before."""
        with self._lock:
            return self._known.get(id)
