"""Placements of tensors on ranks: DTensors, as far as their channels go. No device work, no communication."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn


class Sharding(NamedTuple):
    """A site's memory of how a DTensor lies: equal for each tensor of a site that is placed alike."""

    mesh: Any  # torch.distributed.device_mesh.DeviceMesh
    placements: tuple[Any, ...]  # torch.distributed.tensor.Placement, one for each dimension of the mesh
    dim: int  # of the channels, counted from 0
    channels: int  # of the whole tensor

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.placements))})"


class LocalShard(NamedTuple):
    """A site's memory of its shard, whatever of it leaves the device with a step."""

    channels: int | None  # of this process's part; None: totals alone
    sharding: Sharding | None  # of the DTensor that it was; None: a plain tensor


def is_dtensor(tensor: object) -> bool:
    """Return whether it is a DTensor, without importing torch.distributed.tensor, which takes its time."""
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def find_sharding(tensor: Any, dim: int) -> Sharding:
    """Return how a DTensor lies whose channels are in this dimension."""
    ndim = tensor.dim()
    dim = dim % ndim if ndim else 0
    size = tensor.shape[dim] if ndim else 1
    if isinstance(size, torch.SymInt):  # while a graph is traced: what it is traced with, without a guard on it
        size = size.node.hint or 0
    return Sharding(tensor.device_mesh, tuple(tensor.placements), dim, size)


def explain_unreduced(tensor: Any) -> str | None:
    """Say why the values of a tensor are not its own yet (each rank has a summand); None: they are."""
    for placement in getattr(tensor, "placements", ()):
        if placement.is_partial():
            return f"expected a DTensor that is whole or sharded, got {placement}: its values are yet to be reduced"
    return None


def find_flattened(model: nn.Module) -> dict[nn.Module, Any]:
    """The modules whose parameters FullyShardedDataParallel (FSDP1) has cut, without saying where; by what cut them."""
    found: dict[nn.Module, Any] = {}
    for outer in model.modules():
        if any(cls.__name__ == "FullyShardedDataParallel" for cls in type(outer).__mro__):
            found |= dict.fromkeys(outer.modules(), outer)
    return {module: outer for module, outer in found.items() if outer.sharding_strategy.name != "NO_SHARD"}
