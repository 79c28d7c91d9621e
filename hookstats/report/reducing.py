"""Planes of a statistic over sites and steps, reduced to columns of a picture and coded in a byte a cell.

The page reduces these once more, to pixels: assets/cells.js.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hookstats.numbers.fields import Array, Counts

Codes = NDArray[np.uint8]
Marks = NDArray[np.bool_]
Reduction: TypeAlias = Callable[[Array, Counts], Array]

SILENT, ZERO, FIRST, LAST, NONFINITE = 0, 1, 2, 253, 255
NEUTRAL = 128  # of what is told with a sign
PER_OCTAVE = 16.0  # levels of a relative plane: 4.4 % each, 7.8 octaves to either side
FINEST = 1 / 12  # octaves: the finest step of an absolute plane, 5.9 %; lines tell more
LOWEST = -1075.0  # log2 of zero, as a number: below the smallest float64
_PER_OCTAVE_OF_STEPS = 8  # times that a site's own past is told anew
_MOST_HELD = 256  # steps of it
_DROPPED = 12  # of the 23 bits of a float32's mantissa: a line tells values to 1 / 4096


class CodedRows(NamedTuple):
    """Codes ``[n, columns]``: a value is ``low + (code - FIRST) * step`` of its row, or 2 to the power of that."""

    codes: Codes
    low: Array
    step: Array

    def to_bytes(self) -> bytes:
        return b"".join([self.codes.tobytes(), self.low.astype("<f8").tobytes(), self.step.astype("<f8").tobytes()])


def edges(steps: int, columns: int) -> Counts:
    """Return where each of at most so many columns begins, ascending."""
    count = max(min(steps, columns), 1)
    return np.arange(count, dtype=np.int64) * steps // count


# ``[n, t]`` to ``[n, columns]``: NaN only where a column holds nothing else.
largest: Reduction = partial(np.fmax.reduceat, axis=1)
smallest: Reduction = partial(np.fmin.reduceat, axis=1)


def farthest(values: Array, begin: Counts) -> Array:
    """Return the value that is farthest from zero, with its sign."""
    high, low = largest(values, begin), smallest(values, begin)
    result: Array = np.where(-low > high, low, high)
    return result


def average(values: Array, begin: Counts) -> Array:
    known = ~np.isnan(values)
    count = np.add.reduceat(known, begin, axis=1, dtype=np.int64)
    sums = np.add.reduceat(np.where(known, values, 0.0), begin, axis=1)
    result: Array = np.divide(sums, count, out=np.full(sums.shape, np.nan), where=count > 0)
    return result


def marks(bad: Array, begin: Counts) -> Marks:
    """``[n, columns]``: where something was not finite. bad: how many values were not, ``[n, t]``."""
    result: Marks = np.add.reduceat(bad > 0, begin, axis=1, dtype=np.int64) > 0
    return result


def logarithm(values: Array) -> Array:
    """log2; of zero a number below all others."""
    with np.errstate(divide="ignore", invalid="ignore"):
        result: Array = np.maximum(np.log2(values), LOWEST)
    return result


def past(values: Array) -> Array:
    """The median of all values that a site had before, step by step, ``[n, t]``; its first value where it had none.

    The median is taken anew 8 times an octave of steps, over at most 256 steps at equal distances. A step in which a
    site was silent counts with the value that it had last. A level that stays is therefore told until half of the run
    was like it.
    """
    whole, steps = _fill_gaps(values), values.shape[1]
    first = np.take_along_axis(whole, (~np.isnan(whole)).argmax(axis=1)[:, None], axis=1)
    result = np.empty_like(whole)
    begin = 0
    while begin < steps:
        end = min(steps, begin + max(1, begin // _PER_OCTAVE_OF_STEPS))
        every = 1
        while -(-begin // every) > _MOST_HELD:
            every *= 2
        usual = _median(whole[:, :begin:every])[:, None]
        result[:, begin:end] = np.where(np.isnan(usual), first, usual)
        begin = end
    return result


def _fill_gaps(values: Array) -> Array:
    """Fill in the last known value where one is NaN."""
    latest = np.where(np.isnan(values), 0, np.arange(values.shape[1]))
    result: Array = np.take_along_axis(values, np.maximum.accumulate(latest, axis=1), axis=1)
    return result


def _median(values: Array) -> Array:
    """The median of each row's known values; NaN where there are none. np.nanmedian takes far longer."""
    count = (~np.isnan(values)).sum(axis=1)
    if not values.shape[1]:
        return np.full(len(values), np.nan)
    ordered, places = np.sort(values, axis=1), np.stack([np.maximum(count - 1, 0) // 2, count // 2], axis=1)
    result: Array = np.take_along_axis(ordered, np.minimum(places, values.shape[1] - 1), axis=1).mean(axis=1)
    return result


def relative_codes(far: Array, is_bad: Marks, per_unit: float) -> Codes:
    """Return codes of signed changes that were reduced to columns. is_bad: where something was not finite."""
    with np.errstate(invalid="ignore"):
        return _mark_bad(np.clip(NEUTRAL + np.round(far * per_unit), FIRST, LAST + 1), is_bad)


def absolute_rows(logs: Array, is_bad: Marks, finest: float = FINEST) -> CodedRows:
    """Return codes of logarithms that were reduced to columns.

    The smallest value of a row has the first code, its largest the last, unless a step would be finer.
    """
    known = np.where(logs > LOWEST, logs, np.nan)
    low, high = (np.nan_to_num(of.reduce(known, axis=1, initial=np.nan)) for of in (np.fmin, np.fmax))
    step = np.maximum((high - low) / (LAST - FIRST), finest)
    with np.errstate(invalid="ignore"):
        codes = np.where(logs > LOWEST, FIRST + np.round((logs - low[:, None]) / step[:, None]), ZERO)
    return CodedRows(_mark_bad(np.where(np.isnan(logs), np.nan, codes), is_bad), low, step)


def linear_rows(top: Array, is_bad: Marks) -> CodedRows:
    """Return codes of shares, from 0 to the largest of the row."""
    step = np.maximum(np.nan_to_num(np.fmax.reduce(top, axis=1)), 1e-9) / (LAST - FIRST)
    with np.errstate(invalid="ignore"):
        return CodedRows(_mark_bad(FIRST + np.round(top / step[:, None]), is_bad), np.zeros(len(top)), step)


def _mark_bad(codes: Array, is_bad: Marks) -> Codes:
    found = np.where(np.isnan(codes), SILENT, codes).astype(np.uint8)
    found[is_bad] = NONFINITE
    return found


def round_values(values: Array) -> NDArray[np.float32]:
    """Round to float32 of 1 / 4096: further bits would be noise, and take room when they are compressed."""
    with np.errstate(over="ignore"):
        bits = np.ascontiguousarray(values, "<f4").view("<u4")
    half, whole = np.uint32(1 << (_DROPPED - 1)), np.uint32(0xFFFFFFFF >> _DROPPED << _DROPPED)
    result: NDArray[np.float32] = ((bits + half) & whole).view("<f4")
    return result


def transpose_bytes(values: NDArray[np.float32]) -> bytes:
    """Return all first bytes, then all second ones, and so on: what is alike lies together, and becomes small."""
    result: bytes = np.ascontiguousarray(values, "<f4").view(np.uint8).reshape(-1, 4).T.tobytes()
    return result
