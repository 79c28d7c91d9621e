"""Tensors so large that a thread reads several tiles, with what is not finite in the later ones."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import State

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("histogram", ["none", "per_tensor", "per_channel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_values_that_are_not_finite_in_later_tiles_of_256_mb(dtype: torch.dtype, histogram: str) -> None:
    """Only from this size on does a thread have a second tile, which is masked from its start behind one with a NaN."""
    channels = 128
    x = torch.randn(256 << 20 >> (1 if dtype == torch.bfloat16 else 2), device="cuda").to(dtype).view(-1, channels)
    rows = len(x)
    x[rows // 2 :: 7, 3] = float("nan")
    x[rows // 3 :: 11, 64] = float("inf")
    x[-5:, 127] = -float("inf")
    x[rows // 4, :] = float("nan")
    state = State(channels, histogram, "cuda")
    state.fold(x, 1)
    stats = state.stats()
    wide = x.double()
    finite = wide.isfinite()
    masked = torch.where(finite, wide, 0.0)
    count = finite.sum(0)
    assert stats.channels.count.tolist() == count.tolist()
    assert stats.channels.nans.tolist() == wide.isnan().sum(0).tolist()
    assert stats.channels.posinfs.tolist() == wide.isposinf().sum(0).tolist()
    assert stats.channels.neginfs.tolist() == wide.isneginf().sum(0).tolist()
    mean = masked.sum(0) / count
    var = (torch.where(finite, wide - mean, 0.0) ** 2).sum(0) / (count - 1)
    torch.testing.assert_close(torch.tensor(stats.channels.mean), mean.cpu(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.tensor(stats.channels.var), var.cpu(), rtol=1e-5, atol=0)
    if histogram != "none":
        assert int(stats.histogram.counts.sum()) == int(count.sum())
