"""Replicas that are none any more: named with ranks and step, as they begin."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import hookstats
from hookstats import Snapshot
from hookstats.numbers.ranks import drifts_from_json, drifts_to_json
from tests import ranks
from tests.cluster.trainings import (
    DDP,
    STEPS,
    Case,
    Mlp,
    averaged,
    ddp,
    hsdp,
    parallel_by_hand,
    sgd,
    square,
    tensor_parallel,
    trained,
)

BREAKS = 7


def clips_alone(rank: int, world: int) -> Case:
    case = ddp(rank, world)

    def clip(step: int) -> bool:
        if rank == 1 and step >= BREAKS:
            nn.utils.clip_grad_norm_(case.model.parameters(), 1e-3)
        return True

    return case._replace(fault=clip)


def skips_alone(rank: int, world: int) -> Case:
    return ddp(rank, world)._replace(fault=lambda step: not (rank == 1 and step == BREAKS))


def hooks_lost(rank: int, world: int) -> Case:
    """The wrapped module is called, not DistributedDataParallel: nothing is reduced."""
    model = DDP(Mlp())
    return Case(model, sgd(model), square(model.module, rank))


def noise_of_its_own(rank: int, world: int) -> Case:
    case = ddp(rank, world)

    def add(step: int) -> None:
        if step >= BREAKS:
            with torch.no_grad():
                case.model.module.up.weight.add_(
                    1e-3 * torch.randn(8, 8, generator=torch.Generator().manual_seed(rank))
                )

    return case._replace(after=add)


def one_layer_not_reduced(rank: int, world: int) -> Case:
    model = Mlp()

    def share(step: int) -> None:
        left_out = list(model.down.parameters()) if step >= BREAKS else []
        averaged([each for each in model.parameters() if all(each is not other for other in left_out)])

    return Case(model, sgd(model), square(model, rank), share=share)


def norm_clipped_alone(rank: int, world: int) -> Case:
    """Let one rank clip layer norms alone, so that they drift apart over tensor parallel ranks."""
    case = tensor_parallel(rank, world)

    def clip(step: int) -> bool:
        if rank == 1 and step >= BREAKS:
            for parameter in case.model.parameters():
                assert isinstance(parameter.grad, DTensor)
                parameter.grad._local_tensor.mul_(0.5)
        return True

    return case._replace(fault=clip)


def hsdp_bit_flips(rank: int, world: int) -> Case:
    """In rank 3's shard, whose replica is rank 1."""
    case = hsdp(rank, world)

    def flip(step: int) -> None:
        if rank == 3 and step == BREAKS:
            case.model.up.weight._local_tensor.view(torch.int32)[0, 0] ^= 1

    return case._replace(after=flip)


def one_shard_drifts(rank: int, world: int) -> Case:
    case = parallel_by_hand(rank, world)

    def drift(step: int) -> None:
        if rank == 3 and step >= BREAKS:
            with torch.no_grad():
                case.model.up.weight.mul_(1.001)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    lie = {"up.*": (Replicate(), Shard(0)), "down.*": (Replicate(), Shard(1))}
    return case._replace(after=drift, group=hookstats.Ranks(mesh, placements=lie))


def among_sharded(rank: int, world: int) -> Case:
    """More layers than are looked at in a step are measured before a step by one rank, and behind it by others."""
    torch.manual_seed(0)
    inner = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)), nn.Linear(8, 8))
    model = DDP(inner)
    parameters = list(inner[:-1].parameters())
    optimizer = torch.optim.SGD([*parameters[rank::world], *inner[-1].parameters()], lr=0.01)

    def send(step: int) -> None:
        for i, parameter in enumerate(parameters):
            dist.broadcast(parameter.data, i % world)
            parameter.grad = None
        if rank == 1 and step >= BREAKS:
            inner[-1].weight.data.mul_(1.001)

    return Case(model, optimizer, square(model, rank), after=send)


class Found(NamedTuple):
    """Expected contents of one finding."""

    severity: str
    step: int
    tensor: str
    ranks: tuple[int, ...]
    reference: int


ILL: dict[str, tuple[int, Callable[[int, int], Case], Found]] = {
    "one rank clips alone": (3, clips_alone, Found("critical", BREAKS, "param_grad", (1,), 0)),
    # In the step after it, rank 1 holds what the others held: a rank that is a step behind is no drift.
    "an optimizer's step is left out": (3, skips_alone, Found("critical", BREAKS + 2, "param_sample", (1,), 0)),
    "a layer beside many that each rank steps alone": (
        3,
        among_sharded,
        Found("critical", BREAKS + 1, "param_sample", (1,), 0),
    ),
    "nothing is reduced": (3, hooks_lost, Found("critical", 0, "param_grad", (1, 2), 0)),
    "noise of each rank's own": (3, noise_of_its_own, Found("critical", BREAKS + 1, "param_sample", (1, 2), 0)),
    "one layer is not reduced": (3, one_layer_not_reduced, Found("warning", BREAKS, "param_grad", (1, 2), 0)),
    "a norm is clipped on one rank": (2, norm_clipped_alone, Found("critical", BREAKS, "param_grad", (1,), 0)),
    "a bit flips in a shard": (4, hsdp_bit_flips, Found("critical", BREAKS + 1, "param_sample", (3,), 1)),
    "a shard by hand drifts": (4, one_shard_drifts, Found("critical", BREAKS + 1, "param_sample", (3,), 1)),
}


def ill(rank: int, world: int) -> dict[str, Any]:
    return {name: trained(rank, world, make) for name, (size, make, _) in ILL.items() if size == world}


@cache
def of_ill(world: int) -> list[dict[str, Any]]:
    return ranks.run(ill, world, timeout=120)


@pytest.mark.parametrize("name", ILL)
def test_who_drifts_is_named_with_the_step_in_which_it_began(name: str) -> None:
    world, _, want = ILL[name]
    for found in of_ill(world):  # on all ranks the same
        (finding, *_), drifts = found[name]
        first = next(each for each in drifts if each)[0]
        assert finding.severity == want.severity
        assert finding.step == finding.since == want.step
        assert finding.site.tensor == first.site.tensor == want.tensor
        assert (first.ranks, first.reference_rank) == (want.ranks, want.reference)
        assert [bool(each) for each in drifts].index(True) == want.step
        assert first.is_certain == (want.severity == "critical")
        who = f"rank{'s' * (len(want.ranks) > 1)} {', '.join(map(str, want.ranks))} hold"
        assert finding.sentence.startswith(who)
        assert f"since step {want.step}" in finding.sentence


def test_only_what_drifts_is_named() -> None:
    drifts = of_ill(3)[0]["one layer is not reduced"][1]
    assert {each.site.name for each in drifts[BREAKS]} == {"down.weight", "down.bias"}
    drifts = of_ill(4)[0]["a bit flips in a shard"][1]
    assert {each.site.name for each in drifts[BREAKS + 1]} >= {"up.weight"}
    assert all(each.ranks == (3,) for each in drifts[BREAKS + 1])


def recorded(rank: int, world: int, folder: str) -> list[Any]:
    case, lines = clips_alone(rank, world), f"{folder}/lines.jsonl"
    sinks = [hookstats.record(f"{folder}/run"), hookstats.sinks.JsonLines(lines)]
    monitor = hookstats.attach(case.model, every=1, process_group=dist.group.WORLD, sinks=sinks)
    snapshots = []
    for step in range(STEPS):
        case.train(step)
        snapshots.append(monitor.step())
    snapshots += monitor.detach()
    return [each.to_dict() for each in snapshots if each is not None]


def test_drifts_are_recorded_judged_and_read(tmp_path: Path) -> None:
    live = [Snapshot.from_dict(each) for each in ranks.run(recorded, 2, str(tmp_path))[0]]
    assert [bool(each.drifts) for each in live] == [step >= BREAKS for step in range(STEPS)]
    run = hookstats.load(tmp_path / "run")
    assert [each.drifts for each in run] == [each.drifts for each in live]
    assert all(one.equals(other) for one, other in zip(run, live, strict=True))
    (finding,) = [each for each in run.findings if each.rule == "replica-drift"]
    assert (finding.step, finding.severity) == (BREAKS, "critical")
    (again,) = [each for each in hookstats.rules.judge(run) if each.rule == "replica-drift"]
    assert again.sentence == finding.sentence
    without = Snapshot.from_dict({**live[-1].to_dict(), "drifts": []})
    assert not without.equals(live[-1])


def test_drifts_that_are_none_are_refused() -> None:
    drift = hookstats.results.Drift(hookstats.Site("a", "param_sample"), (1, 2), 0, 3, True, False)
    (told,) = drifts_to_json([drift])
    assert drifts_from_json([told]) == (drift,)
    for place, wrong in ((0, 1), (1, None), (2, [-1]), (2, "1"), (3, -1), (4, "x")):
        with pytest.raises((ValueError, TypeError)):
            drifts_from_json([[*told[:place], wrong, *told[place + 1 :]]])
