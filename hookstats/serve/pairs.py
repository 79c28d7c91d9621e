"""Two runs on one page that grows. All of both is read again when one of them has grown.

`Columns` are added to at their end alone. A step that only one run has is a column already, empty for the other run.
When that run comes to the step, what was reduced before changes in its middle. Of two runs that are recorded at the
same time, nearly every step is such a step.
"""

from __future__ import annotations

import time
from dataclasses import replace

from hookstats.report.loading import recorded
from hookstats.report.record import Recorded
from hookstats.report.writing import of_all_sites
from hookstats.serve.growing import NO_DETAILS, Growing, Version
from hookstats.serve.runs import Watched
from hookstats.terminal.following import State

_ORDER = ("deleted", "torn", "unreadable", "recording", "died", "waiting", "ended")  # what is told of both


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


class GrowingPair(Growing):
    """Versions of the page of two runs."""

    def __init__(self, both: Both) -> None:
        super().__init__(both)
        self._runs = both.runs
        self._first: Recorded | None = None

    def _look(self, mark: tuple[int, ...]) -> bool:
        if self._first is None or mark != self._read:
            began = time.monotonic()
            a, b = (self._recorded(run) for run in self._runs)
            if self._first is None or self._first.sites != a.sites:
                self._details, self._pictures = dict(NO_DETAILS), {}
            record, blobs = of_all_sites(a, b)
            self._publish(
                Version(self._numbered(), record | self._details, blobs | self._pictures, set(self._pictures))
            )
            self._first, self._read = a, mark
            self._slow = time.monotonic() - began
        return True

    def _tell(self) -> bool:
        assert self._first is not None
        first = self._first
        return self._tell_details(first, lambda: first)

    def _recorded(self, run: Watched) -> Recorded:
        found = replace(recorded(run.path), grows=True, name=run.name)
        if not len(found.steps) or not found.sites:
            raise ValueError(f"{run.name}: nothing was measured yet")
        return found
