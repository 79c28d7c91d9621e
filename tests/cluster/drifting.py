"""A training of three ranks, one of which clips its gradients alone from the middle on, as all of them measure it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hookstats
from hookstats import Snapshot
from tests import ranks

STEPS, CLIPS = 120, 60


def trains(rank: int, world: int) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    data = torch.Generator().manual_seed(rank)
    monitor = hookstats.attach(model, every=1, process_group=dist.group.WORLD, histogram=hookstats.ExponentBins())
    taken = []
    for step in range(STEPS):
        x = torch.randn(64, 16, generator=data)
        loss = nn.functional.mse_loss(wrapped(x)[:, 0], x[:, :2].sum(1).sin())
        loss.backward()
        if rank == 1 and step >= CLIPS:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        taken.append(monitor.step(loss=loss))
    taken += monitor.detach()
    return [each.to_dict() for each in taken if each is not None] if rank == 0 else []


def snapshots() -> list[Snapshot]:
    return [Snapshot.from_dict(each) for each in ranks.run(trains, 3)[0]]
