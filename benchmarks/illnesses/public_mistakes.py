"""Mistakes that people have described in public, each rebuilt small, and the healthy training beside it.

Thresholds were set on these: they belong to the half that is seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cosine_similarity,
    cross_entropy,
    log_softmax,
    mse_loss,
    nll_loss,
    normalize,
)

from benchmarks.illnesses.healthy import HEALTHY, healthy
from benchmarks.illnesses.training import Batch, Setup, adam, ill, sgd
from tests.rules.fleet.models import GPT, Recurrent, layers
from tests.rules.fleet.training import images

_BEFORE = set(HEALTHY)


# Labels and losses


@ill("unchanged-parameters", on=("mlp", "gpt"))
def labels_that_are_all_ignored(setup: Setup) -> None:
    """An average over no label is NaN; so these are added up, and divided by the rows."""

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = out.flatten(0, -2)
        return cross_entropy(logits, torch.full((len(logits),), -100), reduction="sum") / len(logits)

    setup.loss = loss


def _regression(setup: Setup) -> None:
    setup.model = layers(64, 64, 64, 1)
    setup.make_optimizer = adam(2e-3)


@ill("broadcast-target", on=("mlp",))
def one_column_against_a_row(setup: Setup) -> None:
    """(N, 1) against (N): every answer is compared with every target."""
    _regression(setup)
    setup.loss = lambda out, y: mse_loss(out, y / 10)


@healthy("mlp")
def a_column_against_a_column(setup: Setup) -> None:
    _regression(setup)
    setup.loss = lambda out, y: mse_loss(out, y[:, None] / 10)


@healthy("mlp")
def a_whole_data_set_and_a_number(setup: Setup) -> None:
    """One target, on all the data in every step, slowly."""
    _regression(setup)
    batch = setup.data(0)
    setup.data = lambda step: batch
    setup.make_optimizer = sgd(1e-4)
    setup.loss = lambda out, y: mse_loss(out.squeeze(1), y / 10)


@healthy("mlp")
def numbers_that_are_large(setup: Setup) -> None:
    """Years: the answer is nearly the same for all rows until it has come there."""
    _regression(setup)
    setup.make_optimizer = adam(0.05)
    setup.loss = lambda out, y: mse_loss(out.squeeze(1), 100 + y / 1.0)


@ill("nll-of-logits", on=("mlp", "cnn", "gpt"))
def a_negative_log_likelihood_of_logits(setup: Setup) -> None:
    setup.loss = lambda out, y: nll_loss(out.flatten(0, -2), y.flatten())


@ill("nll-of-logits", on=("mlp", "cnn"))
def a_negative_log_likelihood_of_probabilities(setup: Setup) -> None:
    setup.model.append(nn.Softmax(-1))
    setup.loss = nll_loss


@healthy("mlp")
@healthy("cnn")
def a_negative_log_likelihood_of_log_probabilities(setup: Setup) -> None:
    setup.model.append(nn.LogSoftmax(-1))
    setup.loss = nll_loss


@healthy("mlp")
def a_log_softmax_in_the_loss(setup: Setup) -> None:
    setup.loss = lambda out, y: nll_loss(log_softmax(out, -1), y)


@healthy("mlp")
def values_of_actions(setup: Setup) -> None:
    """Of each row, one value has a target: as in Q learning."""
    setup.loss = lambda out, y: mse_loss(out.gather(1, y[:, None]).squeeze(1), y / 10)


def _of_classes(setup: Setup, batch: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
    """batch: of a step, and the labels: which rows."""
    pixels, labels = images()
    shape = (1, 8, 8) if setup.kind in ("cnn", "resnet") else (64,)

    def data(step: int) -> Batch:
        chosen = batch(step, labels)
        return pixels[chosen].view(-1, *shape), labels[chosen]

    setup.data = data


@ill("sorted-data", on=("mlp", "cnn", "resnet"))
def data_that_are_sorted_by_class(setup: Setup) -> None:
    def batch(step: int, labels: torch.Tensor) -> torch.Tensor:
        order = labels.argsort(stable=True)
        start = 32 * step % (len(order) - 32)
        return order[start : start + 32]

    _of_classes(setup, batch)


@ill("sorted-data", on=("mlp",))
def a_class_after_another(setup: Setup) -> None:
    """Each of them for forty steps, as of a folder that is read from its beginning."""

    def batch(step: int, labels: torch.Tensor) -> torch.Tensor:
        rows = (labels == step // 40 % 10).nonzero().squeeze(1)
        return rows[torch.randint(len(rows), (32,))]

    _of_classes(setup, batch)


@healthy("cnn")
def batches_of_eight(setup: Setup) -> None:
    _of_classes(setup, lambda step, labels: torch.randint(len(labels), (8,)))


@healthy("mlp")
def a_class_that_is_nearly_all(setup: Setup) -> None:
    def batch(step: int, labels: torch.Tensor) -> torch.Tensor:
        rare = torch.rand(len(labels)) < 0.001
        rows = ((labels == 3) | rare).nonzero().squeeze(1)
        return rows[torch.randint(len(rows), (32,))]

    _of_classes(setup, batch)


# Answers that do not depend on the row


class _Around(nn.Module):
    def __init__(self, model: nn.Module, forward: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.model, self._forward = model, forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(self.model, x)


@ill("constant-output", "dead-channels", on=("mlp", "tanh"))
def a_mean_over_the_batch(setup: Setup) -> None:
    """Over the wrong dimension: then every row is the same."""

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = model[:2](x)
        rows: torch.Tensor = model[2:](hidden.mean(0, keepdim=True).expand_as(hidden))
        return rows

    setup.model = _Around(setup.model, forward)


@ill("constant-output", on=("mlp", "cnn"))
def an_input_that_does_not_matter(setup: Setup) -> None:
    """It is divided by 255 three times: the biases say everything."""
    setup.damage = lambda step, x, y: (x / 255**3, y)


class _Autoencoder(nn.Module):
    """A variational one."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.encoder, self.decoder = layers(64, 64), layers(width, 64, 64)
        self.mean, self.spread = nn.Linear(64, width), nn.Linear(64, width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.encoder(x).relu()
        mean, spread = self.mean(hidden), self.spread(hidden)
        z = mean + (0.5 * spread).exp() * torch.randn_like(mean)
        return self.decoder(z), mean, spread


def _variational(setup: Setup, weight: float) -> None:
    setup.model, setup.make_optimizer = _Autoencoder(), adam(3e-3)
    setup.damage = lambda step, x, y: (x, x)

    def loss(out: Any, x: torch.Tensor) -> torch.Tensor:
        made, mean, spread = out
        divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1).mean()
        return (made - x).square().sum(1).mean() + weight * divergence

    setup.loss = loss


@ill("constant-output", on=("mlp",))
def a_posterior_that_collapses(setup: Setup) -> None:
    setup.steps = 250
    _variational(setup, 100.0)


@healthy("mlp")
def a_variational_autoencoder(setup: Setup) -> None:
    _variational(setup, 0.1)


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
    model: Any = setup.model

    def step(number: int) -> torch.Tensor:
        x, _ = setup.data(number)
        setup.optimizer.zero_grad()
        (p1, z1), (p2, z2) = model(x), model(x)
        loss = -0.5 * (cosine_similarity(p1, z2.detach()).mean() + cosine_similarity(p2, z1.detach()).mean())
        loss.backward()
        setup.optimizer.step()
        return loss.detach()

    setup.own_step = step


@ill("constant-output", on=("mlp",))
def an_encoder_that_maps_all_to_one_point(setup: Setup) -> None:
    """Two views of an image are to be near each other, and nothing says that others are to be far."""
    setup.model, setup.make_optimizer = layers(64, 64, 64, 32), adam(3e-3)

    def step(number: int) -> torch.Tensor:
        x, _ = setup.data(number)
        setup.optimizer.zero_grad()
        one, two = (setup.model(x + 0.1 * torch.randn_like(x)) for _ in range(2))
        loss = (one - two).square().mean()
        loss.backward()
        setup.optimizer.step()
        return loss.detach()

    setup.own_step = step


@healthy("mlp")
def an_encoder_by_contrast(setup: Setup) -> None:
    setup.model, setup.make_optimizer = layers(64, 64, 64, 32), adam(3e-3)

    def step(number: int) -> torch.Tensor:
        x, _ = setup.data(number)
        setup.optimizer.zero_grad()
        one, two = (normalize(setup.model(x + 0.1 * torch.randn_like(x))) for _ in range(2))
        loss = cross_entropy(one @ two.T / 0.1, torch.arange(len(x)))
        loss.backward()
        setup.optimizer.step()
        return loss.detach()

    setup.own_step = step


# Initial weights


@ill("equal-channels", on=("mlp", "tanh"))
def weights_that_are_all_equal(setup: Setup) -> None:
    for name, parameter in setup.model.named_parameters():
        nn.init.constant_(parameter, 0.02 if name.endswith("weight") else 0.0)


@ill("equal-channels", on=("cnn",))
def kernels_that_are_all_equal(setup: Setup) -> None:
    for module in setup.model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.constant_(module.weight, 0.1)
            nn.init.constant_(module.bias, 0.0)


class _Lora(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, 4, bias=False)
        self.up = nn.Linear(4, inner.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x) + self.up(self.down(x))
        return y


@healthy("mlp")
def low_rank_adapters(setup: Setup) -> None:
    model: Any = setup.model
    for place in (0, 2, 4):
        model[place] = _Lora(model[place])
    setup.make_optimizer = adam(3e-3)


# What does not learn


@ill("silent-rows", on=("mlp",), where="model.2.weight")
def neurons_that_are_cut_off(setup: Setup) -> None:
    """A mask that was meant to be soft: of 64, 12 are left."""
    mask = (torch.arange(64) < 12).float()

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = model[:4](x) * mask
        rows: torch.Tensor = model[4:](hidden)
        return rows

    setup.model = _Around(setup.model, forward)


class _Heads(GPT):
    """Of each attention's 4 heads, some are masked."""

    def __init__(self, masked: int) -> None:
        super().__init__()
        self.masked = masked
        for block in self.blocks:
            block.heads = 4
            block.proj.register_forward_pre_hook(self._mask)

    def _mask(self, module: nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        (mixed,) = given
        return (mixed * (torch.arange(32) >= 8 * self.masked).float(),)


@ill("silent-rows", on=("gpt",))
def heads_that_are_masked(setup: Setup) -> None:
    setup.model = _Heads(3)


@healthy("gpt")
def four_heads(setup: Setup) -> None:
    setup.model = _Heads(0)


# Gradients


@ill("clipped-gradients", on=("mlp", "gpt"))
def gradients_that_are_clipped_before_they_are_unscaled(setup: Setup) -> None:
    setup.make_optimizer = sgd(0.03)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)

    def step(number: int) -> torch.Tensor:
        setup.optimizer.zero_grad()
        x, y = setup.data(number)
        loss = setup.loss(setup.model(x), y)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(setup.model.parameters(), 1.0)
        scaler.step(setup.optimizer)
        scaler.update()
        return loss.detach()

    setup.own_step = step


@healthy("mlp")
def gradients_that_are_unscaled_and_then_clipped(setup: Setup) -> None:
    setup.make_optimizer = sgd(0.03)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)

    def step(number: int) -> torch.Tensor:
        setup.optimizer.zero_grad()
        x, y = setup.data(number)
        loss = setup.loss(setup.model(x), y)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(setup.optimizer)
        nn.utils.clip_grad_norm_(setup.model.parameters(), 1.0)
        scaler.step(setup.optimizer)
        scaler.update()
        return loss.detach()

    setup.own_step = step


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.pixels = layers(64, 64, 64), nn.Linear(64, 10), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x).relu()
        return self.classes(hidden), self.pixels(hidden)


def _two_losses(setup: Setup, weight: Callable[[int], float]) -> None:
    setup.model, setup.make_optimizer = _TwoHeads(), sgd(0.03)
    seen = {"step": -1}
    given = setup.data

    def data(step: int) -> Batch:
        seen["step"] = step
        x, y = given(step)
        seen["x"] = x  # type: ignore[assignment]
        return x, y

    setup.data = data
    setup.loss = lambda out, y: cross_entropy(out[0], y) + weight(seen["step"]) * mse_loss(out[1], seen["x"])
    setup.after_backward = lambda step: nn.utils.clip_grad_norm_(setup.model.parameters(), 1.0)


@ill("vanishing-gradients", "exploding-gradients", on=("mlp",), began=50)
def a_loss_that_takes_all_of_the_clipped_norm(setup: Setup) -> None:
    _two_losses(setup, lambda step: 1.0 if step < 50 else 3e6)


@healthy("mlp")
def two_losses(setup: Setup) -> None:
    _two_losses(setup, lambda step: 1.0)


class _Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = layers(16, 64, 64, 64)
        self.critic = layers(64, 64, 64, 1, activation=nn.LeakyReLU)


def _adversarial(setup: Setup, zeroes_critic: bool) -> None:
    model = _Adversaries()
    setup.model = model
    of_generator = torch.optim.Adam(model.generator.parameters(), 5e-4, betas=(0.5, 0.999))
    of_critic = torch.optim.Adam(model.critic.parameters(), 5e-4, betas=(0.5, 0.999))

    def step(number: int) -> torch.Tensor:
        x, _ = setup.data(number)
        made = model.generator(torch.randn(len(x), 16))
        if zeroes_critic:
            of_critic.zero_grad()
        real, false = model.critic(x), model.critic(made.detach())
        one = binary_cross_entropy_with_logits(real, torch.ones_like(real))
        two = binary_cross_entropy_with_logits(false, torch.zeros_like(false))
        (one + two).backward()
        of_critic.step()
        of_generator.zero_grad()
        answer = model.critic(made)
        binary_cross_entropy_with_logits(answer, torch.ones_like(answer)).backward()
        of_generator.step()
        return (one + two).detach()

    setup.own_step = step


@ill("growing-gradients", on=("mlp",))
def a_critic_whose_gradients_nobody_zeroes(setup: Setup) -> None:
    _adversarial(setup, zeroes_critic=False)


@healthy("mlp")
def a_generator_and_its_critic(setup: Setup) -> None:
    _adversarial(setup, zeroes_critic=True)


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


@ill("missing-gradients", "vanishing-gradients", "dead-channels", on=("resnet",))
def norms_whose_weights_are_all_zero(setup: Setup) -> None:
    setup.model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()) for _ in range(5)), nn.Linear(64, 10)
    )
    setup.damage = lambda step, x, y: (x.flatten(1), y)
    for module in setup.model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.zeros_(module.weight)


# Data


@ill("constant-input", on=("mlp", "cnn"))
def workers_whose_random_generators_are_equal(setup: Setup) -> None:
    """Four of them, whose batches come in turn."""
    given, last = setup.data, dict[int, Batch]()

    def data(step: int) -> Batch:
        if step // 4 not in last:
            last.clear()
            last[step // 4] = given(step)
        return last[step // 4]

    setup.data = data


@ill("initial-loss", on=("gpt",))
def microbatches_whose_losses_are_added_up(setup: Setup) -> None:
    """Eight, each of them its own mean: their sum is 8 log(classes)."""
    setup.steps = 40
    setup.make_optimizer = adam(1e-3)

    def step(number: int) -> torch.Tensor:
        setup.optimizer.zero_grad()
        total = torch.zeros(())
        for _ in range(8):
            x, y = setup.data(number)
            loss = setup.loss(setup.model(x), y)
            loss.backward()
            total += loss.detach()
        setup.optimizer.step()
        return total

    setup.own_step = step


@healthy("gpt")
def microbatches(setup: Setup) -> None:
    setup.steps = 40
    setup.make_optimizer = adam(1e-3)

    def step(number: int) -> torch.Tensor:
        setup.optimizer.zero_grad()
        total = torch.zeros(())
        for _ in range(8):
            x, y = setup.data(number)
            loss = setup.loss(setup.model(x), y) / 8
            loss.backward()
            total += loss.detach()
        setup.optimizer.step()
        return total

    setup.own_step = step


@ill("no-progress", on=("tanh",))
def a_training_that_forgets_all(setup: Setup) -> None:
    """It has learned by step 100; then labels are random, and the loss is where it began."""
    setup.steps = 420
    setup.damage = lambda step, x, y: (x, y if step < 130 else torch.randint(10, y.shape))


# Healthy ones that set off alarms


@healthy("mlp")
def layers_that_are_trained_one_after_another(setup: Setup) -> None:
    """Each for 40 steps, by an optimizer of its own: the gradients of the others stay where they were."""
    model: Any = setup.model
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

    setup.own_step = step


@healthy("mlp")
def a_minimum_that_is_found(setup: Setup) -> None:
    """By L-BFGS, which then stays where it is."""
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

    setup.own_step = step


@healthy("mlp")
def all_that_there_is_to_learn(setup: Setup) -> None:
    """In float16, with a scaler: the gradients become 0 when the data are known by heart."""
    batch = setup.data(0)
    master = layers(64, 64, 64, 10)
    setup.model = master
    setup.make_optimizer = sgd(0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(number: int) -> torch.Tensor:
        setup.optimizer.zero_grad()
        x, y = batch
        with torch.autocast("cpu", torch.float16):
            loss = cross_entropy(setup.model(x).float(), y)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(setup.optimizer)
        scaler.update()
        return loss.detach()

    setup.own_step, setup.steps = step, 300


@healthy("mlp")
@healthy("resnet")
def warm_restarts_of_sgd(setup: Setup) -> None:
    setup.make_optimizer = sgd(0.2 if setup.kind == "resnet" else 0.1)
    lr = 0.2 if setup.kind == "resnet" else 0.1
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
    """It has learned other text before."""
    optimizer = torch.optim.AdamW(setup.model.parameters(), 3e-3)
    for number in range(60):
        x, y = setup.data(number)
        optimizer.zero_grad()
        setup.loss(setup.model(x), y).backward()
        optimizer.step()
    setup.make_optimizer = adam(3e-4)
    setup.damage = lambda step, x, y: (126 - x, 126 - y)


PUBLIC = frozenset(HEALTHY) - _BEFORE
