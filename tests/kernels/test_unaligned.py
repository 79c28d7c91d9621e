"""Rows, planes and whole tensors that are no whole packs or begin anywhere, against float64 on the same data."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conftest import DTYPES, HISTOGRAMS, Backend, check
from tests.kernels.test_kernels import normal

INF, NAN = float("inf"), float("nan")
# One of each size: what an address and a width change is which values are loaded together. How each dtype is read is
# test_kernels.py's.
SIZES = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def crossed(sizes: list[Any], few: list[Any]) -> list[Any]:
    """All sizes with two dtypes, a few with the others."""
    usual = (torch.float32, torch.bfloat16)
    cases = [(dtype, size) for dtype in SIZES for size in (sizes if dtype in usual else few)]
    return [pytest.param(*case, id="-".join(map(str, case))) for case in cases]


def shifted(x: torch.Tensor, offset: int) -> torch.Tensor:
    """The same values, `offset` elements after an aligned address; what lies around would show."""
    around = torch.full((x.numel() + 16,), 1e4).to(x.dtype)
    around[offset : offset + x.numel()] = x.reshape(-1)
    return around[offset : offset + x.numel()].view(x.shape)


@pytest.mark.parametrize(
    ("dtype", "channels"),
    crossed([1, 2, 3, 5, 6, 7, 10, 12, 61, 63, 64, 65, 66, 67, 100, 127, 132, 250, 257, 1001], [1, 3, 6, 64, 67, 257]),
)
def test_rows_of_any_width_at_any_address(backend: Backend, dtype: torch.dtype, channels: int) -> None:
    x = normal(131, channels).to(dtype)
    for offset in (0, 1, 2, 3):
        for histogram in HISTOGRAMS if channels in (3, 64, 67) else ["per_channel"]:
            view = shifted(x, offset)
            check(backend.accumulate(view, 1, histogram).stats(), view, 1)
    y = x.t().contiguous()
    check(backend.accumulate(y, 0, "per_channel").stats(), y, 0)


@pytest.mark.parametrize("dtype", SIZES, ids=str)
def test_slices_of_rows_of_any_width(backend: Backend, dtype: torch.dtype) -> None:
    x = normal(90, 75).to(dtype)
    for first, last in ((0, 74), (1, 65), (2, 71), (3, 6), (72, 75)):
        for rows in (x[:, first:last], x[::3, first:last], x[5:6, first:last]):
            check(backend.accumulate(rows, 1, "per_channel").stats(), rows, 1)


@pytest.mark.parametrize(("dtype", "rows"), crossed([1, 2, 3, 5, 127, 128, 129, 511, 513, 4097], [3, 5, 129, 513]))
def test_tails_of_every_length(backend: Backend, dtype: torch.dtype, rows: int) -> None:
    for channels in (3, 10007 if rows == 5 else 67):
        x = normal(rows, channels).to(dtype)
        check(backend.accumulate(x, 1, "per_tensor").stats(), x, 1)


@pytest.mark.parametrize("histogram", HISTOGRAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_what_is_not_finite_or_overflows_stays_in_its_channel(
    backend: Backend, dtype: torch.dtype, histogram: str
) -> None:
    for channels in (3, 7, 61, 66):
        x = normal(400, channels)
        x[::7, 0], x[::5, -1], x[3::11, 1], x[9::31, channels // 2] = NAN, INF, -INF, torch.finfo(dtype).max
        view: Any = shifted(x.to(dtype), 1)
        check(backend.accumulate(view, 1, histogram).stats(), view, 1)


@pytest.mark.parametrize(
    ("dtype", "plane"),
    crossed([(1, 1), (1, 3), (1, 5), (2, 3), (3, 3), (1, 7), (7, 7), (13, 17)], [(1, 1), (2, 3), (13, 17)]),
)
def test_planes_of_any_size_at_any_address(backend: Backend, dtype: torch.dtype, plane: tuple[int, int]) -> None:
    for channels in (3, 8, 20):
        x = normal(9, channels, *plane).to(dtype)
        for offset in (0, 1, 3):
            for histogram in HISTOGRAMS if channels == 8 else ["per_channel"]:
                view = shifted(x, offset)
                check(backend.accumulate(view, 1, histogram).stats(), view, 1)


@pytest.mark.parametrize(
    ("dtype", "size"), crossed([4, 5, 6, 7, 8, 9, 1023, 4097, 4099, 40_002, 300_001], [5, 9, 4099, 40_002])
)
def test_whole_tensors_and_long_channels_of_any_size(backend: Backend, dtype: torch.dtype, size: int) -> None:
    x = normal(3 * size).to(dtype)
    for offset in (0, 1, 2):
        whole = shifted(x[:size], offset)
        check(backend.accumulate(whole, None, "per_tensor").stats(), whole, None)
        if size < 50_000:
            channels = shifted(x.view(3, size), offset)
            check(backend.accumulate(channels, 0, "per_channel").stats(), channels, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_in_planes(backend: Backend, dtype: torch.dtype) -> None:
    x = normal(40, 12, 7, 7)
    x[::3, 0, 6, 6], x[::2, 1, 0, 0], x[5, 2], x[6, 11, 6, 6] = NAN, -INF, INF, min(torch.finfo(dtype).max, 1e150)
    view = shifted(x.to(dtype), 1)
    for histogram in HISTOGRAMS:
        check(backend.accumulate(view, 1, histogram).stats(), view, 1)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex128], ids=str)
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9])
def test_on_a_gpu_the_tests_tensors_end_in_memory_of_whole_words(dtype: torch.dtype, size: int) -> None:
    x = torch.arange(float(size)).to(dtype)[size // 2 :]
    there = Backend("gpu", torch.ops.hookstats, "cpu:0").to_device(x)
    assert there.untyped_storage().nbytes() % 8 == 0
    assert (there.dtype, there.stride(), there.storage_offset()) == (dtype, x.stride(), x.storage_offset())
    assert torch.equal(there.to(torch.complex128), x.to(torch.complex128))


def test_on_a_gpu_the_tests_tensors_are_conjugates_where_they_were() -> None:
    x = torch.tensor([1 + 2j, 3j]).conj()
    there = Backend("gpu", torch.ops.hookstats, "cpu:0").to_device(x)
    assert there.is_conj()
    assert torch.equal(there, x)
