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
from hookstats.cluster.union import Place
from hookstats.numbers.snapshot import Snapshot
from tests import ranks
from tests.cluster.steps import Here, job_of
from tests.frames import snapshot_of
from tests.plain import hearing

SITE = Site("norm", "output")


class Ranks:
    """Four ranks, dp x tp, over several steps."""

    def __init__(self) -> None:
        self.apart: list[dict[Site, None]] = [{} for _ in range(4)]

    def merged(self, values: list[torch.Tensor | None]) -> list[Snapshot]:
        """By all ranks."""
        made = []
        for rank, each in enumerate(values):
            apart = Site("norm", f"output[tp={rank % 2}]")
            placed = Place(3, "each", peers=(rank // 2 * 2, rank // 2 * 2 + 1), site=apart)
            made.append({SITE: Here(each, 3, placed=placed)})
        job = job_of(made)
        for packer, apart in zip(job.packers, self.apart, strict=True):
            packer.apart = apart
        return [snapshot_of(job.merged(rank)) for rank in range(4)]

    def names(self, *values: Any) -> list[str]:
        first, *others = [[site.tensor for site in each] for each in self.merged(list(values))]
        assert all(each == first for each in others)
        return first


A, B, C, D = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
APART = ["output[tp=0]", "output[tp=1]"]


def test_ranks_that_hold_the_same_in_each_data_parallel_group_count_once() -> None:
    (snapshot, *_) = Ranks().merged([A, A, B, B])
    assert list(snapshot) == [SITE]
    once = hookstats.measure(torch.cat([A, B], 1), channel_dim=0)
    assert snapshot[SITE].calls == 2
    assert snapshot[SITE].channels.count.tolist() == [10] * 3
    assert snapshot[SITE].total.min == once.total.min
    torch.testing.assert_close(torch.tensor(snapshot[SITE].channels.rms), torch.tensor(once.channels.rms))


def test_one_rank_that_differs_keeps_all_apart_also_where_groups_hold_the_same_the_other_way_round() -> None:
    assert Ranks().names(A, A, B, C) == APART
    assert Ranks().names(A, B, B, A) == APART


def test_a_site_is_apart_from_its_first_difference_on_though_it_is_the_same_again() -> None:
    job = Ranks()
    assert job.names(A, A, B, B) == ["output"]
    assert job.names(A, C, B, D) == APART
    assert job.names(A, A, B, B) == APART


def test_an_infinity_of_the_other_sign_is_a_difference() -> None:
    above, below = A.clone(), A.clone()
    above[0, 0], below[0, 0] = torch.inf, -torch.inf
    assert Ranks().names(above, below, B, B) == APART


def test_zeros_and_nothing_are_no_difference() -> None:
    job, zeros = Ranks(), torch.zeros(3, 5)
    assert job.names(zeros, zeros, zeros, zeros) == ["output"]
    assert job.names(None, None, None, None) == ["output"]
    assert job.names(A, A, None, None) == ["output"]
    assert job.names(A, None, B, None) == APART


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
        (note,) = told
        assert "They are kept apart from this step on" in note
