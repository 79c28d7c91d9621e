"""Statistics of a site against float64 on the same tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hookstats.numbers.fields import STATISTICS, LinearBins, Stats
from hookstats.results import SiteStats
from tests import reference
from tests.conftest import compare

_RTOL = 1e-5
_ROUNDED = 1e-10  # of the largest value
_TINY = 1e-150  # a float64 does not hold the square of less, which is what a state has of deviations and norms


def check_site(stats: SiteStats, tensors: list[torch.Tensor], dim: int | None, scale: float = 1.0) -> None:
    """Compare totals, channels where there are some, and the histogram.

    dim: of the channels; None: totals alone. scale: what the values were multiplied with, in the histogram's counts.
    """
    rows = np.concatenate([reference.channel_rows(each, dim) for each in tensors], axis=1)
    whole = rows.reshape(1, -1)
    _compare(stats.total, whole, "total")
    if dim is not None and tensors[0].dim():
        assert stats.channels is not None, f"expected {len(rows)} channels, got totals alone"
        _compare(stats.channels, rows, "channels")
    if stats._histogram is None:
        return
    rows, whole = rows * scale, whole * scale
    if isinstance(stats._bins, LinearBins):
        of = rows if stats._bins.per_channel else whole
        wanted = reference.linear_counts(of, stats._bins, tensors[0].dtype)
        np.testing.assert_array_equal(stats._histogram.reshape(wanted.shape), wanted)
    elif stats._bins.per_channel:
        np.testing.assert_array_equal(stats._histogram, reference.octave_counts(rows))
    elif stats.histogram is not None:
        np.testing.assert_array_equal(stats.histogram.counts, reference.exponent_counts(whole[0]))


def check_groups(groups: Stats[Any], x: torch.Tensor, dim: int, size: int) -> None:
    rows = reference.channel_rows(x, dim)
    _compare(groups, rows.reshape(len(rows) // size, -1), f"groups of {size}")


def _compare(stats: Stats[Any], rows: Any, where: str) -> None:
    got = {name: np.atleast_1d(getattr(stats, name)) for name in STATISTICS}
    wanted = reference.statistics(rows)
    with np.errstate(invalid="ignore"):
        least = _ROUNDED * wanted["abs_max"]
        for name in ("std", "var"):  # of values that are equal but for the rounding of their mean
            is_rounding = (wanted["std"] < least) & (got["std"] < least)
            got[name] = np.where(is_rounding, wanted[name], got[name])
        for name in ("std", "var", "rms", "l2_norm"):
            got[name] = np.where((wanted[name] < _TINY) & (got[name] < _TINY), wanted[name], got[name])
    compare(got, rows, where, _RTOL)
