"""Plain tensors under tensor parallelism: ranks that hold the same count once, others are kept apart."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hookstats
from hookstats import Site
from hookstats.cluster.flat import Flat, merge
from hookstats.cluster.packing import LocalStep, StepPacking
from hookstats.cluster.table import Placed, ShardRange, Table, Tables
from hookstats.numbers.snapshot import Snapshot
from tests import ranks
from tests.cluster.steps import Here, drained, placing_of
from tests.plain import hearing

SITE = Site("norm", "output")


class Job:
    """Four ranks, dp x tp, over several steps."""

    def __init__(self) -> None:
        self.steps = [StepPacking(rank, Tables(1 << 28, False)) for rank in range(4)]

    def merged(self, values: list[torch.Tensor | None], absent: tuple[int, ...] = ()) -> list[Snapshot]:
        """By all ranks; absent: those that do not come to see what was merged."""
        made = []
        for rank, each in enumerate(values):
            apart = Site("norm", f"output[tp={rank % 2}]")
            placed = Placed(3, "each", ShardRange(group=rank // 2 * 2), apart)
            sites = {SITE: Here(each, 3, placed=placed)}
            made.append(LocalStep(drained(sites), placing_of(sites)))
        tables: dict[bytes, int] = {}
        for rank, step in enumerate(made):
            tables.setdefault(self.steps[rank].table(step)[1], rank)
        listed = [(rank, text) for text, rank in tables.items()]
        flats = [Flat(*steps.pack(step, listed)) for steps, step in zip(self.steps, made, strict=True)]
        whole = merge(flats)
        return [
            steps.unpack(list(whole), step, listed).drained.snapshot()
            for rank, (steps, step) in enumerate(zip(self.steps, made, strict=True))
            if rank not in absent
        ]

    def names(self, *values: Any, absent: tuple[int, ...] = ()) -> list[str]:
        first, *others = [[site.tensor for site in each] for each in self.merged(list(values), absent)]
        assert all(each == first for each in others)
        return first


A, B, C, D = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
APART = ["output[tp=0]", "output[tp=1]"]


def test_ranks_that_hold_the_same_in_each_data_parallel_group_count_once() -> None:
    (snapshot, *_) = Job().merged([A, A, B, B])
    assert list(snapshot) == [SITE]
    once = hookstats.measure(torch.cat([A, B], 1), channel_dim=0)
    assert snapshot[SITE].calls == 2
    assert snapshot[SITE].channels.count.tolist() == [10] * 3
    assert snapshot[SITE].total.min == once.total.min
    torch.testing.assert_close(torch.tensor(snapshot[SITE].channels.rms), torch.tensor(once.channels.rms))


def test_one_rank_that_differs_keeps_all_apart_also_where_groups_hold_the_same_the_other_way_round() -> None:
    assert Job().names(A, A, B, C) == APART
    assert Job().names(A, B, B, A) == APART


def test_a_site_is_apart_from_its_first_difference_on_told_once_though_it_is_the_same_again() -> None:
    job = Job()
    assert job.names(A, A, B, B) == ["output"]
    assert not any(steps.notes for steps in job.steps)
    assert job.names(A, C, B, D) == APART
    assert job.names(A, A, B, B) == APART
    for steps in job.steps:
        (note,) = steps.notes
        assert "norm output as norm output[tp=0] and norm output[tp=1]" in note


def test_a_rank_that_did_not_see_the_difference_learns_of_it_with_the_next_step() -> None:
    job = Job()
    assert job.names(A, C, B, D, absent=(0, 3)) == APART
    assert job.names(A, A, B, B) == APART


def test_zeros_and_nothing_are_no_difference() -> None:
    job, zeros = Job(), torch.zeros(3, 5)
    assert job.names(zeros, zeros, zeros, zeros) == ["output"]
    assert job.names(None, None, None, None) == ["output"]
    assert job.names(A, A, None, None) == ["output"]
    assert job.names(A, None, B, None) == APART


def test_a_table_says_what_its_rows_are_kept_apart_of() -> None:
    sites = {SITE: Here(A, 3, placed=Placed(3, "each", ShardRange(group=0), Site("norm", "output[tp=0]")))}
    table, _ = Tables(1 << 28, False).table_of(drained(sites), placing_of(sites))
    assert [row.apart_of for row in Table.from_text(table.text).rows] == ["output"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def model_of_two_blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), Block(), Block(), nn.LayerNorm(8))


def tokens(dp: int) -> torch.Tensor:
    return torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(dp))


def two_by_two(rank: int, world: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = model_of_two_blocks()
    for name in "12":
        plan = {f"{name}.up": ColwiseParallel(), f"{name}.down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    settings: Any = {"tensors": ["output", "grad_output"], "every": 1}
    monitor = hookstats.attach(model, process_group=dist.group.WORLD, **settings)
    with hearing() as told:
        model(tokens(rank // 2)).pow(3).sum().backward()
        (snapshot,) = [each for each in (monitor.step(), *monitor.detach()) if each is not None]
    plain = model_of_two_blocks()
    alone = hookstats.attach(plain, **settings)
    plain(torch.cat([tokens(0), tokens(1)])).pow(3).sum().backward()
    (whole,) = [each for each in (alone.step(), *alone.detach()) if each is not None]
    apart = [f"{site.name} {site.tensor}" for site in snapshot if "[" in site.tensor]
    far = 0.0
    for site in snapshot:
        if "[" not in site.tensor:
            here, there = snapshot[site].total, whole[site].total
            assert here.count == there.count, site
            far = max(far, abs(here.rms - there.rms) / there.rms)
    return apart, len(snapshot), far, told


def test_two_by_two_ranks_have_the_names_and_numbers_of_the_model_in_one_process() -> None:
    for apart, _sites, far, told in ranks.run(two_by_two, 4):
        assert {each.split("[")[0] for each in apart} == {
            f"{name}.act {kind}" for name in "12" for kind in ("output", "grad_output")
        }
        assert far < 1e-5, far
        assert len(told) == 1
