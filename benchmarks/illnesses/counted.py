"""Mistakes that counts and equalities tell, each beside its healthy twin: in the seen half."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import nn
from torch.nn.functional import (
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    cross_entropy,
    one_hot,
)

from benchmarks.illnesses.models import Around, layers
from benchmarks.illnesses.training import Setup, adam, healthy, ill, sgd

# What norms and dropout make of few values


def _normalised(setup: Setup, norm: Callable[[int], nn.Module], rows: int) -> None:
    setup.model = nn.Sequential(nn.Linear(64, 64), norm(64), nn.ReLU(), nn.Linear(64, 10))
    setup.damage = lambda step, x, y: (x[:rows], y[:rows])


@ill("norm-of-few-values", on=("mlp",), where="1")
def batches_of_two_before_a_batch_norm(setup: Setup) -> None:
    _normalised(setup, nn.BatchNorm1d, 2)


@healthy("mlp")
def batches_of_sixteen_before_a_batch_norm(setup: Setup) -> None:
    _normalised(setup, nn.BatchNorm1d, 16)


@healthy("mlp")
def batches_of_two_before_a_layer_norm(setup: Setup) -> None:
    _normalised(setup, nn.LayerNorm, 2)


@healthy("resnet")
def batches_of_two_images(setup: Setup) -> None:
    """The norms have 64 places of each."""
    setup.make_optimizer = sgd(1e-3)
    setup.damage = lambda step, x, y: (x[:2], y[:2])


def _of_frozen_body(setup: Setup, train: bool) -> None:
    """Train the last layer alone, of a model whose norms know the data."""
    with torch.no_grad():
        for step in range(20):
            setup.model(setup.data(step)[0])
    setup.model[:-1].requires_grad_(False)
    setup.make_optimizer = lambda model: sgd(0.1)(model[-1])
    setup.before.append(lambda step: setup.model[:-1].train(train))


@ill("moving-statistics", on=("resnet",))
def a_frozen_body_in_training_mode(setup: Setup) -> None:
    _of_frozen_body(setup, True)


@healthy("resnet")
def a_frozen_body_in_evaluation_mode(setup: Setup) -> None:
    _of_frozen_body(setup, False)


@ill("heavy-dropout", on=("mlp",), where=("1", "4"))
def dropouts_that_were_given_the_share_to_keep(setup: Setup) -> None:
    setup.model.insert(2, nn.Dropout(0.95))
    setup.model.insert(5, nn.Dropout(0.95))


@healthy("mlp")
def a_pooling_that_leaves_a_ninth(setup: Setup) -> None:
    """The gradient of what it does not choose is 0."""
    setup.model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(64, 10)
    )


@ill("heavy-dropout", on=("mlp",), where="6")
def a_dropout_after_the_last_layer(setup: Setup) -> None:
    setup.model.append(nn.Dropout(0.2))


# What comes before a loss that has its own


@ill("probabilities-as-logits", on=("mlp",))
def a_tanh_before_the_cross_entropy(setup: Setup) -> None:
    setup.steps = 250
    setup.model.append(nn.Tanh())


@ill("probabilities-as-logits", on=("mlp",))
def a_sigmoid_before_a_binary_cross_entropy_of_logits(setup: Setup) -> None:
    setup.model.append(nn.Sigmoid())
    setup.loss = lambda out, y: binary_cross_entropy_with_logits(out, one_hot(y, 10).float())


@healthy("mlp")
def a_sigmoid_before_a_binary_cross_entropy(setup: Setup) -> None:
    setup.model.append(nn.Sigmoid())
    setup.loss = lambda out, y: binary_cross_entropy(out, one_hot(y, 10).float())


@healthy("cnn")
def answers_that_are_means_over_the_image(setup: Setup) -> None:
    """They begin between 0 and 1, as a pooling behind a ReLU leaves them."""
    setup.model = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 10, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


# No gradient


@ill("no-gradients", on=("mlp", "gpt"))
def a_loss_that_is_made_anew(setup: Setup) -> None:
    loss = setup.loss
    setup.loss = lambda out, y: torch.tensor(loss(out, y).item(), requires_grad=True)


@healthy("mlp")
def a_frozen_model_that_is_looked_at(setup: Setup) -> None:
    setup.model.requires_grad_(False)
    setup.step = lambda step: cross_entropy(setup.model(setup.data(step)[0]), setup.data(step)[1])


@ill("unchanged-parameters", on=("mlp",))
def a_cross_entropy_over_a_single_class(setup: Setup) -> None:
    """A decision between two, with one answer."""
    setup.model = layers(64, 64, 1)
    setup.loss = lambda out, y: cross_entropy(out, torch.zeros_like(y))


# Twice the same


def _of_two_critics(setup: Setup, second: Callable[[nn.Module], nn.Module]) -> None:
    first = layers(64, 64, 64, 10)
    setup.model = nn.ModuleDict({"one": first, "two": second(first)})
    setup.make_optimizer = adam(1e-3)

    def loss_of(number: int) -> torch.Tensor:
        x, y = setup.data(number)
        return cross_entropy(setup.model["one"](x), y) + cross_entropy(setup.model["two"](x), y)

    setup.loss_of = loss_of


@ill("equal-modules", on=("mlp",), where="one")
def a_critic_that_began_as_a_copy_of_the_other(setup: Setup) -> None:
    _of_two_critics(setup, deepcopy)


@healthy("mlp")
def two_critics_that_began_apart(setup: Setup) -> None:
    _of_two_critics(setup, lambda first: layers(64, 64, 64, 10))


@healthy("gpt")
def blocks_that_began_as_copies(setup: Setup) -> None:
    """Copy them, as torch's own encoder does."""
    setup.model.blocks = nn.ModuleList(deepcopy(setup.model.blocks[0]) for _ in range(3))


@ill("missing-gradients", on=("mlp",), where="extra")
def a_layer_that_forward_forgets(setup: Setup) -> None:
    setup.model = Around(setup.model, lambda model, x: model(x))
    setup.model.extra = nn.Linear(64, 64)


# Steps that are too small


@ill("tiny-updates", on=("mlp", "tanh", "gpt"), began=40)
def a_decay_for_each_epoch_that_is_taken_at_each_batch(setup: Setup) -> None:
    setup.before.append(lambda step: setup.set_lr(3e-3 * 0.8**step))


@healthy("mlp")
def stairs_of_epochs(setup: Setup) -> None:
    setup.before.append(lambda step: setup.set_lr(0.03 * 0.1 ** (step // 50)))


# Losses that cannot be


@ill("impossible-loss", on=("mlp",))
def targets_beyond_one_of_a_binary_cross_entropy(setup: Setup) -> None:
    setup.loss = lambda out, y: binary_cross_entropy_with_logits(out, 10.0 * one_hot(y, 10))


@healthy("mlp")
def targets_of_a_binary_cross_entropy(setup: Setup) -> None:
    setup.loss = lambda out, y: binary_cross_entropy_with_logits(out, one_hot(y, 10).float())


@ill("impossible-loss", on=("gpt",))
def labels_that_are_not_shifted(setup: Setup) -> None:
    """Every token is to be answered by itself."""
    setup.steps = 250
    setup.make_optimizer = adam(1e-2)
    setup.damage = lambda step, x, y: (x, x)


@ill("no-progress", on=("mlp", "tanh"))
def answers_that_the_input_says_nothing_of(setup: Setup) -> None:
    """A model can learn how frequent each is, and nothing else."""
    setup.steps = 220
    setup.damage = lambda step, x, y: (x, (10 * torch.rand(len(x)) ** 1.6).long())


@ill("input-shift", on=("mlp", "cnn"))
def pixels_that_are_scaled_in_place(setup: Setup) -> None:
    """A little each time that they come."""
    setup.damage = lambda step, x, y: (x * 1.01**step, y)
