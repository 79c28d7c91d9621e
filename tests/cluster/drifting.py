"""A training of three ranks with a fault from the middle on, as all of them measure it: for pictures."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hookstats
from hookstats import Snapshot
from tests import ranks

STEPS, BEGINS = 120, 60
FAULTS = ("a_rank_that_clips_alone", "gradients_that_are_averaged_twice", "ranks_that_draw_the_same")


def trains(rank: int, world: int, fault: str) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    data = torch.Generator().manual_seed(0 if fault == "ranks_that_draw_the_same" else rank)
    tensors = (
        "output",
        "grad_output",
        "model_input",
        "param_sample",
        "param_grad",
        "param_grad_local",
        "reduction",
        "update_sample",
    )
    monitor = hookstats.attach(model, tensors=tensors, every=1, process_group=dist.group.WORLD)
    taken = []
    for step in range(STEPS):
        x = torch.randn(64, 16, generator=data)
        loss = nn.functional.mse_loss(wrapped(x)[:, 0], x[:, :2].sum(1).sin())
        loss.backward()
        if step >= BEGINS and fault == "gradients_that_are_averaged_twice":
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= world
        elif step >= BEGINS and fault == "a_rank_that_clips_alone" and rank == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        taken.append(monitor.step(loss=loss))
    taken += monitor.detach()
    return [each.to_dict() for each in taken if each is not None] if rank == 0 else []


def snapshots(fault: str) -> list[Snapshot]:
    """fault: of FAULTS; what is none is a healthy training."""
    return [Snapshot.from_dict(each) for each in ranks.run(trains, 3, fault)[0]]
