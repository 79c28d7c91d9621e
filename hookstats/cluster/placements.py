"""The part of a site's whole that this rank holds: by the placements of DTensors, by the user's word, or by rule.

A placement holds along one axis of a mesh. Shard of the channels puts the ranks' channels side by side; Shard of
another dimension merges their values; Replicate lets one rank count. Plain tensors: activations of all ranks count,
plain parameters are the same on all. Under tensor parallelism a plain activation may be any of these: where its
module's own weight does not tell, and the user does not, it travels apart for each coordinate: where the ranks' states
have been the same so far it is one site, else it is kept apart, never counted twice. Which ranks hold the same of a
parameter follows from the mesh, or from DistributedDataParallel.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Placement
from torch.nn.parallel import DistributedDataParallel

from hookstats.cluster.groups import Axis, Group, Wanted, axes_of
from hookstats.cluster.union import Owners, OwnSite, Placed, Placing, Share, whole
from hookstats.modules.channels import input_channels, natural_channels
from hookstats.modules.selection import Slot, clean_names
from hookstats.modules.sharding import LocalShard, Sharding, flattened
from hookstats.numbers.fields import Site
from hookstats.numbers.kinds import kind_of
from hookstats.numbers.selection import matches


class Span(NamedTuple):
    """A part of a dimension: how large the whole is, and where in it the part begins and how large it is."""

    whole: int
    offset: int
    size: int


def cuts_of(axes: Sequence[Axis], placements: Sequence[Placement], dim: int) -> list[Axis] | None:
    """Return the axes along which a dimension is cut, in order. None: the channels of a rank do not lie side by side.

    From left to right; but what torch writes as _StridedShard comes after the axes to its right: FSDP2 cuts what tensor
    parallelism has left to it.
    """
    cuts: list[Axis] = []
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


def part_of(size: int, cuts: Sequence[Axis], ranks: frozenset[int]) -> Span | None:
    """Return this rank's part of `size` channels, in the whole that these ranks have. None: they have none."""
    here = _cut(size, cuts, [axis.coordinate for axis in cuts])
    members = [_members(axis, ranks) for axis in cuts]
    if all(len(each) == len(axis.ranks) for each, axis in zip(members, cuts, strict=True)):
        return Span(size, *here)
    parts = [part for part in (_cut(size, cuts, each) for each in itertools.product(*members)) if part[1]]
    begin = min((start for start, _ in parts), default=0)
    end = max((start + length for start, length in parts), default=0)
    if sum(length for _, length in parts) != end - begin:
        return None
    return Span(end - begin, here[0] - begin, here[1])


def _cut(size: int, cuts: Sequence[Axis], coordinates: Sequence[int]) -> tuple[int, int]:
    """Return the begin and size of the part at these coordinates: chunks of chunks, each as torch.chunk makes them."""
    start = 0
    for axis, coordinate in zip(cuts, coordinates, strict=True):
        chunk = -(-size // len(axis.ranks))
        begin = min(coordinate * chunk, size)
        start, size = start + begin, min(chunk, size - begin)
    return start, size


def _members(axis: Axis, ranks: frozenset[int]) -> list[int]:
    """Return the coordinates along an axis of the ranks that are merged."""
    return [coordinate for coordinate, rank in enumerate(axis.ranks) if rank in ranks]


class Placements:
    """The places of a model's sites on this rank."""

    def __init__(self, model: nn.Module, group: Group, wanted: Wanted, tell: Callable[[str], object]) -> None:
        """wanted: what `groups.checked_placements` made of ``placements=``. tell: the user."""
        self._model = weakref.ref(model)
        self._wanted = wanted
        self._tell = tell
        self._told: set[str] = set()  # reasons
        self._axes: dict[Any, tuple[Axis, ...] | None] = {}  # by mesh
        self._replicated = [weakref.ref(each) for each in model.modules() if isinstance(each, DistributedDataParallel)]
        self.group = group
        self.ranks = frozenset(group.ranks)

    def placing(self, held: Mapping[Site, LocalShard]) -> Placing:
        """Return the places of sites in the whole, with the model's parameters as they are now. held: of each site."""
        model = self._model()
        return _Placing(self, nn.Module() if model is None else model, dict(held), self.replicated())

    def replicated(self) -> list[tuple[DistributedDataParallel, bool]]:
        """Return the parts of the model that DDP replicates, and whether their ranks can be compared step by step.

        Not with a communication hook, which may reduce gradients over fewer ranks, and average parameters now and then,
        after steps in which they were the same. Nor with ``join``, where ranks have unlike numbers of steps.
        """
        there = [each for each in (ref() for ref in self._replicated) if each is not None]
        return [(each, not getattr(each, "_comm_hooks", None) and not _joins(each)) for each in there]

    def axes_of(self, mesh: Any) -> tuple[Axis, ...] | None:
        """See `groups.axes_of`."""
        if mesh not in self._axes:
            self._axes[mesh] = axes_of(mesh)
        return self._axes[mesh]

    def wanted(self, name: str) -> tuple[Placement, ...] | None:
        """Return the user's placements of a module or parameter; of several globs, the last."""
        found = [each for glob, each in self._wanted.items() if matches(name, [glob])]
        return found[-1] if found else None

    def tell_of_what_is_apart(self, site: Site, merged_as: Site, why: str) -> None:
        """Warn once for each reason."""
        if why in self._told:
            return
        self._told.add(why)
        self._tell(
            f"{why}: such tensors are kept apart, {site} as {merged_as}. Say how they are placed: process_group="
            "hookstats.Ranks(group, placements={glob: Shard(-1)}) for a part of the channels, Shard(0) or Shard(-2) "
            "for a part of the rows, Replicate() for the same values; one for each dimension of a DeviceMesh",
        )

    def is_lowest(self, axes: Sequence[Axis]) -> bool:
        """Return True for the lowest of the merged ranks along each of these axes."""
        return all(axis.coordinate == _members(axis, self.ranks)[0] for axis in axes)


class _Placing:
    """The sites of a model as it is now."""

    def __init__(
        self,
        placements: Placements,
        model: nn.Module,
        held: dict[Site, LocalShard],
        replicated: Sequence[tuple[DistributedDataParallel, bool]],
    ) -> None:
        self._placements = placements
        self._held = held
        # Merging keeps the latest of these for good; a model that nobody else holds is to go all the same.
        self._modules = WeakValueDictionary(clean_names(model))
        self._parallel = self._tensor_parallel_axes(model)
        self._flat = {
            id(module): placements.ranks.intersection(dist.get_process_group_ranks(outer.process_group))
            for module, outer in flattened(model).items()
        }
        self._by_ddp = _replicated_modules(replicated, placements.ranks)

    def __call__(self, own: OwnSite) -> Placed:
        if kind_of(own.site.tensor).is_part:
            return whole(own)
        held = self._held.get(own.site, LocalShard(None, None))
        if held.sharding is not None:
            return self._place_dtensor(own, held.sharding, held.channels)
        wanted = self._placements.wanted(own.site.name)
        if wanted is not None:
            return self._place_as_wanted(own, wanted, held.channels)
        if own.is_parameter:
            flat = self._flat.get(id(self._modules.get(own.site.name.rpartition(".")[0])))
            if flat:  # each rank has other values of it, in one dimension
                share = Share(leads=dist.get_rank() == min(flat))
                return Placed(own.channels, min(flat), share)
            module, _, key = own.site.name.rpartition(".")
            return whole(own)._replace(share=Share(peers=self._replicated(self._modules.get(module), key)))
        if not self._parallel:
            return whole(own)
        return self._place_plain(own, held.channels)

    def _place_dtensor(self, own: OwnSite, sharding: Sharding, channels: int | None) -> Placed:
        axes = self._placements.axes_of(sharding.mesh)
        ranks = self._placements.ranks & set(sharding.mesh.mesh.flatten().tolist())
        owners: Owners = min(ranks) if own.is_parameter and ranks else "each"
        if axes is None:  # a mesh without this rank
            return Placed(sharding.channels, owners, Share(counts=False, leads=False))
        cuts = cuts_of(axes, sharding.placements, sharding.dim)
        span = None if cuts is None else part_of(sharding.channels, cuts, self._placements.ranks)
        if span is None or (span.size and channels not in (None, span.size)):
            why = f"the channels of a DTensor that is placed {sharding} do not lie side by side"
            return self._keep_apart(own, whole(own), [Axis("rank", self._placements.group.ranks, dist.get_rank())], why)
        replicated = [axis for axis, each in zip(axes, sharding.placements, strict=True) if each.is_replicate()]
        counts = span.size > 0 and self._placements.is_lowest(replicated)
        peers = self._peers(sharding) if own.is_parameter else ()
        share = Share(span.offset if span.size else 0, counts, self._placements.is_lowest(axes), peers)
        placed = Placed(span.whole, owners, share)
        covered = {rank for axis in axes for rank in axis.ranks}
        left = [axis for axis in self._parallel if not covered.issuperset(axis.ranks)]
        return placed if own.is_parameter else self._keep_apart(own, placed, left)

    def _place_as_wanted(self, own: OwnSite, wanted: tuple[Placement, ...], channels: int | None) -> Placed:
        cuts, others, apart, replicated = list[Axis](), list[Axis](), list[Axis](), list[Axis]()
        for axis, placement in zip(self._placements.group.axes, wanted, strict=True):
            if placement.is_replicate():
                replicated.append(axis)
            else:
                of_channels = channels is not None and self._is_of_channels(own, getattr(placement, "dim", 0))
                (apart if of_channels is None else cuts if of_channels else others).append(axis)
        size = (channels or 1) * math.prod(len(axis.ranks) for axis in cuts)
        offset, _ = _cut(size, cuts, [axis.coordinate for axis in cuts])
        parts = [*cuts, *others, *apart] if own.is_parameter else cuts  # of one tensor
        share = Share(offset, self._placements.is_lowest(replicated), self._placements.is_lowest(parts))
        why = "placements= counts a dimension from another end than the channels"
        return self._keep_apart(own, Placed(size, "each", share), apart, why)

    def _is_of_channels(self, own: OwnSite, dim: int) -> bool | None:
        """Return True for the channels' dimension. None: the two are counted from different ends of a tensor."""
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

    def _place_plain(self, own: OwnSite, channels: int | None) -> Placed:
        """Place an activation under tensor parallelism."""
        placed, left = whole(own), self._parallel
        found = None if channels is None else self._shard_of_own_weight(own.site, channels)
        if found is not None:
            span, cuts = found
            placed = Placed(span.whole, "each", Share(span.offset, True, self._placements.is_lowest(cuts)))
            left = [axis for axis in left if axis not in cuts]
        return self._keep_apart(own, placed, left)

    def _shard_of_own_weight(self, site: Site, channels: int) -> tuple[Span, list[Axis]] | None:
        """Return the part of the channels that an activation has which is as wide as its module's local weight."""
        module = self._modules.get(site.name)
        if module is None:
            return None
        is_input = kind_of(site.tensor).is_input
        natural = input_channels(module, None) if is_input else natural_channels(module)
        for parameter in list(module._parameters.values()):  # the trainer may replace them meanwhile
            axes = self._placements.axes_of(parameter.device_mesh) if isinstance(parameter, DTensor) else None
            if axes is None:
                continue
            here = [pair for pair in zip(axes, parameter.placements, strict=True) if pair[0] in self._parallel]
            for dim, size in enumerate(parameter.shape):
                wide = natural.width if natural is not None else None
                if wide != size and (wide is not None or dim != 0 or is_input):
                    continue
                cuts = cuts_of([axis for axis, _ in here], [each for _, each in here], dim)
                span = part_of(size, cuts, self._placements.ranks) if cuts else None
                if cuts and span is not None and span.size == channels != size:
                    return span, cuts
        return None

    def _keep_apart(self, own: OwnSite, placed: Placed, axes: Sequence[Axis], why: str = "") -> Placed:
        """Keep a site apart for each coordinate along these axes. why: they hold other values; "": maybe the same."""
        if not axes:
            return placed
        told = ",".join(f"{axis.name}={axis.coordinate}" for axis in axes)
        site = Site(own.site.name, f"{own.site.tensor}[{told}]")
        if why:
            self._placements.tell_of_what_is_apart(own.site, site, why)
            return placed._replace(site=site)
        # Replicas, for all that is known: whether they are is seen from their states, once they are merged.
        rank = dist.get_rank()
        lines = [[axis.ranks[each] - rank for each in _members(axis, self._placements.ranks)] for axis in axes]
        peers = tuple(sorted(rank + sum(steps) for steps in itertools.product(*lines)))
        return placed._replace(site=site, share=placed.share._replace(peers=peers))

    def _peers(self, sharding: Sharding) -> tuple[int, ...]:
        """Return the merged ranks that hold the same part of a DTensor."""
        here = sharding.mesh.get_coordinate()
        through: Any = tuple(
            slice(None) if placement.is_replicate() else coordinate
            for placement, coordinate in zip(sharding.placements, here, strict=True)
        )
        return tuple(sorted(self._placements.ranks.intersection(sharding.mesh.mesh[through].flatten().tolist())))

    def _replicated(self, module: nn.Module | None, key: str) -> tuple[int, ...]:
        """Return the merged ranks on which DistributedDataParallel makes a parameter the same."""
        ranks, ignored = self._by_ddp.get(id(module), ((), frozenset[str]()))
        return () if key in ignored else ranks

    def _tensor_parallel_axes(self, model: nn.Module) -> list[Axis]:
        """Return the axes of DTensor parameters, not of data parallelism: ranks along them may hold equal activations.

        What FSDP and DDP have made data parallel is known by its ranks; along an axis inside of these, as that of
        experts, batches differ.
        """
        data_parallel = _data_parallel_ranks(model)
        found: dict[tuple[int, ...], Axis] = {}
        for module in self._modules.values():
            for parameter in list(module._parameters.values()):  # the trainer may replace them meanwhile
                of_mesh = self._placements.axes_of(parameter.device_mesh) if isinstance(parameter, DTensor) else None
                axes: tuple[Axis, ...] = of_mesh or ()
                for axis in axes:
                    is_merged = len(_members(axis, self._placements.ranks)) > 1
                    if is_merged and not any(ranks.issuperset(axis.ranks) for ranks in data_parallel):
                        found.setdefault(axis.ranks, axis)
        return list(found.values())


def _replicated_modules(
    replicated: Sequence[tuple[DistributedDataParallel, bool]], ranks: frozenset[int]
) -> dict[int, tuple[tuple[int, ...], frozenset[str]]]:
    """Return by module id the ranks over which DDP replicates a module, and the parameters that it ignores.

    replicated: see `Placements.replicated`; what cannot be compared is this rank's alone.
    """
    found = {}
    for outer, is_comparable in replicated:
        members = dist.get_process_group_ranks(outer.process_group) if is_comparable else [dist.get_rank()]
        peers = tuple(sorted(ranks.intersection(members)))
        ignored: set[str] = set(getattr(outer, "parameters_to_ignore", ()))
        for path, module in outer.module.named_modules():
            keys = (name.rpartition(".") for name in ignored)
            found[id(module)] = peers, frozenset(key for owner, _, key in keys if owner == path)
    return found


def _joins(outer: DistributedDataParallel) -> bool:
    """Return True if it was given to torch.distributed.algorithms.Join, which does not take that back."""
    return bool(getattr(getattr(outer, "_join_config", None), "enable", False))


def _data_parallel_ranks(model: nn.Module) -> list[set[int]]:
    """Return the ranks, this one among them, over which FSDP shards or DDP replicates: each has other batches."""
    found: dict[tuple[int, ...], None] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            found |= dict.fromkeys(_ranks_of_fsdp(module))
        elif isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
            found[tuple(dist.get_process_group_ranks(module.process_group))] = None
    return [set(ranks) for ranks in found]


def _ranks_of_fsdp(module: FSDPModule) -> list[tuple[int, ...]]:
    """Return the ranks of the meshes of an FSDPModule.

    It has no public name for these. Where none is found, activations are kept apart, which is never wrong.
    """
    try:
        state: Any = module._get_fsdp_state()
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        meshes = [each.mesh_info.mesh for group in groups if group for each in (group, *group.fsdp_params)]
        return [tuple(mesh.mesh.flatten().tolist()) for mesh in dict.fromkeys(meshes)]
    except AttributeError:
        return []
