"""Tests of the part of a whole that a rank holds, and of the arguments that name it. One process plays all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hookstats.cluster.groups import Group, MeshAxis, check_placements, find_group
from hookstats.cluster.placements import Placements, find_cuts, part_of
from hookstats.cluster.union import Place, TableRow
from hookstats.modules.sharding import LocalShard, Sharding
from hookstats.numbers.fields import Site


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """Nothing is communicated."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def own(site: tuple[str, str], channels: int, dim: int = -1) -> TableRow:
    return TableRow(Site(*site), channels, False, True, 0 if "param" in site[1] else dim)


def placed(model: nn.Module, site: tuple[str, str], held: LocalShard, group: Any = None, wanted: Any = None) -> Place:
    merged = find_group(dist.group.WORLD if group is None else group)
    names = [*(name for name, _ in model.named_modules()), *(name for name, _ in model.named_parameters())]
    placements = Placements(model, merged, check_placements(wanted, merged, names), {Site(*site): held}, {})
    return placements(own(site, held.channels or 1))


def chunk(rows: torch.Tensor, coordinate: int, size: int) -> torch.Tensor:
    chunks = rows.chunk(size)
    return chunks[coordinate] if coordinate < len(chunks) else rows[:0]


@pytest.mark.parametrize("rows", [1, 5, 7, 9, 16])
@pytest.mark.parametrize("shape", [(2, 2), (4, 2), (2, 4)], ids=str)
def test_the_pieces_of_all_ranks_cover_a_sharded_weight_once(rows: int, shape: tuple[int, int]) -> None:
    """FSDP2 chunks what tensor parallelism has left to a rank, evenly or not."""
    seen = []
    for dp in range(shape[0]):
        for tp in range(shape[1]):
            axes = [MeshAxis("dp", tuple(range(shape[0])), dp), MeshAxis("tp", tuple(range(shape[1])), tp)]
            cuts = find_cuts(axes, (_StridedShard(0, split_factor=shape[1]), Shard(0)), 0)
            assert cuts is not None
            span = part_of(rows, cuts, frozenset(range(4)))
            held = list(range(span.offset, span.offset + span.size))
            assert span.whole == rows
            assert held == chunk(chunk(torch.arange(rows), tp, shape[1]), dp, shape[0]).tolist()
            seen += held
    assert sorted(seen) == list(range(rows))


def test_even_pieces_lie_where_torch_says() -> None:
    for shape in ((2, 3), (3, 2)):
        for placements in (
            (Shard(0), Shard(0)),
            (_StridedShard(0, split_factor=shape[1]), Shard(0)),
            (Replicate(), Shard(0)),
            (Shard(0), Shard(1)),
        ):
            for i in range(shape[0]):
                for j in range(shape[1]):
                    whole, at = _compute_local_shape_and_global_offset((24, 6), shape, [i, j], placements)
                    axes = [MeshAxis(str(n), tuple(range(shape[n])), (i, j)[n]) for n in range(2)]
                    cuts = find_cuts(axes, placements, 0)
                    assert cuts is not None
                    assert part_of(24, cuts, frozenset(range(3))) == (24, at[0], whole[0]), (placements, i, j)


def test_channels_that_do_not_lie_side_by_side_are_merged_as_totals() -> None:
    axis = MeshAxis("dp", (0, 1), 0)
    assert find_cuts([axis], [_StridedShard(0, split_factor=2)], 0) is None
    assert find_cuts([axis], [_StridedShard(0, split_factor=2)], 1) == []
    with as_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        held = LocalShard(4, Sharding(mesh, (_StridedShard(0, split_factor=2),), 0, 8))
        found = placed(nn.Linear(2, 8), ("weight", "param"), held)
        assert (found.channels, found.owners, found.is_counted) == (1, 0, True)  # totals


def test_a_group_of_some_of_a_meshs_ranks_merges_what_these_hold() -> None:
    with as_rank(3, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        held = LocalShard(2, Sharding(mesh, (_StridedShard(0, split_factor=2), Shard(0)), 0, 8))
        model = nn.Linear(3, 8)
        assert placed(model, ("weight", "param"), held)[:2] == (8, 0)
        found = placed(model, ("weight", "param"), held, mesh["dp"])
        assert found.channels == 4  # the rows 4 to 7
        assert found.offset == 2
        assert found.owners == 1
        norm = LocalShard(1, Sharding(mesh, (Shard(0), Replicate()), 0, 2))
        assert not placed(model, ("bias", "param"), norm).is_counted
        assert placed(model, ("bias", "param"), norm, mesh["dp"]).is_counted


def test_where_a_dimension_is_counted_from_another_end_there_are_totals() -> None:
    with as_rank(1, 2):
        model = nn.Linear(4, 6)
        for wanted, channels, site in ((Shard(-1), 12, None), (Shard(0), 6, None), (Shard(-2), 6, None)):
            found = placed(model, ("", "output"), LocalShard(6, None), wanted={"": wanted})
            assert (found.channels, found.site, found.owners) == (channels, site, "each")
        assert placed(model, ("weight", "param"), LocalShard(6, None), wanted={"weight": Shard(-2)}).channels == 12
        assert placed(model, ("weight", "param"), LocalShard(6, None), wanted={"weight": Shard(1)}).channels == 6
        assert not placed(model, ("", "output"), LocalShard(6, None), wanted={"": Replicate()}).is_counted
        found = placed(model, ("", "output"), LocalShard(6, None), wanted={"": Shard(1)})
        assert (found.channels, found.offset, found.site) == (1, 0, None)  # totals


def test_what_names_the_ranks_is_checked() -> None:
    with pytest.raises(ValueError, match=r"expected torch.distributed to be initialized"):
        find_group(None)
    with as_rank(5, 8):
        with pytest.raises(TypeError, match=r"expected a torch.distributed.ProcessGroup.*or a DeviceMesh, got str"):
            find_group("world")
        with pytest.raises(ValueError, match=r"expected a group that rank 5 is in, got what .*new_group returns"):
            find_group(dist.new_group([0, 1]))
        with pytest.raises(ValueError, match="expected a group that rank 5 is in, got one of the ranks 0, 1"):
            find_group(dist.device_mesh.DeviceMesh("cpu", [0, 1]))
        assert find_group(dist.new_group([1, 5])) == Group((1, 5), (MeshAxis("rank", (1, 5), 1),))
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        assert find_group(mesh) == Group(tuple(range(8)), (MeshAxis("dp", (1, 5), 1), MeshAxis("tp", (4, 5, 6, 7), 1)))


GROUP = Group((0, 1), (MeshAxis("rank", (0, 1), 0),))
MESH = Group((0, 1, 2, 3), (MeshAxis("dp", (0, 2), 0), MeshAxis("tp", (0, 1), 0)))


@pytest.mark.parametrize(
    ("placements", "group", "error", "told"),
    [
        ({1: Shard(0)}, GROUP, TypeError, "expected globs over the names of modules and parameters, got 1"),
        ({"x*": Shard(0)}, GROUP, ValueError, "placements: .*'x\\*'"),
        ({"a": 0}, GROUP, TypeError, r"'a': expected Shard\(dim\) or Replicate\(\) .*, got 0"),
        ({"a": Partial()}, GROUP, ValueError, r"'a': expected Shard\(dim\) or Replicate\(\), got P"),
        ({"a": (Shard(0), Shard(-1))}, GROUP, ValueError, "'a': expected one placement, got 2: "),
        ({"a": Shard(0)}, MESH, ValueError, r"expected one for each dimension of the DeviceMesh \(dp, tp\), got 1: "),
    ],
    ids=str,
)
def test_placements_are_checked(placements: Any, group: Group, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        check_placements(placements, group, ["a", "b"])


def test_placements_are_one_for_each_axis() -> None:
    assert check_placements({"a": Shard(0)}, GROUP, ["a", "b"]) == {"a": (Shard(0),)}
    assert check_placements({"*": (Shard(0), Replicate())}, MESH, ["a"]) == {"*": (Shard(0), Replicate())}
    assert check_placements(None, MESH, ["a"]) == {}
