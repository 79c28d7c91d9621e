"""Histogram, and what it tells between its edges. Pure numpy."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from hookstats.numbers.fields import BLOCK_GROUPS, DISTANCE_BINS, Array, Counts


class Histogram:
    """Counts per bin. ``edges`` ``[bins + 1]`` ascend; ``counts`` are int64 ``[bins]`` or ``[channels, bins]``.

    ``underflow``, ``overflow``: finite values below and above all bins, an int or int64 ``[channels]``.

    By exponent, per channel of |x|: a bin holds the values from its lower edge up to, not including, the upper one; on
    the negative side, the other way round (a value belongs to the bin of its magnitude). No value lies outside; a
    float64 beyond float32's range is in the outermost bin. Linear: the same, and the last bin has its upper edge too.
    """

    def __init__(self, counts: Counts, edges: Array, underflow: Any = 0, overflow: Any = 0) -> None:
        self.counts = counts
        self.edges = edges
        self.underflow = underflow
        self.overflow = overflow

    def __repr__(self) -> str:
        return f"Histogram({self.counts.sum()} values, counts {list(self.counts.shape)})"


class BlockExponents:
    """Blocks of ``size`` neighbours along ``dim`` (`ExponentBins`): how far their largest values are above the others.

    Of each tensor, 1,024 blocks that are evenly spread over it are counted, all where it has no more.

    ``distances``: int64 ``[39]``, values that are not 0 by the octaves between them and the largest ``|x|`` of their
    block: entry d counts 2^(E-d) < |x| <= 2^(E-d+1) for 2^E <= largest < 2^(E+1), the last one all that is smaller. A
    value of 2^(E+1) cannot be, so entry 0 holds what is above 2^E. ``zeros``: values that are 0. ``largest``: int64
    ``[255]``, blocks by E + 127, as float32 has it; the first entry is E < -126, also of zeros alone. ``nonfinite``:
    blocks with a NaN or an infinity; of their values, nothing else is counted here.
    """

    def __init__(self, size: int, dim: int, counts: Counts, scale: float = 1.0) -> None:
        """counts: as in the state, ``[576]``. scale: what the values were multiplied with before; a power of two."""
        self.size = size
        self.dim = dim
        distances = counts[: BLOCK_GROUPS * DISTANCE_BINS].reshape(BLOCK_GROUPS, DISTANCE_BINS).sum(0)
        self.zeros = int(distances[0])
        self.distances = distances[1:]
        largest = counts[BLOCK_GROUPS * DISTANCE_BINS : -1]
        shift = int(np.rint(np.log2(scale)))
        at = np.clip(np.arange(largest.size) - shift, 0, largest.size - 1)
        self.largest = largest if shift == 0 else np.bincount(at, largest, largest.size).astype(np.int64)
        self.nonfinite = int(counts[-1])

    def __repr__(self) -> str:
        return f"BlockExponents({self.largest.sum() + self.nonfinite} blocks of {self.size})"


class Density:
    """Density of the values of histograms, inside the bins, too.

    By exponent, the density in a bin is taken as proportional to |x|^s: s from the densities of the bins beside it, at
    an end of the data from the two before. Linear, it is even. No bin reaches beyond the smallest and largest value,
    and zeros, which are counted, lie at 0.
    """

    def __init__(self, counts: Counts, edges: Array, low: Array, high: Array, zeros: Array | None) -> None:
        """counts: ``[bins]`` or ``[rows, bins]``; low, high, zeros: ``[rows]``, the extremes and how many are 0.

        edges: ``[bins + 1]``; the outermost bins hold what lies beyond them. zeros: None for linear bins.
        """
        many = np.atleast_2d(counts).astype(np.float64)
        with np.errstate(all="ignore"):  # bins that are empty, or that one value fills
            inner = np.concatenate([[-np.inf], edges[1:-1], [np.inf]])
            lower, upper = (np.clip(part, low[:, None], high[:, None]) for part in (inner[:-1], inner[1:]))
            power = np.zeros_like(many)
            if zeros is not None:
                middle = int(np.searchsorted(edges, 0.0, side="right")) - 1
                power = _powers(many, edges, lower, upper, middle)
                rest = np.maximum(many[:, middle] - zeros, 0)  # between 0 and the bins beside
                negative = rest * np.where(low >= 0, 0, np.where(high <= 0, 1, 0.5))
                nothing, left, right = np.zeros_like(rest), lower[:, middle], upper[:, middle]
                many = _insert_columns(many, middle, negative, zeros, rest - negative)
                lower = _insert_columns(lower, middle, np.minimum(left, 0), nothing, np.maximum(left, 0))
                upper = _insert_columns(upper, middle, np.minimum(right, 0), nothing, np.maximum(right, 0))
                power = _insert_columns(power, middle, nothing, nothing, nothing)
            self._counts, self._lower, self._upper = many, lower, upper
            self._low, self._high = low, high
            self._negative = upper <= 0
            self._near, self._far = np.where(self._negative, [-upper, -lower], [lower, upper])
            self._length = np.log(self._far / self._near)
            most = 600 / self._length  # or its exponential overflows
            exponent = np.clip(power + 1, -most, most)
            self._exponent = np.where(exponent == 0, 1e-30, exponent)

    def quantile(self, q: float) -> Array:
        """``[rows]``; NaN where a row is empty."""
        cumulative = np.cumsum(self._counts, axis=1)
        rank = np.maximum(q * cumulative[:, -1:], 1e-300)
        bins = np.minimum((cumulative < rank).sum(1, keepdims=True), cumulative.shape[1] - 1)

        def of_bin(values: Any) -> Any:
            return np.take_along_axis(values, bins, axis=1)

        negative, near, far = of_bin(self._negative), of_bin(self._near), of_bin(self._far)
        exponent, length, count = of_bin(self._exponent), of_bin(self._length), of_bin(self._counts)
        with np.errstate(all="ignore"):
            share = 1 - (of_bin(cumulative) - rank) / count
            share = np.where(negative, 1 - share, share)  # of the bin, from the end near 0
            by_power = near * np.exp(np.log1p(share * np.expm1(exponent * length)) / exponent)
            inside = np.clip(np.where(near > 0, by_power, near + share * (far - near)), near, far)
        inside = np.where((share >= 1) | (near == far), far, inside)
        return np.where(count > 0, np.where(negative, -inside, inside), np.nan)[:, 0]

    def share_below(self, x: float) -> Array:
        """``[rows]``: the share of the values that are smaller than x; NaN where a row is empty."""
        return self._mean(np.where(self._lower >= x, 0.0, np.where(self._upper <= x, 1.0, self._below(x))))

    def share_above(self, x: float) -> Array:
        """``[rows]``: the share of the values that are larger than x; NaN where a row is empty."""
        return self._mean(np.where(self._upper <= x, 0.0, np.where(self._lower >= x, 1.0, 1 - self._below(x))))

    def _below(self, x: float) -> Array:
        """The share of each bin's values that are below x, in magnitude."""
        with np.errstate(all="ignore"):
            at = np.clip(np.where(self._negative, -x, x), self._near, self._far)
            by_power = _integrate_exponential(self._exponent, np.log(at / self._near)) / _integrate_exponential(
                self._exponent, self._length
            )
            share = np.where(self._near > 0, by_power, (at - self._near) / (self._far - self._near))
        return np.where(self._negative, 1 - share, share)

    def kurtosis(self, mean: Array, var: Array) -> Array:
        """``[rows]``: E[(x - mean)^4] / var^2, from exact moments ``[rows]``; NaN where |mean| > 2 std, see SiteStats.

        The smallest and the largest value are known, and count as they are. The moments of all others are those of
        |x|^s inside the bins; they are scaled, by no more than an octave, so that the second one is exact.
        """
        with np.errstate(all="ignore"):
            square = var + mean**2
            grown = np.sqrt(np.maximum(square - self._of_ends(2), 0) / self._of_others(2))
            grown = np.where(np.isnan(grown), 1, np.clip(grown, 0.5, 2))
            third, fourth = (self._of_ends(k) + self._of_others(k) * grown**k for k in (3, 4))
            central = fourth - 4 * mean * third + 6 * mean**2 * square - 3 * mean**4
            found: Array = np.where(mean**2 <= 4 * var, central / var**2, np.nan)
            return found

    def _of_ends(self, k: int) -> Array:
        """``[rows]``: what the smallest and the largest value bring to the mean of x^k."""
        brought: Array = (self._low**k + self._high**k) / self._counts.sum(1)
        return brought

    @cached_property
    def _others(self) -> Array:
        """The counts without the smallest and the largest value."""
        others, rows = self._counts.copy(), np.arange(len(self._counts))
        is_filled = others > 0
        others[rows, is_filled.argmax(1)] -= 1
        others[rows, others.shape[1] - 1 - is_filled[:, ::-1].argmax(1)] -= 1
        rest: Array = np.maximum(others, 0)
        return rest

    def _of_others(self, k: int) -> Array:
        """``[rows]``: what all other values bring to the mean of x^k."""
        ratio = _integrate_exponential(self._exponent + k, self._length) / _integrate_exponential(
            self._exponent, self._length
        )
        power = self._near**k * np.where(self._far > self._near, ratio, 1)
        around_zero = (self._far ** (k + 1) - self._near ** (k + 1)) / ((k + 1) * (self._far - self._near))
        inside = np.where(self._near > 0, power, np.where(self._far > self._near, around_zero, self._near**k))
        signed = np.where(self._negative, (-1) ** k * inside, inside)
        brought: Array = np.where(self._others > 0, self._others * signed, 0).sum(1) / self._counts.sum(1)
        return brought

    def _mean(self, values: Array) -> Array:
        """Over all values, of what it is in each bin."""
        with np.errstate(invalid="ignore"):
            mean: Array = np.where(self._counts > 0, self._counts * values, 0).sum(1) / self._counts.sum(1)
        return mean


def _insert_columns(values: Array, at: int, *columns: Array) -> Array:
    """``[rows, bins]``, three columns in the place of one."""
    return np.concatenate([values[:, :at], np.stack(columns, axis=1), values[:, at + 1 :]], axis=1)


def _integrate_exponential(exponent: Array, length: Array) -> Array:
    """The integral of exp(exponent * t) from 0 to length."""
    exponent = np.where(exponent == 0, 1e-30, exponent)  # whose integral is the length, to the last bit
    grown: Array = np.expm1(exponent * length) / exponent
    return grown


def _powers(counts: Array, edges: Array, lower: Array, upper: Array, middle: int) -> Array:
    """``[rows, bins]``: s of a density |x|^s in each bin; 0 where no bin beside it tells.

    From both bins beside it, the slope of log density over log |x| between their centres. At an end of the data, the
    slope to the last bin, and as much steeper as it became there: in the tail of a normal distribution four times an
    octave, which is the most that is taken, of an exponential one twice.
    """
    cut = (lower > edges[:-1]) | (upper < edges[1:])  # at the extreme: one value of it says nothing of the density
    near, far = np.minimum(np.abs(lower), np.abs(upper)), np.maximum(np.abs(lower), np.abs(upper))
    usable = (counts - cut > 0) & (upper > lower) & (near > 0)
    usable[:, middle] = False
    beyond, bins = np.full((len(counts), 2), np.nan), counts.shape[1]
    density = np.where(usable, np.log((counts - cut) / (upper - lower)), np.nan)
    density = np.concatenate([beyond, density, beyond], axis=1)
    centre = np.concatenate([beyond, np.log(near * far) / 2, beyond], axis=1)

    def slope(a: int, b: int) -> Any:
        one, other = slice(2 + a, 2 + a + bins), slice(2 + b, 2 + b + bins)
        return (density[:, other] - density[:, one]) / (centre[:, other] - centre[:, one])

    result = slope(-1, 1)
    for side in (-1, 1):
        last, before = slope(side, 0), slope(2 * side, side)
        steeper = np.where(before < 0, np.clip(last / before, 1, 4), np.where(before >= 0, 4, 1))
        at_end = np.where(last < 0, last * np.sqrt(steeper), last)
        result = np.where(np.isnan(result), at_end, result)
    return np.where(np.isnan(result) | ~usable, 0, result)
