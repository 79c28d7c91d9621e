"""The statistics: what a state holds and how each number is finished from it. Pure numpy; knows nothing of torch.

A state is a float64 array ``[fields, ...]`` in the order of `FIELDS`; the trailing shape is that of the channels. Every
statistic is a row of `STATISTICS`. Moments, norms and extremes are over the finite values; NaN, +Inf and -Inf are
counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Counts: TypeAlias = NDArray[np.int64]

# In the order of csrc/stats.h; _native refuses an extension that was built with another one.
FIELDS = ("count", "mean", "m2", "min", "max", "abs_sum", "zeros", "nans", "posinfs", "neginfs")


class Site(NamedTuple):
    """One tensor of one module, or a parameter."""

    name: str  # the module's or parameter's clean path, "" for the model itself
    tensor: str  # "output", "grad_output", "input", ..., see attach; "output.0" or "output.logits" inside a container

    def __str__(self) -> str:
        return f"{self.name or '(model)'} {self.tensor}"


class Skipped(NamedTuple):
    """Why tensors of a site were not measured, and how many: in a snapshot those of its step."""

    reason: str
    times: int | None  # None: the site was given up, after several measured steps in which nothing could be measured

    def __str__(self) -> str:
        if self.times is None:
            return f"given up: {self.reason}"
        return f"{self.times} {'tensor' if self.times == 1 else 'tensors'}: {self.reason}"


@dataclass(frozen=True)
class State:
    """The rows of a state by name, each an array of the channels' shape."""

    count: Array
    mean: Array
    m2: Array
    min: Array
    max: Array
    abs_sum: Array
    zeros: Array
    nans: Array
    posinfs: Array
    neginfs: Array


def _in_order(values: Any, to: type[np.generic]) -> Any:
    """float64 as int64 of the same order, or back: a thread that flushes subnormals to zero compares them as zeros."""
    bits = values.view(np.int64)
    return (bits ^ (bits >> 63 & np.int64(2**63 - 1))).view(to)


def total(moments: Array) -> Array:
    """The state ``[fields, ...]`` of all entries of the last dimension together (Chan, Golub & LeVeque 1979)."""
    s = State(*moments)
    full = s.count > 0
    count = s.count.sum(-1)
    with np.errstate(over="ignore", invalid="ignore"):  # float64 data beyond 1e154: infinite or NaN, as documented
        mean = (s.count * s.mean).sum(-1) / np.maximum(count, 1.0)
        m2 = (s.m2 + s.count * (s.mean - mean[..., None]) ** 2).sum(-1)
    low = _in_order(_in_order(np.where(full, s.min, np.inf), np.int64).min(-1), np.float64)
    high = _in_order(_in_order(np.where(full, s.max, -np.inf), np.int64).max(-1), np.float64)
    sums = (row.sum(-1) for row in (s.abs_sum, s.zeros, s.nans, s.posinfs, s.neginfs))
    return np.stack([count, mean, m2, low, high, *sums])


def _of_values(value: Array, s: State) -> Array:
    """The value where there was one, NaN where there was none."""
    return np.where(s.count > 0, value, np.nan)


def _per(value: Array, s: State) -> Array:
    return np.divide(value, s.count, out=np.full_like(s.count, np.nan), where=s.count > 0)


def _var(s: State) -> Array:
    return np.divide(s.m2, s.count - 1, out=np.full_like(s.count, np.nan), where=s.count > 1)


def _square_sum(s: State) -> Array:
    return s.m2 + s.count * s.mean**2


def _abs_max(s: State) -> Array:
    largest: Array = np.maximum(np.abs(s.min).view(np.int64), np.abs(s.max).view(np.int64)).view(np.float64)
    return largest


STATISTICS: dict[str, Callable[[State], Array]] = {
    "count": lambda s: s.count,
    "mean": lambda s: _of_values(s.mean, s),
    "var": _var,
    "std": lambda s: np.sqrt(_var(s)),
    "rms": lambda s: np.sqrt(_per(_square_sum(s), s)),
    "abs_mean": lambda s: _per(s.abs_sum, s),
    "l1_norm": lambda s: s.abs_sum,
    "l2_norm": lambda s: np.sqrt(_square_sum(s)),
    "abs_max": lambda s: _of_values(_abs_max(s), s),
    "min": lambda s: _of_values(s.min, s),
    "max": lambda s: _of_values(s.max, s),
    "zeros": lambda s: s.zeros,
    "nans": lambda s: s.nans,
    "posinfs": lambda s: s.posinfs,
    "neginfs": lambda s: s.neginfs,
}

# Histogram bins, as csrc/bins.h has them.
EXPONENT_BINS = 512
OCTAVE_BINS = 64
FIRST_OCTAVE = -46


class ExponentBins(NamedTuple):
    """Histogram by the value's exponent: no range to choose, no value lost, exact to merge.

    Per tensor: one bin for each sign and float32 exponent, zeros and subnormals together in the middle (509 bins).
    ``per_channel=True``: 64 octaves of ``|x|`` for each channel, from below 2^-46 (zeros too) to 2^16 and above; this
    costs 512 bytes of state per channel.
    """

    per_channel: bool = False


@dataclass(frozen=True)
class LinearBins:
    """Histogram in ``n`` equal bins from ``lo`` to ``hi``, ``hi`` included, as ``torch.histc`` has them.

    Finite values outside are counted in ``Histogram.underflow`` and ``.overflow``. ``per_channel=True``: one for each
    channel, at 8 * (n + 2) bytes of state. ValueError unless lo < hi, and (hi - lo) * n is finite, in float32.
    """

    lo: float
    hi: float
    n: int
    per_channel: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or isinstance(self.n, bool) or not 1 <= self.n <= 2**30:
            raise ValueError(f"LinearBins: expected n, the number of bins, from 1 to 2^30; got {self.n!r}")
        with np.errstate(over="ignore", invalid="ignore"):
            lo, hi = np.float32(self.lo), np.float32(self.hi)
            usable = lo < hi and np.isfinite((hi - lo) * np.float32(self.n))
        if not usable:
            raise ValueError(f"LinearBins: expected lo < hi and a finite range, in float32; got {self.lo}, {self.hi}")


Bins: TypeAlias = ExponentBins | LinearBins


def histogram_shape(bins: Bins | None, channels: int) -> tuple[int, ...]:
    """Of the histogram in a state; (0,) without one. Linear bins have a counter for what lies below, and above."""
    if bins is None:
        return (0,)
    if isinstance(bins, LinearBins):
        return (channels, bins.n + 2) if bins.per_channel else (bins.n + 2,)
    return (channels, OCTAVE_BINS) if bins.per_channel else (EXPONENT_BINS,)


def divided(moments: Array, by: float) -> Array:
    """The state of the values, each divided by a positive number."""
    result: Array = moments.copy()
    for name in ("mean", "min", "max", "abs_sum"):
        result[FIELDS.index(name)] /= by
    result[FIELDS.index("m2")] /= by * by
    return result


def exponent_histogram(state: Counts) -> tuple[Counts, Array]:
    """Counts ``[509]`` and edges ``[510]``, ascending, from the state's 512 bins ``sign << 8 | exponent``."""
    positive, negative = state[1:255], state[257:511]
    counts = np.concatenate([negative[::-1], state[:1], positive])
    magnitudes = 2.0 ** np.arange(-126, 129)
    return counts, np.concatenate([-magnitudes[::-1], magnitudes])


def octave_edges() -> Array:
    """Edges ``[65]`` of the per-channel bins: 0, 2^-46, 2^-45, ..., 2^16, inf."""
    return np.concatenate([[0.0], 2.0 ** np.arange(FIRST_OCTAVE, FIRST_OCTAVE + OCTAVE_BINS - 1), [np.inf]])
