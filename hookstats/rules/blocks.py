"""Whether tensors would fit into formats with a scale for each block: from the distances to the blocks' largest."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hookstats.numbers.fields import DISTANCE_BINS, Array, Counts, ExponentBins, Site
from hookstats.rules.step import Mask, Step


class _Format(NamedTuple):
    block: int
    lost: int  # values that lie so many octaves below the largest of their block become 0 in any case
    may_be: int  # those that lie so many may


# OCP Microscaling Formats 1.0: the scale is the power of two that puts the largest of a block into the octave of the
# element format's largest value, so that what is at most half the smallest value, a tie included, is at most
# 2^(E - lost + 1): of e2m1 2^(E - 2 - 2), of e4m3 2^(E - 8 - 10), of e5m2 2^(E - 15 - 17).
# NVFP4 (arXiv 2509.25149): the scale is the largest of a block / 6, rounded to e4m3, so that half the smallest value,
# scale / 4, is between 2^(E - 5) and 2^(E - 3), even where rounding moves the scale by a quarter.
BLOCK_FORMATS = {
    "mxfp8_e4m3": _Format(32, 19, 19),
    "mxfp8_e5m2": _Format(32, 33, 33),
    "mxfp4": _Format(32, 5, 5),
    "nvfp4": _Format(16, 6, 4),
}
_SMALLEST_SCALE = 2.0**-8 / 448  # of NVFP4, relative to the largest: rounding moves smaller ones by over a quarter


class BlockFit(NamedTuple):
    """What casting to a format with a scale for each block would do to a tensor."""

    site: Site
    format: str
    lost: tuple[float, float]  # the share of the values that are not 0 that become 0: at least, and at most
    nonfinite: float  # the share of blocks with a NaN or an infinity, of which nothing would be left


class BlockFits(NamedTuple):
    """The same of many tensors, arrays ``[k]``."""

    ids: Counts
    least: Array
    most: Array
    nonfinite: Array


def block_fits(step: Step, chosen: Mask, name: str) -> BlockFits:
    """Of those among some sites that have blocks of this format's size and values in them that are not 0."""
    format = BLOCK_FORMATS[name]
    fits = isinstance(step.bins, ExponentBins) and step.bins.block == format.block
    ids, counts = step.blocks(chosen if fits else np.zeros_like(chosen))
    values = counts[:, 1:DISTANCE_BINS].sum(1)
    ids, counts, values = (each[values > 0] for each in (ids, counts, values))
    # Of subnormal values distances do not tell, nor do they where the scale of NVFP4 has few bits, or is 0.
    chosen = np.zeros_like(chosen)
    chosen[ids] = True
    _, exponents = step.exponents(chosen)
    unsure = exponents[:, 0] - step.totals.zeros[ids].astype(np.int64)
    if name == "nvfp4":
        reached = step.totals.abs_max[ids] * step.scales[ids] * _SMALLEST_SCALE
        has_few_bits = np.exp2(np.arange(1.0, 255) - 127) < reached[:, None]
        unsure += format.block * np.where(has_few_bits, counts[:, DISTANCE_BINS + 1 : -1], 0).sum(1)
    surely, maybe = (counts[:, 1 + first : DISTANCE_BINS].sum(1) for first in (format.lost, format.may_be))
    if name == "nvfp4":
        surely = np.maximum(surely - unsure, 0)
    blocks = np.maximum(counts[:, DISTANCE_BINS:].sum(1), 1)
    return BlockFits(ids, surely / values, np.minimum(maybe + unsure, values) / values, counts[:, -1] / blocks)
