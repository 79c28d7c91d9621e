"""Groups of ranks, and what they make together."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hookstats import ExponentBins, Site
from hookstats.cluster.merging import Merging
from hookstats.cluster.packing import LocalStep, StepPacking
from hookstats.cluster.table import Tables
from hookstats.cluster.tree import levels
from hookstats.numbers.fields import FIELDS
from tests.cluster.steps import BUDGET, Here, drained, job_of
from tests.cluster.sums import Step, Sums, counted_collectives, submit, wanted
from tests.ranks import outcomes, run


def test_groups_are_of_at_most_fan_ranks_nodes_first_and_their_first_ranks_go_on() -> None:
    assert levels(range(4)) == [[(0, 1, 2, 3)]]
    assert levels(range(8), fan=2) == [[(0, 1), (2, 3), (4, 5), (6, 7)], [(0, 2), (4, 6)], [(0, 4)]]
    assert levels(range(8), fan=64, local=4) == [[(0, 1, 2, 3), (4, 5, 6, 7)], [(0, 4)]]
    assert levels([1, 3]) == [[(1, 3)]]
    assert levels([0, 4, 8], local=4) == [[(0, 4, 8)]]  # one rank of each node
    assert levels([5]) == []
    large = levels(range(16384), local=8)
    assert [len(groups) for groups in large] == [2048, 32, 1]
    for ranks, fan, local in ((range(100), 7, 1), (range(3, 99, 3), 5, 12), (range(65), 64, 1)):
        plan = levels(ranks, fan, local)
        below = sorted(ranks)
        for groups in plan:
            assert sorted(rank for group in groups for rank in group) == below
            assert max(map(len, groups)) <= fan
            below = [group[0] for group in groups]
        assert len(plan[-1]) == 1
    with pytest.raises(ValueError, match="fan=1"):
        levels(range(4), fan=1)


def merges_twice(rank: int, world: int, fan: int, seed: int) -> Any:
    found = []
    for elements in (3, 50):
        merging = Merging(range(world), Sums(elements), fan=fan)
        sleeps = random.Random(100 * seed + rank)
        done = []
        for number in (0, 10, 20):
            time.sleep(sleeps.random() / 20)
            merging.submit(Step(number, rank), number)
        done += merging.wait(60)
        done += merging.close()
        assert [each.ranks for each in done] == [tuple(range(world))] * 3
        assert [each.world_size for each in done] == [world] * 3
        found.append([[part.tolist() for part in each.step] for each in done])
    return found


@pytest.mark.parametrize(("world", "fan"), [(2, 64), (4, 2), (8, 2), (8, 3)])
def test_every_rank_gets_what_a_flat_merge_gives_with_the_same_bits_in_each_run_whoever_comes_first(
    world: int, fan: int
) -> None:
    first = run(merges_twice, world, fan, 1)
    assert all(each == first[0] for each in first)
    assert run(merges_twice, world, fan, 2) == first
    for elements, steps in zip((3, 50), first[0], strict=True):
        for number, (floats, ints) in zip((0, 10, 20), steps, strict=True):
            of_floats, of_ints = wanted(number, range(world), elements=elements)
            assert ints == of_ints.tolist()
            np.testing.assert_allclose(floats, of_floats, rtol=1e-12, atol=1e-12)


def counts_collectives(rank: int, world: int) -> list[int]:
    """Of ten, then of a thousand sites."""
    called = counted_collectives()
    counts = []
    for elements in (10, 1000):
        merging = Merging(range(world), Sums(elements), fan=2)
        merging.submit(Step(0, rank), 0)
        assert merging.wait(60)[0].ranks == (0, 1, 2, 3)
        merging.close()
        counts.append(len(called))
        called.clear()
    return counts


def test_the_number_of_collectives_does_not_depend_on_the_number_of_sites() -> None:
    # Two levels: below up twice and down once; at the top twice.
    assert run(counts_collectives, 4) == [[5, 5], [3, 3], [5, 5], [3, 3]]


def beside_other_groups(rank: int, world: int) -> Any:
    def summed_by(group: Any) -> float:
        x = torch.ones(1)
        dist.all_reduce(x, group=group)
        return x.item()

    groups = [dist.new_group([1, 3])]
    first = Merging(range(world), Sums())
    groups.append(dist.new_group([0, 1, 2]))
    second = Merging(range(world), Sums(), fan=2)
    pair = Merging([1, 3], Sums()) if rank in (1, 3) else None
    if pair is None:
        with pytest.raises(ValueError, match=rf"expected ranks with this one, {rank}, got \(1, 3\)"):
            Merging([1, 3], Sums())
    every = [each for each in (first, second, pair) if each is not None]
    found = [submit(merging, [0, 5]) for merging in every]
    groups.append(dist.new_group([2, 3]))
    sums = [
        summed_by(group) for group, members in zip(groups, ([1, 3], [0, 1, 2], [2, 3]), strict=True) if rank in members
    ]
    for merging, done in zip(every, found, strict=True):
        done += merging.wait(60)
        done += merging.close()
    groups.append(dist.new_group([0, 3]))
    sums += [summed_by(groups[-1])] if rank in (0, 3) else []
    return sums, [[(each.ranks, [part.tolist() for part in each.step]) for each in done] for done in found]


def test_several_mergings_and_the_users_own_groups_do_not_disturb_each_other() -> None:
    found = run(beside_other_groups, 4)
    assert [sums for sums, _ in found] == [[3.0, 2.0], [2.0, 3.0], [3.0, 2.0], [2.0, 2.0, 2.0]]
    whole = [((0, 1, 2, 3), [part.tolist() for part in wanted(number, range(4))]) for number in (0, 5)]
    pair = [((1, 3), [part.tolist() for part in wanted(number, [1, 3])]) for number in (0, 5)]
    for rank, (_, (first, *others)) in enumerate(found):
        assert first == whole
        assert [each[0] for each in others[0]] == [each[0] for each in whole]
        assert others[1:] == ([pair] if rank in (1, 3) else [])


def sites_of(rank: int, step: int) -> dict[Site, Here]:
    random = torch.Generator().manual_seed(100 * rank + step)
    sites = {
        Site("a", "output"): Here(torch.randn(6, 20, generator=random, dtype=torch.float64) + 1e3 * rank),
        Site("a", "grad_output"): Here(torch.randn(6, 20, generator=random, dtype=torch.float64)),
    }
    if rank == 1:
        sites[Site("b", "output")] = Here(torch.randn(3, 5, generator=random, dtype=torch.float64))
    return sites


def merges_real_steps(rank: int, world: int) -> Any:
    merging = Merging(range(world), StepPacking(rank, Tables(BUDGET, True)), fan=2)
    for step in (0, 1):
        made = drained(sites_of(rank, step), ExponentBins(), step=step, scalars={"loss": float(rank)})
        merging.submit(LocalStep(made), step)
    done = [(each.ranks, each.step.drained) for each in merging.wait(60)]
    merging.close()
    return [(ranks, made.step, made.scalars, made.blocks, made.columns.sites) for ranks, made in done]


def test_the_steps_of_monitors_are_what_merging_without_communication_gives() -> None:
    found = run(merges_real_steps, 4)
    for step in (0, 1):
        want = job_of([sites_of(rank, step) for rank in range(4)], ExponentBins(), spread=True).merged()
        for each in found:
            ranks, number, scalars, blocks, sites = each[step]
            assert (ranks, number, scalars) == ((0, 1, 2, 3), step, {"loss": 1.5})
            assert sites == want.columns.sites
            assert [block.tobytes() for block in blocks] == [block.tobytes() for block in found[0][step][3]]
            for row in want.layout.rows:
                (part,) = row.parts
                size = len(FIELDS) * part.channels
                mine, theirs = (block[part.offset : part.offset + part.size] for block in (blocks[0], want.blocks[0]))
                np.testing.assert_allclose(mine[:size].view(float), theirs[:size].view(float), rtol=1e-12)
                np.testing.assert_array_equal(mine[size:], theirs[size:])


def under_torchrun() -> None:
    dist.init_process_group("gloo")
    merging = Merging([0, 1], Sums())
    merging.submit(Step(0, merging.rank), 0)
    (done,) = merging.wait(60)
    assert done.ranks == (0, 1), done
    merging.close()
    dist.destroy_process_group()
    print("merged", flush=True)


def is_torchrun(rank: int, world: int) -> None:
    """Its agent, with forks instead of processes that import torch once more."""
    arguments: Any = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, "start_method": "fork"}
    arguments |= {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "test"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]  # it sets them itself
    elastic_launch(LaunchConfig(**arguments), under_torchrun)()


def test_ranks_that_torchrun_started_are_merged() -> None:
    (ended,) = outcomes(is_torchrun, 1, init="", timeout=120)
    assert ended.code == 0, ended.output
    assert ended.output.count("merged") == 2


def on_unlike_nodes(rank: int, world: int) -> Any:
    """Two ranks on one node, and two nodes of one."""
    os.environ["LOCAL_WORLD_SIZE"] = "2" if rank < 2 else "1"
    merging = Merging(range(world), Sums())
    merging.submit(Step(0, rank), 0)
    (merged,) = merging.wait(60)
    merging.close()
    return merged.ranks


def test_ranks_on_nodes_of_unlike_size_build_one_tree() -> None:
    assert run(on_unlike_nodes, 4) == [(0, 1, 2, 3)] * 4
