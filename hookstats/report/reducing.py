"""Planes of a statistic over sites and steps, reduced to columns of a picture and coded in a byte a cell."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hookstats.numbers.fields import Array, Counts

Codes = NDArray[np.uint8]

SILENT, ZERO, FIRST, LAST, NONFINITE = 0, 1, 2, 253, 255
NEUTRAL = 128  # of what is told with a sign
PER_OCTAVE = 16  # levels of a relative plane: 4.4 % each, 7.8 octaves to either side
_ABSOLUTE = 1 / 12  # octaves: the finest step of an absolute plane, 5.9 %; twelve bits are for lines
_LOWEST = -1075.0  # log2 of zero, as a number: below the smallest float64
_PAST = 128  # measured steps of a site's own past, or an eighth of the run


class Rows(NamedTuple):
    """Codes ``[n, columns]``; a value is ``low + (code - FIRST) * step`` of its row, or 2 to the power of that."""

    codes: Codes
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


def past(values: Array, window: int = _PAST, grows: bool = False) -> Array:
    """``[n, t]``: the median of the values that a site had before; its first value where it had none.

    Over ``window`` steps or an eighth of the run, at least 8; it is taken anew after every eighth of the window.
    Steps in which a site was silent count with what it had last. grows: what comes later changes nothing of this, and
    the window is not an eighth of a run of which nobody knows the end.
    """
    count, steps = values.shape
    window = window if grows else min(window, max(8, steps // 8))
    stride = max(1, window // 8)
    known = ~np.isnan(values)
    latest = np.maximum.accumulate(np.where(known, np.arange(steps), -1), axis=1)
    first = known.argmax(axis=1)
    filled = np.take_along_axis(values, np.where(latest < 0, first[:, None], latest), axis=1)
    filled[~known.any(axis=1)] = 0.0  # nothing is known of it, at any step
    at = np.arange(0, steps, stride)
    result = np.empty((count, len(at)))
    result[:, 0] = filled[:, 0]
    for i in range(1, len(at)):
        begin = max(0, int(at[i]) - window)
        result[:, i] = np.median(filled[:, begin : at[i]], axis=1)
    return np.repeat(result, np.diff(at, append=steps), axis=1)


def relative_codes(change: Array, begin: Counts, bad: Array, per_unit: float = PER_OCTAVE) -> Codes:
    """Of changes ``[n, t]``, signed: the farthest of each column. bad: how many values were not finite."""
    with np.errstate(invalid="ignore"):
        codes = np.clip(NEUTRAL + np.round(farthest(change, begin) * per_unit), FIRST, LAST + 1)
    return _marked(codes, begin, bad)


def absolute_rows(values: Array, begin: Counts, bad: Array) -> Rows:
    """The largest of each column, by its logarithm, on a scale for each row."""
    return coded(largest(logarithm(values), begin), LAST, _ABSOLUTE, begin, bad)


def linear_rows(values: Array, begin: Counts, bad: Array) -> Rows:
    """The same of shares, from 0 to the largest of the row."""
    top = largest(values, begin)
    step = np.maximum(np.nan_to_num(np.fmax.reduce(top, axis=1)), 1e-9) / (LAST - FIRST)
    with np.errstate(invalid="ignore"):
        codes = FIRST + np.round(top / step[:, None])
    return Rows(_marked(codes, begin, bad), np.zeros(len(values)), step)


def coded(logs: Array, last: int, finest: float, begin: Counts, bad: Array) -> Rows:
    low, step = _scales(np.where(logs > _LOWEST, logs, np.nan), last, finest)
    with np.errstate(invalid="ignore"):
        codes = np.where(logs > _LOWEST, FIRST + np.round((logs - low[:, None]) / step[:, None]), ZERO)
    return Rows(_marked(np.where(np.isnan(logs), np.nan, codes), begin, bad), low, step)


def _marked(codes: Array, begin: Counts, bad: Array) -> Codes:
    found = np.where(np.isnan(codes), SILENT, codes).astype(np.uint8)
    found[np.add.reduceat(bad > 0, begin, axis=1, dtype=np.int64) > 0] = NONFINITE
    return found


def _scales(values: Array, last: int, finest: float) -> tuple[Array, Array]:
    """Of each row, the smallest value, and a step so that the largest has a code."""
    low, high = (of.reduce(values, axis=1, initial=np.nan) for of in (np.fmin, np.fmax))
    low, high = np.nan_to_num(low), np.nan_to_num(high)
    return low, np.maximum((high - low) / (last - FIRST), finest)


class Lines(NamedTuple):
    """Twelve bits a value: codes uint16 ``[n, columns]``, 0 silent, 1 zero; low and step as in `Rows`."""

    codes: NDArray[np.uint16]
    low: Array
    step: Array


def line(values: Array, is_log: bool) -> Lines:
    """Of values that are reduced to columns already."""
    logs = logarithm(values) if is_log else values
    with np.errstate(invalid="ignore"):
        usable = np.isfinite(logs) & (logs > (_LOWEST if is_log else -np.inf))
    low, step = _scales(np.where(usable, logs, np.nan), 4095, 1e-300)
    with np.errstate(invalid="ignore", over="ignore"):
        codes = FIRST + np.round((logs - low[:, None]) / step[:, None])
        codes = np.where(usable, codes, np.where(np.isnan(logs), SILENT, ZERO))
    return Lines(np.nan_to_num(codes).astype(np.uint16), low, step)
