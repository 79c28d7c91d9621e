"""Tensors that are not plain memory: mere shapes, and wrappers that hold their data in other tensors."""

from __future__ import annotations

import torch

from hookstats import _native
from hookstats.modules.sharding import is_dtensor, sharding_of, unreduced
from hookstats.watch.memory import Entry, local_part


def is_a_mere_shape(tensor: torch.Tensor) -> bool:
    """Fake and meta tensors, and those inside functorch: there is no one piece of data to read."""
    return type(tensor).__name__ == "FakeTensor" or (not is_wrapper(tensor) and _native.has_no_data(tensor))


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether it holds its data in other tensors."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def part_here(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a wrapper's values; of a nested tensor, those of all its items, one behind the other.

    TypeError where that is not a part of them.
    """
    problem = unreduced(tensor)
    if problem is not None:
        raise TypeError(problem)
    if tensor.is_nested and tensor.layout == torch.jagged:
        return tensor.detach().values()
    return local_part(tensor)


def note_sharding(entry: Entry, tensor: torch.Tensor, dim: int, clears: int) -> None:
    """The site remembers where a tensor lies that is measured now. dim: of its channels. clears: `Store.clears`.

    TypeError for a DTensor that lies elsewhere than one before it in the same step: their values belong to different
    parts of the whole, and could not be told apart.
    """
    sharding = sharding_of(tensor, dim) if is_dtensor(tensor) else None
    before, entry.sharded_in = (entry.sharding if entry.sharded_in == clears else sharding), clears
    if (sharding is None) != (before is None) or (sharding and before and sharding[:2] != before[:2]):
        raise TypeError(f"expected a tensor placed as the one before it in this step, {before}, got {sharding}")
    entry.sharding = sharding
