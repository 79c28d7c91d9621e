"""A small training whose parts can be broken one by one, and how it is run and judged."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hookstats
from hookstats import Monitor, Snapshot
from tests.rules.fleet.models import GPT, Recurrent, cnn, layers, resnet
from tests.rules.fleet.training import images, lines

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Setup:
    """A training as it is before somebody breaks it. An illness replaces some of its parts."""

    kind: str
    model: nn.Module
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    data: Callable[[int], Batch]
    loss: Callable[[Any, torch.Tensor], torch.Tensor]
    steps: int = 130
    before: list[Callable[[int], None]] = field(default_factory=list)  # each step
    damage: Callable[[int, torch.Tensor, torch.Tensor], Batch] = lambda step, x, y: (x, y)  # the batch
    zeroes: bool = True
    after_backward: Callable[[int], None] = lambda step: None
    steps_optimizer: Callable[[int], bool] = lambda step: True
    own_step: Callable[[int], torch.Tensor] | None = None  # in place of all of this
    optimizer: torch.optim.Optimizer = field(init=False)

    def prepare(self) -> None:
        self.optimizer = self.make_optimizer(self.model)

    def step(self, number: int) -> torch.Tensor:
        if self.own_step is not None:
            return self.own_step(number)
        for each in self.before:
            each(number)
        if self.zeroes:
            self.optimizer.zero_grad()
        x, y = self.damage(number, *self.data(number))
        loss = self.loss(self.model(x), y)
        loss.backward()
        self.after_backward(number)
        if self.steps_optimizer(number):
            self.optimizer.step()
        return loss

    def set_lr(self, lr: float, group: int | None = None) -> None:
        for i, each in enumerate(self.optimizer.param_groups):
            if group in (None, i):
                each["lr"] = lr


def _digits(*shape: int) -> Callable[[int], Batch]:
    pixels, labels = images()

    def data(step: int) -> Batch:
        chosen = torch.randint(len(labels), (64,))
        return pixels[chosen].view(-1, *shape) if shape else pixels[chosen], labels[chosen]

    return data


def _text(step: int) -> Batch:
    ids = lines()
    return ids[:, :-1], ids[:, 1:]


def _of_tokens(output: Any, targets: torch.Tensor) -> torch.Tensor:
    logits = output[0] if isinstance(output, tuple) else output
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def sgd(lr: float, **how: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr, momentum=0.9, **how)


def adam(lr: float, **how: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr, **how)


KINDS: dict[str, Callable[[], Setup]] = {
    "mlp": lambda: Setup("mlp", layers(64, 64, 64, 64, 10), sgd(0.03), _digits(), cross_entropy),
    "tanh": lambda: Setup("tanh", layers(64, 64, 64, 64, 10, activation=nn.Tanh), adam(1e-3), _digits(), cross_entropy),
    "cnn": lambda: Setup("cnn", cnn(), adam(2e-3), _digits(1, 8, 8), cross_entropy),
    "resnet": lambda: Setup("resnet", resnet(), sgd(0.03), _digits(1, 8, 8), cross_entropy),
    "gpt": lambda: Setup("gpt", GPT(), adam(3e-3), _text, _of_tokens),
    "lstm": lambda: Setup("lstm", Recurrent(nn.LSTM), adam(5e-3), _text, _of_tokens),
}


_SEEN = ("public_mistakes", "twins", "counted")  # files


class Illness(NamedTuple):
    """One thing that is broken, and what would be a right diagnosis of it."""

    name: str
    kind: str
    breaks: Callable[..., Any]
    rules: frozenset[str]
    where: tuple[str, ...] | None  # names of modules or parameters, one of which is to be named
    began: int

    @property
    def is_unseen(self) -> bool:
        """Return whether no threshold was set by it: so of all in more.py, of none in _SEEN, of others by name."""
        file = self.breaks.__module__.rpartition(".")[2]
        return file == "more" or (
            file not in _SEEN and self.kind != "fleet" and zlib.crc32(self.name.encode()) % 2 == 1
        )

    def make(self) -> Setup:
        setup = KINDS[self.kind]()
        self.breaks(setup)
        return setup


ILL: list[Illness] = []


def ill(
    *rules: str, on: tuple[str, ...] = ("mlp", "cnn"), where: Any = None, began: int = 0
) -> Callable[[Callable[[Setup], None]], Callable[[Setup], None]]:
    """Registers an illness. rules: those that name its cause. on: the kinds of models that it is tried on.

    where: of which modules or parameters a finding must speak: names, or a dict of these by kind. None: of any.
    """

    def register(breaks: Callable[[Setup], None]) -> Callable[[Setup], None]:
        for kind in on:
            names = where.get(kind) if isinstance(where, dict) else where
            places = (names,) if isinstance(names, str) else names
            ILL.append(Illness(breaks.__name__, kind, breaks, frozenset(rules), places, began))
        return breaks

    return register


class Measured(NamedTuple):
    snapshots: list[Snapshot]
    losses: list[float]


def seeded() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002, sklearn's


ROWS = [1]  # of which each so-many-th is read


def attached(model: nn.Module, snapshots: list[Snapshot]) -> Monitor:
    """At every step, as `attach` does it where nothing else is asked for."""
    return hookstats.attach(model, every=1, rows=ROWS[-1], sinks=snapshots.append)


def run(setup: Setup) -> Measured:
    """A training that is measured."""
    snapshots: list[Snapshot] = []
    losses = []
    setup.prepare()
    with attached(setup.model, snapshots) as monitor:
        for number in range(setup.steps):
            loss = setup.step(number)
            losses.append(float(loss))
            monitor.step(loss=loss)
    return Measured(snapshots, losses)
