"""Values that are not finite, and others for which a tile is read again: against float64, over many tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.conftest import Backend, check
from tests.kernels.test_kernels import INF, NAN, normal

CHANNELS = 64
TILE = 16 * 128  # rows: 16 threads share the 64 channels of a block on a GPU, and a tile is 128 packs of a thread
FIRST = 16 * 4  # of them, those that the first shift is chosen from
ROWS = 2 * TILE + 405  # and a tile that is no whole groups of packs


def sown(x: torch.Tensor, share: float, *values: float, seed: int = 1) -> torch.Tensor:
    """In place, the values at random places, about that share of all."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.rand(x.shape, generator=generator) < share
    x[places] = torch.tensor(values, dtype=x.dtype)[
        torch.randint(len(values), (int(places.sum()),), generator=generator)
    ]
    return x


def rows() -> torch.Tensor:
    return normal(ROWS, CHANNELS)


def changed(first: int, stop: int | None, share: float, *values: float) -> torch.Tensor:
    x = rows()
    sown(x[first:stop], share, *values)
    return x


def with_channels_of_nan() -> torch.Tensor:
    x = rows()
    x[:, 5], x[:TILE, 9], x[TILE:, 11], x[FIRST:, 13] = NAN, NAN, NAN, INF
    return x


def every_exponent() -> torch.Tensor:
    exponents = torch.randint(-120, 120, (ROWS, CHANNELS), generator=torch.Generator().manual_seed(2))
    return sown(torch.ldexp(rows(), exponents), 0.01, NAN)


def equal_after(x: torch.Tensor, first: int) -> torch.Tensor:
    x[first:] = torch.linspace(1.1, 2.3, CHANNELS)  # equal values round the same way each time
    return x


VALUES = {
    "nan": changed(0, None, 0.01, NAN),
    "one_nan": changed(TILE + 7, TILE + 8, 0.1, NAN),
    "nan_in_the_first_values": changed(0, FIRST, 0.5, NAN),
    "inf_in_the_first_values": changed(0, FIRST, 0.5, INF, -INF),
    "nan_in_the_last_values": changed(ROWS - 5, None, 0.5, NAN),
    "nan_in_later_tiles": changed(TILE, None, 0.01, NAN),
    "half_minus_inf": changed(0, None, 0.5, -INF),
    "nan_and_inf": changed(0, None, 0.05, NAN, INF, -INF),
    "channels_of_nan": with_channels_of_nan(),
    "every_exponent_and_nan": every_exponent(),
    "mean_1e4_and_nan": sown(rows() + 1e4, 0.01, NAN),
    "growing_mean_and_nan": sown(rows() + torch.arange(ROWS).view(-1, 1), 0.01, NAN),
    "subnormal_and_nan": sown(rows() * 1e-40, 0.01, NAN),
    "one_outlier_in_the_first_values": changed(16, 32, 1.0, 1e4),
    "equal_and_nan": sown(equal_after(rows(), 0), 0.01, NAN),
    "equal_after_nan": equal_after(torch.full((ROWS, CHANNELS), NAN, dtype=torch.float64), FIRST),
    "equal_after_inf": equal_after(torch.full((ROWS, CHANNELS), INF, dtype=torch.float64), FIRST),
    "equal_and_nan_after_others": sown(equal_after(rows(), TILE), 0.01, NAN),
    "equal_and_inf_after_others": sown(equal_after(rows(), TILE), 0.01, INF),
    "hot_bin_and_nan": sown(torch.where(rows() > 2, 7.0, 1.5).double(), 0.01, NAN),
}


@pytest.fixture
def in_one_part(backend: Backend) -> Iterator[Backend]:
    """Let one thread read many tiles, where that can be chosen."""
    chosen = backend.name == "cuda_on_cpu"
    if chosen:
        backend.ops.use_one_part(True)
    yield backend
    if chosen:
        backend.ops.use_one_part(False)


FEW = ["nan_and_inf", "channels_of_nan", "mean_1e4_and_nan", "equal_after_nan"]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [(values, torch.float32) for values in VALUES]
    + [(values, dtype) for values in FEW for dtype in (torch.float16, torch.bfloat16, torch.float64)],
    ids=str,
)
def test_what_is_finite_matches_float64_in_rows_and_planes(
    in_one_part: Backend, values: str, dtype: torch.dtype
) -> None:
    x = VALUES[values].to(dtype)
    odd = x[:, 1:].contiguous()  # no whole packs
    for tensor, channel_dim in ((x, 1), (odd, 1), (x, None), (odd[:1011, :40].T.contiguous(), 0)):
        check(in_one_part.accumulate(tensor, channel_dim, "per_channel").stats(), tensor, channel_dim)


@pytest.mark.parametrize("values", ["nan_and_inf", "channels_of_nan", "equal_after_nan"])
def test_what_is_finite_matches_float64_on_the_rows_that_count(in_one_part: Backend, values: str) -> None:
    x = VALUES[values].bfloat16()
    mask = torch.rand(ROWS, generator=torch.Generator().manual_seed(3)) < 0.9
    state = in_one_part.accumulate(x, 1, "per_tensor", mask=mask)
    check(state.stats(), x[mask], 1)


@pytest.fixture
def is_exact(harness: Any) -> Iterator[Callable[[torch.Tensor], bool]]:
    """Return whether a tensor's variances equal float64's to the last bits: sums of float32 do not."""
    backend = Backend("cuda_on_cpu", harness, "cpu")

    def measure(x: torch.Tensor) -> bool:
        finite = x.float().double()
        finite = finite[finite.isfinite().all(1)]
        m2 = ((finite - finite.mean(0)) ** 2).sum(0)
        return bool(((backend.accumulate(x.float(), 1).moments[2] / m2 - 1).abs() < 1e-13).all())

    harness.use_one_part(True)
    yield measure
    harness.use_one_part(False)


def test_a_tile_with_nan_is_read_again_in_float64_and_no_other_one(is_exact: Callable[[torch.Tensor], bool]) -> None:
    x = rows()[:TILE]  # one tile for each thread
    assert not is_exact(x)
    x[:16] = NAN  # in its first pack
    assert is_exact(x)


@pytest.mark.parametrize("far", [16, 64], ids="rows: {}".format)
def test_first_values_far_from_the_others_do_not_have_a_tile_read_again(
    is_exact: Callable[[torch.Tensor], bool], far: int
) -> None:
    x = rows()[:TILE]
    x[:far] += 1e3  # the first one of each thread, or the first four
    assert not is_exact(x)
