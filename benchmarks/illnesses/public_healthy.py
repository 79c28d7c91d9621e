"""Healthy trainings beside the mistakes of public_mistakes.py, and those that once set off alarms: in the seen half."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import (
    cosine_similarity,
    cross_entropy,
    log_softmax,
    mse_loss,
    nll_loss,
    normalize,
)

from benchmarks.illnesses.models import Recurrent, Rotating, frequencies, layers
from benchmarks.illnesses.public_mistakes import (
    Heads,
    adversarial,
    in_microbatches,
    of_classes,
    regression,
    scaled,
    variational,
    with_two_losses,
)
from benchmarks.illnesses.training import Batch, Setup, adam, healthy, sgd

# Labels and losses


@healthy("mlp")
def a_column_against_a_column(setup: Setup) -> None:
    regression(setup)
    setup.loss = lambda out, y: mse_loss(out, y[:, None] / 10)


@healthy("mlp")
def a_whole_data_set_and_a_number(setup: Setup) -> None:
    """One target, on all the data in every step, slowly."""
    regression(setup)
    batch = setup.data(0)
    setup.data = lambda step: batch
    setup.make_optimizer = sgd(1e-4)
    setup.loss = lambda out, y: mse_loss(out.squeeze(1), y / 10)


@healthy("mlp")
def numbers_that_are_large(setup: Setup) -> None:
    """Years: the answer is nearly the same for all rows until it has come there."""
    regression(setup)
    setup.make_optimizer = adam(0.05)
    setup.loss = lambda out, y: mse_loss(out.squeeze(1), 100 + y / 1.0)


@healthy("mlp", "cnn")
def a_negative_log_likelihood_of_log_probabilities(setup: Setup) -> None:
    setup.model.append(nn.LogSoftmax(-1))
    setup.loss = nll_loss


@healthy("mlp")
def a_log_softmax_in_the_loss(setup: Setup) -> None:
    setup.loss = lambda out, y: nll_loss(log_softmax(out, -1), y)


@healthy("mlp")
def values_of_actions(setup: Setup) -> None:
    """One value of each row has a target, as in Q learning."""
    setup.loss = lambda out, y: mse_loss(out.gather(1, y[:, None]).squeeze(1), y / 10)


@healthy("cnn")
def batches_of_eight(setup: Setup) -> None:
    of_classes(setup, lambda step, labels: torch.randint(len(labels), (8,)))


@healthy("mlp")
def a_class_that_is_nearly_all(setup: Setup) -> None:
    def batch(step: int, labels: torch.Tensor) -> torch.Tensor:
        rare = torch.rand(len(labels)) < 0.001
        rows = ((labels == 3) | rare).nonzero().squeeze(1)
        return rows[torch.randint(len(rows), (32,))]

    of_classes(setup, batch)


# Answers that do not depend on the row


@healthy("mlp")
def a_class_that_is_rare(setup: Setup) -> None:
    """One row in two hundred."""

    def damage(step: int, x: torch.Tensor, y: torch.Tensor) -> Batch:
        keeps = (y != 7) | (torch.rand(len(y)) < 0.05)
        return x[keeps], y[keeps]

    setup.damage = damage


@healthy("mlp")
def a_class_that_comes_later(setup: Setup) -> None:
    """After 100 steps."""
    setup.damage = lambda step, x, y: (x[(y != 7) | (step >= 100)], y[(y != 7) | (step >= 100)])


@healthy("mlp")
def small_answers_that_are_learned(setup: Setup) -> None:
    """Answers of 0.01, from a last layer that begins small: their gradient is not that of their own size alone."""
    regression(setup)
    last: Any = setup.model[-1]
    nn.init.normal_(last.weight, std=1e-3)
    setup.loss = lambda out, y: mse_loss(out, (y[:, None] - 4.5) / 100)


@healthy("mlp")
def a_variational_autoencoder(setup: Setup) -> None:
    variational(setup, 0.1)


class _Siamese(nn.Module):
    """SimSiam, of Chen and He 2020."""

    def __init__(self) -> None:
        super().__init__()
        self.projector = nn.Sequential(
            nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(),
            nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64),
        )  # fmt: skip
        self.predictor = nn.Sequential(nn.Linear(64, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.projector(x + 0.1 * torch.randn_like(x))
        return self.predictor(z), z


@healthy("mlp")
def two_views_of_an_image(setup: Setup) -> None:
    setup.model, setup.make_optimizer = _Siamese(), sgd(0.05)

    def loss_of(number: int) -> torch.Tensor:
        x, _ = setup.data(number)
        (p1, z1), (p2, z2) = setup.model(x), setup.model(x)
        return -0.5 * (cosine_similarity(p1, z2.detach()).mean() + cosine_similarity(p2, z1.detach()).mean())

    setup.loss_of = loss_of


@healthy("mlp")
def an_encoder_by_contrast(setup: Setup) -> None:
    setup.model, setup.make_optimizer = layers(64, 64, 64, 32), adam(3e-3)

    def loss_of(number: int) -> torch.Tensor:
        x, _ = setup.data(number)
        one, two = (normalize(setup.model(x + 0.1 * torch.randn_like(x))) for _ in range(2))
        return cross_entropy(one @ two.T / 0.1, torch.arange(len(x)))

    setup.loss_of = loss_of


# Initial weights


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, 4, bias=False)
        self.up = nn.Linear(4, inner.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.up(self.down(x))


@healthy("mlp")
def low_rank_adapters(setup: Setup) -> None:
    for place in (0, 2, 4):
        setup.model[place] = Adapted(setup.model[place])
    setup.make_optimizer = adam(3e-3)


# What does not learn


@healthy("gpt")
def four_heads(setup: Setup) -> None:
    setup.model = Heads(0)


# Gradients


@healthy("mlp")
def gradients_that_are_unscaled_and_then_clipped(setup: Setup) -> None:
    scaled(setup, unscales=True)


@healthy("mlp")
def two_losses(setup: Setup) -> None:
    with_two_losses(setup, lambda step: 1.0)
    setup.clip(1.0)


@healthy("mlp")
def a_generator_and_its_critic(setup: Setup) -> None:
    adversarial(setup, zeroes_critic=True)


class _Actors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = layers(64, 64, 64, 64, 10), layers(64, 64, 64, 64, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.actor(x), self.critic(x)


@healthy("mlp")
def an_actor_and_a_critic(setup: Setup) -> None:
    """Side by side; the gradients of one are ten million times smaller than those of the other."""
    setup.model, setup.make_optimizer = _Actors(), adam(1e-3)

    def loss(out: Any, y: torch.Tensor) -> torch.Tensor:
        values = out[1].squeeze(1)
        return cross_entropy(out[0], y) * 1e-5 + 100 * mse_loss(values, 10.0 * y)

    setup.loss = loss


# Data


@healthy("gpt")
def microbatches(setup: Setup) -> None:
    setup.make_optimizer = adam(1e-3)
    in_microbatches(setup)


# Healthy ones that set off alarms


@healthy("mlp")
def layers_that_are_trained_one_after_another(setup: Setup) -> None:
    """Each for 40 steps, by an optimizer of its own: the gradients of the others stay where they were."""
    model = setup.model
    heads = [nn.Linear(64, 10) for _ in range(3)]
    stages = [[*model[2 * i].parameters(), *heads[i].parameters()] for i in range(3)]
    optimizers = [torch.optim.SGD(stage, 0.05, momentum=0.9) for stage in stages]

    def step(number: int) -> torch.Tensor:
        stage = min(number // 40, 2)
        x, y = setup.data(number)
        optimizers[stage].zero_grad()
        with torch.no_grad():
            hidden = model[: 2 * stage](x)
        hidden = model[2 * stage : 2 * stage + 2](hidden)
        loss = cross_entropy(heads[stage](hidden), y)
        loss.backward()
        optimizers[stage].step()
        return loss.detach()

    setup.step = step


@healthy("mlp")
def a_minimum_that_is_found(setup: Setup) -> None:
    """L-BFGS finds it, and then stays where it is."""
    setup.model = nn.Linear(64, 1)
    setup.optimizer = torch.optim.LBFGS(setup.model.parameters(), max_iter=20)
    x = torch.randn(256, 64)
    y = x @ torch.randn(64, 1)

    def step(number: int) -> torch.Tensor:
        def closure() -> torch.Tensor:
            setup.optimizer.zero_grad()
            loss = mse_loss(setup.model(x), y)
            loss.backward()
            return loss

        loss: Any = setup.optimizer.step(closure)
        return loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(loss)

    setup.step = step


@healthy("mlp")
def all_that_there_is_to_learn(setup: Setup) -> None:
    """Training in float16, with a scaler: the gradients become 0 when the data are known by heart."""
    batch = setup.data(0)
    setup.model, setup.make_optimizer = layers(64, 64, 64, 10), sgd(0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(number: int) -> torch.Tensor:
        setup.optimizer.zero_grad()
        x, y = batch
        with torch.autocast("cpu", torch.float16):
            loss = cross_entropy(setup.model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(setup.optimizer)
        scaler.update()
        return loss.detach()

    setup.step, setup.steps = step, 300


@healthy("mlp", "resnet")
def warm_restarts_of_sgd(setup: Setup) -> None:
    lr = 0.2 if setup.kind == "resnet" else 0.1
    setup.make_optimizer = sgd(lr)
    setup.before = [lambda step: setup.set_lr(lr * 0.5 * (1 + math.cos(math.pi * (step % 30) / 30)))]


@healthy("mlp")
def one_batch_that_is_noisy(setup: Setup) -> None:
    setup.make_optimizer = sgd(0.01)

    def damage(step: int, x: torch.Tensor, y: torch.Tensor) -> Batch:
        return (x + 0.5 * torch.randn_like(x), torch.randint(10, y.shape)) if step == 80 else (x, y)

    setup.damage = damage


@healthy("mlp")
def a_gradient_that_is_scaled_from_outside(setup: Setup) -> None:
    """Eight times from step 60 on: by a hook, or by eight ranks whose gradients are added up."""

    def scale(step: int) -> None:
        for each in setup.model.parameters():
            if step >= 60 and each.grad is not None:
                each.grad.mul_(8)

    setup.after_backward = scale
    setup.make_optimizer = adam(1e-3)


@healthy("lstm")
def a_gated_recurrent_unit(setup: Setup) -> None:
    setup.model = Recurrent(nn.GRU)


@healthy("gpt")
def a_fine_tuned_model(setup: Setup) -> None:
    """The model has learned other text before."""
    optimizer = torch.optim.AdamW(setup.model.parameters(), 3e-3)
    for number in range(60):
        x, y = setup.data(number)
        optimizer.zero_grad()
        setup.loss(setup.model(x), y).backward()
        optimizer.step()
    setup.make_optimizer = adam(3e-4)
    setup.damage = lambda step, x, y: (126 - x, 126 - y)


@healthy("gpt")
def rotary_frequencies(setup: Setup) -> None:
    """With a mask of -inf, and buffers that hold no number on purpose, as observers for quantisation begin."""
    setup.model, setup.steps = Rotating(frequencies()), 80
    setup.model.register_buffer("smallest", torch.tensor(torch.inf))
    setup.model.register_buffer("best", torch.full((3,), torch.finfo(torch.float32).max))
    setup.model.register_buffer("edges", torch.tensor([-torch.inf, 0.0, 1.0, torch.inf]))
    setup.model.register_buffer("lower", torch.full((8, 8), torch.finfo(torch.float32).min).triu(1))


@healthy("resnet")
def batch_norms_of_a_trained_model_that_are_frozen(setup: Setup) -> None:
    """Their statistics were loaded."""
    for module in setup.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
            module.eval()


@healthy("resnet")
def batch_norms_that_are_frozen_after_a_while(setup: Setup) -> None:
    def freeze(step: int) -> None:
        if step == 60:
            setup.set_lr(1e-4)
            for module in setup.model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()

    setup.before.append(freeze)


@healthy("resnet")
def pixels_up_to_255_behind_batch_norms(setup: Setup) -> None:
    setup.damage = lambda step, x, y: (255 * x, y)
