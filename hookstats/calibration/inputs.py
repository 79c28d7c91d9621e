"""InputStats: what the inputs of one layer were over all batches. Pure numpy."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from hookstats.numbers.fields import Array, Counts
from hookstats.numbers.histogram import Density
from hookstats.numbers.site_stats import SiteStats

MAGNITUDES = 255  # bins of |x|: below 2^-126, and one for each float32 exponent


@dataclass(frozen=True, eq=False)
class InputStats:
    """The inputs of one Linear, convolution or expert, over all batches; ``C`` is its number of input channels.

    Everything is about the finite values, in the units of the inputs, and 0 where there was none.

    Attributes:
        abs_max: float64 ``[C]``, the largest |x| of each channel.
        mean: float64 ``[C]``, the mean of x.
        abs_mean: float64 ``[C]``, the mean of |x|, as AWQ takes it (arXiv 2306.00978).
        l2_norm: float64 ``[C]``, the root of the sum of x^2 over all tokens, as Wanda takes it (arXiv 2306.11695).
        tokens: how many rows came, ``[C]`` each: of a Linear all dimensions but the last, of a convolution the batch
            and all positions. Padding counts.
        nonfinite: how many values were NaN or infinite, and were left out.
        zeros: how many values were 0.
        magnitudes: int64 ``[255]``, how many values have which |x|: below 2^-126, then from 2^-126 to below 2^-125, and
            so on up to 2^128.
    """

    abs_max: Array
    mean: Array
    abs_mean: Array
    l2_norm: Array
    tokens: int
    nonfinite: int
    zeros: int
    magnitudes: Counts

    @property
    def amax(self) -> float:
        """The largest |x| of all channels."""
        return float(self.abs_max.max(initial=0.0))

    def quantile(self, q: float) -> float:
        """The q-quantile of |x| over all channels, from ``magnitudes``; of ``quantile(0.999)``, the 99.9th percentile.

        It and the exact quantile lie between the same two powers of 2 (between amax and the one below), so that they
        differ by less than a factor of 2; for many normal values, by 3 %. Inside of a bin as `Density` has it. 0 where
        there was no value; ValueError unless 0 <= q <= 1.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"quantile: expected 0 <= q <= 1, got {q}")
        if not self.magnitudes.any():
            return 0.0
        edges = np.concatenate([[0.0], 2.0 ** np.arange(-126, 129)])
        high, zeros = np.array([self.amax]), np.array([float(self.zeros)])
        return float(Density(self.magnitudes, edges, np.zeros(1), high, zeros).quantile(q)[0])

    def bits(self) -> tuple[bytes, ...]:
        """Return all of it as bytes, to be compared bit for bit."""
        return tuple(np.asarray(getattr(self, field.name)).tobytes() for field in fields(self))

    def merge(self, other: InputStats) -> InputStats:
        """Return the statistics of both's tokens together; both have the same channels."""
        tokens = max(self.tokens + other.tokens, 1)
        mine, others = self.tokens / tokens, other.tokens / tokens
        return InputStats(
            abs_max=np.maximum(self.abs_max, other.abs_max),
            mean=self.mean * mine + other.mean * others,
            abs_mean=self.abs_mean * mine + other.abs_mean * others,
            l2_norm=np.hypot(self.l2_norm, other.l2_norm),
            tokens=self.tokens + other.tokens,
            nonfinite=self.nonfinite + other.nonfinite,
            zeros=self.zeros + other.zeros,
            magnitudes=self.magnitudes + other.magnitudes,
        )

    def __repr__(self) -> str:
        return f"InputStats({self.tokens} tokens, {len(self.abs_max)} channels, amax {self.amax:.6g})"


def make_empty(channels: int) -> InputStats:
    """The statistics of an input that never came."""
    zeros = np.zeros(channels)
    return InputStats(zeros, zeros, zeros, zeros, 0, 0, 0, np.zeros(MAGNITUDES, np.int64))


def from_site(stats: SiteStats) -> InputStats:
    """Make it from a site that was measured with channels and ``histogram=ExponentBins()``."""
    of, total, histogram = stats.channels, stats.total, stats.histogram
    assert of is not None
    assert histogram is not None
    middle, counts = MAGNITUDES - 1, histogram.counts
    both = counts[middle + 1 :] + counts[:middle][::-1]
    return InputStats(
        abs_max=_zero_uncounted(of.abs_max, of.count),
        mean=_zero_uncounted(of.mean, of.count),
        abs_mean=_zero_uncounted(of.abs_mean, of.count),
        l2_norm=_zero_uncounted(of.l2_norm, of.count),
        tokens=int((of.count + of.nans + of.posinfs + of.neginfs)[0]),
        nonfinite=int(total.nans + total.posinfs + total.neginfs),
        zeros=int(total.zeros),
        magnitudes=np.concatenate([counts[middle : middle + 1], both]),
    )


def _zero_uncounted(values: Array, count: Array) -> Array:
    return np.where(count > 0, values, 0.0)
