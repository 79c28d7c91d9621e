"""Trainings of several ranks, of all kinds of parallelism, and what is found when their replicas are looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import hookstats
from hookstats.rules import Finding, judge

STEPS = 12
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
    group: Any = None  # the ranks that are merged; None: all

    def train(self, step: int) -> None:
        self.loss(step).backward()
        self.share(step)
        if self.fault(step):
            self.optimizer.step()
        self.after(step)
        if not self.is_kept(step):
            self.optimizer.zero_grad()


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


def by_hand(rank: int, world: int) -> Case:
    model = Mlp()
    return Case(model, sgd(model), square(model, rank), share=lambda step: averaged(list(model.parameters())))


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


def hsdp(rank: int, world: int) -> Case:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Mlp(), mesh=mesh)
    return Case(model, sgd(model), square(model, rank))


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


def measured(world: int, case: Case, steps: int = STEPS, **attached: Any) -> list[hookstats.Snapshot]:
    """Train, and return each step as all ranks have measured it."""
    monitor = hookstats.attach(case.model, every=1, process_group=case.group or dist.group.WORLD, **attached)
    MONITORS.append(monitor)
    snapshots = []
    for step in range(steps):
        case.train(step)
        snapshots.append(monitor.step())
    snapshots += monitor.detach()
    arrived = [each for each in snapshots if each is not None]
    assert [each.ranks for each in arrived] == [tuple(range(world))] * steps
    return arrived


def trained(rank: int, world: int, make: Callable[[int, int], Case]) -> tuple[list[Finding], list[Any]]:
    """The findings on replicas; and the drifts of each step."""
    arrived = measured(world, make(rank, world))
    return [each for each in judge(arrived) if each.rule == "replica-drift"], [each.drifts for each in arrived]
