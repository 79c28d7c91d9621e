"""One Triton kernel per tensor, in the manner of torchtitan's tensor logging: nine statistics in one pass, added up in
float32 by atomic operations, skipped where a flag on the device says so. Needs Triton."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

BLOCK, BLOCKS = 2048, 8  # values at a time, and how many times in a program


@triton.jit  # type: ignore[untyped-decorator]
def nine_kernel(x, state, flag, n, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    if tl.load(flag) != 0:
        infinity = float("inf")
        first = tl.program_id(0).to(tl.int64) * (BLOCK * BLOCKS)
        count = tl.zeros([BLOCK], tl.float32)
        sums = tl.zeros([BLOCK], tl.float32)
        squares = tl.zeros([BLOCK], tl.float32)
        zeros = tl.zeros([BLOCK], tl.float32)
        nonfinite = tl.zeros([BLOCK], tl.float32)
        low = tl.full([BLOCK], infinity, tl.float32)
        smallest = tl.full([BLOCK], infinity, tl.float32)
        high = tl.full([BLOCK], -infinity, tl.float32)
        largest = tl.zeros([BLOCK], tl.float32)
        for i in range(BLOCKS):
            at = first + i * BLOCK + tl.arange(0, BLOCK)
            inside = at < n
            y = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            size = tl.abs(y)
            finite = inside & (size < infinity)  # NaN is smaller than nothing
            kept = tl.where(finite, size, 0.0)
            count += finite.to(tl.float32)
            sums += kept
            squares += kept * kept
            zeros += (inside & (y == 0.0)).to(tl.float32)
            nonfinite += (inside & (finite == 0)).to(tl.float32)
            low = tl.minimum(low, tl.where(finite, y, infinity))
            smallest = tl.minimum(smallest, tl.where(kept > 0.0, kept, infinity))
            high = tl.maximum(high, tl.where(finite, y, -infinity))
            largest = tl.maximum(largest, kept)
        tl.atomic_add(state + 0, tl.sum(count))
        tl.atomic_add(state + 1, tl.sum(sums))
        tl.atomic_add(state + 2, tl.sum(squares))
        tl.atomic_add(state + 3, tl.sum(zeros))
        tl.atomic_add(state + 4, tl.sum(nonfinite))
        tl.atomic_min(state + 5, tl.min(low))
        tl.atomic_min(state + 6, tl.min(smallest))
        tl.atomic_max(state + 7, tl.max(high))
        tl.atomic_max(state + 8, tl.max(largest))


@functools.cache
def flag_on(device: torch.device) -> torch.Tensor:
    """Measuring is on."""
    return torch.ones(1, dtype=torch.int32, device=device)


def nine_by_triton(x: torch.Tensor, state: torch.Tensor) -> None:
    grid = (triton.cdiv(x.numel(), BLOCK * BLOCKS),)
    nine_kernel[grid](x.contiguous(), state, flag_on(x.device), x.numel(), BLOCK=BLOCK, BLOCKS=BLOCKS, num_warps=8)


@torch.library.custom_op("hookstats_peers::nine", mutates_args=("state",))
def nine_in_graphs(x: torch.Tensor, state: torch.Tensor) -> None:
    """The same as an operator, so that it stays in compiled graphs."""
    nine_by_triton(x, state)


@nine_in_graphs.register_fake
def _(x: torch.Tensor, state: torch.Tensor) -> None:
    return None
