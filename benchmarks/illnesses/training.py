"""A small training whose parts can be changed one by one, how a change is registered, and how it is run."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hookstats
from benchmarks.illnesses.models import GPT, Recurrent, cnn, layers, resnet
from hookstats import Snapshot

Batch = tuple[torch.Tensor, torch.Tensor]
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass
class Setup:
    """A training as it is before somebody changes it. A change replaces some of its parts."""

    kind: str
    model: Any
    make_optimizer: Optimizers
    data: Callable[[int], Batch]
    loss: Callable[[Any, torch.Tensor], torch.Tensor] = cross_entropy
    steps: int = 130
    before: list[Callable[[int], object]] = field(default_factory=list)  # each step
    damage: Callable[[int, torch.Tensor, torch.Tensor], Batch] = lambda step, x, y: (x, y)  # the batch
    zeroes: bool = True
    after_backward: Callable[[int], object] = lambda step: None
    steps_optimizer: Callable[[int], bool] = lambda step: True
    optimizer: Any = None  # made at the end, where a change has made none

    def step(self, number: int) -> torch.Tensor:
        """Train one step, and return its loss."""
        for each in self.before:
            each(number)
        if self.zeroes:
            self.optimizer.zero_grad()
        loss = self.loss_of(number)
        loss.backward()
        self.after_backward(number)
        if self.steps_optimizer(number):
            self.optimizer.step()
        return loss

    def loss_of(self, number: int) -> torch.Tensor:
        x, y = self.damage(number, *self.data(number))
        return self.loss(self.model(x), y)

    def set_lr(self, lr: float, group: int | None = None) -> None:
        for i, each in enumerate(self.optimizer.param_groups):
            if group in (None, i):
                each["lr"] = lr

    def cast(self, dtype: torch.dtype) -> None:
        """Hold parameters and images in a dtype."""
        self.model.to(dtype)
        self.damage = lambda step, x, y: (x.to(dtype) if x.is_floating_point() else x, y)

    def clip(self, norm: float) -> None:
        self.after_backward = lambda step: nn.utils.clip_grad_norm_(self.model.parameters(), norm)


@cache
def images() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 1,797 images of 8 x 8 pixels, float32 ``[n, 64]``, and their labels."""
    data = pytest.importorskip("sklearn.datasets").load_digits()
    return torch.tensor(data.data / 16.0, dtype=torch.float32), torch.tensor(data.target)


def some(size: int = 32, *shape: int) -> Batch:
    """Return random images, with their labels."""
    pixels, labels = images()
    chosen = torch.randint(len(labels), (size,))
    return pixels[chosen].view(size, *(shape or (64,))), labels[chosen]


@cache
def text() -> torch.Tensor:
    """Return characters of Python's own library, below 128."""
    return torch.tensor(list(Path(os.__file__).read_bytes())).clamp(max=127)


def lines(size: int = 8, length: int = 24) -> torch.Tensor:
    """Return random pieces of it, ``[size, length]``."""
    starts = torch.randint(len(text()) - length, (size,)).tolist()
    return torch.stack([text()[start : start + length] for start in starts])


def digits(size: int = 64, *shape: int) -> Callable[[int], Batch]:
    return lambda step: some(size, *shape)


def words(size: int = 8, length: int = 24) -> Callable[[int], Batch]:
    return lambda step: (lambda ids: (ids[:, :-1], ids[:, 1:]))(lines(size, length))


def of_tokens(output: Any, targets: torch.Tensor) -> torch.Tensor:
    logits = output[0] if isinstance(output, tuple) else output
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def by(optimizer: Callable[..., torch.optim.Optimizer], lr: float, **how: Any) -> Optimizers:
    return lambda model: optimizer([*model.parameters()], lr, **how)


def sgd(lr: float, momentum: float = 0.9, **how: Any) -> Optimizers:
    return by(torch.optim.SGD, lr, momentum=momentum, **how)


def adam(lr: float, **how: Any) -> Optimizers:
    return by(torch.optim.AdamW, lr, **how)


KINDS: dict[str, Callable[[], Setup]] = {
    "mlp": lambda: Setup("mlp", layers(64, 64, 64, 64, 10), sgd(0.03), digits()),
    "tanh": lambda: Setup("tanh", layers(64, 64, 64, 64, 10, activation=nn.Tanh), adam(1e-3), digits()),
    "cnn": lambda: Setup("cnn", cnn(), adam(2e-3), digits(64, 1, 8, 8)),
    "resnet": lambda: Setup("resnet", resnet(), sgd(0.03), digits(64, 1, 8, 8)),
    "gpt": lambda: Setup("gpt", GPT(), adam(3e-3), words(), of_tokens),
    "lstm": lambda: Setup("lstm", Recurrent(nn.LSTM), adam(5e-3), words(), of_tokens),
}
# Those whose model is all their own.
OWN: dict[str, Callable[[], Setup]] = {
    "digits": lambda: Setup("digits", None, adam(1e-3), digits(32), steps=150),
    "text": lambda: Setup("text", None, adam(1e-3), words(), of_tokens, steps=150),
}
# Of files, whether no threshold was set by their trainings. Of other files half of them are unseen, by name.
UNSEEN = {"more": True, "more_healthy": True} | dict.fromkeys(
    ("public_mistakes", "public_healthy", "twins", "counted", "spikes"), False
)


class Measured(NamedTuple):
    snapshots: list[Snapshot]
    losses: list[float]


class Training(NamedTuple):
    """One that is registered, and what would be a right diagnosis of it; without rules it is healthy."""

    kind: str
    change: Callable[[Setup], object]
    rules: frozenset[str] = frozenset()
    where: tuple[str, ...] | None = None  # names of modules or parameters, one of which is to be named
    began: int = 0

    @property
    def name(self) -> str:
        return self.change.__name__

    @property
    def key(self) -> str:
        return self.name if self.kind in OWN else f"{self.name}.{self.kind}"

    @property
    def is_unseen(self) -> bool:
        """Return whether no threshold was set by it."""
        name = self.name if self.rules else self.key
        return UNSEEN.get(self.change.__module__.rpartition(".")[2], zlib.crc32(name.encode()) % 2 == 1)

    def make(self) -> Setup:
        seed()
        setup = (KINDS | OWN)[self.kind]()
        self.change(setup)
        setup.optimizer = setup.optimizer or setup.make_optimizer(setup.model)
        return setup

    def run(self, **how: Any) -> Measured:
        """Measure each step, as `attach` does it where nothing else is asked for."""
        setup, snapshots, losses = self.make(), list[Snapshot](), []
        with hookstats.attach(setup.model, every=1, sinks=snapshots.append, **how) as monitor:
            for number in range(setup.steps):
                loss = setup.step(number)
                losses.append(float(loss))
                monitor.step(loss=loss)
        return Measured(snapshots, losses)


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002, sklearn's


ILL: dict[str, Training] = {}
HEALTHY: dict[str, Training] = {}
Register = Callable[[Callable[[Setup], object]], Callable[[Setup], object]]


def _add(registered: dict[str, Training], training: Training) -> None:
    if training.key in registered:
        raise ValueError(f"expected a new name for a training, got {training.key} again")
    registered[training.key] = training


def ill(*rules: str, on: tuple[str, ...] = ("mlp", "cnn"), where: Any = None, began: int = 0) -> Register:
    """Register an illness. rules: those that name its cause. on: the kinds of models that it is tried on.

    where: of which modules or parameters a finding must speak: names, or a dict of these by kind. None: of any.
    """

    def register(change: Callable[[Setup], object]) -> Callable[[Setup], object]:
        for kind in on:
            names = where.get(kind) if isinstance(where, dict) else where
            places = (names,) if isinstance(names, str) else names
            _add(ILL, Training(kind, change, frozenset(rules), places, began))
        return change

    return register


def healthy(*kinds: str) -> Register:
    """Register a change of a healthy training that leaves it healthy."""

    def register(change: Callable[[Setup], object]) -> Callable[[Setup], object]:
        for kind in kinds:
            _add(HEALTHY, Training(kind, change))
        return change

    return register
