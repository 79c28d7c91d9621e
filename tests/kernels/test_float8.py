"""float8, which the CUDA kernels read value by value."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import HISTOGRAMS, Backend, check
from tests.kernels.test_kernels import normal

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def any_bytes(*shape: int) -> torch.Tensor:
    """All 256 of them, with what is not finite."""
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(2), dtype=torch.uint8)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("histogram", HISTOGRAMS)
def test_every_value_of_every_channel_is_counted(backend: Backend, dtype: torch.dtype, histogram: str) -> None:
    for shape, dim in [((300, 64), 1), ((5, 24, 8, 12), 1), ((20_004,), None), ((6, 3000), 0)]:
        x = any_bytes(*shape).view(dtype)
        check(backend.accumulate(x, dim, histogram).stats(), x, dim)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_what_leaves_no_variance_leaves_none(backend: Backend, dtype: torch.dtype) -> None:
    x = torch.full((3000, 8), 0.375).to(dtype)
    x[:, 1], x[:, 2] = 0.0, float("nan")
    x[7, 3] = 0.4375  # one value, next to the others
    stats = backend.accumulate(x, 1, "per_channel").stats()
    check(stats, x, 1)
    assert stats.channels.var[:2].tolist() == [0, 0]


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_the_largest_values_of_the_format(backend: Backend, dtype: torch.dtype) -> None:
    x = normal(2000, 64).to(dtype)
    x[::2], x[1::4] = torch.finfo(dtype).max, -torch.finfo(dtype).max
    check(backend.accumulate(x, 1, "per_tensor").stats(), x, 1)


def test_several_launches_add_up(backend: Backend) -> None:
    x = any_bytes(900, 40).view(torch.float8_e5m2)
    state = backend.accumulate(x[:400], 1, "per_channel")
    check(backend.accumulate(x[400:], 1, into=state).stats(), x, 1)
