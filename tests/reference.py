"""Every statistic in float64, straight from its definition, on the same data. Independent of hookstats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def channel_rows(x: torch.Tensor, channel_dim: int | None) -> np.ndarray[Any, Any]:
    """float64 [channels, values]; one channel for channel_dim=None."""
    wide = x.detach().resolve_neg().cpu().double()
    if channel_dim is None or x.dim() == 0:
        return wide.reshape(1, -1).numpy()
    return wide.movedim(channel_dim, 0).reshape(x.shape[channel_dim], -1).numpy()


def finite(row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    kept: np.ndarray[Any, Any] = row[np.isfinite(row)]
    return kept


def _std(v: np.ndarray[Any, Any]) -> float:
    return float(np.std(v.astype(np.longdouble), ddof=1))


def kurtosis(v: np.ndarray[Any, Any]) -> float:
    deviations = v.astype(np.longdouble) - np.mean(v.astype(np.longdouble))
    return float(np.mean(deviations**4) / np.mean(deviations**2) ** 2)


# Each from the finite values of a channel, all but the last three, which see every value.
STATISTICS: dict[str, Callable[[Any], float]] = {
    "count": lambda v: float(v.size),
    "mean": lambda v: float(np.mean(v.astype(np.longdouble))),
    "var": lambda v: _std(v) ** 2,
    "std": _std,
    "rms": lambda v: float(np.sqrt(np.mean(np.square(v.astype(np.longdouble))))),
    "abs_mean": lambda v: float(np.mean(np.abs(v.astype(np.longdouble)))),
    "l1_norm": lambda v: float(np.sum(np.abs(v.astype(np.longdouble)))),
    "l2_norm": lambda v: float(np.sqrt(np.sum(np.square(v.astype(np.longdouble))))),
    "abs_max": lambda v: float(np.max(np.abs(v))),
    "min": lambda v: float(np.min(v)),
    "max": lambda v: float(np.max(v)),
    "zeros": lambda v: float(np.sum(v == 0)),
}
COUNTED: dict[str, Callable[[Any], float]] = {
    "nans": lambda row: float(np.sum(np.isnan(row))),
    "posinfs": lambda row: float(np.sum(row == np.inf)),
    "neginfs": lambda row: float(np.sum(row == -np.inf)),
}
NEEDS = {"var": 2, "std": 2, "count": 0, "l1_norm": 0, "l2_norm": 0, "zeros": 0}  # finite values; others need one


def statistics(row: np.ndarray[Any, Any]) -> dict[str, float]:
    """All statistics of one channel; NaN where there are too few finite values."""
    v = finite(row)
    found = {name: f(v) if v.size >= NEEDS.get(name, 1) else float("nan") for name, f in STATISTICS.items()}
    return found | {name: f(row) for name, f in COUNTED.items()}


def _exponents(v: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """floor(log2 |v|), exactly; very low for zero."""
    mantissa, exponent = np.frexp(np.abs(v))
    return np.where(mantissa == 0, -(10**6), exponent - 1)


def exponent_counts(row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """int64 [509]: negative values from large to small, zeros and float32-subnormals, positive from small to large."""
    v = finite(row)
    exponents = np.minimum(_exponents(v), 127)
    place = np.where(exponents < -126, 254, 254 + np.sign(v) * (exponents + 127)).astype(int)
    return np.bincount(place, minlength=509)


def linear_counts(row: np.ndarray[Any, Any], bins: Any, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """int64 [n + 2]: below, the bins of torch.histc, above; in float64 for float64 data, else in float32."""
    v = torch.from_numpy(finite(row)).to(torch.float64 if dtype == torch.float64 else torch.float32)
    counts = torch.histc(v, bins.n, bins.lo, bins.hi).long()
    lo, hi = torch.tensor([bins.lo, bins.hi], dtype=v.dtype)
    return np.concatenate([[int((v < lo).sum())], counts.numpy(), [int((v > hi).sum())]])


def octave_counts(row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """int64 [64] of |x|: below 2^-46, then octaves up to 2^16, then all above."""
    return np.bincount(np.clip(_exponents(finite(row)) + 47, 0, 63).astype(int), minlength=64)
