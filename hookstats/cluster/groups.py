"""The arguments that say which ranks are merged, and how plain tensors lie on them; checked.

A mesh is seen by its axes: along each of its dimensions the ranks that differ from this one in it alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from hookstats.cluster.union import some
from hookstats.numbers.selection import as_globs

Wanted: TypeAlias = Mapping[str, tuple[Placement, ...]]  # by glob; one placement for each axis of the group


class MeshAxis(NamedTuple):
    """A dimension of a mesh, through this rank."""

    name: str
    ranks: tuple[int, ...]  # of the job
    coordinate: int  # this rank's


class Group(NamedTuple):
    """The ranks that are merged, in their order, and the axes along which placements are named."""

    ranks: tuple[int, ...]  # of the job
    axes: tuple[MeshAxis, ...]


def find_axes(mesh: DeviceMesh) -> tuple[MeshAxis, ...] | None:
    """Return the axes of a mesh through this rank; None where this rank is not part of it."""
    here = mesh.get_coordinate()
    if here is None:
        return None
    names = mesh.mesh_dim_names or [f"dim{i}" for i in range(mesh.ndim)]
    found = []
    for i, name in enumerate(names):
        through: Any = tuple(slice(None) if j == i else coordinate for j, coordinate in enumerate(here))
        found.append(MeshAxis(name, tuple(mesh.mesh[through].tolist()), here[i]))
    return tuple(found)


def find_group(process_group: Any) -> Group:
    """Return the ranks that ``process_group=`` names: those of a ProcessGroup, or all of a DeviceMesh.

    Raises:
        TypeError: for anything else. ValueError: where this rank is not one of them, or torch.distributed does not run.
    """
    if not dist.is_initialized():
        raise ValueError("process_group: expected torch.distributed to be initialized, got a process without it")
    rank = dist.get_rank()
    if isinstance(process_group, DeviceMesh):
        ranks = tuple(process_group.mesh.flatten().tolist())
        axes = find_axes(process_group)
    elif isinstance(process_group, dist.ProcessGroup):
        ranks = tuple(dist.get_process_group_ranks(process_group))
        axes = (MeshAxis("rank", ranks, ranks.index(rank)),) if rank in ranks else None
    elif isinstance(process_group, int) and process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"process_group: expected a group that rank {rank} is in, got what torch.distributed.new_group returns to "
            "ranks that are not in it: attach there without process_group="
        )
    else:
        raise TypeError(
            "process_group: expected a torch.distributed.ProcessGroup, such as torch.distributed.group.WORLD, or a "
            f"DeviceMesh, got {type(process_group).__name__}"
        )
    if axes is None:
        raise ValueError(f"process_group: expected a group that rank {rank} is in, got one of the ranks {some(ranks)}")
    return Group(ranks, axes)


def check_placements(placements: Any, group: Group, names: Iterable[str]) -> Wanted:
    """Check ``placements=``, which says how the tensors lie whose modules or parameters its globs match.

    Raises:
        TypeError, ValueError: for anything but ``{glob: Placement, or a tuple of them}``, one for each dimension of the
            DeviceMesh that is the group, else one; for a glob that matches none of the names; for Partial.
    """
    if placements is None:
        return {}
    known = list(names)
    found: dict[str, tuple[Placement, ...]] = {}
    for glob, given in placements.items():
        if not isinstance(glob, str):
            raise TypeError(f"placements: expected globs over the names of modules and parameters, got {glob!r}")
        as_globs("placements", glob, known)
        each = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        for one in each:
            if not isinstance(one, Placement):
                raise TypeError(
                    f"placements: {glob!r}: expected Shard(dim) or Replicate() of torch.distributed.tensor, got {one!r}"
                )
            if one.is_partial():
                raise ValueError(f"placements: {glob!r}: expected Shard(dim) or Replicate(), got {one}")
        if len(each) != len(group.axes):
            dims = ", ".join(axis.name for axis in group.axes)
            expected = f"one for each dimension of the DeviceMesh ({dims})" if len(group.axes) > 1 else "one placement"
            raise ValueError(f"placements: {glob!r}: expected {expected}, got {len(each)}: {', '.join(map(str, each))}")
        found[glob] = each
    return found
