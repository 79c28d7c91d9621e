"""Trainings that jump, diverge or die at once, with models of their own: ill, and in the seen half."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam

from benchmarks.illnesses.ill import when
from benchmarks.illnesses.models import GPT, layers
from benchmarks.illnesses.training import Batch, Setup, adam, by, digits, ill, images, sgd

SPIKE = ("loss-spike", "exploding-gradients", "gradient-norm-spike")


@ill("loss-spike", on=("digits",))
def learning_rate_that_diverges_from_the_start(setup: Setup) -> None:
    setup.model, setup.make_optimizer, setup.steps = nn.Linear(64, 1), by(SGD, 0.3), 40
    pixels, labels = images()
    setup.loss_of = lambda number: mse_loss(setup.model(pixels)[:, 0], labels.float())


@ill("loss-spike", on=("text",))
def jump_of_a_language_model(setup: Setup) -> None:
    """One step with a learning rate that is far too large, from which it comes back slowly."""
    setup.model, setup.make_optimizer, setup.steps = GPT(), adam(3e-3), 120
    setup.before = [lambda i: setup.set_lr(0.3 if i == 43 else 3e-3)]


@ill(*SPIKE, on=("text",))
def slow_divergence_of_a_language_model(setup: Setup) -> None:
    """The learning rate is warmed up, and goes on."""
    setup.model, setup.make_optimizer, setup.steps = GPT(), sgd(0.0), 220
    setup.before = [lambda i: setup.set_lr(0.05 * 1.03**i)]


def _of_layers(setup: Setup, steps: int, lr: float = 0.01) -> None:
    setup.model, setup.make_optimizer = layers(64, 64, 64, 10), sgd(lr)
    setup.data, setup.steps = digits(64), steps


@ill(*SPIKE, on=("digits",))
def spike_of_the_learning_rate(setup: Setup) -> None:
    _of_layers(setup, 150)
    setup.make_optimizer = by(Adam, 1e-3)
    setup.before = [lambda i: setup.set_lr(0.3 if i == 74 else 1e-3)]


@ill(*SPIKE, on=("digits",))
def corrupted_batches(setup: Setup) -> None:
    _of_layers(setup, 130)

    def damage(step: int, x: torch.Tensor, y: torch.Tensor) -> Batch:
        return (20 * x, torch.randint(10, (64,))) if step in (101, 102, 103) else (x, y)

    setup.damage = damage


@ill(*SPIKE, on=("digits",))
def labels_that_are_random_in_one_batch(setup: Setup) -> None:
    _of_layers(setup, 230, lr=0.1)
    setup.damage = lambda step, x, y: (x, torch.randint(10, (64,)) if step == 203 else y)


@ill(*SPIKE, on=("digits",))
def weights_that_a_bit_has_flipped(setup: Setup) -> None:
    _of_layers(setup, 120)

    row = setup.model[2].weight[3]
    setup.before = when(85, lambda: row[row.argmax()].mul_(2.0**8))


@ill("nonfinite", on=("digits",))
def nan_by_the_loss(setup: Setup) -> None:
    """A division, in a step that may not be measured."""
    setup.model, setup.make_optimizer, setup.steps = layers(64, 64, 10), by(SGD, 0.1), 80
    usual = setup.loss_of

    def loss_of(number: int) -> torch.Tensor:
        loss = usual(number)
        return loss if number != 53 else loss * (loss - loss) / (loss - loss).detach()

    setup.loss_of = loss_of


@ill("dead-channels", on=("digits",))
def relus_that_adam_has_killed(setup: Setup) -> None:
    _of_layers(setup, 100)
    setup.make_optimizer = by(Adam, 0.3)


@ill("update-ratio", on=("digits",))
def updates_that_are_too_large(setup: Setup) -> None:
    setup.model, setup.make_optimizer = layers(64, 64, 64, 10, activation=nn.Tanh), by(Adam, 0.1)
    setup.data, setup.steps = digits(64), 120
