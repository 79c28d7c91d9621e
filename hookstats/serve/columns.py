"""The columns of the page of a run that grows: new steps are added to them, and what was reduced before stays.

They are what `planes.heatmap` and `planes.lines` make of the whole run. When there are too many columns, two become one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from hookstats.numbers.fields import Array, Counts
from hookstats.report import planes
from hookstats.report.reducing import Marks, Past, average, farthest, largest, line, logarithm

_FEWEST = 64  # columns for which there is room at first


class Reduced:
    """``[n, columns]``, of which each is reduced from ``wide`` steps, the last perhaps from fewer."""

    def __init__(self, rows: int, most: int, reduce: Callable[[Array, Counts], Array]) -> None:
        """most: columns. reduce: as `largest`; reduced once more, what it gives for parts is what it gives for all."""
        self._reduce = reduce
        self._most = most
        self._room = np.empty((rows, min(_FEWEST, most)))
        self.wide = 1
        self.steps = 0

    @property
    def values(self) -> Array:
        return self._room[:, : -(-self.steps // self.wide)]

    def reserve(self, steps: int) -> None:
        """Columns become as wide as so many steps in all need."""
        while self.wide * self._most < steps:
            if self.steps:
                values = self.values
                merged = self._reduce(values, np.arange(0, values.shape[1], 2))
                self._room[:, : merged.shape[1]] = merged
            self.wide *= 2
        needed, values = -(-steps // self.wide), self.values
        if needed > self._room.shape[1]:
            self._room = np.empty((len(values), min(2 * needed, self._most)))
            self._room[:, : values.shape[1]] = values

    def add(self, values: Array) -> None:
        """``[n, t]``: of the next steps."""
        steps = values.shape[1]
        self.reserve(self.steps + steps)
        first, begun = divmod(self.steps, self.wide)
        begin = np.arange(0, steps, self.wide)
        if begun:  # a column that is not full counts as one more step before these
            values = np.concatenate([self._room[:, first : first + 1], values], axis=1)
            begin = np.append(0, np.arange(1 + self.wide - begun, 1 + steps, self.wide))
        new = self._reduce(values, begin)
        self._room[:, first : first + new.shape[1]] = new
        self.steps += steps


def total(values: Array, begin: Counts) -> Array:
    """What is NaN does not count."""
    result: Array = np.add.reduceat(np.where(np.isnan(values), 0.0, values), begin, axis=1)
    return result


class Average:
    """Of what is known in each column; NaN where nothing is."""

    def __init__(self, rows: int, most: int) -> None:
        self._sums, self._known = Reduced(rows, most, total), Reduced(rows, most, total)

    def reserve(self, steps: int) -> None:
        self._sums.reserve(steps)
        self._known.reserve(steps)

    def add(self, values: Array) -> None:
        self._sums.add(values)
        self._known.add((~np.isnan(values)).astype(np.float64))

    @property
    def values(self) -> Array:
        sums, known = self._sums.values, self._known.values
        result: Array = np.divide(sums, known, out=np.full(sums.shape, np.nan), where=known > 0)
        return result


class Heat:
    """One of `planes.STATISTICS`, in both views."""

    def __init__(self, key: str, rows: int) -> None:
        self._key, kind = key, planes.STATISTICS[key][1]
        self._is_log = kind == "scale"
        self._past = Past(rows)
        self._far = Reduced(rows, planes.COLUMNS, farthest)
        self._top = Reduced(rows, planes.COLUMNS, planes.topmost(kind))

    def reserve(self, steps: int) -> None:
        self._far.reserve(steps)
        self._top.reserve(steps)

    def add(self, values: Array) -> None:
        told = logarithm(values) if self._is_log else values
        self._far.add(told - self._past.of(told))
        self._top.add(told)

    def blobs(self, is_bad: Marks) -> dict[str, bytes]:
        return planes.coded(self._key, self._far.values, self._top.values, is_bad, grows=True)


class Columns:
    """All heatmaps and lines. What the first picture needs can be given for all steps before the rest is.

    ``fired``: in how many steps each site was not silent; ``measured``: how many values were.
    """

    FIRST = ("rms", "nans", "posinfs", "neginfs")  # statistics
    ALL = (*FIRST, "abs_max", "mean", "std", "min", "max", "zeros", "count")

    def __init__(self, rows: int, steps: int) -> None:
        """steps: so many will come at least."""
        self.fired = np.zeros(rows, np.int64)
        self.measured = 0.0
        self._bad = Reduced(rows, planes.COLUMNS, largest)
        self._heats = {key: Heat(key, rows) for key in planes.STATISTICS}
        most = planes.line_columns(rows)
        self._lines: dict[str, Reduced | Average] = {
            name: Average(rows, most) if reduce is average else Reduced(rows, most, reduce)
            for name, (_, reduce, _) in planes.LINES.items()
        }
        for each in (self._bad, *self._heats.values(), *self._lines.values()):
            each.reserve(steps)

    def begin(self, given: Mapping[str, Array]) -> None:
        """Of the next steps, planes ``[n, t]`` of `FIRST`, by statistic; NaN where a site was silent."""
        bad = given["nans"] + given["posinfs"] + given["neginfs"]
        self.fired += (~np.isnan(bad)).sum(axis=1)
        self._bad.add(bad)
        self._heats["rms"].add(given["rms"])

    def complete(self, given: Mapping[str, Array]) -> None:
        """Planes of `ALL`, of steps of which `begin` was given those of `FIRST`."""
        self.measured += float(sum(np.nansum(given[name]) for name in ("count", "nans", "posinfs", "neginfs")))
        for key, heat in self._heats.items():
            if key != "rms":
                heat.add(planes.numbers_of(given.__getitem__, key))
        for name, reduced in self._lines.items():
            reduced.add(given[planes.LINES[name][0]])

    def heatmaps(self, keys: Iterable[str]) -> dict[str, bytes]:
        is_bad = self._bad.values > 0
        return {name: blob for key in keys for name, blob in self._heats[key].blobs(is_bad).items()}

    def lines(self) -> dict[str, bytes]:
        return {
            f"line.{name}": planes.packed(line(reduced.values, planes.LINES[name][2], grows=True))
            for name, reduced in self._lines.items()
        }
