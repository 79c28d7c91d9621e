"""A fleet of short trainings by which the rules are judged: usual ones, unusual but healthy ones, and ill ones."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import hookstats
from hookstats import Snapshot
from hookstats.rules import Finding, judge
from tests.rules.trainings import ALL, digits


class Training(NamedTuple):
    """step: does one step of training, optimizer and all, and returns its loss."""

    model: nn.Module
    step: Callable[[int], Any]
    steps: int = 150


Maker = Callable[[], Training]
USUAL: dict[str, Maker] = {}
UNUSUAL: dict[str, Maker] = {}
UNSEEN: dict[str, Maker] = {}  # unusual ones that no threshold was set by
ILL: dict[str, tuple[Maker, frozenset[str]]] = {}  # and the rules of which one has to find it


def usual(make: Maker) -> Maker:
    USUAL[make.__name__] = make
    return make


def unusual(make: Maker) -> Maker:
    UNUSUAL[make.__name__] = make
    return make


def unseen(make: Maker) -> Maker:
    UNSEEN[make.__name__] = make
    return make


def ill(*rules: str) -> Callable[[Maker], Maker]:
    """rules: of which one has to find it."""

    def register(make: Maker) -> Maker:
        ILL[make.__name__] = make, frozenset(rules)
        return make

    return register


def run(make: Maker, seed: int = 0) -> list[Snapshot]:
    """The snapshots of a training, one of every step."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002, sklearn's
    training = make()
    snapshots: list[Snapshot] = []
    with hookstats.attach(training.model, every=1, tensors=ALL, sinks=snapshots.append) as monitor:
        for number in range(training.steps):
            monitor.step(loss=training.step(number))
    return snapshots


def thinned(snapshots: list[Snapshot], every: int) -> list[Snapshot]:
    """Keep every n-th step as measured, and the scalars of all others."""
    kept, earlier = [], {}
    for snapshot in snapshots:
        if snapshot.step % every:
            earlier[snapshot.step] = snapshot.scalars
        else:
            kept.append(Snapshot(replace(snapshot.frame, earlier_scalars=earlier)))
            earlier = {}
    return kept


def alarms(snapshots: list[Snapshot]) -> list[Finding]:
    """Return the findings that are worse than a note."""
    return [finding for finding in judge(snapshots) if finding.severity != "note"]


def plain(
    model: nn.Module,
    loss_of: Callable[[int], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    clip: float | None = None,
    before: Callable[[int], object] | None = None,
) -> Callable[[int], torch.Tensor]:
    """A step of training as most are, whose loss is given as it is. before: may change what it will."""

    def step(number: int) -> torch.Tensor:
        if before is not None:
            before(number)
        optimizer.zero_grad()
        loss = loss_of(number)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss

    return step


@cache
def images() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of digits, ``[n, 64]``, and their labels."""
    return digits()


def some(size: int = 32, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random digits, with their labels."""
    pixels, labels = images()
    chosen = torch.randint(len(labels), (size,))
    return pixels[chosen].view(size, *(shape or (64,))), labels[chosen]


@cache
def text() -> torch.Tensor:
    """Characters of Python's own library, below 128."""
    return torch.tensor(list(Path(os.__file__).read_bytes())).clamp(max=127)


def lines(size: int = 8, length: int = 24) -> torch.Tensor:
    """Random pieces of it, ``[size, length]``."""
    starts = torch.randint(len(text()) - length, (size,)).tolist()
    return torch.stack([text()[start : start + length] for start in starts])


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
