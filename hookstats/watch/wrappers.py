"""Tensors that are not plain memory: mere shapes, and wrappers that hold their data in other tensors."""

from __future__ import annotations

import torch

from hookstats import _native
from hookstats.watch.memory import local_part


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
    for placement in getattr(tensor, "placements", ()):
        if placement.is_partial():
            raise TypeError(
                f"expected a DTensor that is whole or sharded, got {placement}: its values are yet to be reduced"
            )
    if tensor.is_nested and tensor.layout == torch.jagged:
        return tensor.detach().values()
    return local_part(tensor)
