"""Every statistic in float64, straight from its definition, on the same data. Independent of hookstats."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]


def remembered(of_rows: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps the last results: the same data are measured on every backend, with every histogram."""
    found: dict[Any, Any] = {}

    @wraps(of_rows)
    def remember(rows: Array, *more: Any) -> Any:
        key = (hash(rows.tobytes()), rows.shape, rows.dtype, more)  # found sooner than those of hashlib
        if key not in found:
            if len(found) == 1024:
                del found[next(iter(found))]
            found[key] = of_rows(rows, *more)
        return found[key]

    return remember


def channel_rows(x: torch.Tensor, channel_dim: int | None) -> Array:
    """float64 [channels, values]; one channel for channel_dim=None."""
    wide = x.detach().resolve_neg().cpu().double()
    if channel_dim is None or x.dim() == 0:
        return wide.reshape(1, -1).numpy()
    return wide.movedim(channel_dim, 0).reshape(x.shape[channel_dim], -1).numpy()


class Finite:
    """The finite values of each channel [channels, values], zero where there is another one, and sums of them."""

    def __init__(self, rows: Array) -> None:
        self.at = np.isfinite(rows)
        self.float64 = np.where(self.at, rows, 0)
        self.values = self.float64.astype(np.longdouble)
        self.count = self.at.sum(1)

    def extreme(self, of: np.ufunc, values: Array, none: float) -> Array:
        found: Array = of.reduce(np.where(self.at, values, none), axis=1, initial=none)
        return found

    @cached_property
    def mean(self) -> Array:
        mean: Array = self.values.sum(1) / self.count
        return mean

    @cached_property
    def std(self) -> Array:
        deviations = np.where(self.at, self.values - self.mean[:, None], 0)
        std: Array = np.sqrt(np.square(deviations).sum(1) / (self.count - 1))
        return std.astype(np.float64)

    @cached_property
    def abs_sum(self) -> Array:
        abs_sum: Array = np.abs(self.values).sum(1)
        return abs_sum

    @cached_property
    def square_sum(self) -> Array:
        square_sum: Array = np.square(self.values).sum(1)
        return square_sum


def kurtosis(values: Array) -> float:
    """Compute the kurtosis of finite values, in one dimension."""
    v = values.astype(np.longdouble)
    squares = np.square(v - np.mean(v))  # whose squares are found much sooner than fourth powers
    return float(np.mean(np.square(squares)) / np.mean(squares) ** 2)


# Each from the finite values of a channel, all but the last three, which see every value; [channels].
STATISTICS: dict[str, Callable[[Finite], Array]] = {
    "count": lambda v: v.count,
    "mean": lambda v: v.mean,
    "var": lambda v: v.std**2,
    "std": lambda v: v.std,
    "rms": lambda v: np.sqrt(v.square_sum / v.count),
    "abs_mean": lambda v: v.abs_sum / v.count,
    "l1_norm": lambda v: v.abs_sum,
    "l2_norm": lambda v: np.sqrt(v.square_sum),
    "abs_max": lambda v: v.extreme(np.maximum, np.abs(v.float64), -np.inf),
    "min": lambda v: v.extreme(np.minimum, v.float64, np.inf),
    "max": lambda v: v.extreme(np.maximum, v.float64, -np.inf),
    "zeros": lambda v: (v.at & (v.float64 == 0)).sum(1),
}
COUNTED: dict[str, Callable[[Array], Array]] = {
    "nans": lambda rows: np.isnan(rows).sum(1),
    "posinfs": lambda rows: (rows == np.inf).sum(1),
    "neginfs": lambda rows: (rows == -np.inf).sum(1),
}
NEEDS = {"var": 2, "std": 2, "count": 0, "l1_norm": 0, "l2_norm": 0, "zeros": 0}  # finite values; others need one


@remembered
def statistics(rows: Array) -> dict[str, Array]:
    """All statistics of each channel, float64 [channels]; NaN where there are too few finite values.

    `rows` is [channels, values], or [values] of one channel.
    """
    rows = np.atleast_2d(rows).astype(np.float64)
    v = Finite(rows)
    with np.errstate(all="ignore"):
        found = {name: np.where(v.count >= NEEDS.get(name, 1), f(v), np.nan) for name, f in STATISTICS.items()}
        return {name: value.astype(np.float64) for name, value in found.items()} | {
            name: f(rows).astype(np.float64) for name, f in COUNTED.items()
        }


def _exponents(v: Array) -> Array:
    """floor(log2 |v|), exactly; very low for zero."""
    mantissa, exponent = np.frexp(np.abs(v))
    return np.where(mantissa == 0, -(10**6), exponent - 1)


@remembered
def exponent_counts(row: Array) -> Array:
    """int64 [509]: negative values from large to small, zeros and float32-subnormals, positive from small to large."""
    v = row[np.isfinite(row)]
    exponents = np.minimum(_exponents(v), 127)
    place = np.where(exponents < -126, 254, 254 + np.sign(v) * (exponents + 127)).astype(int)
    return np.bincount(place, minlength=509)


@remembered
def linear_counts(rows: Array, bins: Any, dtype: torch.dtype) -> Array:
    """int64 [channels, n + 2]: below, the bins of torch.histc, above; in float64 for float64 data, else in float32."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    lo, hi = torch.tensor([bins.lo, bins.hi], dtype=wide)
    counts = np.empty((len(rows), bins.n + 2), np.int64)
    for row, out in zip(rows, counts, strict=True):
        v = torch.from_numpy(row[np.isfinite(row)]).to(wide)
        out[0], out[-1] = (v < lo).sum(), (v > hi).sum()
        out[1:-1] = torch.histc(v, bins.n, bins.lo, bins.hi).numpy()
    return counts


@remembered
def octave_counts(rows: Array) -> Array:
    """int64 [channels, 64] of |x|: below 2^-46, then octaves up to 2^16, then all above."""
    octave = np.clip(_exponents(np.where(np.isfinite(rows), rows, 0)) + 47, 0, 63).astype(int)
    channel = np.broadcast_to(np.arange(len(rows))[:, None], rows.shape)
    return np.bincount((64 * channel + octave)[np.isfinite(rows)], minlength=64 * len(rows)).reshape(-1, 64)
