"""The columns of the page of a run that grows: new steps are added to them, and what was reduced before stays.

They are what `planes.heatmap` and `planes.lines` make of the whole run. Of too many columns, two become one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from hookstats.numbers.fields import Array, Counts
from hookstats.report import planes
from hookstats.report.reducing import (
    Ends,
    Marks,
    Past,
    Rows,
    average,
    ends_of,
    farthest,
    largest,
    line,
    logarithm,
    relative_codes,
)

_FEWEST = 64  # columns for which there is room at first


class Reduced:
    """``[n, columns]``, of which each is reduced from ``wide`` steps, the last perhaps from fewer."""

    def __init__(self, rows: int, most: int, steps: int, reduce: Callable[[Array, Counts], Array]) -> None:
        """most: columns. steps: so many will come at least.

        reduce: as `largest`; reduced once more, what it gives for parts is what it gives for all.
        """
        self._reduce = reduce
        self._most = most
        self._room = np.empty((rows, min(_FEWEST, most)))
        self.wide = 1
        self.steps = 0
        self._reserve(steps)

    @property
    def columns(self) -> int:
        return -(-self.steps // self.wide)

    @property
    def values(self) -> Array:
        return self._room[:, : self.columns]

    def of(self, rows: slice | Counts, columns: slice) -> Array:
        """Some of the values."""
        result: Array = self.values[rows, columns]
        return result

    def _reserve(self, steps: int) -> None:
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
        self._reserve(self.steps + steps)
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


class Average(Reduced):
    """Of what is known in each column; NaN where nothing is. ``values`` are sums."""

    def __init__(self, rows: int, most: int, steps: int) -> None:
        super().__init__(rows, most, steps, total)
        self._known = Reduced(rows, most, steps, total)

    def add(self, values: Array) -> None:
        super().add(values)
        self._known.add((~np.isnan(values)).astype(np.float64))

    def of(self, rows: slice | Counts, columns: slice) -> Array:
        sums, known = super().of(rows, columns), self._known.of(rows, columns)
        result: Array = np.divide(sums, known, out=np.full(sums.shape, np.nan), where=known > 0)
        return result


class Coded:
    """Codes of columns: of those that are new, and of rows whose scale they have changed."""

    def __init__(
        self,
        reduced: Reduced,
        code: Callable[[Array, Marks, Ends | None], Rows],
        ends: Callable[[Array], Ends],
    ) -> None:
        """code: of some rows and columns, those that are not finite, and the ends of their rows in other columns.

        ends: of rows, those of what is coded.
        """
        self._reduced, self._code, self._ends_of = reduced, code, ends
        self._wide = 0

    def take(self, is_bad: Marks) -> Rows:
        """Of all columns; its codes stay as they are until the next one. is_bad: where something was not finite."""
        count, rows = self._reduced.columns, slice(None)
        if self._wide != self._reduced.wide:
            self._wide, self._full = self._reduced.wide, 0  # columns that stay as they are
            self._ends = (np.full(len(is_bad), np.nan), np.full(len(is_bad), np.nan))
            self._told: Rows | None = None
        full, told = self._full, self._told
        new = self._code(self._reduced.of(rows, slice(full, count)), is_bad[:, full:], self._ends)
        room: Any = new.codes if told is None else told.codes
        if told is None or count > room.shape[1]:
            room = np.empty((len(is_bad), 2 * count), new.codes.dtype)
            if told is not None:
                room[:, :full] = told.codes[:, :full]
        room[:, full:count] = new.codes
        if told is not None:
            other = np.flatnonzero((new.low != told.low) | (new.step != told.step))
            if len(other):
                again = self._code(self._reduced.of(other, slice(count)), is_bad[other], None)
                room[other, :full] = again.codes[:, :full]
        low, high = self._ends_of(self._reduced.of(rows, slice(full, count - 1)))
        self._ends = (np.fmin(self._ends[0], low), np.fmax(self._ends[1], high))
        self._full, self._told = count - 1, new._replace(codes=room)
        return new._replace(codes=room[:, :count])


class Heat:
    """One of `planes.STATISTICS`, in both views."""

    def __init__(self, key: str, rows: int, steps: int) -> None:
        self._key, kind = key, planes.STATISTICS[key][1]
        self._is_log = kind == "scale"
        self._past = Past(rows)
        self._far = Reduced(rows, planes.COLUMNS, steps, farthest)
        self._top = Reduced(rows, planes.COLUMNS, steps, planes.topmost(kind))
        one = np.ones(rows)
        self._relative = Coded(
            self._far,
            lambda far, is_bad, _: Rows(relative_codes(far, is_bad, planes.UNITS[kind]), one, one),
            lambda _: (one, one),
        )
        self._absolute = Coded(
            self._top,
            lambda top, is_bad, ends: planes.absolute(top, kind, is_bad, True, ends),
            lambda top: ends_of(top, self._is_log),
        )

    def add(self, values: Array) -> None:
        told = logarithm(values) if self._is_log else values
        self._far.add(told - self._past.of(told))
        self._top.add(told)

    def blobs(self, is_bad: Marks) -> dict[str, bytes]:
        relative = self._relative.take(is_bad).codes.tobytes()
        return {f"{self._key}.relative": relative, f"{self._key}.absolute": planes.scaled(self._absolute.take(is_bad))}


class Line:
    """One of `planes.LINES`."""

    def __init__(self, name: str, rows: int, steps: int) -> None:
        self.statistic, reduce, is_log = planes.LINES[name]
        self._rows, most = rows, planes.line_columns(rows)
        self.reduced = Average(rows, most, steps) if reduce is average else Reduced(rows, most, steps, reduce)
        self._coded = Coded(
            self.reduced,
            lambda values, _, ends: line(values, is_log, True, ends),
            lambda values: ends_of(logarithm(values) if is_log else values, is_log),
        )

    def blob(self) -> bytes:
        return planes.packed(self._coded.take(np.empty((self._rows, self.reduced.columns), bool)))


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
        self._bad = Reduced(rows, planes.COLUMNS, steps, largest)
        self._heats = {key: Heat(key, rows, steps) for key in planes.STATISTICS}
        self._lines = {name: Line(name, rows, steps) for name in planes.LINES}

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
        for each in self._lines.values():
            each.reduced.add(given[each.statistic])

    def heatmaps(self, keys: Iterable[str]) -> dict[str, bytes]:
        is_bad = self._bad.values > 0
        return {name: blob for key in keys for name, blob in self._heats[key].blobs(is_bad).items()}

    def lines(self) -> dict[str, bytes]:
        return {f"line.{name}": each.blob() for name, each in self._lines.items()}
