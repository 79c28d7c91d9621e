"""accumulate and merge against float64 on the same data, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pytest
import torch

import hookstats
from hookstats import _native
from hookstats.numbers import fields
from tests.conftest import DTYPES, HISTOGRAMS, Backend, State, check

INF, NAN = float("inf"), float("nan")
NARROW = [dtype for dtype in DTYPES if dtype.itemsize < 4]


@lru_cache(128)
def _drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return _drawn(shape, seed).clone()  # a copy takes a tenth of the time


# name: (tensor from float64 values of a dtype, channel dimension)
Maker = Callable[[torch.dtype], torch.Tensor]
LAYOUTS: dict[str, tuple[Maker, int | None]] = {
    "rows": (lambda t: normal(700, 70).to(t), 1),
    "rows_3d": (lambda t: normal(9, 33, 40).to(t), -1),
    "rows_of_one_channel": (lambda t: normal(300, 1).to(t), 1),
    "rows_of_three_channels": (lambda t: normal(30011, 3).to(t), 1),
    "planes": (lambda t: normal(5, 6, 9, 11).to(t), 1),
    "planes_in_packs": (lambda t: normal(5, 6, 8, 12).to(t), 1),
    "planes_unaligned": (lambda t: normal(3, 4, 67, 67).to(t), 1),
    "planes_of_16": (lambda t: normal(300, 6, 4, 4).to(t), 1),
    "planes_of_2": (lambda t: normal(150, 33, 2).to(t), 1),
    "planes_of_32_in_every_second_image": (lambda t: normal(66, 5, 4, 8).to(t)[::2], 1),
    "planes_in_few_images": (lambda t: normal(15, 6, 4, 4).to(t), 1),
    "channels_last": (lambda t: normal(5, 34, 9, 11).to(t).to(memory_format=torch.channels_last), 1),
    "whole": (lambda t: normal(9, 33, 40).to(t), None),
    "whole_transposed": (lambda t: normal(33, 40).to(t).t(), None),
    "channels_first": (lambda t: normal(7, 500).to(t), 0),
    "transposed": (lambda t: normal(70, 300).to(t).t(), -1),
    "every_second_row": (lambda t: normal(500, 40).to(t)[::2], -1),
    "every_second_channel": (lambda t: normal(300, 80).to(t)[:, ::2], -1),
    "slice_of_channels": (lambda t: normal(12, 30, 50).to(t)[:, 3:20, 5:43], -1),
    "odd_storage_offset": (lambda t: normal(20001).to(t)[1:].view(400, 50), -1),
    "permuted_5d": (lambda t: normal(3, 4, 5, 6, 7).to(t).permute(4, 0, 3, 1, 2), 1),
    "many_dims": (lambda t: normal(4, 6, 4, 6, 4, 6).to(t)[::2, ::3, ::2, ::3, ::2, ::3], 2),
    "many_dims_rows": (lambda t: normal(4, 6, 4, 6, 34).to(t)[::2, :, ::2, ::3], -1),
    "expanded": (lambda t: normal(6, 1, 50).to(t).expand(6, 40, 50), -1),
    "expanded_channels": (lambda t: normal(60, 1).to(t).expand(60, 35), -1),
    "zero_dim": (lambda t: normal(1)[0].to(t), None),
    "one_value": (lambda t: normal(1, 1).to(t), -1),
    "one_row": (lambda t: normal(1, 100).to(t), -1),
}


# One layout for each way in which a kernel reads (on a GPU: rows or one channel after another; in packs, in few
# dimensions, in many; on a CPU: short rows, long ones, short planes, neighbours of a channel, strides): with these
# every dtype and histogram is compiled apart. Other layouts lead to the same code.
PATHS = ["rows", "rows_3d", "rows_of_three_channels", "every_second_channel", "many_dims_rows"]
PATHS += ["whole", "planes", "planes_in_packs", "planes_of_16", "many_dims"]
CASES = [
    pytest.param(layout, dtype, HISTOGRAMS if layout in PATHS else ["per_channel"], id=f"{layout}-{dtype}")
    for layout in LAYOUTS
    for dtype in (DTYPES if layout in PATHS else [torch.float32, torch.bfloat16, torch.float64])
]


@pytest.mark.parametrize(("layout", "dtype", "histograms"), CASES)
def test_every_layout_dtype_and_histogram_matches_float64(
    backend: Backend, layout: str, dtype: torch.dtype, histograms: list[str]
) -> None:
    make, channel_dim = LAYOUTS[layout]
    x = make(dtype)
    for histogram in histograms:
        state = backend.accumulate(x, channel_dim, histogram)
        check(state.stats(), x, channel_dim)
        assert state.counters[0] == 1


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 127, 128, 129, 511, 512, 513, 1025, 4097])
def test_sizes_around_tile_edges(backend: Backend, rows: int) -> None:
    for channels in (1, 2, 31, 32, 33, 63, 64, 65, 129):
        x = normal(rows, channels).float()
        check(backend.accumulate(x, 1, "per_channel").stats(), x, 1)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097, 16383, 16385, 70001])
def test_plane_sizes_around_tile_edges(backend: Backend, size: int) -> None:
    for x in (normal(2, size).float(), normal(2, 2 * size).float()[:, ::2]):  # side by side, and apart
        check(backend.accumulate(x, 0, "per_channel").stats(), x, 0)
        check(backend.accumulate(x, None, "per_tensor").stats(), x, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ten_thousand_channels(backend: Backend, dtype: torch.dtype) -> None:
    x = normal(41, 10007).to(dtype)
    for tensor, dim in ((x, 1), (x.t().contiguous(), 0)):
        check(backend.accumulate(tensor, dim, "per_channel").stats(), tensor, dim)


@pytest.mark.parametrize("rows", [3, 4, 5, 63, 64, 65, 67, 2047, 2048, 2049, 2113, 4100, 8191])
def test_sizes_around_the_tiles_of_the_packed_kernels(backend: Backend, rows: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = normal(rows, 64).to(dtype)
        check(backend.accumulate(x, 1, "per_channel").stats(), x, 1)
        y = normal(1, 4 * rows).to(dtype)
        check(backend.accumulate(y, 0, "per_channel").stats(), y, 0)
        check(backend.accumulate(y, None, "per_tensor").stats(), y, None)


def test_planes_with_gaps(backend: Backend) -> None:
    x = normal(3, 5, 24, 24).float()
    for view in (x[:, :, 4:12], x[:, :, :, 4:12], x[:, 1:3], x[:, :, :, 3:10], x[:, :, ::2]):
        check(backend.accumulate(view, 1, "per_channel").stats(), view, 1)


@pytest.mark.gpu
def test_a_block_counts_more_rows_than_16_bits_hold() -> None:
    x = torch.full((40_000_000, 4), 1.5, dtype=torch.bfloat16, device="cuda")
    x[:, 1], x[:, 2], x[::3, 3] = 0.3, -70.0, 0.0
    state = State(4, "per_channel", "cuda")
    state.fold(x, 1)
    third = (len(x) + 2) // 3
    wanted = [{47: len(x)}, {45: len(x)}, {53: len(x)}, {0: third, 47: len(x) - third}]
    assert [{i: n for i, n in enumerate(row) if n} for row in state.histogram.tolist()] == wanted


def _with(x: torch.Tensor, *values: float, first: bool = False) -> torch.Tensor:
    """The values sown into x; into the first row too, where the shift is taken from."""
    flat = x.view(-1)
    places = torch.randperm(flat.numel(), generator=torch.Generator().manual_seed(1))
    for i, place in enumerate(places[: flat.numel() // 50].tolist()):
        flat[place] = values[i % len(values)]
    if first:
        x[0] = values[0]
    return x


CONSTANTS = torch.tensor([1.1, 1.7, 2.3, 1.9, 1.3])
HARD: dict[str, torch.Tensor] = {
    "mean_1e4": (normal(3000, 5) + 1e4).float(),
    "mean_-1e4": (normal(3000, 5) - 1e4).float(),
    "near_1e30": (normal(1000, 5) * 1e30).float(),
    "near_float32_max": (normal(1000, 5).clamp(-3, 3) * 1e38).float(),
    "near_1e-30": (normal(1000, 5) * 1e-30).float(),
    "near_1e-18": (normal(1000, 5) * 1e-18).float(),
    "subnormal": (normal(1000, 5) * 1e-40).float(),
    "subnormal_among_normal": _with(normal(1000, 5).float(), 1e-41, -1e-44, 0.0, -0.0),
    "relu_sparse": normal(1000, 5).float().relu(),
    "all_zero": torch.zeros(1000, 5),
    "minus_zero": -torch.zeros(1000, 5),
    "constant": torch.full((1000, 5), 3.14),
    "constant_large": torch.full((1000, 5), 1e30),
    "nan": _with(normal(1000, 5).float(), NAN),
    "inf": _with(normal(1000, 5).float(), INF, -INF),
    "nan_and_inf": _with(normal(1000, 5).float(), NAN, INF, -INF),
    "nan_first": _with(normal(1000, 5).float(), NAN, first=True),
    "inf_first": _with(normal(1000, 5).float(), INF, first=True),
    "nan_until_row_40_then_mean_1e4": torch.where(
        torch.arange(1000).view(-1, 1) < 40, NAN, _with((normal(1000, 5) + 1e4).float(), NAN)
    ),
    "all_exponents": torch.ldexp(normal(3000, 5).float(), torch.arange(15000).view(-1, 5) % 240 - 120),
    "all_exponents_and_nan_and_inf": _with(
        torch.ldexp(normal(3000, 5).float(), torch.arange(15000).view(-1, 5) % 240 - 120), NAN, INF, -INF
    ),
    "all_nan": torch.full((300, 5), NAN),
    "all_inf": torch.full((300, 5), -INF),
    "outlier_first": _with(normal(1000, 5).float(), 1e5, first=True),
    "one_outlier_in_each_tile": normal(1000, 5).float() + 1e6 * (torch.arange(1000) % 64 == 3).view(-1, 1),
    "growing_mean": (normal(4000, 5) + torch.arange(4000).view(-1, 1)).float(),
    "two_far_means": (normal(4000, 5) + 1e3 * (torch.arange(4000) >= 2000).view(-1, 1)).float(),
    # Equal values round the same way each time: nothing averages out.
    "constant_after_zeros": torch.zeros(1024, 5).index_fill_(
        0, torch.tensor([i for i in range(1024) if i % 128 >= 8]), 1.4427528381347656
    ),
    "constants_after_zeros": torch.where(torch.arange(1024).view(-1, 1) % 64 < 4, 0.0, CONSTANTS),
    "far_first_of_128_equal": torch.where(torch.arange(1024).view(-1, 1) % 128 == 0, 77.7, CONSTANTS),
    "far_first_of_512_equal": torch.where(torch.arange(1024).view(-1, 1) % 512 < 8, 77.7, CONSTANTS),
    "hot_bin": torch.where(normal(4000, 5) > 2, 7.0, 1.5).float(),
}


@pytest.mark.parametrize("values", [(0.0, 1e-41), (0.0, NAN, INF, -INF)], ids=["finite", "not_finite"])
def test_nothing_is_lost_between_the_parts_of_a_large_tensor(backend: Backend, values: tuple[float, ...]) -> None:
    x = _with(normal(30011, 3).float(), *values)
    for tensor, channel_dim in ((x, 1), (x.t().contiguous(), 0), (x, None)):
        check(backend.accumulate(tensor, channel_dim, "per_channel").stats(), tensor, channel_dim)


@pytest.mark.parametrize("channel_dim", [1, None], ids=["rows", "whole"])
@pytest.mark.parametrize("values", HARD)
def test_hard_float32_values(backend: Backend, values: str, channel_dim: int | None) -> None:
    x = HARD[values]
    for histogram in ("per_tensor", "per_channel"):
        check(backend.accumulate(x, channel_dim, histogram).stats(), x, channel_dim)


@pytest.mark.parametrize("values", HARD)
def test_hard_values_in_planes(backend: Backend, values: str) -> None:
    x = HARD[values].t().contiguous()
    check(backend.accumulate(x, 0, "per_channel").stats(), x, 0)
    short = HARD[values].view(-1, 4, 5).transpose(1, 2).contiguous()  # of 4 values, in many images
    for histogram in ("per_tensor", "per_channel"):
        check(backend.accumulate(short, 1, histogram).stats(), short, 1)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("values", HARD)
def test_hard_values_of_narrow_dtypes(backend: Backend, values: str, dtype: torch.dtype) -> None:
    x = HARD[values].to(dtype)
    check(backend.accumulate(x, 1, "per_channel").stats(), x, 1)


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [(dtype, 4100) for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)]
    + [(torch.float32, 1024), (torch.bfloat16, 2048)],
    ids=str,
)
def test_values_that_drift_and_outliers_where_kernels_look(backend: Backend, dtype: torch.dtype, rows: int) -> None:
    noise = normal(rows, 64)
    running_mean = noise.cumsum(0) / torch.arange(1, rows + 1)[:, None]
    bursts = 1 + noise / 1000
    for eighth in (3, 5):  # a CUDA thread looks there before it reads; two of its four values lie far from its mean
        bursts[eighth * rows // 8 :][:16] += 100
    for values in (running_mean, noise.cumsum(0) / 100, bursts):
        x = values.to(dtype)
        check(backend.accumulate(x, 1, "per_tensor").stats(), x, 1)
        check(backend.accumulate(x[:, 1:], 1, "per_channel").stats(), x[:, 1:], 1)
        y = x.t().contiguous()
        check(backend.accumulate(y, 0, "per_channel").stats(), y, 0)
        check(backend.accumulate(y, None).stats(), y, None)


@pytest.mark.parametrize("histogram", HISTOGRAMS)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_value_of_a_narrow_dtype_is_counted_in_its_bin(
    backend: Backend, dtype: torch.dtype, histogram: str
) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32)
    x = bits.to(torch.int16 if dtype.itemsize == 2 else torch.uint8).view(dtype)
    check(backend.accumulate(x, None, histogram).stats(), x, None)
    check(backend.accumulate(x.view(-1, 64), 1, histogram).stats(), x.view(-1, 64), 1)
    check(backend.accumulate(x.view(4, 32, 512), 1, histogram).stats(), x.view(4, 32, 512), 1)


@pytest.mark.parametrize("histogram", ["many_linear", "many_linear_per_channel"])
@pytest.mark.parametrize("channel_dim", [0, 1])
def test_more_linear_bins_than_shared_memory_holds(backend: Backend, histogram: str, channel_dim: int) -> None:
    x = normal(60, 300).float()
    check(backend.accumulate(x, channel_dim, histogram).stats(), x, channel_dim)


def test_linear_bins_have_the_edges_of_histc(backend: Backend) -> None:
    edges = np.linspace(-1.5, 2.0, 38)
    near = [np.nextafter(np.float32(edge), np.float32(side)) for edge in edges for side in (-9, edge, 9)]
    x = torch.tensor([*near, *edges, INF, -INF, NAN, 1e30, -1e30, 0.0, -0.0], dtype=torch.float32)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        stats = backend.accumulate(x.to(dtype), None, "linear").stats()
        check(stats, x.to(dtype), None)
        assert stats.histogram.counts.sum() + stats.histogram.underflow + stats.histogram.overflow == len(x) - 3


def test_float64_keeps_its_precision_and_clamps_its_histogram(backend: Backend) -> None:
    x = normal(2000, 3) + 1e4
    check(backend.accumulate(x, 1, "per_tensor").stats(), x, 1, rtol=1e-10)
    values = [1e300, -1e300, 1e-300, -1e-300, 5e-324, 0.0, 2.0**128, 2.0**-126, 2.0**-126 * (1 - 2**-53)]
    wide = torch.tensor(values, dtype=torch.float64)
    stats = backend.accumulate(wide, None, "per_tensor").stats()
    assert stats.histogram.counts[-1] == 2  # 1e300 and 2^128, with what float32 has largest
    assert stats.histogram.counts[0] == 1
    assert stats.histogram.counts[254] == 5  # zero, and all that float32 has no normal number for
    assert stats.histogram.counts.sum() == 9


@pytest.mark.parametrize("channel_dim", [1, None])
def test_float64_squares_that_overflow_show_and_spoil_nothing_else(backend: Backend, channel_dim: int | None) -> None:
    x = normal(1000, 2)
    check(backend.accumulate(x * 1e150, channel_dim).stats(), x * 1e150, channel_dim)
    constant = torch.full((10, 2), 1e200, dtype=torch.float64)
    assert backend.accumulate(constant, channel_dim).stats().total.var == 0
    x[7, 1] = 1e200
    stats = backend.accumulate(x, channel_dim).stats()
    assert not np.isfinite(stats.total.var)
    assert stats.total.count == 2000
    assert stats.total.max == 1e200


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (3, 0, 4)])
def test_an_empty_tensor_changes_nothing(backend: Backend, shape: tuple[int, ...]) -> None:
    state = State(4, "per_tensor", backend.device)
    backend.accumulate(normal(9, 4).float(), 1, into=state)
    before = [tensor.clone() for tensor in state.tensors if tensor is not None]
    whole = State(1, "none", backend.device)
    backend.accumulate(torch.empty(shape), None, into=whole)
    assert whole.counters.tolist() == [0, 0]
    backend.accumulate(torch.empty(0, 4), 1, into=state)
    after = [tensor for tensor in state.tensors if tensor is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_two_runs_are_bit_identical(backend: Backend) -> None:
    for make, channel_dim in LAYOUTS.values():
        x = make(torch.float32)
        first = backend.accumulate(x, channel_dim, "per_channel")
        assert first.same_bits(backend.accumulate(x, channel_dim, "per_channel"))


def test_the_first_tensor_of_each_site_is_numbered_in_order_of_execution(backend: Backend) -> None:
    x = normal(10, 3).float()
    states = [backend.accumulate(x, 1) for _ in range(3)]
    numbers = [int(state.counters[1]) for state in states]
    assert 0 < numbers[0] < numbers[1] < numbers[2]
    backend.accumulate(x, 1, into=states[0])
    assert states[0].counters.tolist() == [2, numbers[0]]


def test_a_zero_flag_stops_the_kernel(backend: Backend) -> None:
    x = backend.to_device(normal(3000, 40).float())
    for value, calls in ((0, 0), (1, 1)):
        state = State(40, "per_tensor", backend.device)
        active = torch.tensor([value], dtype=torch.int32, device=backend.device)
        state.fold(x, 1, active=active, ops=backend.ops)
        assert state.counters[0] == calls
        assert state.moments[0, 0] == 3000 * calls


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("dtype", "histogram"),
    [(dtype, "per_channel") for dtype in DTYPES] + [(torch.bfloat16, "linear"), (torch.bfloat16, "linear_per_channel")],
    ids=str,
)
@pytest.mark.parametrize("layout", ["rows", "planes"])
def test_any_number_of_threads_is_bit_identical(dtype: torch.dtype, layout: str, histogram: str) -> None:
    backend = Backend("cpu", torch.ops.hookstats, "cpu")
    x, dim = (normal(5000, 100).to(dtype), 1) if layout == "rows" else (normal(4, 30, 60, 60).to(dtype), 1)
    states = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        states += [backend.accumulate(x, dim, histogram), backend.accumulate(x, None, histogram)]
    assert all(state.same_bits(states[0]) for state in states[2::2])
    assert all(state.same_bits(states[1]) for state in states[3::2])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("channel_dim", "histogram"), [(1, "per_channel"), (1, "per_tensor"), (None, "per_channel")])
def test_one_bin_of_one_thread_takes_more_than_16_bits(channel_dim: int | None, histogram: str) -> None:
    backend = Backend("cpu", torch.ops.hookstats, "cpu")
    torch.set_num_threads(1)
    state = backend.accumulate(torch.ones(140_000, 64, dtype=torch.bfloat16), channel_dim, histogram)
    per_row = 64 if channel_dim is None or histogram == "per_tensor" else 1
    assert set(state.histogram.flatten().tolist()) == {0, 140_000 * per_row}


@pytest.mark.usefixtures("threads")
def test_flush_to_zero_set_by_the_trainer_loses_nothing() -> None:
    backend = Backend("cpu", torch.ops.hookstats, "cpu")
    torch.set_num_threads(1)
    x = HARD["subnormal_among_normal"]
    try:
        torch.set_flush_denormal(True)
        stats = backend.accumulate(x, 1, "per_channel").stats()
        assert float(torch.tensor([1e-40]) * 1) == 0  # still set for everybody else
    finally:
        torch.set_flush_denormal(False)
    check(stats, x, 1)


@pytest.mark.parametrize("shape", [(3, 5), (3000, 5), (2, 20_000)])
@pytest.mark.parametrize("way", ["rows", "planes", "merge", "totals"])
def test_flush_to_zero_does_not_make_zeros_of_float64_subnormals(way: str, shape: tuple[int, int]) -> None:
    bits = torch.randint(1, 2**52, shape) | torch.randint(0, 2, shape) << 63
    x = bits.view(torch.float64)
    backend, dim = Backend("cpu", torch.ops.hookstats, "cpu"), 0 if way == "planes" else 1
    try:
        torch.set_flush_denormal(True)
        state = backend.accumulate(x, dim, "per_tensor")
        if way == "merge":
            part, state = state, State(shape[1], "per_tensor", "cpu")
            backend.merge(state, part)
        stats = state.stats()
        if way == "totals":
            words = _native.Totals([state.moments], [state.counters]).take([])
            moments = words[:, : len(fields.FIELDS)].view(torch.float64).T.numpy()
            stats = hookstats.results.SiteStats(moments, 1, None, False)
        got = [getattr(stats.total, name) for name in ("zeros", "min", "max", "abs_max")]
        of_channels = None if stats.channels is None else [stats.channels.zeros, stats.channels.min, stats.channels.max]
    finally:
        torch.set_flush_denormal(False)
    values = x.numpy()  # threads of torch's own stay in that mode
    assert got == [0, values.min(), values.max(), np.abs(values).max()]
    if of_channels is not None:
        expected = [0 * values.min(1 - dim), values.min(1 - dim), values.max(1 - dim)]
        np.testing.assert_array_equal(of_channels, np.stack(expected))


def test_64_bit_offsets(backend: Backend) -> None:
    # A few elements far apart in a storage of which only their pages are ever touched.
    far = 2**31 + 5
    storage = torch.empty(far + 40, dtype=torch.bfloat16)
    storage[:40], storage[far:] = 3.0, 5.0
    for shape, strides, dim, means in [
        ((2, 1), (far, 1), 1, [4]),
        ((2, 40), (far, 1), 1, [4] * 40),
        ((40, 2), (1, far), 1, [3, 5]),
        ((2, 2, 2, 2, 2), (far, 17, 7, 3, 1), 0, [3, 5]),
        ((2, 2, 2, 2, 2), (far, 17, 7, 3, 1), 4, [4, 4]),
    ]:
        channels = backend.accumulate(torch.as_strided(storage, shape, strides), dim).stats().channels
        assert channels.mean.tolist() == means


def test_reference_bins_agree_with_numpy_on_plain_numbers() -> None:
    from tests import reference

    row = np.array([0.0, 1.0, -1.0, 1.5, 2.0, 0.5])
    counts = reference.exponent_counts(row)
    edges = fields.exponent_histogram(np.zeros(512, dtype=np.int64))[1]
    assert counts.sum() == 6
    for value, count in ((0.0, 1), (1.2, 2), (2.5, 1), (0.7, 1)):
        assert counts[np.searchsorted(edges, value) - 1] == count
    octaves, octave_edges = reference.octave_counts(row[None])[0], fields.octave_edges()
    for value, count in ((0.0, 1), (1.2, 3), (2.5, 1), (0.7, 1)):
        assert octaves[np.searchsorted(octave_edges, value, side="right") - 1] == count
