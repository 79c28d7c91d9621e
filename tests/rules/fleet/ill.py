"""Trainings that are truly ill."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from tests.rules.fleet.models import GPT, layers
from tests.rules.fleet.training import Training, ill, images, lines, plain, set_lr, some
from tests.rules.trainings import Experts, Stream

SPIKE = ("loss-spike", "exploding-gradients", "gradient-norm-spike")


def digits_of(model: nn.Module, optimizer: torch.optim.Optimizer, before: object = None, steps: int = 120) -> Training:
    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some(64)
        return cross_entropy(model(pixels), labels)

    return Training(model, plain(model, loss_of, optimizer, before=before), steps)  # type: ignore[arg-type]


@ill(*SPIKE)
def learning_rate_that_diverges_in_the_middle() -> Training:
    model = layers(64, 64, 64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return digits_of(model, optimizer, lambda i: set_lr(optimizer, 0.05 if i < 60 else 1.5))


@ill("loss-spike")
def learning_rate_that_diverges_from_the_start() -> Training:
    model = nn.Linear(64, 1)
    pixels, labels = images()
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    return Training(model, plain(model, lambda i: mse_loss(model(pixels)[:, 0], labels.float()), optimizer), 40)


@ill("loss-spike")
def jump_of_a_language_model() -> Training:
    """One step with a learning rate that is far too large, from which it comes back slowly."""
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    step = plain(
        model, lambda i: model.loss(lines()), optimizer, before=lambda i: set_lr(optimizer, 0.3 if i == 43 else 3e-3)
    )
    return Training(model, step, 120)


@ill(*SPIKE)
def slow_divergence_of_a_language_model() -> Training:
    """The learning rate is warmed up, and goes on."""
    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), 0.0, momentum=0.9)
    step = plain(model, lambda i: model.loss(lines()), optimizer, before=lambda i: set_lr(optimizer, 0.05 * 1.03**i))
    return Training(model, step, 220)


@ill(*SPIKE)
def spike_of_the_learning_rate() -> Training:
    model = layers(64, 64, 64, 10)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    return digits_of(model, optimizer, lambda i: set_lr(optimizer, 0.3 if i == 74 else 1e-3), 150)


@ill(*SPIKE)
def corrupted_batches() -> Training:
    model = layers(64, 64, 64, 10)

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some(64)
        if number in (101, 102, 103):
            pixels, labels = 20 * pixels, torch.randint(10, (64,))
        return cross_entropy(model(pixels), labels)

    return Training(model, plain(model, loss_of, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)), 130)


@ill(*SPIKE)
def labels_that_are_random_in_one_batch() -> Training:
    model = layers(64, 64, 64, 10)

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some(64)
        return cross_entropy(model(pixels), torch.randint(10, (64,)) if number == 203 else labels)

    return Training(model, plain(model, loss_of, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)), 230)


@ill(*SPIKE)
def weights_that_a_bit_has_flipped() -> Training:
    model = layers(64, 64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def flip(number: int) -> None:
        if number == 85:
            with torch.no_grad():
                model[2].weight[3, model[2].weight[3].argmax()] *= 2.0**8

    return digits_of(model, optimizer, flip)


@ill("nonfinite")
def nan_by_the_data() -> Training:
    model = layers(64, 64, 10)

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some()
        if number == 53:
            pixels[3, 7] = float("nan")
        return cross_entropy(model(pixels), labels)

    return Training(model, plain(model, loss_of, torch.optim.SGD(model.parameters(), 0.1)), 80)


@ill("nonfinite")
def nan_by_the_loss() -> Training:
    """A division, in a step that may not be measured."""
    model = layers(64, 64, 10)

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some()
        loss = cross_entropy(model(pixels), labels)
        return loss if number != 53 else loss * (loss - loss) / (loss - loss).detach()

    return Training(model, plain(model, loss_of, torch.optim.SGD(model.parameters(), 0.1)), 80)


@ill("dead-channels")
def relus_that_adam_has_killed() -> Training:
    model = layers(64, 64, 64, 10)
    return digits_of(model, torch.optim.Adam(model.parameters(), 0.3), steps=100)


@ill("dead-channels")
def relu_behind_a_negative_bias() -> Training:
    model = layers(64, 64, 64, 10)
    with torch.no_grad():
        model[2].bias.fill_(-20)
    return digits_of(model, torch.optim.SGD(model.parameters(), 0.05), steps=100)


@ill("vanishing-gradients")
def stack_of_sigmoids() -> Training:
    model = layers(*[64] * 13, 10, activation=nn.Sigmoid)
    return digits_of(model, torch.optim.SGD(model.parameters(), 0.05), steps=60)


@ill("exploding-gradients")
def stack_with_large_weights() -> Training:
    model = layers(*[64] * 13, 10)
    with torch.no_grad():
        for layer in model[::2]:
            nn.init.orthogonal_(layer.weight, 8.0)
    return digits_of(model, torch.optim.SGD(model.parameters(), 1e-12), steps=60)


@ill("saturated-channels")
def saturated_tanh() -> Training:
    model = layers(64, 64, 64, 64, 10, activation=nn.Tanh)
    with torch.no_grad():
        model[2].weight.mul_(1000)
    return digits_of(model, torch.optim.SGD(model.parameters(), 1e-3), steps=110)


@ill("outlier-channels")
def massive_channel() -> Training:
    model = Stream(blocks=4)
    with torch.no_grad():
        model.blocks[1].down.bias[17] = 3e4
    return digits_of(model, torch.optim.SGD(model.parameters(), 1e-3), steps=60)


@ill("update-ratio")
def updates_that_are_too_large() -> Training:
    model = layers(64, 64, 64, 10, activation=nn.Tanh)
    return digits_of(model, torch.optim.Adam(model.parameters(), 0.1), steps=120)


@ill("expert-load")
def collapsed_router() -> Training:
    model = Experts()
    with torch.no_grad():
        model.router.bias[3] = 20
    return digits_of(model, torch.optim.SGD(model.parameters(), 0.01), steps=110)


@ill("residual-drift")
def stream_that_grows() -> Training:
    model = Stream(gain=30.0, norm=False)
    return digits_of(model, torch.optim.SGD(model.parameters(), 1e-5), steps=60)
