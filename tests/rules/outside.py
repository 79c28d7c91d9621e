"""Trainings in which something writes parameters between two steps of their optimizer."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hookstats
from hookstats import Snapshot

TENSORS = ("output", "param_sample", "update_sample", "outside_update", "optimizer_law")


def snapshots(
    between: Callable[[int, nn.Module], None] | None = None,
    every: int = 1,
    steps: int = 24,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, 3e-3),
    dtype: torch.dtype = torch.float32,
) -> list[Snapshot]:
    """between: what is done after each step. None: averaged weights are put in after step 11, and stay."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)).to(dtype)
    optimizer, taken = make_optimizer(model.parameters()), list[Snapshot]()
    average = copy.deepcopy(model.state_dict())
    with hookstats.attach(model, tensors=TENSORS, every=every, sinks=taken.append) as monitor:
        for step in range(steps):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
            loss = (model(x) - x[:, :2]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
            for name, value in model.state_dict().items():
                average[name].lerp_(value, 0.1)
            if between is not None:
                between(step, model)
            elif step == 11:
                model.load_state_dict(average)
    return taken


def halving(parameters: Any, begin: int = 12) -> torch.optim.Optimizer:
    """An optimizer with a hook of its own, which halves the gradient of one parameter from a step on."""
    optimizer, steps = torch.optim.SGD(parameters, 0.1), itertools.count()

    def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if next(steps) >= begin:
            optimizer.param_groups[0]["params"][2].grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    return optimizer
