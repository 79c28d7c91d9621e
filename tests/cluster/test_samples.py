"""Samples of parameters and buffers, of ranks that measure together."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import hookstats
from tests import ranks

SAMPLES = ("param_sample", "update_sample")


def replicas(rank: int, world: int) -> list[tuple[float, float, float]]:
    torch.manual_seed(0)
    model = nn.Linear(100, 50)
    model.register_buffer("table", torch.full((5,), float(rank)))
    ddp = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    mon = hookstats.attach(ddp, every=1, process_group=dist.group.WORLD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(8, 100, generator=torch.Generator().manual_seed(rank))
    before = model.bias.detach().clone()
    ddp(x).square().sum().backward()
    optimizer.step()
    change = (model.bias.detach() - before).double()
    arrived = mon.step()
    (snapshot,) = [each for each in (arrived, *mon.detach()) if each is not None]
    assert snapshot.ranks == tuple(range(world))
    weight, bias = (snapshot[name, "update_sample"].total for name in ("weight", "bias"))
    assert (weight.count, bias.count) == (4096, 50)  # replicas count once
    assert abs(bias.rms / change.square().mean().sqrt().item() - 1) < 1e-5
    assert snapshot["weight", "param_sample"].histogram is None
    assert snapshot["weight", "param_grad"].histogram is not None
    assert snapshot["", "input"].total.count == world * 8 * 100  # each rank's batch
    table = snapshot["table", "buffer_sample"].total
    assert (table.count, table.mean) == (5 * world, (world - 1) / 2)  # each rank has its own
    return [(weight.count, weight.rms, snapshot["weight", "param_sample"].total.rms)]


def test_two_replicas_are_one() -> None:
    first, second = ranks.run(replicas, 2)
    assert first == second
