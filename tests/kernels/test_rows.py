"""Tensors of which only some rows count, against float64 on those rows. The other rows hold what would show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hookstats.numbers import fields
from tests.conftest import DTYPES, HISTOGRAMS, Backend, check
from tests.kernels.test_kernels import normal

BATCH, LENGTH = 4, 33
POISON = torch.tensor([1e30, float("nan"), float("inf"), -float("inf"), -1e30, 0.0, 77.0], dtype=torch.float64)


def _padded(*shape: int) -> torch.Tensor:
    """Sequences of different lengths, one of them empty, one whole."""
    lengths = torch.linspace(0, shape[-1], shape[0]).long()
    return torch.arange(shape[-1]) < lengths.view(-1, 1)


def _random(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.6


MASKS: dict[str, Callable[..., torch.Tensor]] = {
    "all": lambda *shape: torch.ones(shape, dtype=torch.bool),
    "one": lambda *shape: torch.zeros(shape, dtype=torch.bool).index_put_((torch.tensor(-1),) * 2, torch.tensor(True)),
    "random": _random,
    "padded": _padded,
    "padded_on_the_left": lambda *shape: _padded(*shape).flip(1),
}

# The same values somewhere else in memory.
Lay = Callable[[torch.Tensor], torch.Tensor]
_contiguous = torch.Tensor.contiguous


def _transposed(a: int, b: int) -> Lay:
    return lambda x: x.transpose(a, b).contiguous().transpose(a, b)


def _slice(x: torch.Tensor) -> torch.Tensor:
    """In each dimension, of a larger tensor."""
    around = torch.full([size + 5 for size in x.shape], 1e3).to(x.dtype)
    around[tuple(slice(1, 1 + size) for size in x.shape)] = x
    return around[tuple(slice(1, 1 + size) for size in x.shape)]


def _columns(x: torch.Tensor) -> torch.Tensor:
    """In whole packs, of wider rows."""
    return torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]]


def _unaligned(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)


# name: (shape behind the mask's, channel dimension, how it lies in memory)
LAYOUTS: dict[str, tuple[tuple[int, ...], int | None, Lay]] = {
    "tokens": ((64,), -1, _contiguous),
    "tokens_1024": ((1024,), -1, _contiguous),
    "tokens_of_ten_channels": ((10,), -1, _contiguous),
    "tokens_of_257_channels": ((257,), -1, _contiguous),
    "tokens_of_one_channel": ((1,), -1, _contiguous),
    "sequence_first": ((64,), -1, _transposed(0, 1)),
    "channels_before_tokens": ((64,), -1, _transposed(1, 2)),
    "slice": ((64,), -1, _slice),
    "columns": ((64,), -1, _columns),
    "unaligned": ((64,), -1, _unaligned),
    "heads": ((6, 16), -1, _contiguous),
    "heads_as_channels": ((6, 16), -2, _contiguous),
    "odd_heads": ((3, 7), -1, _contiguous),
    "odd_heads_as_channels": ((3, 7), -2, _contiguous),
    "heads_before_tokens": ((6, 16), -1, _transposed(1, 2)),
    "slice_of_heads": ((3, 7), -1, _slice),
    "columns_of_heads": ((6, 16), -1, _columns),
    "columns_of_heads_as_channels": ((6, 16), -2, _columns),
    "swapped_heads": ((6, 16), -1, _transposed(2, 3)),
    "whole": ((64,), None, _contiguous),
    "whole_of_width_10": ((10,), None, _contiguous),
    "whole_sequence_first": ((64,), None, _transposed(0, 1)),
    "whole_unaligned": ((64,), None, _unaligned),
    "whole_slice": ((6, 16), None, _slice),
    "whole_columns": ((64,), None, _columns),
    "whole_without_width": ((), None, _contiguous),
    "whole_without_width_sequence_first": ((), None, _transposed(0, 1)),
}

# One layout for each way in which a kernel reads listed rows (in packs or value by value, rows of one dimension or two;
# one channel after another): with these every dtype and histogram is compiled apart.
PATHS = ["tokens", "tokens_of_ten_channels", "sequence_first", "heads", "heads_as_channels", "odd_heads_as_channels"]
PATHS += ["whole", "whole_of_width_10"]
CASES = [
    pytest.param(layout, dtype, id=f"{layout}-{dtype}")
    for layout in LAYOUTS
    for dtype in (DTYPES if layout in PATHS else [torch.float32, torch.bfloat16])
]


def poisoned(mask: torch.Tensor, *width: int) -> torch.Tensor:
    x = normal(*mask.shape, *width)
    out = x[~mask]
    x[~mask] = POISON[torch.arange(out.numel()) % len(POISON)].view(out.shape)
    return x


def check_rows(
    backend: Backend, x: torch.Tensor, mask: torch.Tensor, channel_dim: int | None, histogram: str = "none"
) -> None:
    state = backend.accumulate(x, channel_dim, histogram, mask=mask)
    by_row = mask.view(mask.shape if x.shape[: mask.dim()] == mask.shape else -1)
    check(state.stats(), x[by_row], channel_dim)
    assert state.counters[0] == 1


@pytest.mark.parametrize(("layout", "dtype"), CASES)
def test_every_layout_dtype_and_histogram_matches_float64_on_the_rows_that_count(
    backend: Backend, layout: str, dtype: torch.dtype
) -> None:
    width, channel_dim, lay = LAYOUTS[layout]
    mask = _random(BATCH, LENGTH)
    x = lay(poisoned(mask, *width).to(dtype))
    for histogram in HISTOGRAMS if layout in PATHS else ["per_channel"]:
        check_rows(backend, x, mask, channel_dim, histogram)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_mask_matches_float64_on_the_rows_that_count(backend: Backend, layout: str) -> None:
    width, channel_dim, lay = LAYOUTS[layout]
    for mask in (make(BATCH, LENGTH) for name, make in MASKS.items() if name != "random"):
        check_rows(backend, lay(poisoned(mask, *width).float()), mask, channel_dim, "per_channel")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("width", "channel_dim"), [((64,), -1), ((10,), -1), ((6, 16), -2), ((64,), None), ((), None)])
def test_tokens_of_all_sequences_in_one_dimension(
    backend: Backend, mask: str, width: tuple[int, ...], channel_dim: int | None
) -> None:
    made = MASKS[mask](BATCH, LENGTH)
    x = poisoned(made.flatten(), *width).float()
    check_rows(backend, x, made, channel_dim, "per_channel")
    check_rows(backend, x, made.flatten(), channel_dim, "per_tensor")


@pytest.mark.parametrize("kept", [1, 2, 3, 4, 5, 31, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1025, 2047, 2049, 4099])
def test_numbers_of_rows_around_tile_edges(backend: Backend, kept: int) -> None:
    order = torch.randperm(4100, generator=torch.Generator().manual_seed(kept))
    mask = torch.zeros(4100, dtype=torch.bool).index_fill_(0, order[:kept], True)
    x = poisoned(mask, 64)
    for dtype in (torch.float32, torch.bfloat16):
        check_rows(backend, x.to(dtype), mask, 1, "per_channel")
        check_rows(backend, x[:, :12].contiguous().to(dtype), mask, None, "per_tensor")
    check_rows(backend, x[:, :3].float(), mask, 1, "per_channel")
    check_rows(backend, x[:, :3].float(), mask, None, "per_tensor")


@pytest.mark.parametrize("kept", [5, 1000, 9_999])
def test_a_tensor_in_many_parts_of_which_few_rows_count(backend: Backend, kept: int) -> None:
    mask = torch.arange(10_000) < kept
    x = poisoned(mask, 64).to(torch.bfloat16)
    check_rows(backend, x, mask, 1, "per_channel")
    check_rows(backend, x, mask, None, "per_tensor")


@pytest.mark.parametrize(
    ("rows", "histogram"), [(1, histogram) for histogram in HISTOGRAMS] + [(5000, "none"), (5000, "per_channel")]
)
@pytest.mark.parametrize(("width", "channel_dim"), [(64, 1), (3, 1), (64, None), (3, None)])
def test_where_no_row_counts_nothing_changes(
    backend: Backend, width: int, channel_dim: int | None, histogram: str, rows: int
) -> None:
    x, nothing = normal(rows, width).float(), torch.zeros(rows, dtype=torch.bool)
    state = backend.accumulate(x, channel_dim, histogram, mask=nothing)
    assert not any(tensor.any() for tensor in state.tensors if tensor is not None)
    whole = backend.accumulate(x, channel_dim, histogram)
    backend.accumulate(x, channel_dim, into=state)
    backend.accumulate(x, channel_dim, into=state, mask=nothing)
    assert state.same_bits(whole)


@pytest.mark.parametrize(
    ("shape", "channel_dim"),
    [
        ((7, LENGTH, 10), -1),  # another batch
        ((LENGTH, BATCH, 10), -1),
        ((BATCH, 10), -1),
        ((10, BATCH, LENGTH), 0),
        ((BATCH, LENGTH, 10), 0),  # rows would be channels
        ((BATCH, LENGTH, 10), 1),
        ((BATCH, LENGTH), -1),
        ((BATCH * LENGTH,), 0),
        ((BATCH,), None),
        ((), None),
    ],
)
def test_a_tensor_that_has_not_the_mask_s_rows_is_measured_whole(
    backend: Backend, shape: tuple[int, ...], channel_dim: int | None
) -> None:
    x = normal(*shape).float()
    masked = backend.accumulate(x, channel_dim, "per_channel", mask=_random(BATCH, LENGTH))
    assert masked.same_bits(backend.accumulate(x, channel_dim, "per_channel"))


def test_a_mask_of_a_single_row(backend: Backend) -> None:
    for shape in ((1, 1, 64), (1, 64), (1, 1, 3, 5)):
        x, mask = normal(*shape).float(), torch.ones(1, 1, dtype=torch.bool)
        check(backend.accumulate(x, -1, mask=mask).stats(), x, -1)
        check(backend.accumulate(x, None, mask=mask).stats(), x, None)


def test_rows_more_than_32_bits_apart(backend: Backend) -> None:
    # A few elements far apart in a storage of which only their pages are ever touched.
    far = 2**31 + 8
    storage = torch.empty(far + 40, dtype=torch.bfloat16)
    storage[:40], storage[far:] = 3.0, 5.0
    for kept, mean in ((0, 3.0), (1, 5.0)):
        for shape, strides in (((2, 40), (far, 1)), ((2, 10, 3), (far, 1, 10)), ((2, 9), (far, 1))):
            x = torch.as_strided(storage, shape, strides)
            for channel_dim in (-1, None):
                state = backend.accumulate(x, channel_dim, mask=torch.arange(2) == kept)
                assert set(state.moments[fields.FIELDS.index("mean")].tolist()) == {mean}


def test_negative_view_bits_are_resolved_under_a_mask() -> None:
    backend = Backend("cpu", torch.ops.hookstats, "cpu")
    x, mask = torch.complex(normal(50, 4), normal(50, 4)).conj().imag, _random(50)
    assert x.is_neg()
    check(backend.accumulate(x, 1, mask=mask).stats(), x[mask], 1)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("width", "channel_dim", "histogram"),
    [((100,), -1, histogram) for histogram in HISTOGRAMS]
    + [(width, dim, "per_channel") for width, dim in (((10,), -1), ((100,), None), ((10, 20), -2))],
)
def test_threads_and_the_order_of_blocks_do_not_show_under_a_mask(
    backend: Backend, width: tuple[int, ...], channel_dim: int | None, histogram: str
) -> None:
    mask = _random(5000)
    x = poisoned(mask, *width).float()
    states = []
    for seed in range(3):
        torch.set_num_threads(seed + 1)
        if backend.name == "cuda_on_cpu":
            backend.ops.shuffle(seed)
        states.append(backend.accumulate(x, channel_dim, histogram, mask=mask))
    assert all(state.same_bits(states[0]) for state in states)
