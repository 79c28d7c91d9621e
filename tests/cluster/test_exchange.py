"""Groups of ranks, and the all-reduce that is all that they tell each other."""

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

from hookstats.cluster import exchange
from hookstats.cluster.exchange import Exchange, find_default_store
from tests.ranks import outcomes, run

SIZES = (0, 1, 7, 1000, 1 << 19)  # of the last, the leader holds one at a time


def summed(ours: Exchange, numbers: np.ndarray) -> np.ndarray:
    return ours.reduce([numbers], [exchange.total])[0]


def numbers_of(rank: int, size: int) -> np.ndarray:
    return np.random.default_rng([rank, size]).standard_normal(size)


def exchanges_twice(rank: int, world: int, fan: int) -> list[Any]:
    exchange.FAN = fan
    return [exchanges(rank, world, seed) for seed in range(2)]


def exchanges(rank: int, world: int, seed: int) -> Any:
    ours, sleeps = Exchange("test", range(world), 60.0), random.Random(100 * seed + rank)
    found: list[Any] = []
    for size in SIZES:
        time.sleep(sleeps.random() / 20)
        found.append(summed(ours, numbers_of(rank, size)).tobytes())
        found.append(ours.max(np.array([[rank, -rank], [-(2**63), 2**62 + rank]])).tolist())
    found.append(ours.gather(np.array([[rank, -(2**63) + rank]])).tolist())
    found.append(ours.gather(np.array(7 * rank)).tolist())
    found.append([ours.gather_texts(b"x" * (rank % 3)), ours.gather_texts(b"same")])
    return found


@pytest.mark.parametrize(("world", "fan"), [(1, 8), (2, 8), (4, 2), (8, 3), (5, 2)])
def test_every_rank_gets_the_same_bits_in_each_run_whoever_comes_first(world: int, fan: int) -> None:
    found = run(exchanges_twice, world, fan)
    first = found[0][0]
    assert all(each == [first, first] for each in found)
    *reduced, pairs, sevens, texts = first
    for size, summed, largest in zip(SIZES, reduced[::2], reduced[1::2], strict=True):
        want = sum(numbers_of(rank, size) for rank in range(world))
        np.testing.assert_allclose(np.frombuffer(summed), want, rtol=1e-13, atol=1e-13)
        assert largest == [[world - 1, 0], [-(2**63), 2**62 + world - 1]]
    assert pairs == [[[rank, -(2**63) + rank]] for rank in range(world)]
    assert sevens == [7 * rank for rank in range(world)]
    assert texts == [[b"x" * (rank % 3) for rank in range(world)], [b"same"] * world]


def beside_other_groups(rank: int, world: int) -> Any:
    def summed_by(group: Any) -> float:
        x = torch.ones(1)
        dist.all_reduce(x, group=group)
        return x.item()

    groups = [dist.new_group([1, 3])]
    every = [Exchange("first", range(world), 60.0)]
    groups.append(dist.new_group([0, 1, 2]))
    every.append(Exchange("second", range(world), 60.0))
    if rank in (1, 3):
        every.append(Exchange("pair", [3, 1], 60.0))
    else:
        with pytest.raises(ValueError, match=rf"expected ranks with this one, {rank}, got \(1, 3\)"):
            Exchange("pair", [1, 3], 60.0)
    found = [summed(each, np.array([float(rank)])).tolist() for each in every]
    groups.append(dist.new_group([2, 3]))
    pairs = zip(groups, ([1, 3], [0, 1, 2], [2, 3]), strict=True)
    return found, [summed_by(group) for group, members in pairs if rank in members]


def test_several_exchanges_and_the_users_own_groups_do_not_disturb_each_other() -> None:
    found = run(beside_other_groups, 4)
    assert [sums for _, sums in found] == [[3.0], [2.0, 3.0], [3.0, 2.0], [2.0, 2.0]]
    for rank, (ours, _) in enumerate(found):
        assert ours == [[6.0]] * 2 + [[4.0]] * (rank in (1, 3))


def under_torchrun() -> None:
    dist.init_process_group("gloo")
    assert summed(Exchange("test", [0, 1], 60.0), np.ones(3)).tolist() == [2.0] * 3
    dist.destroy_process_group()
    print("exchanged", flush=True)


def is_torchrun(rank: int, world: int) -> None:
    """Its agent, with forks instead of processes that import torch once more."""
    arguments: Any = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, "start_method": "fork"}
    arguments |= {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "test"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]  # it sets them itself
    elastic_launch(LaunchConfig(**arguments), under_torchrun)()


def test_ranks_that_torchrun_started_exchange() -> None:
    (ended,) = outcomes(is_torchrun, 1, init="", timeout=120)
    assert ended.code == 0, ended.output
    assert ended.output.count("exchanged") == 2


def test_another_torch_without_a_store_to_give_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist.distributed_c10d, "_get_default_store")
    with pytest.raises(RuntimeError, match=rf"_get_default_store, .* got torch {torch.__version__.split('+')[0]}"):
        find_default_store()
