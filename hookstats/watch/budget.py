"""``attach(budget=0.01)``: which steps are measured, and which rows are read, so that at most this share is added."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import NamedTuple

from hookstats.watch.overhead import Overhead, Stopwatch, TimedStep
from hookstats.watch.sampling import AGAIN, WHOLE_STEPS, Sampling

_log = logging.getLogger("hookstats")
_WARM = 3  # steps that are not timed: kernels are loaded, sites are made, programs compiled
_ROUNDS = 8  # of one step of each kind
_ROWS = (1, 2, 4, 8)  # of which the first that fits is chosen; 8 is tried, and beyond it too little would be seen
_MOST = 1000  # steps between two measured ones
_KINDS = ("not measured", "in full", "in part")


class Choice(NamedTuple):
    """``every``-th steps are measured, of ``rows`` one is read; ``share``: what that adds, as far as it was timed."""

    every: int
    rows: int
    share: float


def choose(share: float, bare: float, idle: float, whole: float, part: float) -> Choice:
    """Return the most that stays within a share of the time of a step: every step rather than every row.

    bare: the time of a step that is not measured; idle: what hookstats takes of it all the same. whole, part: what is
    added by measuring all rows, and one of 8. It is taken for a fixed time, and one for each row that is read. Some
    steps are read in full whatever is chosen.
    """
    most, in_full = _ROWS[-1], WHOLE_STEPS / AGAIN
    of_rows = max(whole - part, 0.0) / (1 - 1 / most)
    added = {rows: max(whole - of_rows, 0.0) + of_rows * (in_full + (1 - in_full) / rows) for rows in _ROWS}
    allowed = share * bare - idle
    every = _MOST if added[most] >= _MOST * allowed else max(math.ceil(added[most] / allowed), 1)
    rows = next((rows for rows in _ROWS if added[rows] <= every * allowed), most)
    return Choice(every, rows, (idle + added[rows] / every) / bare)


class Budget:
    """Times some steps of three kinds by turns, then chooses.

    Of each kind the shortest step counts, because whatever else runs only adds to it. What hooks have taken of the host
    counts where it is more than the difference of steps.
    """

    def __init__(
        self,
        share: float,
        stopwatch: Stopwatch,
        sampling: Sampling,
        overhead: Callable[[], Overhead],
        agree: Callable[[list[float]], list[float]],
    ) -> None:
        """overhead: `Monitor.overhead`, whose skipped_host may be NaN.

        agree: the largest of each number, over all ranks that measure together; they wait for each other, once.
        """
        self.choice: Choice | None = None
        self._share = share
        self._stopwatch = stopwatch
        self._sampling = sampling
        self._overhead = overhead
        self._agree = agree
        self._begun = 0  # steps
        self._timed: dict[str, list[TimedStep]] = {kind: [] for kind in _KINDS}
        self._kind = self._ended = ""  # of the step that runs, and of the one before
        sampling.hold(1)

    def end_step(self, step: TimedStep | None) -> None:
        """The next one has begun, and the stopwatch has taken the time."""
        if self._ended and self.choice is None and step is not None:
            self._timed[self._ended].append(step)

    def begin_step(self) -> bool:
        """Returns whether the step that begins is measured."""
        self._begun, self._ended = self._begun + 1, self._kind
        turn = self._begun - _WARM
        if self.choice is None and turn > len(_KINDS) * _ROUNDS:
            self._choose()
        if self.choice is not None:
            self._kind = ""
            return self._begun % self.choice.every == 0
        self._kind = _KINDS[turn % len(_KINDS)] if turn >= 0 else ""
        self._sampling.hold(_ROWS[-1] if self._kind == "in part" else 1)
        return self._kind != "not measured"

    @property
    def times(self) -> bool:
        """Tell whether the step that runs is one of those that are timed."""
        return bool(self._kind)

    def _choose(self) -> None:
        shortest = [min((each.read_us() for each in self._timed[kind]), default=math.inf) for kind in _KINDS]
        bare, *measured = shortest
        hosts = [min((each.host_us for each in self._timed[kind]), default=0.0) for kind in _KINDS[1:]]
        added = [max(us - bare, host) for us, host in zip(measured, hosts, strict=True)]
        idle = self._overhead().skipped_host
        bare, idle, whole, part = self._agree([bare, 0.0 if math.isnan(idle) else idle, *added])
        self._timed.clear()
        self.choice = choose(self._share, bare, idle, whole, part)
        self._sampling.let_go(self.choice.rows)
        _log.info(
            "budget=%g: a step takes %.2f ms, %.2f of them for hooks; measuring it in full adds %.2f ms, and one of %d "
            "rows %.2f ms: with every=%d and rows=%d about %.2g %% is added",
            self._share,
            bare / 1e3,
            idle / 1e3,
            whole / 1e3,
            _ROWS[-1],
            part / 1e3,
            self.choice.every,
            self.choice.rows,
            100 * self.choice.share,
        )
        if self.choice.share > self._share:
            _log.warning(
                "budget=%g: measuring one step in %d adds %.2g %% to all of them, hooks by themselves %.2g %%; "
                "choose fewer modules= or tensors=",
                self._share,
                self.choice.every,
                100 * self.choice.share,
                100 * idle / bare,
            )
