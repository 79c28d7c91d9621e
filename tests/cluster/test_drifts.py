"""Replicas that are none any more: named with ranks and step, as they begin; and trainings of which none is alarmed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import hookstats
from hookstats import Snapshot
from hookstats.numbers.ranks import drifts_from_json, drifts_to_json
from hookstats.rules import Finding, Judge
from tests import ranks
from tests.plain import hearing

STEPS, BREAKS = 12, 7
MONITORS: list[hookstats.Monitor] = []  # of this rank, the latest last
DDP = nn.parallel.DistributedDataParallel
Optimizer = torch.optim.Optimizer


class Mlp(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(8, width), nn.LayerNorm(width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)).relu())


class Case(NamedTuple):
    """A training of this rank. Its steps: forward and backward; what the ranks share; what goes wrong; a step."""

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[int], torch.Tensor]
    share: Callable[[int], object] = lambda step: None
    fault: Callable[[int], bool] = lambda step: True  # False: the optimizer does not step
    after: Callable[[int], object] = lambda step: None  # the optimizer's step
    is_kept: Callable[[int], bool] = lambda step: False  # gradients are added to


def batch(step: int, seed: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * seed + step))


def square(model: nn.Module, seed: int) -> Callable[[int], torch.Tensor]:
    return lambda step: model(batch(step, seed)).square().mean()


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def averaged(parameters: list[nn.Parameter], group: Any = None) -> None:
    """By hand, as who uses no wrapper does it."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)


def ddp(rank: int, world: int) -> Case:
    model = DDP(Mlp())
    return Case(model, sgd(model), square(model, rank))


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


def by_hand(rank: int, world: int) -> Case:
    model = Mlp()
    return Case(model, sgd(model), square(model, rank), share=lambda step: averaged(list(model.parameters())))


def one_layer_not_reduced(rank: int, world: int) -> Case:
    model = Mlp()

    def share(step: int) -> None:
        left_out = list(model.down.parameters()) if step >= BREAKS else []
        averaged([each for each in model.parameters() if all(each is not other for other in left_out)])

    return Case(model, sgd(model), square(model, rank), share=share)


def tensor_parallel(rank: int, world: int) -> Case:
    """Sequence parallel: the norm is replicated, and its gradient reduced."""

    class Block(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(self.norm(x)).relu())

    block = Block()
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(block, init_device_mesh("cpu", (world,)), plan)
    return Case(block, sgd(block), square(block, 0))


def norm_clipped_alone(rank: int, world: int) -> Case:
    """As layer norms drifted apart over tensor parallel ranks, because one rank alone clipped."""
    case = tensor_parallel(rank, world)

    def clip(step: int) -> bool:
        if rank == 1 and step >= BREAKS:
            for parameter in case.model.parameters():
                assert isinstance(parameter.grad, DTensor)
                parameter.grad._local_tensor.mul_(0.5)
        return True

    return case._replace(fault=clip)


def hsdp(rank: int, world: int) -> Case:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Mlp(), mesh=mesh)
    return Case(model, sgd(model), square(model, rank))


def hsdp_bit_flips(rank: int, world: int) -> Case:
    """In rank 3's shard, whose replica is rank 1."""
    case = hsdp(rank, world)

    def flip(step: int) -> None:
        if rank == 3 and step == BREAKS:
            case.model.up.weight._local_tensor.view(torch.int32)[0, 0] ^= 1

    return case._replace(after=flip)


class ByHand(nn.Module):
    """A part of a column and of a row parallel layer as plain tensors, as Megatron-LM has them."""

    def __init__(self, place: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8)
        torch.manual_seed(10 + place)
        self.up, self.down = nn.Linear(8, 4), nn.Linear(4, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)).relu())


def parallel_by_hand(rank: int, world: int) -> Case:
    """Data parallel over (0, 2) and (1, 3), tensor parallel over (0, 1) and (2, 3), without a DTensor."""
    groups = [dist.new_group(each) for each in ([0, 2], [1, 3], [0, 1], [2, 3])]
    of_data, of_tensor = groups[rank % 2], groups[2 + rank // 2]
    model = ByHand(rank % 2)

    def loss(step: int) -> torch.Tensor:
        x = batch(step, rank // 2)
        out = model(x)
        whole = out.detach().clone()
        dist.all_reduce(whole, group=of_tensor)
        return (out * whole).mean()

    def share(step: int) -> None:
        for parameter in model.norm.parameters():
            dist.all_reduce(parameter.grad, group=of_tensor)
        averaged(list(model.parameters()), of_data)

    return Case(model, sgd(model), loss, share=share)


def one_shard_drifts(rank: int, world: int) -> Case:
    case = parallel_by_hand(rank, world)

    def drift(step: int) -> None:
        if rank == 3 and step >= BREAKS:
            with torch.no_grad():
                case.model.up.weight.mul_(1.001)

    return case._replace(after=drift)


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
    """What one finding is to say."""

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
    "a shard by hand drifts": (4, one_shard_drifts, Found("warning", BREAKS + 1, "param_sample", (3,), 1)),
}


def trained(rank: int, world: int, make: Callable[[int, int], Case]) -> tuple[list[Finding], list[Any]]:
    """The findings on replicas; and the drifts of each step."""
    case, judge = make(rank, world), Judge()
    monitor = hookstats.attach(case.model, every=1, process_group=dist.group.WORLD)
    MONITORS.append(monitor)
    snapshots = []
    for step in range(STEPS):
        case.loss(step).backward()
        case.share(step)
        if case.fault(step):
            case.optimizer.step()
        case.after(step)
        if not case.is_kept(step):
            case.optimizer.zero_grad()
        snapshots.append(monitor.step())
    snapshots += monitor.detach()
    arrived = [each for each in snapshots if each is not None]
    assert [each.ranks for each in arrived] == [tuple(range(world))] * STEPS
    found = [each for snapshot in arrived for each in judge.judge(snapshot)]
    return [each for each in found if each.rule == "replica-drift"], [each.drifts for each in arrived]


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


def batch_norm(rank: int, world: int) -> Case:
    """Its buffers are each rank's own."""
    model = DDP(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)))
    return Case(model, sgd(model), square(model, rank))


def accumulates(rank: int, world: int) -> Case:
    case = ddp(rank, world)

    def loss(step: int) -> torch.Tensor:
        with case.model.no_sync():
            case.model(batch(step, 10 + rank)).square().mean().backward()
        return case.model(batch(step, rank)).square().mean()

    return case._replace(loss=loss)


def local_sgd(rank: int, world: int) -> Case:
    """Gradients are each rank's own; parameters are averaged every third step."""
    model = DDP(Mlp())

    def reduced(own: torch.Tensor) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(own)
        return future

    model.register_comm_hook(None, lambda state, bucket: reduced(bucket.buffer()))

    def average(step: int) -> None:
        if step % 3 == 2:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= world

    return Case(model, sgd(model), square(model, rank), after=average)


def zero_one(rank: int, world: int) -> Case:
    """Each rank steps its own part of the parameters, and sends it to the others."""
    model = DDP(Mlp())
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters[rank::world])

    def send(step: int) -> None:
        for i, parameter in enumerate(parameters):
            dist.broadcast(parameter.data, i % world)
            parameter.grad = None

    return Case(model, optimizer, square(model, rank), after=send)


def zero_redundancy(rank: int, world: int) -> Case:
    model = DDP(Mlp())
    return Case(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam), square(model, rank))


def fsdp(rank: int, world: int) -> Case:
    model = fully_shard(Mlp(), mesh=init_device_mesh("cpu", (world,)))
    return Case(model, sgd(model), square(model, rank))


def experts(rank: int, world: int) -> Case:
    """Of one name on all ranks, and each rank's own."""

    class Moe(Mlp):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(rank)
            self.expert = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.expert(x)

    model = Moe()
    shared = [each for name, each in model.named_parameters() if "expert" not in name]
    return Case(model, sgd(model), square(model, rank), share=lambda step: averaged(shared))


def experts_beside_ddp(rank: int, world: int) -> Case:
    case = experts(rank, world)
    ignored = [name for name, _ in case.model.named_parameters() if "expert" in name]
    DDP._set_params_and_buffers_to_ignore_for_model(case.model, ignored)
    model = DDP(case.model)
    return Case(model, sgd(model), square(model, rank))


def stages(rank: int, world: int) -> Case:
    """Each rank has layers of its own, under names of their own."""
    torch.manual_seed(rank)
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(8, 8)})
    return Case(model, sgd(model), square(model[f"stage{rank}"], rank))


def a_step_for_each_microbatch(rank: int, world: int) -> Case:
    case = ddp(rank, world)

    def loss(step: int) -> torch.Tensor:
        with nullcontext() if step % 2 else case.model.no_sync():
            out = case.model(batch(step, rank)).square().mean()
            if step % 2 == 0:
                out.backward()
        return out if step % 2 else torch.zeros((), requires_grad=True)

    return case._replace(loss=loss, fault=lambda step: bool(step % 2), is_kept=lambda step: step % 2 == 0)


def adversarial(rank: int, world: int) -> Case:
    """The generator's loss leaves gradients in the discriminator, which nobody reduces, nor takes."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = DDP(Mlp()), DDP(Mlp())

    model = Both()
    second = sgd(model.second)

    def loss(step: int) -> torch.Tensor:
        if step % 2:
            second.zero_grad()
            model.second(batch(step, rank)).square().mean().backward()
            second.step()
        return model.second.module(model.first(batch(step, rank))).square().mean()

    return Case(model, sgd(model.first), loss)


def measures_alone(rank: int, world: int) -> Case:
    """One rank reads its gradients before they are clipped, the other one behind."""
    case = ddp(rank, world)

    def clip(step: int) -> bool:
        if rank == 0:
            MONITORS[-1].measure_gradients()
        nn.utils.clip_grad_norm_(case.model.parameters(), 0.01)
        return True

    return case._replace(fault=clip)


def clips_by_us(rank: int, world: int) -> Case:
    """Though one rank does not measure two of the steps."""
    case = ddp(rank, world)

    def clip(step: int) -> bool:
        monitor = MONITORS[-1]
        if rank == 1 and step in (3, 4):
            monitor.pause()
        monitor.clip_grad_norm_(case.model.parameters(), 0.01)
        if rank == 1 and step in (3, 4):
            monitor.resume()
        return True

    return case._replace(fault=clip)


def lora(rank: int, world: int) -> Case:
    """Frozen weights, an A of each rank's own, and a B that begins with zeros on all: equal, and no replicas."""

    class Adapted(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)
            torch.manual_seed(rank)
            self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
            nn.init.zeros_(self.b.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + (self.b(self.a(x)) if self.training else 0)

    model = Adapted()
    return Case(model, sgd(model), lambda step: model(batch(step, rank)).square().mean() * (step > 4))


def independent(rank: int, world: int) -> Case:
    """From the same start, without any exchange."""
    model = Mlp()
    return Case(model, sgd(model), square(model, rank))


def unused(rank: int, world: int) -> Case:
    """A layer that other ranks use in other steps."""
    inner = Mlp()
    inner.extra = nn.Linear(8, 8)
    model = DDP(inner, find_unused_parameters=True)
    forward = inner.forward
    inner.forward = lambda x: forward(x) + (inner.extra(x) if int(1e6 * x[0, 0].item()) % 2 else 0)  # type: ignore[method-assign]
    return Case(model, sgd(model), square(model, rank))


HEALTHY: dict[str, Callable[[int, int], Case]] = {
    each.__name__: each
    for each in (
        ddp, batch_norm, accumulates, local_sgd, zero_one, zero_redundancy, fsdp, hsdp, tensor_parallel, by_hand,
        parallel_by_hand, experts, experts_beside_ddp, stages, lora, independent, unused, a_step_for_each_microbatch,
        adversarial, measures_alone, clips_by_us,
    )
}  # fmt: skip
OF_FOUR = {"hsdp", "parallel_by_hand"}


def healthy(rank: int, world: int) -> dict[str, Any]:
    return {name: trained(rank, world, make) for name, make in HEALTHY.items() if (name in OF_FOUR) == (world == 4)}


@cache
def of_healthy(world: int) -> dict[str, Any]:
    found: dict[str, Any] = ranks.run(healthy, world, timeout=180)[0]
    return found


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_trainings_are_silent(name: str) -> None:
    findings, drifts = of_healthy(4 if name in OF_FOUR else 2)[name]
    assert findings == []
    assert not any(drifts)


def closes_more_steps(rank: int, world: int) -> tuple[list[Any], list[str]]:
    """Rank 1 closes three steps in one of its own: from then on it holds what the others held two steps before."""
    case = ddp(rank, world)
    monitor = hookstats.attach(case.model, every=1, process_group=dist.group.WORLD)
    snapshots = []
    with hearing() as told:
        for step in range(STEPS):
            case.loss(step).backward()
            case.optimizer.step()
            case.optimizer.zero_grad()
            for _ in range(3 if rank == 1 and step == 4 else 1):
                snapshots.append(monitor.step())
        snapshots += monitor.detach()
    merged = [each for each in snapshots if each is not None and len(each.ranks) == world]
    assert len(merged) == STEPS
    return [each.drifts for each in merged], told


def test_a_rank_that_has_closed_more_steps_has_not_drifted_and_is_told_of_once() -> None:
    for drifts, told in ranks.run(closes_more_steps, 3):
        assert drifts == [()] * STEPS
        (behind,) = [each for each in told if "some measured steps before or after" in each]
        assert "rank 1 holds in a step what rank 0 held" in behind


def recorded(rank: int, world: int, folder: str) -> list[Any]:
    case, lines = clips_alone(rank, world), f"{folder}/lines.jsonl"
    sinks = [hookstats.record(f"{folder}/run"), hookstats.sinks.JsonLines(lines)]
    monitor = hookstats.attach(case.model, every=1, process_group=dist.group.WORLD, sinks=sinks)
    snapshots = []
    for step in range(STEPS):
        case.loss(step).backward()
        case.fault(step)
        case.optimizer.step()
        case.optimizer.zero_grad()
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
