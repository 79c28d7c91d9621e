"""Planes of a statistic over sites and steps, reduced to columns of a picture and coded in a byte a cell."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hookstats.numbers.fields import Array, Counts

Codes = NDArray[np.uint8]
Marks = NDArray[np.bool_]
Ends = tuple[Array, Array]

SILENT, ZERO, FIRST, LAST, NONFINITE = 0, 1, 2, 253, 255
NEUTRAL = 128  # of what is told with a sign
PER_OCTAVE = 16.0  # levels of a relative plane: 4.4 % each, 7.8 octaves to either side
_ABSOLUTE = 1 / 12  # octaves: the finest step of an absolute plane, 5.9 %; twelve bits are for lines
LAST_OF_LINE = 4095
_LOWEST = -1075.0  # log2 of zero, as a number: below the smallest float64
_PER_OCTAVE_OF_STEPS = 8  # times that a site's own past is told anew
_MOST_HELD = 256  # steps of it


class Rows(NamedTuple):
    """Codes ``[n, columns]``, uint8 or, of lines, uint16 of twelve bits.

    A value is ``low + (code - FIRST) * step`` of its row, or 2 to the power of that.
    """

    codes: NDArray[np.uint8 | np.uint16]
    low: Array
    step: Array


def edges(steps: int, columns: int) -> Counts:
    """Where each of at most so many columns begins, ascending."""
    count = max(min(steps, columns), 1)
    return np.arange(count, dtype=np.int64) * steps // count


def largest(values: Array, begin: Counts) -> Array:
    """``[n, t]`` to ``[n, columns]``: NaN only where a column holds nothing else."""
    result: Array = np.fmax.reduceat(values, begin, axis=1)
    return result


def smallest(values: Array, begin: Counts) -> Array:
    result: Array = np.fmin.reduceat(values, begin, axis=1)
    return result


def farthest(values: Array, begin: Counts) -> Array:
    """That which is farthest from zero, with its sign."""
    high, low = largest(values, begin), smallest(values, begin)
    result: Array = np.where(-low > high, low, high)
    return result


def average(values: Array, begin: Counts) -> Array:
    known = ~np.isnan(values)
    count = np.add.reduceat(known, begin, axis=1, dtype=np.int64)
    sums = np.add.reduceat(np.where(known, values, 0.0), begin, axis=1)
    result: Array = np.divide(sums, count, out=np.full(sums.shape, np.nan), where=count > 0)
    return result


def logarithm(values: Array) -> Array:
    """log2; of zero a number below all others."""
    with np.errstate(divide="ignore", invalid="ignore"):
        result: Array = np.maximum(np.log2(values), _LOWEST)
    return result


class Past:
    """The median of all values that a site had before, step by step; its first value where it had none.

    The median is taken anew 8 times an octave of steps, over at most 256 steps at equal distances. A step in which a
    site was silent counts with the value that it had last. A level that stays is therefore told until half of the run
    was like it.
    """

    def __init__(self, rows: int) -> None:
        self._steps = 0  # that were given
        self._next = 0  # where the median is taken anew
        self._last = np.full(rows, np.nan)
        self._every = 1  # of the steps, which are held
        self._held = np.empty((rows, 0))
        self._usual = np.full(rows, np.nan)  # NaN until a site has a value

    def of(self, values: Array) -> Array:
        """Tell the past of the next steps, ``[n, t]``."""
        whole = _without_gaps(self._last, values)
        result = np.empty_like(whole)
        begin, end = self._steps, self._steps + whole.shape[1]
        while self._steps < end:
            at = self._steps
            if at == self._next:
                self._usual = _median(self._held)
                self._next = at + max(1, at // _PER_OCTAVE_OF_STEPS)
            self._steps = min(end, self._next)
            now = whole[:, at - begin : self._steps - begin]
            first = np.take_along_axis(now, (~np.isnan(now)).argmax(axis=1)[:, None], axis=1)[:, 0]
            self._usual = np.where(np.isnan(self._usual), first, self._usual)
            result[:, at - begin : self._steps - begin] = self._usual[:, None]
            self._hold(now[:, -at % self._every :: self._every])
        if whole.shape[1]:
            self._last = whole[:, -1].copy()
        return result

    def _hold(self, columns: Array) -> None:
        self._held = np.concatenate([self._held, columns], axis=1)
        while self._held.shape[1] > _MOST_HELD:
            self._held, self._every = self._held[:, ::2], 2 * self._every


def _without_gaps(before: Array, values: Array) -> Array:
    """Fill in the last known value where one is NaN. before: that of each row."""
    whole = np.concatenate([before[:, None], values], axis=1)
    latest = np.maximum.accumulate(np.where(np.isnan(whole), 0, np.arange(whole.shape[1])), axis=1)
    result: Array = np.take_along_axis(whole, latest, axis=1)[:, 1:]
    return result


def _median(values: Array) -> Array:
    """The median of each row's known values; NaN where there are none. np.nanmedian takes far longer."""
    count = (~np.isnan(values)).sum(axis=1)
    if not values.shape[1]:
        return np.full(len(values), np.nan)
    ordered, places = np.sort(values, axis=1), np.stack([np.maximum(count - 1, 0) // 2, count // 2], axis=1)
    result: Array = np.take_along_axis(ordered, np.minimum(places, values.shape[1] - 1), axis=1).mean(axis=1)
    return result


def past(values: Array) -> Array:
    """`Past` of all steps at once."""
    return Past(len(values)).of(values)


def relative_codes(far: Array, is_bad: Marks, per_unit: float) -> Codes:
    """Of changes, signed, that were reduced to columns. is_bad: where something was not finite."""
    with np.errstate(invalid="ignore"):
        return _marked(np.clip(NEUTRAL + np.round(far * per_unit), FIRST, LAST + 1), is_bad)


def absolute_rows(
    logs: Array, is_bad: Marks, grows: bool = False, ends: Ends | None = None, finest: float = _ABSOLUTE
) -> Rows:
    """Of logarithms that were reduced to columns, on a scale for each row. grows, ends: see `_scales`."""
    low, step = _scales(np.where(logs > _LOWEST, logs, np.nan), LAST, finest, grows, ends)
    with np.errstate(invalid="ignore"):
        codes = np.where(logs > _LOWEST, FIRST + np.round((logs - low[:, None]) / step[:, None]), ZERO)
    return Rows(_marked(np.where(np.isnan(logs), np.nan, codes), is_bad), low, step)


def linear_rows(top: Array, is_bad: Marks, grows: bool = False, ends: Ends | None = None) -> Rows:
    """The same of shares, from 0 to the largest of the row; of a run that grows to a power of two behind it."""
    high = np.fmax.reduce(top, axis=1)
    step = np.maximum(np.nan_to_num(high if ends is None else np.fmax(high, ends[1])), 1e-9) / (LAST - FIRST)
    if grows:
        step = np.exp2(np.ceil(np.log2(step)))
    with np.errstate(invalid="ignore"):
        return Rows(_marked(FIRST + np.round(top / step[:, None]), is_bad), np.zeros(len(top)), step)


def marks(bad: Array, begin: Counts) -> Marks:
    """``[n, columns]``: where something was not finite. bad: how many values were not, ``[n, t]``."""
    result: Marks = np.add.reduceat(bad > 0, begin, axis=1, dtype=np.int64) > 0
    return result


def _marked(codes: Array, is_bad: Marks) -> Codes:
    found = np.where(np.isnan(codes), SILENT, codes).astype(np.uint8)
    found[is_bad] = NONFINITE
    return found


def ends_of(values: Array, is_log: bool) -> Ends:
    """Of each row the smallest value that is finite, and the largest. is_log: zero's logarithm counts as infinite."""
    known = np.where(np.isfinite(values) & (values > (_LOWEST if is_log else -np.inf)), values, np.nan)
    low, high = (of.reduce(known, axis=1, initial=np.nan) for of in (np.fmin, np.fmax))
    return low, high


def _scales(values: Array, last: int, finest: float, grows: bool, ends: Ends | None) -> tuple[Array, Array]:
    """Of each row, the smallest value, and a step so that the largest has a code. ends: those of other columns.

    grows: the step is a power of two, and the lowest value that has a code a multiple of a quarter of what has codes.
    So they stay as they are for long, however a row's range grows, and so do the codes that were sent.
    """
    low, high = (of.reduce(values, axis=1, initial=np.nan) for of in (np.fmin, np.fmax))
    if ends is not None:
        low, high = np.fmin(low, ends[0]), np.fmax(high, ends[1])
    low, high = np.nan_to_num(low), np.nan_to_num(high)
    step = (high - low) / (last - FIRST)
    if not grows:
        return low, np.maximum(step, finest)
    least = np.maximum(finest / 2, np.maximum(np.abs(low), np.abs(high)) * 2.0**-44)
    step = np.exp2(np.ceil(np.log2(np.maximum(step, least))))
    levels = last - FIRST + 1
    fits = high - _floor(low, step * (levels // 4)) <= step * (levels - 1)
    step = np.where(fits, step, 2 * step)  # of which a range is half of what has codes at most
    return _floor(low, step * (levels // 4)), step


def _floor(values: Array, unit: Array) -> Array:
    result: Array = np.floor(values / unit) * unit
    return result


def line(values: Array, is_log: bool, grows: bool = False, ends: Ends | None = None) -> Rows:
    """Of values that are reduced to columns already, in twelve bits each. grows, ends: see `_scales`."""
    logs = logarithm(values) if is_log else values
    with np.errstate(invalid="ignore"):
        usable = np.isfinite(logs) & (logs > (_LOWEST if is_log else -np.inf))
    low, step = _scales(np.where(usable, logs, np.nan), LAST_OF_LINE, 1e-300, grows, ends)
    with np.errstate(invalid="ignore", over="ignore"):
        codes = FIRST + np.round((logs - low[:, None]) / step[:, None])
        codes = np.where(usable, codes, np.where(np.isnan(logs), SILENT, ZERO))
    return Rows(np.nan_to_num(codes).astype(np.uint16), low, step)
