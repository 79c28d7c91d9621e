"""What a rule remembers: the last values of each site, for how long it has been ill, the course of one number."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hookstats.numbers.fields import Array
from hookstats.rules.step import Mask

_NEAR = 8
_Values = TypeVar("_Values", bound=NDArray[Any])


def extended(values: _Values, sites: int, missing: Any) -> _Values:
    """What is remembered of each site by id, with `missing` for those that have appeared since."""
    result: Any = np.append(values, np.full(sites - len(values), missing, values.dtype))
    return result  # type: ignore[no-any-return]


class Window:
    """The last ``length`` values of each site, by id; a site that was silent in a step keeps those it had."""

    def __init__(self, length: int, min_history: int) -> None:
        """min_history: values, before which a site has no past."""
        self._length = length
        self._min_history = min_history
        self._values = np.empty((0, length))
        self._pushed = np.empty(0, np.int64)

    def median(self, sites: int) -> Array:
        """``[sites]``, of what was pushed before; NaN where that is too little. Of an even number, the lower one."""
        self._grow(sites)
        result = np.full(len(self._pushed), np.nan)
        counts = np.minimum(self._pushed, self._length)
        for count in np.unique(counts[counts >= self._min_history]).tolist():
            rows, middle = counts == count, (count - 1) // 2
            result[rows] = np.partition(self._values[rows, :count], middle, axis=1)[:, middle]
        return result

    def push(self, values: Array, chosen: Mask) -> None:
        """values, chosen: ``[sites]``, those that have one in this step."""
        self._grow(len(values))
        ids = np.flatnonzero(chosen)
        self._values[ids, self._pushed[ids] % self._length] = values[ids]
        self._pushed[ids] += 1

    def _grow(self, sites: int) -> None:
        new = sites - len(self._pushed)
        if new > 0:
            self._values = np.concatenate([self._values, np.empty((new, self._length))])
            self._pushed = extended(self._pushed, sites, 0)


class Streak:
    """In how many verdicts in a row each site was ill: ``lengths`` ``[sites]``; ``since``: from which step on."""

    def __init__(self, consecutive_steps: int) -> None:
        self._consecutive_steps = consecutive_steps
        self.lengths = np.empty(0, np.int64)
        self.since = np.empty(0, np.int64)

    def push(self, number: int, ill: Mask, judged: Mask | None = None) -> Mask:
        """``[sites]``: ill in this verdict, the last of `consecutive_steps` in a row at least.

        number: of the step. judged: others stay as they were; None: all are.
        """
        lengths = extended(self.lengths, len(ill), 0)
        after = np.where(ill, lengths + 1, 0)
        self.lengths = after if judged is None else np.where(judged, after, lengths)
        begins = (self.lengths == 1) & (lengths == 0)
        self.since = np.where(begins, number, extended(self.since, len(ill), number))
        return ill & (self.lengths >= self._consecutive_steps)

    def push_one(self, number: int, ill: bool) -> bool:
        """The same of something that is one, and no site."""
        return bool(self.push(number, np.array([ill]))[0])


class Course:
    """One number from step to step, against its own level: the median of its last ``_NEAR`` = 8 values.

    How far it usually goes from there is a matter of the last ``length`` values, each against the level before it. So
    neither a descent nor a new level makes everything seem usual; and medians do not know what single values did. All
    of this is in logarithms as long as all values are positive: losses and norms vary by factors, by 1 % in one run and
    by 5 in another, and what is far out is so by a factor, too. Where the deviation is small, it is the same.
    """

    def __init__(self, length: int) -> None:
        self._near: deque[float] = deque(maxlen=_NEAR)
        self._past: deque[tuple[float, float]] = deque(maxlen=length)  # values, each with the level before it

    def __len__(self) -> int:
        return len(self._past)

    @property
    def level(self) -> float:
        """NaN before the first value."""
        return float(np.median(self._near)) if self._near else math.nan

    @property
    def deviation(self) -> float:
        """A standard deviation from the level, of a normal distribution with as large a median absolute deviation."""
        distances = self._distances()
        return float(1.4826 * np.median(np.abs(distances - np.median(distances))))

    @property
    def past(self) -> list[tuple[float, float]]:
        """The last values, each with the level before it."""
        return list(self._past)

    @property
    def spread(self) -> float:
        """As `deviation`, never in logarithms."""
        values, levels = np.array(self._past).T
        distances = values - levels
        return float(1.4826 * np.median(np.abs(distances - np.median(distances))))

    def limit(self, sigmas: float, tail: float) -> float:
        """`sigmas` deviations above the level, and at least ``tail`` times as far as the last values ever went."""
        distances = self._distances()
        usual = max(float(np.median(distances)), 0.0)
        furthest = max(float(distances.max()) - usual, 0.0)
        beyond = usual + max(sigmas * self.deviation, tail * furthest)
        return self.level * math.exp(min(beyond, 700.0)) if self.in_logs else self.level + beyond

    def push(self, value: float, limit: float = math.inf) -> None:
        """limit: what is beyond it counts, among those that tell what is usual, as what is half as far."""
        if self._near:
            level, counts = self.level, value
            if value > limit:
                counts = math.sqrt(level * limit) if self.in_logs else (level + limit) / 2
            self._past.append((counts, level))
        self._near.append(value)

    @property
    def in_logs(self) -> bool:
        """Whether all values are positive."""
        return min(self._near) > 0 and all(value > 0 and level > 0 for value, level in self._past)

    def _distances(self) -> Array:
        values, levels = np.array(self._past).T
        distances: Array = np.log(values / levels) if self.in_logs else values - levels
        return distances
