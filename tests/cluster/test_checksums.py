"""Checksums of tensors' bits: of the bits alone, however they lie, and other ones for other bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from hookstats.cluster import contents
from hookstats.cluster.contents import checksums
from tests.cluster.bits import ALL_DTYPES, bits_of, of_bits

# name: a tensor of a dtype
SHAPES: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "empty": lambda t: of_bits((0,), t),
    "empty_rows": lambda t: of_bits((3, 0, 2), t),
    "scalar": lambda t: of_bits((1,), t)[0],
    "one": lambda t: of_bits((1,), t),
    "odd": lambda t: of_bits((13,), t),
    "matrix": lambda t: of_bits((37, 33), t),
    "one_block": lambda t: of_bits((32768 * 8 // t.itemsize,), t),
    "two_blocks_and_one": lambda t: of_bits((2 * 32768 * 8 // t.itemsize + 1,), t),
    "odd_offset": lambda t: of_bits((1030,), t)[1:],
    "odd_offset_and_end": lambda t: of_bits((1030,), t)[3:-2],
    "transposed": lambda t: of_bits((40, 73), t).t(),
    "channels_last": lambda t: of_bits((6, 5, 3, 3), t).to(memory_format=torch.channels_last),
    "columns": lambda t: of_bits((50, 64), t)[:, 5:22],
    "every_other": lambda t: of_bits((999,), t)[::2],
    "slice_of_slice": lambda t: of_bits((6, 8, 6, 8), t)[:, ::2, 1:5, ::2],
    "expanded": lambda t: of_bits((9, 1), t).expand(9, 7),
    "long_transposed": lambda t: of_bits((700, 101), t).t(),
    "fourteen_dimensions": lambda t: of_bits((2,) * 14, t).permute(*range(13, -1, -1)),
}


@pytest.mark.parametrize("at_once", [8, 1000, 1 << 20])
def test_tensors_are_read_a_few_at_a_time_and_long_ones_in_parts(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    tensors = [make(dtype) for dtype in ALL_DTYPES[::4] for make in (SHAPES["odd"], SHAPES["transposed"])]
    tensors.append(of_bits((3001,), torch.bfloat16))
    wanted = checksums(tensors).tolist()
    monkeypatch.setattr(contents, "_WORDS", at_once)
    assert checksums(tensors).tolist() == wanted


def test_a_view_has_the_checksum_of_its_contiguous_copy() -> None:
    views = [make(dtype) for dtype in ALL_DTYPES for make in SHAPES.values()]
    views.append(of_bits((5, 9), torch.complex64).t().conj())
    assert checksums(views).tolist() == checksums([x.resolve_conj().contiguous() for x in views]).tolist()


# The values of a training are not random bits: few of them, and their last bits are often zeros.
PLAIN: dict[str, Callable[[], torch.Tensor]] = {
    "small integers": lambda: torch.arange(4096, dtype=torch.int64),
    "powers of two": lambda: torch.arange(4096).remainder(24).sub(12).float().exp2(),
    "zeros and ones": lambda: torch.arange(4096).remainder(2).to(torch.bfloat16),
    "doubles of bfloat16": lambda: torch.randn(4096).bfloat16().double(),
    "one token": lambda: torch.zeros(4096, dtype=torch.int32).index_fill(0, torch.tensor([77]), 1),
}


@pytest.mark.parametrize("values", PLAIN)
def test_swapped_elements_rows_and_shifts_of_plain_values_all_differ(values: str) -> None:
    x = PLAIN[values]()
    random = np.random.default_rng(0)
    others = [x, x.flip(0), x.roll(1), x.roll(1024), x.view(64, 64).t().reshape(-1)]
    for distance in [*(1 << k for k in range(12)), *random.integers(1, 4096, 250).tolist()]:
        i = int(random.integers(0, 4096 - distance))
        swapped = x.clone()
        swapped[i], swapped[i + distance] = x[i + distance], x[i]
        rows = x.view(64, 64).clone()
        a, b = random.choice(64, 2, replace=False).tolist()
        rows[[a, b]] = rows[[b, a]]
        others += [swapped, rows.view(-1)]
    contents = {bits_of(each) for each in others}
    assert len(contents) > 100 or values == "one token"
    assert len(set(checksums(others).tolist())) == len(contents)


def test_many_random_flips_and_swaps_never_collide_and_move_half_of_the_bits() -> None:
    """5,000 changes are 1e7 pairs: of 64 random bits two are the same in one of 1e12 such tests."""
    random = np.random.default_rng(1)
    x = torch.randn(512).bfloat16()
    words = x.view(torch.int16)
    many = words.repeat(5_000, 1)
    rows = torch.arange(2_500)
    at = torch.from_numpy(random.integers(0, 512, 2_500))
    many[rows, at] ^= torch.from_numpy((1 << random.integers(0, 15, 2_500)).astype(np.int16))
    a, b = (torch.from_numpy(random.integers(0, 512, 2_500)) for _ in range(2))
    many[2_500 + rows, a], many[2_500 + rows, b] = words[b], words[a]
    found = torch.from_numpy(checksums([*many, words]))
    assert len(torch.unique(found)) == len(torch.unique(torch.cat([many, words[None]]), dim=0))
    flipped = (found[:2_500] ^ found[-1]).numpy().view(np.uint8)
    share = np.unpackbits(flipped.reshape(-1, 8), axis=1).mean(axis=0)  # of the changes that flip each bit
    np.testing.assert_allclose(share, 0.5, atol=0.06)  # 6 standard deviations
