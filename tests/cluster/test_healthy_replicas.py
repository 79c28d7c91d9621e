"""Healthy trainings of several ranks, in none of which replicas are said to have drifted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from tests import ranks
from tests.cluster.trainings import (
    DDP,
    MONITORS,
    Case,
    Mlp,
    averaged,
    batch,
    by_hand,
    ddp,
    hsdp,
    parallel_by_hand,
    sgd,
    square,
    tensor_parallel,
    trained,
)


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
    """Give experts one name on all ranks, and each rank its own weights."""

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
