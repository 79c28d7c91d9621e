"""Samples of tensors on every backend, against the elements that they name, converted by torch."""

from __future__ import annotations

import pytest
import torch

from hookstats.watch.samples import SIZE
from tests.conftest import DTYPES, Backend


def places(count: int) -> torch.Tensor:
    """List sampled elements: all of up to 4096, else 64 evenly spread runs of 64 neighbours, with both ends."""
    if count <= SIZE:
        return torch.arange(count)
    begins = torch.arange(64) * (count - 64) // 63
    return (begins[:, None] + torch.arange(64)).flatten()


def in_memory(x: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(x, (x.numel(),), (1,))


def wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def of_any(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def buffers(tensors: list[torch.Tensor], device: str) -> list[torch.Tensor]:
    return [torch.full((min(x.numel(), SIZE),), 7.0, dtype=wide(x).dtype, device=device) for x in tensors]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_differences_are_those_of_the_named_elements(backend: Backend, dtype: torch.dtype) -> None:
    counts = [0, 1, 63, 64, 65, 4095, 4096, 4097, 4159, 4160, 99_991]
    old, new = ([of_any(n, dtype, seed + i).to(backend.device) for i, n in enumerate(counts)] for seed in (0, 50))
    values, differences = buffers(old, backend.device), buffers(old, backend.device)
    backend.ops.sample(old, values, None, [])
    for x, value in zip(old, values, strict=True):
        assert torch.equal(value.cpu(), wide(x.cpu())[places(x.numel())])
    backend.ops.sample(new, values, None, differences)
    for x, y, value, difference in zip(old, new, values, differences, strict=True):
        at = places(x.numel())
        assert torch.equal(value.cpu(), wide(y.cpu())[at])
        assert torch.equal(difference.cpu(), (wide(y.cpu()) - wide(x.cpu()))[at])


def test_no_element_is_named_twice_and_the_ends_are_among_them() -> None:
    for count in (4097, 4098, 4160, 5000, 8191, 8192, 1 << 20, (1 << 31) + 5):
        at = places(count)
        assert len(at.unique()) == SIZE
        assert (at.min(), at.max()) == (0, count - 1)


@pytest.mark.parametrize("count", [100, 300])
def test_more_tensors_than_one_launch_takes(backend: Backend, count: int) -> None:
    tensors = [of_any(i + 1, torch.float32, i).to(backend.device) for i in range(count)]
    values = buffers(tensors, backend.device)
    backend.ops.sample(tensors, values, None, [])
    assert all(torch.equal(x, value) for x, value in zip(tensors, values, strict=True))


def test_memory_order_whatever_the_strides(backend: Backend) -> None:
    tensors = [
        of_any(90 * 70, torch.float32, 0).view(90, 70).t(),
        of_any(8 * 16 * 9 * 9, torch.bfloat16, 1).view(8, 16, 9, 9).to(memory_format=torch.channels_last),
        of_any(5, torch.float32, 2)[2],
    ]
    tensors = [x.to(backend.device) for x in tensors]
    values = buffers(tensors, backend.device)
    backend.ops.sample(tensors, values, None, [])
    for x, value in zip(tensors, values, strict=True):
        assert torch.equal(value.cpu(), wide(in_memory(x).cpu())[places(x.numel())])


def test_nothing_happens_while_the_flag_is_off(backend: Backend) -> None:
    x = of_any(5000, torch.float32, 0).to(backend.device)
    values, differences = buffers([x], backend.device), buffers([x], backend.device)
    for flag, expected in ((0, 7.0), (1, None)):
        active = torch.full((1,), flag, dtype=torch.int32, device=backend.device)
        backend.ops.sample([x], values, active, differences)
        is_untouched = bool((values[0] == 7.0).all() and (differences[0] == 7.0).all())
        assert is_untouched == (expected is not None)


def test_what_cannot_be_sampled_raises(backend: Backend) -> None:
    x = torch.zeros(20, 20, device=backend.device)
    for tensor in (x[:, ::2], x.to_sparse(), x.long(), x.to("meta"), x[:1].expand(20, 20)):
        with pytest.raises(RuntimeError, match="hookstats: "):
            backend.ops.sample([tensor], [torch.zeros(tensor.numel(), device=backend.device)], None, [])
    with pytest.raises(RuntimeError, match=r"values: expected contiguous Float \[400\]"):
        backend.ops.sample([x], [torch.zeros(399, device=backend.device)], None, [])
