"""Blocks of neighbouring values: which are counted, and how far values lie below the largest of their block."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from hookstats.numbers.histogram import BlockExponents
from tests.conftest import BINS, DTYPES, Backend, State, check
from tests.kernels.test_kernels import normal
from tests.reference import Array

BLOCKS = [name for name in BINS if name.startswith("blocks")]
FLOATS = [dtype for dtype in DTYPES if dtype.itemsize > 1]


def chosen(blocks: int) -> Array:
    """The numbers of the blocks that are counted of so many: one of each 1,024th part, moved by the golden ratio."""
    if blocks <= 1024:
        return np.arange(blocks)
    turns = np.arange(1024)
    begin, end = blocks * turns // 1024, blocks * (turns + 1) // 1024
    moves = turns * 2654435769 % 2**32 >> 16
    return begin + (moves * (end - begin) >> 16)


def counted(matrix: Array, histogram: str) -> Array:
    """The 576 counters of a matrix [rows, width] in float64, by their definition."""
    bins = BINS[histogram]
    lines = np.abs(matrix if bins.block_dim == -1 else matrix.T)
    behind = ((0, 0), (0, -lines.shape[1] % bins.block))  # what fills the last block of a line, and counts nowhere
    blocks = np.pad(lines, behind).reshape(-1, bins.block)
    values = np.pad(np.ones_like(lines, bool), behind).reshape(-1, bins.block)
    sample = chosen(len(blocks))
    blocks, values = blocks[sample], values[sample]
    turns = np.arange(len(sample))
    groups = (turns ^ turns >> 3 ^ turns >> 6 ^ turns >> 9) % 8
    finite = np.isfinite(blocks).all(1)
    blocks, values, groups = blocks[finite], values[finite], groups[finite]
    exponents = np.frexp(blocks.max(1))[1] - 1  # the largest value is in [2^exponent, 2^(exponent + 1))
    largest = np.maximum(np.where(blocks.max(1) == 0, -127, exponents), -127)
    mantissas, exponents = np.frexp(blocks)  # 0.5 <= mantissa < 1
    below = np.minimum(largest[:, None] - np.maximum(exponents - 1 - (mantissas == 0.5), -127), 38)
    counts = np.zeros(576, np.int64)
    at = groups[:, None] * 40 + np.where(blocks == 0, 0, 1 + below)
    counts[:320] = np.bincount(at[values], minlength=320)
    counts[320:575] = np.bincount(largest + 127, minlength=255)
    counts[575] = (~finite).sum()
    return counts


def check_blocks(backend: Backend, x: torch.Tensor, histogram: str, dim: int | None, mask: Array | None = None) -> None:
    wide = x.detach().resolve_neg().cpu().double().numpy()
    matrix = wide.reshape(-1, wide.shape[-1]) if x.dim() > 1 else wide.reshape(1, -1)
    if mask is not None:
        matrix = matrix[mask.reshape(-1)]
    state = backend.accumulate(x, dim, histogram, mask=None if mask is None else torch.from_numpy(mask))
    np.testing.assert_array_equal(state.histogram.cpu().numpy()[512:], counted(matrix, histogram))


def spread(*shape: int) -> torch.Tensor:
    """Make values of many exponents, with zeros."""
    x = normal(*shape) * torch.exp2(8 * normal(*shape, seed=3))
    x[torch.rand(shape, generator=torch.Generator().manual_seed(4)) < 0.1] = 0
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("histogram", BLOCKS)
def test_every_value_of_every_shape(backend: Backend, dtype: torch.dtype, histogram: str) -> None:
    shapes = [(1,), (31,), (70,), (4, 64), (5, 96), (33, 48), (7, 130), (2, 3, 20), (70, 1), (300, 7)]
    for shape in shapes:
        check_blocks(backend, spread(*shape).to(dtype), histogram, len(shape) - 1)
        check_blocks(backend, spread(*shape).to(dtype), histogram, None)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("histogram", BLOCKS)
def test_powers_of_two_count_as_the_end_of_the_octave_below(
    backend: Backend, dtype: torch.dtype, histogram: str
) -> None:
    exponents = torch.arange(64).remainder(12).view(2, 32).repeat(20, 1)
    x = torch.exp2(-exponents.double())
    x[::2] *= 1 + torch.finfo(dtype).eps  # just above
    x[1::4] *= -1
    check_blocks(backend, x.to(dtype), histogram, 1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("histogram", BLOCKS)
def test_a_block_with_nan_or_infinity_is_counted_apart(backend: Backend, dtype: torch.dtype, histogram: str) -> None:
    x = spread(70, 100).to(dtype)
    x[3, 5], x[40, 70], x[41, 99], x[69, 0] = float("nan"), float("inf"), float("-inf"), -float("nan")
    check_blocks(backend, x, histogram, 1)
    check_blocks(backend, torch.full((40, 40), float("nan"), dtype=dtype), histogram, 1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("histogram", BLOCKS)
def test_zeros_and_subnormals(backend: Backend, dtype: torch.dtype, histogram: str) -> None:
    x = torch.zeros(40, 70, dtype=dtype)
    check_blocks(backend, x, histogram, 1)
    x[::3, ::2] = torch.finfo(dtype).smallest_normal / 4
    x[1::5] = -0.0
    x[2, 3] = torch.finfo(dtype).smallest_normal * 2
    check_blocks(backend, x, histogram, 1)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: spread(70, 40).t(),
    "columns": lambda: spread(40, 100)[:, 3:90],
    "every other column": lambda: spread(40, 200)[:, ::2],
    "every other row": lambda: spread(90, 64)[::2],
    "expanded": lambda: spread(1, 64).expand(40, 64),
    "broadcast": lambda: spread(40, 1).expand(40, 64),
    "permuted": lambda: spread(5, 36, 8).permute(2, 0, 1),
    "channels last": lambda: spread(2, 8, 5, 36).to(memory_format=torch.channels_last),
    "unaligned": lambda: spread(64 * 40 + 1)[1:].view(40, 64),
    "negative": lambda: torch.view_as_complex(spread(40, 64, 2)).conj().imag,
    "scalar": lambda: spread(1)[0],
    "long rows": lambda: spread(3, 40_001),
    "many short rows": lambda: spread(3000, 16),
    "many rows of a transposed one": lambda: spread(70, 3001).t(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("histogram", BLOCKS)
def test_every_layout(backend: Backend, layout: str, histogram: str) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = LAYOUTS[layout]()
        check_blocks(backend, x if layout == "negative" else _like(x, dtype), histogram, None)


def _like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert to another dtype, with the same strides."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    memory = torch.zeros(size + x.storage_offset(), dtype=dtype)
    y = memory.as_strided(x.shape, x.stride(), x.storage_offset())
    memory[:] = x.as_strided(memory.shape, (1,), 0).to(dtype)
    return y


@pytest.mark.parametrize("histogram", BLOCKS)
def test_rows_that_count(backend: Backend, histogram: str) -> None:
    mask = np.random.default_rng(0).random((4, 30)) < 0.6
    check_blocks(backend, spread(4, 30, 72).float(), histogram, 2, mask)
    check_blocks(backend, spread(4, 30, 72).float(), histogram, None, mask)
    check_blocks(backend, spread(120, 40).bfloat16(), histogram, 1, mask)
    check_blocks(backend, spread(4, 30, 72).float(), histogram, 2, np.zeros((4, 30), bool))
    check_blocks(backend, spread(4, 900, 72).float(), histogram, 2, np.random.default_rng(1).random((4, 900)) < 0.6)


def test_rows_that_are_all_dimensions_are_blocks_of_one_value_or_of_the_values_that_count(backend: Backend) -> None:
    mask = np.random.default_rng(0).random((4, 30)) < 0.6
    x = spread(4, 30).float()
    kept = x.double().numpy().reshape(-1, 1)[mask.reshape(-1)]
    for histogram in BLOCKS:
        state = backend.accumulate(x, None, histogram, mask=torch.from_numpy(mask))
        np.testing.assert_array_equal(state.histogram.cpu().numpy()[512:], counted(kept, histogram))


@pytest.mark.parametrize("histogram", BLOCKS)
def test_all_other_statistics_are_as_without_blocks(backend: Backend, histogram: str) -> None:
    x = spread(300, 72).float()
    with_blocks, without = (backend.accumulate(x, 1, name) for name in (histogram, "per_tensor"))
    assert without.histogram is not None
    assert torch.equal(with_blocks.histogram[:512], without.histogram)
    assert torch.equal(with_blocks.moments.view(torch.int64), without.moments.view(torch.int64))
    check(backend.accumulate(normal(300, 72).float(), 1, histogram).stats(), normal(300, 72).float(), 1)


def test_counts_add_up_over_tensors_and_merges(backend: Backend) -> None:
    first, second = spread(50, 70).float(), spread(33, 70).float() * 3
    state = backend.accumulate(first, 1, "blocks of 32")
    backend.accumulate(second, 1, into=state)
    other = backend.accumulate(first, 1, "blocks of 32")
    backend.merge(other, backend.accumulate(second, 1, "blocks of 32"))
    expected = sum(counted(x.double().numpy(), "blocks of 32") for x in (first, second))
    for each in (state, other):
        np.testing.assert_array_equal(each.histogram.cpu().numpy()[512:], expected)


@pytest.mark.parametrize("period", [2, 8, 100])
def test_what_is_periodic_is_met_as_often_as_it_occurs(backend: Backend, period: int) -> None:
    x = torch.ones(8192, 32)
    x[::period] *= 1024
    state = backend.accumulate(x, 1, "blocks of 32")
    large = int(state.histogram[512 + 320 + 127 + 10])
    assert large == pytest.approx(1024 / period, abs=3)
    groups = state.histogram[512 : 512 + 320].cpu().view(8, 40).sum(1)
    assert groups.tolist() == [128 * 32] * 8


def test_what_the_counters_say() -> None:
    counts = np.zeros(576, np.int64)
    counts[[0, 1, 4, 39]] = 5, 7, 11, 13
    counts[[280, 281, 319]] = 1, 2, 3  # of the last group
    counts[[320, 320 + 127, 574, 575]] = 1, 2, 3, 4
    blocks = BlockExponents(32, -1, counts)
    assert (blocks.zeros, blocks.nonfinite, blocks.size, blocks.dim) == (6, 4, 32, -1)
    assert blocks.distances.shape == (39,)
    assert blocks.distances[[0, 3, 38]].tolist() == [9, 11, 16]
    assert blocks.largest.shape == (255,)
    assert blocks.largest[[0, 127, 254]].tolist() == [1, 2, 3]
    scaled = BlockExponents(32, -1, counts, scale=1024.0)
    assert scaled.largest[[0, 117, 244]].tolist() == [1, 2, 3]
    assert scaled.distances.tolist() == blocks.distances.tolist()
    assert repr(blocks) == "BlockExponents(10 blocks of 32)"


def test_tensors_that_come_together_are_counted_one_by_one(backend: Backend) -> None:
    tensors = [spread(50, 70).float(), spread(4, 33).bfloat16(), spread(7).float()]
    states = [State(1, "blocks of 32", backend.device) for _ in tensors]
    dims = [x.dim() - 1 for x in tensors]
    assert backend.batch(states, dims).accumulate([backend.to_device(x) for x in tensors]) == []
    for x, state in zip(tensors, states, strict=True):
        wide = x.double().numpy()
        found = state.histogram.cpu().numpy()[512:]
        np.testing.assert_array_equal(found, counted(wide.reshape(-1, wide.shape[-1]), "blocks of 32"))
