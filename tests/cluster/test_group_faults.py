"""attach(process_group=...): what a rank's training sees of what goes wrong, or goes slowly, with the others."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import hookstats
from hookstats.watch.drain import Pending
from tests.cluster.test_process_group import batch, network
from tests.plain import hearing
from tests.ranks import run


def without_groups(rank: int, world: int) -> Any:
    """The groups of DistributedDataParallel are gone when it is first asked which ranks it has."""
    model = nn.parallel.DistributedDataParallel(network())
    monitor = hookstats.attach(model, every=1, process_group=dist.group.WORLD)
    given = []
    with hearing() as told:
        for step in range(2):
            model.module(batch(rank, step)).mean().backward()
            if step == 0:
                dist.barrier()
                dist.destroy_process_group()
            given.append(monitor.step())
        given += monitor.detach()
    return [(each.step, each.ranks) for each in given if each is not None], [str(each) for each in told]


def test_where_it_cannot_be_said_how_tensors_lie_steps_are_each_ranks_own_and_training_goes_on() -> None:
    for rank, (given, told) in enumerate(run(without_groups, 2)):
        assert given == [(0, (rank,)), (1, (rank,))]
        assert len([each for each in told if "not merged over ranks: step 0: KeyError" in each]) == 1, told


def lags_behind(rank: int, world: int) -> Any:
    """The copy of a step arrives when the next one has been measured, as on a GPU."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Tanh()
    monitor = hookstats.attach(model, tensors=["output"], every=1, process_group=dist.group.WORLD)
    whole = torch.arange(24.0).reshape(4, 6)
    ready, Pending.ready = Pending.ready, lambda pending: False  # type: ignore[method-assign]
    given = []
    for placement in (Shard(0), Replicate()):
        model(distribute_tensor(whole, mesh, [placement], src_data_rank=None))
        given.append(monitor.step())
    Pending.ready = ready  # type: ignore[method-assign]
    given += monitor.detach()
    return [each["", "output"].total.count for each in given if each is not None]


def test_a_step_that_arrives_late_lies_as_its_own_tensors_did() -> None:
    assert run(lags_behind, 2) == [[24.0, 24.0]] * 2


def asks_for_its_own(rank: int, world: int) -> Any:
    """The second rank brings its step when the first one has its snapshot."""
    model = network()
    monitor = hookstats.attach(model, process_group=dist.group.WORLD)
    if rank:
        dist.barrier()
    model(batch(rank, 0)).mean().backward()
    monitor.step()
    local = monitor.snapshot()
    if not rank:
        dist.barrier()
    return local.ranks, [each.ranks for each in monitor.detach()]


def test_a_rank_that_asks_for_its_own_snapshot_waits_for_no_other() -> None:
    assert run(asks_for_its_own, 2) == [((rank,), [(0, 1)]) for rank in (0, 1)]


def fails_in_training(rank: int, world: int) -> Any:
    """The second rank brings nothing, until the first one has ended."""
    model = network()
    monitor = hookstats.attach(model, every=1, process_group=dist.group.WORLD)
    with hearing() as told:
        if not rank:
            with suppress(ZeroDivisionError), monitor:
                model(batch(rank, 0)).mean().backward()
                monitor.step()
                raise ZeroDivisionError
        dist.barrier()
        given = monitor.detach()
    return [each.ranks for each in given], [str(each) for each in told]


def test_an_error_that_ends_training_is_not_held_up_until_other_ranks_are_given_up() -> None:
    (given, told), _ = run(fails_in_training, 2)
    assert given == [(0,)]
    assert not [each for each in told if "timed out" in each]


def is_dropped(rank: int, world: int) -> Any:
    found = []
    for detached in (True, False):
        model = network()
        monitor = hookstats.attach(model, every=1, process_group=dist.group.WORLD)
        model(batch(rank, 0)).mean().backward()
        monitor.step()
        while monitor.step() is None:  # until merging has made its table of the model
            model(batch(rank, 0)).mean().backward()
        if detached:
            monitor.detach()
        held = weakref.ref(model)
        kept = [monitor] if detached else []
        del model, monitor
        gc.collect()
        found.append(held() is None)
        kept.clear()
    return found


def test_merging_keeps_no_model_alive() -> None:
    assert run(is_dropped, 2) == [[True, True]] * 2
