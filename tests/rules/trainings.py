"""A training that is measured at every step, and the loss of digits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hookstats
from benchmarks.illnesses.training import images
from hookstats import Snapshot


def train(
    model: nn.Module,
    loss_of: Callable[[int], Any],
    optimizers: Any,
    steps: int,
    before: Callable[[int], object] = lambda step: None,
    **how: Any,
) -> list[Snapshot]:
    """Return what is measured of a training.

    loss_of: of a step; or two of them, what is given to the monitor and what is differentiated. optimizers: one, or a
    list. before: is called with the number of each step, and may make it ill. how: for `attach`.
    """
    taken: list[Snapshot] = []
    with hookstats.attach(model, **{"every": 1} | how, sinks=taken.append) as monitor:
        for step in range(steps):
            before(step)
            model.zero_grad()
            loss = loss_of(step)
            given, differentiated = loss if isinstance(loss, tuple) else (loss, loss)
            differentiated.backward()
            for each in optimizers if isinstance(optimizers, list) else [optimizers]:
                each.step()
            monitor.step(loss=given)
    return taken


class OnDigits:
    """The loss of a classifier on random batches of digits."""

    def __init__(self, model: nn.Module, shape: tuple[int, ...] = (64,)) -> None:
        self.model = model
        self.images, self.labels = images()
        self.images = self.images.view(-1, *shape)

    def __call__(self, step: int) -> torch.Tensor:
        chosen = torch.randint(len(self.labels), (64,))
        return cross_entropy(self.model(self.images[chosen]), self.labels[chosen])
