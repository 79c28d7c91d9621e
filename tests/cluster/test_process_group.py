"""attach(process_group=...): what each rank's monitor, sinks and recordings get."""

from __future__ import annotations

import gc
import logging
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import hookstats
from hookstats import Snapshot
from tests.models import THREE_KINDS
from tests.plain import hearing
from tests.ranks import run, until

SITE = ("0", "output")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(7 + rank, 6, generator=torch.Generator().manual_seed(10 * rank + step)) + 100 * rank


def train(model: nn.Module, monitor: hookstats.Monitor, rank: int, steps: int) -> list[Snapshot]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    given = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch(rank, step)).square().mean()
        loss.backward()
        optimizer.step()
        given.append(monitor.step(loss=loss, rank=rank))
    return [each for each in given if each is not None]


def alone(rank: int, steps: int) -> list[Snapshot]:
    """Measure with a rank's own monitor, without the others."""
    model = nn.parallel.DistributedDataParallel(network())
    monitor = hookstats.attach(model, every=1, tensors=THREE_KINDS)
    return [*train(model, monitor, rank, steps), *monitor.detach()]


def in_a_group(rank: int, world: int, folder: str) -> Any:
    own = alone(rank, 3)
    model = nn.parallel.DistributedDataParallel(network())
    sunk: list[Snapshot] = []
    sinks = [sunk.append, hookstats.record(f"{folder}/all"), hookstats.record(f"{folder}/each", every_rank=True)]
    group = dist.group.WORLD
    ranks = hookstats.Ranks(group, spread=True)
    monitor = hookstats.attach(model, every=1, tensors=THREE_KINDS, process_group=ranks, sinks=sinks)
    given = train(model, monitor, rank, 3)
    local = monitor.snapshot()
    given += monitor.detach()
    assert local.ranks == (rank,)
    assert local.equals(Snapshot.from_dict(own[-1].to_dict() | {"ranks": f"{rank} of {world}"}))
    return [each.to_dict() for each in own], [each.to_dict() for each in given], [each.step for each in sunk]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("runs")
    return folder, run(in_a_group, 2, str(folder))


def test_every_rank_is_given_what_all_have_measured_and_the_same_of_it(seen: Any) -> None:
    _, ((first, merged, sunk), (second, others, nothing)) = seen
    assert merged == others
    assert [Snapshot.from_dict(each).ranks for each in merged] == [(0, 1)] * 3
    assert (sunk, nothing) == ([0, 1, 2], [])
    for each, *own in zip(merged, first, second, strict=True):
        whole, parts = Snapshot.from_dict(each), [Snapshot.from_dict(part) for part in own]
        assert whole.scalars == {"loss": np.mean([part.scalars["loss"] for part in parts]), "rank": 0.5}
        for site in parts[0]:
            if site.tensor == "param_grad":  # reduced: the same on both, and counted once
                assert whole[site].calls == 1
                assert whole[site].total.count == parts[0][site].total.count
                continue
            count = sum(part[site].total.count for part in parts)
            mean = sum(part[site].channels.count * part[site].channels.mean for part in parts) / (15.0 if count else 1)
            assert whole[site].calls == 2
            assert whole[site].total.count == count
            np.testing.assert_allclose(whole[site].channels.mean, mean, rtol=1e-12)
            counts = sum(part[site].histogram.counts for part in parts)
            np.testing.assert_array_equal(whole[site].histogram.counts, counts)


def test_the_first_rank_keeps_the_run_of_all_and_every_rank_its_own_where_that_is_asked_for(seen: Any) -> None:
    folder, ((first, merged, _), (second, _, _)) = seen
    run_of_all = hookstats.load(folder / "all")
    assert [each.name for each in (folder / "all").iterdir()] == ["rank=0"]
    assert run_of_all.steps == [0, 1, 2]
    for step, each in enumerate(merged):
        assert run_of_all[step].equals(Snapshot.from_dict(each))
    assert run_of_all.attempts[0]["settings"]["world_size"] == 2
    for rank, own in enumerate((first, second)):
        kept = hookstats.load(folder / "each", ranks=rank)
        for step, each in enumerate(own):
            assert kept[step].equals(Snapshot.from_dict(each | {"ranks": f"{rank} of 2"}))
    offline = hookstats.load(folder / "each", ranks="merged")
    for step, each in enumerate(merged):
        online, afterwards = Snapshot.from_dict(each), offline[step]
        for site in online:
            if site.tensor != "param_grad":
                np.testing.assert_allclose(online[site].total.rms, afterwards[site].total.rms, rtol=1e-12)


def spread(rank: int, world: int) -> Any:
    model = network()
    monitor = hookstats.attach(model, every=1, process_group=hookstats.Ranks(dist.group.WORLD, spread=True))
    given = [*train(model, monitor, rank, 1), *monitor.detach()]
    return given[0].rank_spread(SITE)["rms"], given[0].to_dict()


def test_the_spread_over_ranks_names_the_rank_of_each_extreme() -> None:
    (spread_of_first, _), (spread_of_second, _) = run(spread, 2)
    assert spread_of_first == spread_of_second
    assert (spread_of_first.min_rank, spread_of_first.max_rank) == (0, 1)
    model = network()
    with torch.no_grad():
        wanted = [model[0](batch(rank, 0)).double().square().mean().sqrt().item() for rank in (0, 1)]
    np.testing.assert_allclose([spread_of_first.min, spread_of_first.max], wanted, rtol=1e-6)


def refused(rank: int, world: int) -> None:
    model = network()
    pair = dist.new_group([0])
    for arguments, expected in (
        ({"process_group": 3}, "expected a torch.distributed.ProcessGroup.*got int"),
        ({"process_group": hookstats.Ranks(3)}, "expected a torch.distributed.ProcessGroup.*got int"),
        ({"process_group": hookstats.Ranks(dist.group.WORLD, placements={"nothing": Shard(-1)})}, "matches nothing"),
        *([({"process_group": pair}, "expected a group that rank 1 is in")] if rank else []),
    ):
        with pytest.raises((TypeError, ValueError), match=expected):
            hookstats.attach(model, **arguments)  # type: ignore[arg-type]
    assert not any(module._forward_hooks for module in model.modules())


def test_what_is_no_group_of_this_rank_is_refused_and_leaves_no_hook() -> None:
    run(refused, 2)


def one_measures_more(rank: int, world: int, who: int) -> Any:
    model = network()
    with hearing() as told:
        monitor = hookstats.attach(model, every=1 + (rank != who), process_group=dist.group.WORLD)
        given = [*train(model, monitor, rank, 5), *monitor.detach()]
    return [(each.step, each.ranks) for each in given], told


@pytest.mark.parametrize("who", [0, 1])
def test_steps_that_only_one_rank_measures_are_its_own_and_said_once(who: int) -> None:
    found = run(one_measures_more, 2, who)
    (more, told), (less, nothing) = found[who], found[1 - who]
    assert more == [(0, (0, 1)), (1, (who,)), (2, (0, 1)), (3, (who,)), (4, (0, 1))]
    assert less == [(0, (0, 1)), (2, (0, 1)), (4, (0, 1))]
    (said,) = (each for each in told if "not merged over ranks" in each)
    assert "another rank is at step 2 without step 1: measured alike (every=)" in said
    assert not any("not merged" in each for each in nothing)


def dropped(rank: int, world: int) -> list[str]:
    """List the threads left by a monitor that nobody detached and nobody holds any more."""
    model = network()
    train(model, hookstats.attach(model, every=1, process_group=dist.group.WORLD), rank, 2)
    del model
    gc.collect()
    with suppress(AssertionError):
        until(lambda: threading.active_count() == 1)
    return [each.name for each in threading.enumerate()]


def test_the_thread_of_a_monitor_that_is_gone_ends() -> None:
    assert run(dropped, 2) == [["MainThread"]] * 2


def silent(rank: int, world: int) -> Any:
    dist.barrier()  # or one rank ends while the other one still connects
    messages: list[str] = []
    log = logging.getLogger("hookstats")
    log.addFilter(lambda record: messages.append(record.getMessage()))
    log.setLevel(logging.INFO)
    monitor = hookstats.attach(network())
    monitor.detach()
    return messages


def test_attach_says_what_to_pass_where_torch_distributed_runs() -> None:
    for rank, messages in enumerate(run(silent, 2)):
        expected = f"the numbers are those of rank {rank} alone; attach(process_group=torch.distributed.group.WORLD)"
        assert any(expected in message for message in messages)
