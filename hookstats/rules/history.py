"""What a rule remembers: the last values of each site, for how long it has been ill, the course of one number."""

from __future__ import annotations

from collections import deque

import numpy as np

from hookstats.numbers.fields import Array, Counts
from hookstats.rules.step import Mask


class Window:
    """The last ``length`` values of each site, by id; a site that was silent in a step keeps those it had."""

    def __init__(self, length: int, least: int) -> None:
        """least: values, before which a site has no past."""
        self._length = length
        self._least = least
        self._values = np.empty((0, length))
        self._pushed = np.empty(0, np.int64)

    def median(self, sites: int) -> Array:
        """``[sites]``, of what was pushed before; NaN where that is too little. Of an even number, the lower one."""
        self._grow(sites)
        result = np.full(len(self._pushed), np.nan)
        counts = np.minimum(self._pushed, self._length)
        for count in np.unique(counts[counts >= self._least]).tolist():
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
            self._pushed = np.concatenate([self._pushed, np.zeros(new, np.int64)])


class Streak:
    """In how many verdicts in a row each site was ill, by id."""

    def __init__(self) -> None:
        self._lengths = np.empty(0, np.int64)

    def longer(self, ill: Mask, judged: Mask | None = None) -> Counts:
        """``[sites]``, this verdict included. judged: others stay as they were; None: all are."""
        new = len(ill) - len(self._lengths)
        lengths = np.concatenate([self._lengths, np.zeros(new, np.int64)]) if new > 0 else self._lengths
        after = np.where(ill, lengths + 1, 0)
        self._lengths = after if judged is None else np.where(judged, after, lengths)
        return self._lengths


class Course:
    """The last ``length`` values of one number.

    Mean and deviation are those of the logarithms as long as all values are positive: losses and norms vary by factors,
    by 1 % in one run and by 5 in another, and what is far out is so by a factor, too. Where the deviation is small, it
    is the same.
    """

    def __init__(self, length: int) -> None:
        self._values: deque[float] = deque(maxlen=length)

    def __len__(self) -> int:
        return len(self._values)

    def push(self, value: float) -> None:
        self._values.append(value)

    @property
    def is_positive(self) -> bool:
        return min(self._values) > 0

    @property
    def mean(self) -> float:
        return self.limit(0.0)

    def limit(self, sigmas: float) -> float:
        """So many standard deviations above the mean."""
        values = np.array(self._values)
        in_logs = self.is_positive
        if in_logs:
            values = np.log(values)
        limit = float(values.mean() + sigmas * values.std())
        with np.errstate(over="ignore"):
            return float(np.exp(limit)) if in_logs else limit
