"""Memories: the last values of each site, for how long it has been ill, the course of one number, the losses."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hookstats.numbers.fields import Array, Counts
from hookstats.numbers.frame import Mask

_NEAR = 8
_REFRESH = 16  # steps, after which a window's medians are taken anew at the latest
_Values = TypeVar("_Values", bound=NDArray[Any])


def extend(values: _Values, sites: int, missing: Any) -> _Values:
    """Return what is remembered of each site by id, with `missing` for those that have appeared since."""
    if len(values) >= sites:
        return values
    result: Any = np.append(values, np.full(sites - len(values), missing, values.dtype))
    return result  # type: ignore[no-any-return]


def middle(values: Array) -> float:
    """The median, as np.median has it, of a few values; NaN of none or where one is NaN. It is ten times as fast."""
    if not len(values):
        return math.nan
    ordered, half = np.sort(values), len(values) // 2
    if ordered[-1] != ordered[-1]:
        return math.nan
    return float(ordered[half]) if len(ordered) % 2 else float(ordered[half - 1] + ordered[half]) / 2


class Window:
    """The last ``length`` values of each site, by id; a site that was silent in a step keeps those it had."""

    def __init__(self, length: int, min_history: int) -> None:
        """min_history: values, before which a site has no past."""
        self._length = length
        self._min_history = min_history
        self._values = np.empty((0, length))
        self._pushed = np.empty(0, np.int64)
        self._medians = np.empty(0)
        self._left = 0  # steps until they are taken anew

    def median(self, sites: int, is_exact: bool = True) -> Array:
        """``[sites]``, of what was pushed before; NaN where that is too little. Of an even number, the lower one.

        Where it need not be exact, it is taken anew when an eighth of the values are new, or 16: that is enough to see
        that nothing is far from it.
        """
        if is_exact or self._left <= 0 or len(self._medians) < sites:
            self._grow(sites)
            counts = np.minimum(self._pushed, self._length)
            most = int(counts.max(initial=0))
            self._left = min(_REFRESH, -(-most // 8)) if most > self._min_history else 1
            self._medians = np.full(len(counts), np.nan)
            for count in np.unique(counts[counts >= self._min_history]).tolist():
                rows, middle = counts == count, (count - 1) // 2
                self._medians[rows] = np.partition(self._values[rows, :count], middle, axis=1)[:, middle]
        return self._medians

    def push(self, values: Array, ids: Counts) -> None:
        """values: ``[sites]``. ids: of those that have one in this step."""
        self._grow(len(values))
        self._left -= 1
        pushed = self._pushed[ids]
        self._values[ids, pushed % self._length] = values[ids]
        self._pushed[ids] = pushed + 1

    def _grow(self, sites: int) -> None:
        new = sites - len(self._pushed)
        if new > 0:
            self._values = np.concatenate([self._values, np.zeros((new, self._length))])
            self._pushed = extend(self._pushed, sites, 0)


class Streak:
    """Verdicts in a row in which each site was ill: ``lengths`` ``[sites]``; ``since``: from which step on."""

    def __init__(self) -> None:
        self.goes_on = False  # whether any is longer than 0
        self.lengths = np.empty(0, np.int64)
        self.since = np.empty(0, np.int64)

    def push(self, number: int, ill: Mask, judged: Mask | None = None, steps: int = 1, over: float = 0.0) -> Mask:
        """``[sites]``: ill in this verdict, the last of so many `steps` in a row at least.

        number: of the step. judged: others stay as they were; None: all are. over: how many steps of the run it must
        have lasted, measured or not.
        """
        new = len(ill) - len(self.lengths)
        if new > 0:
            self.lengths, self.since = extend(self.lengths, len(ill), 0), extend(self.since, len(ill), number)
        if not self.goes_on and not np.count_nonzero(ill):  # five times as fast as ill.any()
            return ill
        lengths = self.lengths
        after = np.where(ill, lengths + 1, 0)
        self.lengths = after if judged is None else np.where(judged, after, lengths)
        begins = (self.lengths == 1) & (lengths == 0)
        self.since = np.where(begins, number, self.since)
        self.goes_on = bool(np.count_nonzero(self.lengths))
        lasts = ill & (self.lengths >= steps)
        return lasts & (number - self.since + 1 >= over) if over else lasts


class Course:
    """A number from step to step, against its own level: the median of its last ``_NEAR`` = 8 values.

    How far it usually goes from there is a matter of the last ``length`` values, each against the level before it. So
    neither a descent nor a new level makes everything seem usual; and medians do not know what single values did. All
    of this is in logarithms as long as all values are positive: losses and norms vary by factors, by 1 % in one run and
    by 5 in another, and what is far out is so by a factor, too. Where the deviation is small, it is the same.
    """

    def __init__(self, length: int) -> None:
        self._near: deque[float] = deque(maxlen=_NEAR)
        self._past: deque[tuple[float, float]] = deque(maxlen=length)  # values, each with the level before it
        self._distances: list[float] = []  # of these, sorted; in logarithms or not
        self._others = 0  # of these, not positive
        self._level = math.nan
        self.in_logs = True  # whether all values are positive

    def __len__(self) -> int:
        return len(self._past)

    @property
    def level(self) -> float:
        """NaN before the first value."""
        return self._level

    @property
    def deviation(self) -> float:
        """A standard deviation from the level, of a normal distribution with as large a median absolute deviation."""
        return 1.4826 * middle(np.abs(np.array(self._distances) - _find_middle(self._distances)))

    @property
    def past(self) -> list[tuple[float, float]]:
        """The last values, each with the level before it."""
        return list(self._past)

    @property
    def spread(self) -> float:
        """The same as `deviation`, never in logarithms."""
        values, levels = np.array(self._past).T
        distances = values - levels
        return 1.4826 * middle(np.abs(distances - middle(distances)))

    def limit(self, sigmas: float, tail: float) -> float:
        """`sigmas` deviations above the level, and at least ``tail`` times as far as the last values ever went."""
        usual = max(_find_middle(self._distances), 0.0)
        furthest = max(self._distances[-1] - usual, 0.0)
        beyond = usual + max(sigmas * self.deviation, tail * furthest)
        return self.level * math.exp(min(beyond, 700.0)) if self.in_logs else self.level + beyond

    def is_surely_usual(self, value: float, tail: float) -> bool:
        """Return whether a value is within each `limit` of this tail: it is known at once, while a deviation is not."""
        usual = max(_find_middle(self._distances), 0.0)
        beyond = usual + tail * max(self._distances[-1] - usual, 0.0)
        return value <= (self.level * math.exp(min(beyond, 700.0)) if self.in_logs else self.level + beyond)

    def push(self, value: float, limit: float = math.inf) -> None:
        """limit: what is beyond it counts, among those that tell what is usual, as what is half as far."""
        if self._near:
            level, counts = self.level, value
            if value > limit:
                counts = math.sqrt(level * limit) if self.in_logs else (level + limit) / 2
            if self._past and len(self._past) == self._past.maxlen:
                first = self._past[0]
                del self._distances[bisect_left(self._distances, self._distance(*first))]
                self._others -= min(first) <= 0
            self._past.append((counts, level))
            self._others += min(counts, level) <= 0
            if self._others == 0 or not self.in_logs:
                insort(self._distances, self._distance(counts, level))
        self._near.append(value)
        self._level = _find_middle(sorted(self._near))
        in_logs = min(self._near) > 0 and self._others == 0
        if in_logs != self.in_logs:
            self.in_logs = in_logs
            self._distances = sorted(self._distance(*each) for each in self._past)

    def _distance(self, value: float, level: float) -> float:
        return math.log(value) - math.log(level) if self.in_logs else value - level


class Losses:
    """The first five losses of a run and the last ten."""

    def __init__(self) -> None:
        self._firsts: list[float] = []
        self._last: deque[float] = deque(maxlen=10)

    def push(self, losses: Iterable[float]) -> None:
        """losses: of the steps since the last call."""
        self._last.extend(new := list(losses))
        self._firsts += new[: 5 - len(self._firsts)]

    def have_fallen(self, share: float = 0.02) -> bool | None:
        """Return whether the loss has come down by this share since the run began; None where that is not known."""
        if len(self._last) < 10:
            return None
        first = middle(np.array(self._firsts))
        return middle(np.array(self._last)) < first - share * abs(first)


def _find_middle(ordered: list[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
