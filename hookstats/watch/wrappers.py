"""Tensors that are not plain memory: mere shapes, and wrappers that hold their data in other tensors."""

from __future__ import annotations

from typing import Any

import torch

from hookstats import _native
from hookstats.modules.sharding import Sharding, explain_unreduced
from hookstats.watch.memory import Entry, local_part


def is_a_mere_shape(tensor: torch.Tensor) -> bool:
    """Fake and meta tensors, and those inside functorch: there is no one piece of data to read."""
    return type(tensor).__name__ == "FakeTensor" or (not is_wrapper(tensor) and _native.has_no_data(tensor))


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether it holds its data in other tensors."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def part_here(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a wrapper's values; of a nested tensor, those of all items, one after the other.

    TypeError where that is not a part of them.
    """
    problem = explain_unreduced(tensor)
    if problem is not None:
        raise TypeError(problem)
    if tensor.is_nested and tensor.layout == torch.jagged:
        return tensor.detach().values()
    return local_part(tensor)


def channel_dim_of_site(spec: Any, ndim: int) -> int:
    """Return the channel dimension of a site's tensors with so many dimensions; where none came, that of its type."""
    found: int | None = spec.dims.get(ndim, spec.channels.dim)
    return -1 if found is None else found


def note_sharding_of(entry: Entry, sharding: Sharding | None, clears: int) -> None:
    """A site remembers how the tensor lies of which it measures a part now; None: a plain one. clears: `Store.clears`.

    TypeError for one that lies elsewhere than one before it in the same step: their values belong to different parts of
    the whole, and could not be told apart.
    """
    before, entry.sharded_in = (entry.sharding if entry.sharded_in == clears else sharding), clears
    if (sharding is None) != (before is None) or (sharding and before and sharding[:2] != before[:2]):
        raise TypeError(f"expected a tensor placed as the one before it in this step, {before}, got {sharding}")
    if sharding != entry.sharding:
        entry.sharding = sharding
