"""What rounding explains: how far statistics of one computation may lie apart when it is done in another order.

Two programs that compute the same function round differently: sums are taken in another order, operators are fused.
With u the unit roundoff of the dtype that values are kept in, and u32 that of float32, in which sums are taken:

- **An element.** A sum of K terms, in any order, is off by about sqrt(K) u32 of its terms' norm (Higham & Mary 2019,
  "A new approach to probabilistic rounding error analysis"; the bound that always holds, K u, is never met), and the
  result is rounded once more. K is not in a record; 4,096 is taken. So one layer changes an element by
  e = u + 64 u32, relative to the values' rms r.
- **Depth.** Roundings of one layer are independent of those of the next, and a layer of a network that can be trained
  passes on a perturbation about as large as it came. After D sites it is e sqrt(D): a random walk.
- **Count.** If elements are off by d_i, whose root mean square is d, then mean, abs_mean and rms (a mean and two norms:
  triangle inequality) are off by d at most. This is reached only if all d_i have one direction; roundings are
  independent, so over n elements they average to e sqrt(D / n).
- **Extremes** are single elements, and do not average: e sqrt(D) of the largest magnitude.
- **The measurement** adds float32 sums within a tile, and float64 sums of tiles: 3e-8 of r was seen between layouts of
  the same values; 2^-22 is allowed.

`HEADROOM` times that is allowed. In their first step, eager and compiled programs of small models, and with their
samples in another order, used up to 0.06 of it in float32, and 0.45 where parameters are bfloat16 too.

Counts are not judged this way: a value at a power of two (0.5, 1) falls into the other bin of a histogram by any
rounding, and zeros appear where numbers underflow. Counts of NaN and Inf, and of all values, must agree.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hookstats.numbers.columns import Columns
from hookstats.numbers.fields import FIELDS, Array, Counts

# Unit roundoff: half the distance from 1 to the next larger number.
UNIT_ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "tfloat32": 2.0**-11,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}
HEADROOM = 8.0
_SUM = 64 * UNIT_ROUNDOFF["float32"]  # sqrt(4,096) terms
_MEASUREMENT = 2.0**-22
# Significant bits that values of a dtype need at most; what needs fewer is told from it by two extremes a step.
_BITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
_SPECIAL = 3  # values of so few bits, as 0, 1 or 6, occur in every dtype


def error(unit: Array, depth: Counts) -> Array:
    """Of an element after so many sites, relative to the values' rms."""
    result: Array = (unit + np.minimum(_SUM, 64 * unit)) * np.sqrt(depth)
    return result


def allowed_for_means(unit: Array, depth: Counts, count: Array) -> Array:
    """How far mean, abs_mean and rms of `count` values may be apart, relative to their rms."""
    result: Array = HEADROOM * error(unit, depth) / np.sqrt(np.maximum(count, 1)) + _MEASUREMENT
    return result


def allowed_for_extremes(unit: Array, depth: Counts) -> Array:
    """How far min and max may be apart, relative to the largest magnitude."""
    return HEADROOM * error(unit, depth)


def bits_needed(values: Array) -> Counts:
    """Significant bits of each number, 0 of what is not finite, or special."""
    mantissa, _ = np.frexp(np.where(np.isfinite(values), values, 0.0))
    whole = np.abs(mantissa * 2.0**53).astype(np.int64)
    lowest = np.maximum(whole & -whole, 1)
    bits: Counts = np.where(whole > 0, 54 - np.frexp(lowest.astype(np.float64))[1], 0)
    return np.where(bits > _SPECIAL, bits, 0)


def bits_of_sites(columns: Columns) -> Counts:
    """``[sites]``: significant bits that min and max of each need, as they were measured; 0 where nothing is told."""
    extremes = columns.wholes[[FIELDS.index("min"), FIELDS.index("max")]]
    return np.where(columns.calls > 0, bits_needed(extremes).max(0), 0)


def dtype_of(bits: int) -> str | None:
    """The dtype of values that need so many significant bits."""
    return next((name for name, most in _BITS.items() if 0 < bits <= most), None)


def units_of(bits: Counts, is_module: NDArray[np.bool_], is_trained: bool = False) -> Array:
    """``[sites]``, in order of execution: the unit roundoff by which each may be off.

    The coarsest dtype of those up to it: a float32 tensor that is computed from bfloat16 ones is as exact as these. But
    a dtype that less than a quarter of the sites of modules have is taken for that of single sites: an Embedding's
    weight that was loaded from a bfloat16 file makes no bfloat16 program. is_trained: the parameters have been changed
    by what is computed from them, and the coarsest dtype is that of all.
    """
    units = np.full(len(bits), UNIT_ROUNDOFF["float64"])
    told = is_module & (bits > 0) if (is_module & (bits > 0)).any() else bits > 0
    for name, most in reversed(_BITS.items()):
        at = (bits > 0) & (bits <= most)
        if 4 * (at & told).sum() >= told.sum() > 0:
            at = np.maximum.accumulate(at) | is_trained
        units[at] = UNIT_ROUNDOFF[name]
    if told.any():
        first = int(np.argmax(bits > 0))
        units[:first] = np.maximum(units[:first], units[first])
    else:
        units[:] = UNIT_ROUNDOFF["float32"]
    return units
