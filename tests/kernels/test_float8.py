"""float8 in packs: the CUDA kernels count values there, so that all but the last bits of a float64 is exact."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import HISTOGRAMS, Backend, check
from tests.kernels.test_kernels import normal

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def rtol(backend: Backend) -> float:
    return 1e-5 if backend.name == "cpu" else 1e-12


def any_bytes(*shape: int) -> torch.Tensor:
    """All 256 of them, with what is not finite."""
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(2), dtype=torch.uint8)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("histogram", HISTOGRAMS)
def test_every_value_of_every_channel_is_counted(backend: Backend, dtype: torch.dtype, histogram: str) -> None:
    for shape, dim in [((300, 64), 1), ((5, 24, 8, 12), 1), ((20_004,), None), ((6, 3000), 0)]:
        x = any_bytes(*shape).view(dtype)
        check(backend.accumulate(x, dim, histogram).stats(), x, dim, rtol(backend))


@pytest.mark.parametrize("channels", [4, 8, 12, 16, 20, 28, 32, 36, 60, 64, 68, 132, 1000])
def test_channels_that_do_not_fill_the_columns(backend: Backend, channels: int) -> None:
    for dtype in FLOAT8:
        x = any_bytes(201, channels).view(dtype)
        check(backend.accumulate(x, 1, "per_channel").stats(), x, 1, rtol(backend))
        check(backend.accumulate(x, 1, "per_tensor").stats(), x, 1, rtol(backend))
        y = x.t().reshape(channels, -1)[:, :200].contiguous()
        check(backend.accumulate(y, 0, "per_channel").stats(), y, 0, rtol(backend))


@pytest.mark.parametrize("packs", [1, 2, 3, 7, 8, 9, 31, 32, 33, 255, 256, 257, 2047, 2049, 8191])
def test_tails_of_every_length(backend: Backend, packs: int) -> None:
    x = any_bytes(packs, 4).view(torch.float8_e4m3fn)
    check(backend.accumulate(x, 1, "per_channel").stats(), x, 1, rtol(backend))
    flat = x.reshape(-1)
    check(backend.accumulate(flat, None, "per_tensor").stats(), flat, None, rtol(backend))


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_what_leaves_no_variance_leaves_none(backend: Backend, dtype: torch.dtype) -> None:
    x = torch.full((3000, 8), 0.375).to(dtype)
    x[:, 1], x[:, 2] = 0.0, float("nan")
    x[7, 3] = 0.4375  # one value, next to the others
    stats = backend.accumulate(x, 1, "per_channel").stats()
    check(stats, x, 1, rtol(backend))
    assert stats.channels is not None
    assert stats.channels.var[:2].tolist() == [0, 0]


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_the_largest_values_of_the_format(backend: Backend, dtype: torch.dtype) -> None:
    x = normal(2000, 64).to(dtype)
    x[::2], x[1::4] = torch.finfo(dtype).max, -torch.finfo(dtype).max
    check(backend.accumulate(x, 1, "per_tensor").stats(), x, 1, rtol(backend))


def test_several_launches_add_up(backend: Backend) -> None:
    x = any_bytes(900, 40).view(torch.float8_e5m2)
    state = backend.accumulate(x[:400], 1, "per_channel")
    check(backend.accumulate(x[400:], 1, into=state).stats(), x, 1, rtol(backend))
