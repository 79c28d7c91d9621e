"""DTensors in compiled graphs: what ranks measured of them, merged, is what all of them hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import hookstats
from tests import ranks
from tests.cluster.parallel import (
    TENSORS,
)
from tests.plain import hearing

COMPILES = True


class Scaled(nn.Module):
    """A weight times a tensor that all ranks have; the weight's gradient is a sum over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.inner(x * 1.0) @ weight if x.dim() else self.inner(x * 1.0) * weight


def yet_to_be_reduced(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    weight = distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)], src_data_rank=None)
    settings: Any = (((), True), ((), False), ((4,), True), ((3, 4), True))
    for shape, channels in settings:
        x = distribute_tensor(torch.ones(shape), mesh, [Replicate()], src_data_rank=None).requires_grad_()
        model = Scaled()
        monitor = hookstats.attach(model, ["inner"], tensors=TENSORS[:2], channels=channels)
        with hearing() as told:
            torch.compile(model, backend="aot_eager", fullgraph=True)(x, weight).to_local().sum().backward()
            (skipped,) = monitor.skipped.values()
            (snapshot,) = monitor.detach()
        assert any("inner grad_output" in each and "P(sum)" in each for each in told)
        assert skipped.times == 1
        assert [(str(site), snapshot[site].total.count) for site in snapshot] == [("inner output", x.numel())]
        torch.compiler.reset()


class Loss(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().sum()


def a_loss(rank: int, world: int) -> None:
    """A DTensor of no dimension, in a graph."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = distribute_tensor(torch.ones(4, 6), mesh, [Replicate()], src_data_rank=None).requires_grad_()
    model = nn.Sequential(Loss(), nn.Identity())
    monitor = hookstats.attach(model, ["0"], tensors=TENSORS[:2])
    torch.compile(model, backend="aot_eager", fullgraph=True)(x).to_local().backward()
    (snapshot,) = monitor.detach()
    assert [snapshot["0", kind].total.max for kind in TENSORS[:2]] == [24.0, 1.0]


def vectors_and_scalars(rank: int, world: int) -> None:
    yet_to_be_reduced(rank, world)
    a_loss(rank, world)


def test_in_a_graph_a_scalar_is_measured_and_a_gradient_that_is_yet_to_be_reduced_never() -> None:
    ranks.run(vectors_and_scalars, 2, timeout=180)
