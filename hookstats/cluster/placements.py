"""The part of a site's whole that this rank holds: by the placements of DTensors, by the user's word, or by rule.

A placement holds along one axis of a mesh. Shard of the channels puts the ranks' channels side by side; Shard of
another dimension merges their values; Replicate lets one rank count. Where the channels do not lie side by side, or it
is not known which dimension they are, totals are merged. Plain tensors: activations of all ranks count,
plain parameters are the same on all. Under tensor parallelism a plain activation may be any of these: where its
module's own weight does not tell, and the user does not, it travels apart for each coordinate: where the ranks' states
have been the same so far it is one site, else it is kept apart, never counted twice. Which ranks hold the same of a
parameter follows from the mesh, from DistributedDataParallel, or from the user's word.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Placement
from torch.nn.parallel import DistributedDataParallel

from hookstats.cluster.groups import Group, MeshAxis, Wanted, find_axes
from hookstats.cluster.union import Place, TableRow, whole
from hookstats.modules.channels import find_input_channels, find_natural_channels
from hookstats.modules.selection import Slot, clean_names
from hookstats.modules.sharding import LocalShard, Sharding, find_flattened
from hookstats.numbers.fields import Site
from hookstats.numbers.kinds import kind_of
from hookstats.numbers.selection import matches


class DimSpan(NamedTuple):
    """A part of a dimension: how large the whole is, and where in it the part begins and how large it is."""

    whole: int
    offset: int
    size: int


def find_cuts(axes: Sequence[MeshAxis], placements: Sequence[Placement], dim: int) -> list[MeshAxis] | None:
    """Return the axes along which a dimension is cut, in order. None: the channels of a rank do not lie side by side.

    From left to right; but what torch writes as _StridedShard comes after the axes to its right: FSDP2 cuts what tensor
    parallelism has left to it.
    """
    cuts: list[MeshAxis] = []
    for axis, placement in reversed(list(zip(axes, placements, strict=True))):
        if not placement.is_partial() and getattr(placement, "dim", None) == dim:
            factor = int(getattr(placement, "split_factor", 1))
            if factor == 1:
                cuts.insert(0, axis)
            elif factor == math.prod(len(cut.ranks) for cut in cuts):
                cuts.append(axis)
            else:
                return None
    return cuts


def part_of(size: int, cuts: Sequence[MeshAxis], ranks: frozenset[int]) -> DimSpan | None:
    """Return this rank's part of `size` channels, cut as torch.chunk does it, in the whole that these ranks have.

    None: they have none, where they are some of those of an axis, or have parts of what others have the rest of.
    """
    whole, start = size, 0
    for i, axis in enumerate(cuts):
        chunk = -(-size // len(axis.ranks))
        begin = min(axis.coordinate * chunk, size)
        start, size = start + begin, min(chunk, size - begin)
        members = len(_list_members(axis, ranks))
        if members == 1 and len(axis.ranks) > 1:  # what this rank has along it is all that is merged
            if any(len(_list_members(each, ranks)) > 1 for each in cuts[:i]):
                return None
            whole, start = size, 0
        elif members < len(axis.ranks):
            return None
    return DimSpan(whole, start, size)


def _list_members(axis: MeshAxis, ranks: frozenset[int]) -> list[int]:
    """Return the coordinates along an axis of the ranks that are merged."""
    return [coordinate for coordinate, rank in enumerate(axis.ranks) if rank in ranks]


class Placements:
    """The places of a model's sites on this rank, as the model is now."""

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        wanted: Wanted,
        held: Mapping[Site, LocalShard],
        replicated: Mapping[DistributedDataParallel, bool],
    ) -> None:
        """wanted: what `groups.check_placements` made of ``placements=``. held: what this rank has of each site.

        replicated: parts of the model, and whether they are `is_comparable`.
        """
        self._group = group
        self._ranks = frozenset(group.ranks)
        self._wanted = wanted
        self._held = dict(held)
        # Merging keeps the latest of these for good; a model that nobody else holds is to go all the same.
        self._modules = WeakValueDictionary(clean_names(model))
        self._axes: dict[Any, tuple[MeshAxis, ...] | None] = {}  # by mesh
        self._parallel = self._find_tensor_parallel_axes(_find_data_parallel_ranks(model))
        self._flat = {
            id(module): self._ranks.intersection(dist.get_process_group_ranks(outer.process_group))
            for module, outer in find_flattened(model).items()
        }
        self._by_ddp = _find_replicated(replicated, self._ranks)

    def __call__(self, own: TableRow) -> Place:
        if kind_of(own.site.tensor).is_part:
            return whole(own)
        sharding, channels = (held := self._held.get(own.site, LocalShard(None, None))).sharding, held.channels
        wanted = [each for glob, each in self._wanted.items() if matches(own.site.name, [glob])]
        if sharding is not None:
            return self._place_dtensor(own, sharding, channels)
        if wanted:
            return self._place_as_wanted(own, wanted[-1], channels)
        if not own.is_parameter:
            return self._place_plain(own, channels) if self._parallel else whole(own)
        path, _, key = own.site.name.rpartition(".")
        module = self._modules.get(path)
        if flat := self._flat.get(id(module)):  # each rank has other values of it, in one dimension
            return Place(own.channels, min(flat), is_leading=dist.get_rank() == min(flat))
        peers, ignored = self._by_ddp.get(id(module), ((), frozenset()))
        return whole(own)._replace(peers=() if key in ignored else peers)

    def _is_lowest(self, axes: Sequence[MeshAxis]) -> bool:
        """Return True for the lowest of the merged ranks along each of these axes."""
        return all(axis.coordinate == _list_members(axis, self._ranks)[0] for axis in axes)

    def _list_along(self, axes: Sequence[MeshAxis]) -> tuple[int, ...]:
        """Return the merged ranks that differ from this one along these axes alone; (): their numbers are irregular."""
        rank = dist.get_rank()
        steps = [[axis.ranks[each] - rank for each in _list_members(axis, self._ranks)] for axis in axes]
        found = {rank + sum(each) for each in itertools.product(*steps)}
        return tuple(sorted(found)) if len(found) == math.prod(map(len, steps)) and found <= self._ranks else ()

    def _place_dtensor(self, own: TableRow, sharding: Sharding, channels: int | None) -> Place:
        mesh, placements, dim, size = sharding
        axes = self._find_axes(mesh)
        ranks = self._ranks.intersection(mesh.mesh.flatten().tolist())
        owners = min(ranks) if own.is_parameter and ranks else "each"
        if axes is None:  # a mesh without this rank
            return Place(size, owners, is_counted=False, is_leading=False)
        cuts = find_cuts(axes, placements, dim)
        span = None if cuts is None else part_of(size, cuts, self._ranks)
        if span is None or (span.size and channels not in (None, span.size)):  # they do not lie side by side
            span = DimSpan(1, 0, 1)
        replicated = [axis for axis, each in zip(axes, placements, strict=True) if each.is_replicate()]
        counts, leads = span.size > 0 and self._is_lowest(replicated), self._is_lowest(axes)
        placed = Place(span.whole, owners, span.offset if span.size else 0, counts, leads)
        if own.is_parameter:
            here = zip(placements, mesh.get_coordinate(), strict=True)
            same: Any = tuple(slice(None) if each.is_replicate() else coordinate for each, coordinate in here)
            return placed._replace(peers=tuple(sorted(self._ranks.intersection(mesh.mesh[same].flatten().tolist()))))
        covered = {rank for axis in axes for rank in axis.ranks}
        return self._keep_apart(own, placed, [axis for axis in self._parallel if not covered.issuperset(axis.ranks)])

    def _place_as_wanted(self, own: TableRow, wanted: tuple[Placement, ...], channels: int | None) -> Place:
        replicated, cuts, parts = list[MeshAxis](), list[MeshAxis](), list[MeshAxis]()
        size, offset = channels or 1, 0
        for axis, placement in zip(self._group.axes, wanted, strict=True):
            if placement.is_replicate():
                replicated.append(axis)
                continue
            of_channels = channels is not None and self._is_of_channels(own, getattr(placement, "dim", 0))
            if of_channels is None:
                size = 0
            elif of_channels:
                cuts.append(axis)
                size, offset = size * len(axis.ranks), offset * len(axis.ranks) + axis.coordinate * (channels or 1)
            parts.append(axis)
        leads = self._is_lowest(parts if own.is_parameter else cuts)  # of the parts of one tensor
        peers = self._list_along(replicated) if own.is_parameter else ()
        return Place(size or 1, "each", offset if size else 0, self._is_lowest(replicated), leads, peers)

    def _is_of_channels(self, own: TableRow, dim: int) -> bool | None:
        """Return True for the channels' dimension. None: it is not known, as they are counted from different ends."""
        channels = own.channel_dim
        if channels is None or (channels < 0) == (dim < 0):
            return dim == channels
        if own.is_parameter:
            module, _, key = own.site.name.rpartition(".")
            owner = self._modules.get(module)
            tensor = None if owner is None else Slot(owner, key).get()
            if tensor is not None:
                return dim % tensor.dim() == channels % tensor.dim()
        return False if dim == 0 else None

    def _place_plain(self, own: TableRow, channels: int | None) -> Place:
        """Place an activation under tensor parallelism."""
        found = None if channels is None else self._find_shard_of_own_weight(own.site, channels)
        if found is None:
            return self._keep_apart(own, whole(own), self._parallel)
        span, cuts = found
        placed = Place(span.whole, "each", span.offset, is_leading=self._is_lowest(cuts))
        return self._keep_apart(own, placed, [axis for axis in self._parallel if axis not in cuts])

    def _find_shard_of_own_weight(self, site: Site, channels: int) -> tuple[DimSpan, list[MeshAxis]] | None:
        """Return the part of the channels that an activation has which is as wide as its module's local weight."""
        module = self._modules.get(site.name)
        if module is None:
            return None
        is_input = kind_of(site.tensor).is_input
        natural = find_input_channels(module, None) if is_input else find_natural_channels(module)
        wide = natural.width if natural is not None else None
        for parameter in list(module._parameters.values()):  # the trainer may replace them meanwhile
            axes = self._find_axes(parameter.device_mesh) if isinstance(parameter, DTensor) else None
            if axes is None:
                continue
            here = [pair for pair in zip(axes, parameter.placements, strict=True) if pair[0] in self._parallel]
            for dim, size in enumerate(parameter.shape):
                if wide != size and (wide is not None or dim != 0 or is_input):
                    continue
                cuts = find_cuts([axis for axis, _ in here], [each for _, each in here], dim)
                span = part_of(size, cuts, self._ranks) if cuts else None
                if cuts and span is not None and span.size == channels != size:
                    return span, cuts
        return None

    def _keep_apart(self, own: TableRow, placed: Place, axes: Sequence[MeshAxis]) -> Place:
        """Keep a site apart for each coordinate along these axes.

        Replicas, for all that is known: whether they are is seen from their states, once they are merged.
        """
        if not axes:
            return placed
        told = ",".join(f"{axis.name}={axis.coordinate}" for axis in axes)
        site = Site(own.site.name, f"{own.site.tensor}[{told}]")
        return placed._replace(site=site, peers=self._list_along(axes))

    def _find_axes(self, mesh: Any) -> tuple[MeshAxis, ...] | None:
        if mesh not in self._axes:
            self._axes[mesh] = find_axes(mesh)
        return self._axes[mesh]

    def _find_tensor_parallel_axes(self, data_parallel: list[set[int]]) -> list[MeshAxis]:
        """Return the axes of DTensor parameters, not of data parallelism: ranks along them may hold equal activations.

        What FSDP and DDP have made data parallel is known by its ranks; along an axis inside of these, as that of
        experts, batches differ.
        """
        found: dict[tuple[int, ...], MeshAxis] = {}
        for module in self._modules.values():
            for parameter in list(module._parameters.values()):  # the trainer may replace them meanwhile
                of_mesh = self._find_axes(parameter.device_mesh) if isinstance(parameter, DTensor) else None
                axes: tuple[MeshAxis, ...] = of_mesh or ()
                for axis in axes:
                    is_merged = len(_list_members(axis, self._ranks)) > 1
                    if is_merged and not any(ranks.issuperset(axis.ranks) for ranks in data_parallel):
                        found.setdefault(axis.ranks, axis)
        return list(found.values())


def is_comparable(outer: DistributedDataParallel) -> bool:
    """Return whether the ranks of DistributedDataParallel can be compared step by step.

    Not with a communication hook, which may reduce gradients over fewer ranks, and average parameters now and then,
    after steps in which they were the same. Nor with ``join``, where ranks have unlike numbers of steps:
    torch.distributed.algorithms.Join does not take that back.
    """
    has_joined = getattr(getattr(outer, "_join_config", None), "enable", False)
    return not getattr(outer, "_comm_hooks", None) and not has_joined


def _find_replicated(
    replicated: Mapping[DistributedDataParallel, bool], ranks: frozenset[int]
) -> dict[int, tuple[tuple[int, ...], frozenset[str]]]:
    """Return by module id the ranks over which DDP replicates a module, and the parameters that it ignores.

    replicated: with whether they are compared; what is not is this rank's alone.
    """
    found = {}
    for outer, is_compared in replicated.items():
        members = dist.get_process_group_ranks(outer.process_group) if is_compared else [dist.get_rank()]
        peers = tuple(sorted(ranks.intersection(members)))
        ignored: set[str] = set(getattr(outer, "parameters_to_ignore", ()))
        for path, module in outer.module.named_modules():
            keys = (name.rpartition(".") for name in ignored)
            found[id(module)] = peers, frozenset(key for owner, _, key in keys if owner == path)
    return found


def _find_data_parallel_ranks(model: nn.Module) -> list[set[int]]:
    """Return the ranks, this one among them, over which FSDP shards or DDP replicates: each has other batches.

    A FSDPModule has no public name for these. Where none is found, activations are kept apart, which is never wrong.
    """
    found: dict[tuple[int, ...], None] = {}
    for module in model.modules():
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
            found[tuple(dist.get_process_group_ranks(module.process_group))] = None
        elif isinstance(module, FSDPModule):
            state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            meshes = [each.mesh_info.mesh for group in groups if group for each in (group, *group.fsdp_params)]
            found |= dict.fromkeys(tuple(mesh.mesh.flatten().tolist()) for mesh in dict.fromkeys(meshes))
    return [set(ranks) for ranks in found]
