"""Formats with a scale for each block: what tensors would lose in them, from the distances to the blocks' largest."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hookstats.numbers.fields import BLOCK_GROUPS, DISTANCE_BINS, Array, Counts, ExponentBins, Site
from hookstats.rules.step import Mask, Step


class _BlockFormat(NamedTuple):
    block: int
    lost: int  # values that lie so many octaves below the largest of their block become 0 in any case
    may_be: int  # those that lie so many may


# OCP Microscaling Formats 1.0: the scale is the power of two that puts the largest of a block into the octave of the
# element format's largest value, so that what is at most half the smallest value, a tie included, is at most
# 2^(E - lost + 1): of e2m1 2^(E - 2 - 2), of e4m3 2^(E - 8 - 10), of e5m2 2^(E - 15 - 17).
# NVFP4 (arXiv 2509.25149): the scale is the largest of a block / 6, rounded to e4m3, so that half the smallest value,
# scale / 4, is between 2^(E - 5) and 2^(E - 3), even where rounding moves the scale by a quarter.
BLOCK_FORMATS = {
    "mxfp8_e4m3": _BlockFormat(32, 19, 19),
    "mxfp8_e5m2": _BlockFormat(32, 33, 33),
    "mxfp4": _BlockFormat(32, 5, 5),
    "nvfp4": _BlockFormat(16, 6, 4),
}
_SMALLEST_SCALE = 2.0**-8 / 448  # of NVFP4, relative to the largest: rounding moves smaller ones by over a quarter


class BlockFit(NamedTuple):
    """The effect of casting a tensor to a format with a scale for each block."""

    site: Site
    format: str
    lost: tuple[float, float]  # the share of the values that are not 0 that become 0: at least, and at most
    nonfinite: float  # the share of blocks with a NaN or an infinity, of which nothing would be left
    standard_error: float  # of both ends of lost, since only some blocks are counted; 0 where all are


def fit_blocks(step: Step, chosen: Mask, name: str) -> list[BlockFit]:
    """Return the effect on those of the chosen sites that have blocks of this format's size, not all of them 0."""
    format = BLOCK_FORMATS[name]
    fits = isinstance(step.bins, ExponentBins) and step.bins.block == format.block
    ids, counts = step.blocks(chosen if fits else np.zeros_like(chosen))
    groups, largest = np.split(counts, [BLOCK_GROUPS * DISTANCE_BINS], axis=1)
    groups = groups.reshape(-1, BLOCK_GROUPS, DISTANCE_BINS)
    some = groups[:, :, 1:].any((1, 2))
    ids, groups, largest = ids[some], groups[some], largest[some]
    values, totals = groups[:, :, 1:].sum(2), step.totals.entries(ids)
    everything = totals.count + totals.nans + totals.posinfs + totals.neginfs
    # Short blocks make it more where all are counted.
    counted = np.minimum((groups.sum((1, 2)) + format.block * largest[:, -1]) / everything, 1.0)
    # Of subnormal values distances do not tell, nor do they where the scale of NVFP4 has few bits, or is 0.
    chosen = np.zeros_like(chosen)
    chosen[ids] = True
    _, exponents = step.exponents(chosen)
    unsure = (exponents[:, 0] - totals.zeros) * counted
    if name == "nvfp4":
        reached = totals.abs_max * step.scales[ids] * _SMALLEST_SCALE
        has_few_bits = np.exp2(np.arange(1.0, 255) - 127) < reached[:, None]
        unsure += format.block * np.where(has_few_bits, largest[:, 1:-1], 0).sum(1)
    surely, maybe = (groups[:, :, 1 + first :].sum(2) for first in (format.lost, format.may_be))
    error = np.maximum(*(_estimate_errors(lost, values, counted) for lost in (surely, maybe)))
    least = np.maximum(surely.sum(1) - unsure, 0) if name == "nvfp4" else surely.sum(1)
    whole = values.sum(1)
    most = np.minimum(maybe.sum(1) + unsure, whole)
    columns = (ids, least / whole, most / whole, largest[:, -1] / largest.sum(1), error)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [BlockFit(step.sites[i], name, (low, high), bad, off) for i, low, high, bad, off in rows]


def _estimate_errors(lost: Counts, values: Counts, counted: Array) -> Array:
    """Return the standard errors of lost / values ``[k]``, from 8 groups of blocks ``[k, 8]``, each a sample by itself.

    Values of a block are alike, so it is the groups that tell how far a sample may be off: a ratio's error from
    interpenetrating subsamples (Wolter, Introduction to Variance Estimation, 2007, chapter 2). At least as if one value
    more or less had been lost: that a sample shows none does not say that there are none.
    """
    share = lost.sum(1) / values.sum(1)
    off = lost - share[:, None] * values
    squares = np.maximum(BLOCK_GROUPS / (BLOCK_GROUPS - 1) * (off**2).sum(1), 1.0)
    result: Array = np.sqrt((1 - counted) * squares) / values.sum(1)
    return result
