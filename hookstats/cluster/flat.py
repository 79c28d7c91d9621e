"""A step as a few arrays that ranks merge element by element: the same result whoever merges which elements of them.

Elementwise functions alone, in the order of the ranks: no sum whose order numpy would choose by an array's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hookstats.numbers.fields import FIELDS, Array, Counts, least, merge_states

Section: TypeAlias = NDArray[Any]  # [rows, elements], of 8-byte numbers
Merge: TypeAlias = Callable[[Sequence[Section]], Section]  # of the parts' elements, in the order of the parts

SPREAD = ("rms", "abs_max", "mean", "nonfinite")  # of which the ranks' extremes are told
OF_STEP = ("time", "grad_scale", "overflowed")  # scalars that every step has
# Rows of counts. CONTENT: checksums of the ranks' states, whose sum wraps; APART: ranks that have seen other ones.
CALLS, FIRED, SHOWN, FOLDED, SKIPPED, GIVEN_UP, CONTENT, APART = range(8)
ORDER, SKIPPED_BY = range(2)  # rows of lowest
NONE = np.iinfo(np.int64).max  # in lowest
PER_SITE = {False: 8 + 2, True: 8 + 2 + 4 * len(SPREAD)}  # numbers that are no state: without spread, and with
SUM, COUNT, MIN, MAX = range(4)  # rows of scalars
_AT_ONCE = 1 << 15  # channels of all parts that are merged in one go: what a cache holds
_COUNT = FIELDS.index("count")
_MOMENTS = [FIELDS.index(name) for name in ("mean", "m2")]
_EXTREMES = [FIELDS.index(name) for name in ("min", "max")]


class Flat(NamedTuple):
    """The sections that a rank contributes, or that have been merged. What a rank does not have is neutral there."""

    columns: Array  # [10, channels of all sites]: states; zeros where nothing was measured
    bins: Counts  # [1, counters of all sites]
    counts: Counts  # [8, sites]: sums
    lowest: Counts  # [2, sites]: when a site first ran (rank << 32 | place); the first rank that left out tensors of it
    scalars: Array  # [4, scalars]: sum, count, min, max over the ranks that have them
    spread: Array  # [16, sites], or [16, 0]: of each of SPREAD min, its rank, max, its rank
    samples: Counts  # [1 + most ids of a rank, ranks]: how many ids a rank gave with the step, and these; sums


def neutral(
    channels: int, counters: int, sites: int, scalars: int, spread: bool, samples: tuple[int, int] = (0, 0)
) -> Flat:
    """What a rank without anything contributes. samples: most ids of a rank, and ranks."""
    flat = Flat(
        np.zeros((len(FIELDS), channels)),
        np.zeros((1, counters), np.int64),
        np.zeros((8, sites), np.int64),
        np.full((2, sites), NONE),
        np.zeros((4, scalars)),
        np.full((4 * len(SPREAD), sites if spread else 0), np.nan),
        np.zeros((1 + samples[0], samples[1]), np.int64),
    )
    flat.scalars[MIN], flat.scalars[MAX] = np.inf, -np.inf
    return flat


def merge(flats: Sequence[Flat]) -> Flat:
    """What several ranks contribute, merged in their order."""
    return Flat(*(of(parts) for of, parts in zip(MERGES, zip(*flats, strict=True), strict=True)))


def _columns(parts: Sequence[Section]) -> Section:
    """States of the same channels, as if one process had measured all; what one rank alone has stays, to the bit."""
    result: Section = np.empty(parts[0].shape)
    step = max(_AT_ONCE // len(parts), 1)
    for begin in range(0, result.shape[1], step):
        here = [part[:, begin : begin + step] for part in parts]
        result[:, begin : begin + step] = _some_columns(here)
    return result


def _some_columns(parts: list[Section]) -> Section:
    result = merge_states(parts)
    measured = [part[_COUNT] > 0 for part in parts]
    number = np.sum(measured, axis=0)
    if (number == 1).any():
        for part, here in zip(parts, measured, strict=True):
            for row in _MOMENTS:
                np.copyto(result[row], part[row], where=here & (number == 1))
    result[np.ix_(_EXTREMES, number == 0)] = 0  # as a rank has them that measured nothing
    return result


def _sum(parts: Sequence[Section]) -> Section:
    result: Section = parts[0].copy()
    for part in parts[1:]:
        result += part
    return result


def _lowest(parts: Sequence[Section]) -> Section:
    result: Section = parts[0].copy()
    for part in parts[1:]:
        np.minimum(result, part, out=result)
    return result


def _scalars(parts: Sequence[Section]) -> Section:
    with np.errstate(over="ignore", invalid="ignore"):  # a loss that is infinite
        result = _sum(parts)
    result[MIN] = least(np.stack([part[MIN] for part in parts]))
    result[MAX] = -least(np.stack([-part[MAX] for part in parts]))
    return result


def _spread(parts: Sequence[Section]) -> Section:
    """NaN is no extreme; of equal ones, that of the lowest rank."""
    result: Section = parts[0].copy()
    for part in parts[1:]:
        for value, rank, sign in ((i, i + 1, 1 - i % 4) for i in range(0, len(result), 2)):
            ours, theirs = sign * result[value], sign * part[value]
            earlier = (theirs == ours) & (part[rank] < result[rank])
            taken = (theirs < ours) | np.isnan(ours) | earlier
            for row in (value, rank):
                np.copyto(result[row], part[row], where=taken)
    return result


# One for each section of Flat.
MERGES: tuple[Merge, ...] = (_columns, _sum, _sum, _lowest, _scalars, _spread, _sum)
