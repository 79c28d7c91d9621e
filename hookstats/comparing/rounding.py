"""Bounds of rounding: how far statistics of one computation may differ when it is done in another order.

Two programs that compute the same function round differently: sums are taken in another order, operators are fused.
With u the unit roundoff of the dtype that values are kept in, and u32 that of float32, in which sums are taken:

- **An element.** A sum of K terms, in any order, is off by about sqrt(K) u32 of its terms' norm (Higham & Mary 2019,
  "A new approach to probabilistic rounding error analysis"; the bound that always holds, K u, is never met), and the
  result is rounded once more. K is not in a record; 4,096 is taken. So one layer changes an element by e = u + 64
  u32, relative to the values' rms r.
- **Depth.** Roundings of one layer are independent of those of the next, and a layer of a network that can be trained
  passes on a perturbation about as large as it came. After D sites it is e sqrt(D): a random walk.
- **Count.** If elements are off by d_i, whose root mean square is d, then mean, abs_mean and rms (a mean and two
  norms: triangle inequality) are off by d at most, and so would be std. This is reached only if all d_i have one
  direction. Roundings of what differs from row to row are independent: over n elements they average to e sqrt(D / n).
- **Weights.** Where one program rounds weights and the other does not (autocast, bfloat16 weights, TF32), channel f
  of x W^T is off by sum_k dW_fk x_bk, and dW is drawn once for all rows b. With K independent dW_fk of u w, the mean
  of the channel is off by u w sqrt(K) times the rms of the mean row: between u r / sqrt(rows), where rows have
  nothing in common, and u r, where they are alike; a bias, or what repeats (one token, padding), is the latter. How
  much rows have in common is not in a record: that they are alike is assumed. So the mean of a channel does not
  average at all, and that of a whole tensor only over channels, as their dW are independent: 0.68 u sqrt(D / C). C is
  the narrowest width up to the site, since no more directions than that came through; 1 where no channels are kept.
  0.68 is sqrt(3) 0.39: for input, weight and output, the rms of a rounding that is uniform within u 2^k, over that of
  values spread over a binade. This part is there where `dtype` is named; of two runs whose values tell one dtype each
  holds the same weights.
- **Kinks.** If inputs of a ReLU are off by E = e sqrt(D), the share of them that change sign, at the density of a
  normal distribution at 0, is 0.8 E 0.4; of the gradients that pass, half as many, it is twice that: below E. A
  gradient that comes or goes is an error as large as itself, so k kinks add k E to the mean *square*; in gradients of
  parameters, where a row that comes or goes does so in all inputs of a unit, only channels average. Few flips are no
  normal distribution: three more are allowed, each 1 / n of the largest magnitude. A gradient of which 1 % at least
  is exactly zero, other than rows that are zero throughout, has come through one kink more.
- **Sums over rows.** Kernels that are given bfloat16 may also sum in it: a parameter's gradient, over R rows, is then
  off by u sqrt(R), for each element anew.
- **Cancelling.** The gradient of a bias is the sum of its module's gradients over R rows. It may vanish, as before a
  norm that takes the bias out again, and their roundings remain. Its scale is the larger of its rms and sqrt(R) times
  that of the terms, where these are watched.
- **Extremes** are single elements, and do not average: e sqrt(D) of the largest magnitude, and the kinks. Quantiles
  are not judged: they are estimates.
- **The measurement** adds float32 sums within a tile, and float64 sums of tiles: 3e-8 of r was seen between layouts
  of the same values; 2^-22 is allowed.

Weights, kinks and sums are parts for dtypes coarser than float32: two float32 programs hold the same weights, are
within 1e-7 of a kink once in ten million values, and are judged as sharply as if there were none.

`HEADROOM` times that is allowed. In their first step, eager and compiled programs of small models, and with their
samples in another order, used up to 0.06 of it in float32, and 0.45 where parameters are bfloat16 too. Of ten kinds of
models, float32 against autocast, and against bfloat16 or float16 weights, used up to 0.20 of it in outputs and 0.46 in
gradients, and 0.65 over three steps.

It does not hold for a recurrent module, which rounds its state once a time step and counts as one site: weights in
bfloat16 and one token 32 times used all of it. Nor for gradients that are zero but for rounding, unless of a bias:
those of queries and keys, where all tokens are equal. A sum of equal terms in bfloat16 itself stops growing at 256 of
them: gradients of an Embedding and of a norm on a CPU, for a token that repeats. They are wrong by that, and found.

Counts are not judged this way: a value at a power of two (0.5, 1) falls into the other bin of a histogram by any
rounding, and zeros appear where numbers underflow. Counts of NaN and Inf, and of all values, must agree.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hookstats.numbers.fields import FIELDS, Array, Counts
from hookstats.numbers.frame import StepFrame
from hookstats.numbers.significands import SIGNIFICANT_BITS, count_bits

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
_ALIKE = 0.68  # three roundings (input, weight, output), the root mean square of each 0.39 u
_FLIPS = 3  # so many where few are expected: the chance of a fourth, if 0.05 are, is 3e-7


class Errors(NamedTuple):
    """Errors of elements by site, relative to the values' rms: root mean squares of independent parts."""

    own: Array  # drawn for each value
    alike: Array  # drawn for each channel, and the same for all its values
    flips: Array  # 1 for gradients that came through kinks which may flip, else 0

    def select(self, chosen: Counts) -> Errors:
        """Return the errors of some sites."""
        return Errors(*(each[chosen] for each in self))

    def bound_means(self, count: Array, draws: Array, peak: Array) -> Array:
        """Return how far mean, abs_mean and rms of `count` values may be apart, relative to their rms.

        draws: how many channels there are whose errors are independent; peak: the largest magnitude over the rms.
        """
        count = np.maximum(count, 1)
        spread = np.sqrt(self.own**2 / count + self.alike**2 / draws)
        result: Array = HEADROOM * spread + self.flips * _FLIPS * peak / count + _MEASUREMENT
        return result

    def bound_extremes(self) -> Array:
        """Return how far min and max may be apart, relative to the largest magnitude."""
        return HEADROOM * np.hypot(self.own, self.alike)


def errors(units: Array, kinks: Counts, rows: Array, is_alike: bool) -> Errors:
    """Return the errors of sites in order of execution: after D of them it is e sqrt(D).

    units: unit roundoffs; kinks: how many a gradient came through, 0 for what is no gradient; rows: over how many a
    parameter's gradient is summed, 0 for all else; is_alike: whether one program may hold coarser weights than the
    other.
    """
    depth = np.arange(1, len(units) + 1)
    each = (units + np.minimum(_SUM, 64 * units)) * np.sqrt(depth)
    is_coarse = units > UNIT_ROUNDOFF["float32"]
    flipped = np.where(is_coarse, np.sqrt(kinks * each), 0.0)
    alike = np.where(is_coarse & is_alike, _ALIKE * each, 0.0)
    summed = np.where(is_coarse, units * np.sqrt(rows), 0.0)
    has_flips = (flipped > 0).astype(np.float64)
    return Errors(
        np.hypot(each, np.where(rows > 0, summed, flipped)),
        np.hypot(alike, np.where(rows > 0, flipped, 0.0)),
        has_flips,
    )


def count_bits_of_sites(frame: StepFrame) -> Counts:
    """``[sites]``: significant bits that min and max of each need, as they were measured; 0 where nothing is told."""
    extremes = frame.wholes[[FIELDS.index("min"), FIELDS.index("max")]]
    return np.where(frame.calls > 0, count_bits(extremes).max(0), 0)


def find_units(bits: Counts, is_module: NDArray[np.bool_], is_trained: bool = False) -> Array:
    """``[sites]``, in order of execution: the unit roundoff by which each may be off.

    The coarsest dtype of those up to it: a float32 tensor that is computed from bfloat16 ones is as exact as these. But
    a dtype that less than a quarter of the sites of modules have is taken for that of single sites: an Embedding's
    weight that was loaded from a bfloat16 file makes no bfloat16 program. is_trained: the parameters have been changed
    by what is computed from them, and the coarsest dtype is that of all.
    """
    units = np.full(len(bits), UNIT_ROUNDOFF["float64"])
    told = is_module & (bits > 0) if (is_module & (bits > 0)).any() else bits > 0
    for name, most in reversed(SIGNIFICANT_BITS.items()):
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
