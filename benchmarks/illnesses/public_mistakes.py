"""Mistakes that people have described in public, each rebuilt small; public_healthy.py has the healthy ones.

Thresholds were set on these: they belong to the half that is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    mse_loss,
    nll_loss,
)

from benchmarks.illnesses.ill import always, when
from benchmarks.illnesses.models import GPT, Around, Rotating, Several, layers
from benchmarks.illnesses.training import Batch, Setup, adam, ill, images, sgd, text

# Modes


@ill("evaluation-mode", on=("cnn", "mlp"))
def a_validation_after_which_the_model_stays_in_evaluation_mode(setup: Setup) -> None:
    setup.before = when(60, lambda: setup.model.eval())


# Labels and losses


@ill("unchanged-parameters", on=("mlp", "gpt"))
def labels_that_are_all_ignored(setup: Setup) -> None:
    """An average over no label is NaN; so these are added up, and divided by the rows."""

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = out.flatten(0, -2)
        return cross_entropy(logits, torch.full((len(logits),), -100), reduction="sum") / len(logits)

    setup.loss = loss


def regression(setup: Setup) -> None:
    setup.model = layers(64, 64, 64, 1)
    setup.make_optimizer = adam(2e-3)


@ill("broadcast-target", on=("mlp",))
def one_column_against_a_row(setup: Setup) -> None:
    """(N, 1) against (N): every answer is compared with every target."""
    regression(setup)
    setup.loss = lambda out, y: mse_loss(out, y / 10)


@ill("nll-of-logits", on=("mlp", "cnn", "gpt"))
def a_negative_log_likelihood_of_logits(setup: Setup) -> None:
    setup.loss = lambda out, y: nll_loss(out.flatten(0, -2), y.flatten())


@ill("nll-of-logits", on=("mlp", "cnn"))
def a_negative_log_likelihood_of_probabilities(setup: Setup) -> None:
    setup.model.append(nn.Softmax(-1))
    setup.loss = nll_loss


def of_classes(setup: Setup, batch: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
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

    of_classes(setup, batch)


@ill("sorted-data", on=("mlp",))
def a_class_after_another(setup: Setup) -> None:
    """Each of them for forty steps, as of a folder that is read from its beginning."""

    def batch(step: int, labels: torch.Tensor) -> torch.Tensor:
        rows = (labels == step // 40 % 10).nonzero().squeeze(1)
        return rows[torch.randint(len(rows), (32,))]

    of_classes(setup, batch)


@ill("absent-class", on=("mlp", "cnn"))
def a_class_that_no_row_has(setup: Setup) -> None:
    """A filter of the data has lost one."""
    _without(setup, 7)


@ill("absent-class", on=("gpt",))
def an_end_of_text_that_is_taken_for_padding(setup: Setup) -> None:
    """The loss leaves it out. The most frequent character is the end here, and the others are the vocabulary."""
    known = text().unique()
    setup.model.head = nn.Linear(setup.model.head.in_features, len(known), bias=False)
    tokens = torch.zeros(128, dtype=torch.int64)
    tokens[known] = torch.arange(len(known))
    setup.damage = lambda step, x, y: (tokens[x], tokens[y])
    end = int(tokens[ord(" ")])
    setup.loss = lambda out, y: cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=end)


def _without(setup: Setup, label: int) -> None:
    setup.damage = lambda step, x, y: (x[y != label], y[y != label])


# Answers that do not depend on the row


@ill("constant-output", "dead-channels", on=("mlp", "tanh"))
def a_mean_over_the_batch(setup: Setup) -> None:
    """The wrong dimension makes every row the same."""

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = model[:2](x)
        return model[2:](hidden.mean(0, keepdim=True).expand_as(hidden))

    setup.model = Around(setup.model, forward)


@ill("constant-output", on=("mlp", "cnn"))
def an_input_that_does_not_matter(setup: Setup) -> None:
    """The input is divided by 255 three times: the biases say everything."""
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


def variational(setup: Setup, weight: float) -> None:
    setup.model, setup.make_optimizer = _Autoencoder(), adam(3e-3)
    setup.damage = lambda step, x, y: (x, x)

    def loss(out: Any, x: torch.Tensor) -> torch.Tensor:
        made, mean, spread = out
        divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1).mean()
        return (made - x).square().sum(1).mean() + weight * divergence

    setup.loss = loss


@ill("posterior-collapse", "constant-output", on=("mlp",))
def a_posterior_that_collapses(setup: Setup) -> None:
    setup.steps = 250
    variational(setup, 100.0)


@ill("constant-output", on=("mlp",))
def an_encoder_that_maps_all_to_one_point(setup: Setup) -> None:
    """Two views of an image are to be near each other, and nothing says that others are to be far."""
    setup.model, setup.make_optimizer = layers(64, 64, 64, 32), adam(3e-3)

    def loss_of(number: int) -> torch.Tensor:
        x, _ = setup.data(number)
        one, two = (setup.model(x + 0.1 * torch.randn_like(x)) for _ in range(2))
        return (one - two).square().mean()

    setup.loss_of = loss_of


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


# What does not learn


@ill("silent-rows", on=("mlp",), where="model.2.weight")
def neurons_that_are_cut_off(setup: Setup) -> None:
    """A mask that was meant to be soft: of 64, 12 are left."""
    mask = (torch.arange(64) < 12).float()

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = model[:4](x) * mask
        return model[4:](hidden)

    setup.model = Around(setup.model, forward)


class Heads(GPT):
    """Some of each attention's 4 heads are masked."""

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
    setup.model = Heads(3)


# Gradients


def scaled(setup: Setup, unscales: bool) -> None:
    """Scale the loss, and clip the gradients."""
    setup.make_optimizer = sgd(0.03)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)

    def step(number: int) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = setup.loss_of(number)
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(setup.optimizer)
        nn.utils.clip_grad_norm_(setup.model.parameters(), 1.0)
        scaler.step(setup.optimizer)
        scaler.update()
        return loss.detach()

    setup.step = step


@ill("clipped-gradients", on=("mlp", "gpt"))
def gradients_that_are_clipped_before_they_are_unscaled(setup: Setup) -> None:
    scaled(setup, unscales=False)


def with_two_losses(setup: Setup, weight: Callable[[int], float]) -> None:
    setup.model = Several(layers(64, 64, 64), classes=nn.Linear(64, 10), pixels=nn.Linear(64, 64))

    def loss_of(number: int) -> torch.Tensor:
        x, y = setup.data(number)
        classes, pixels = setup.model(x)
        return cross_entropy(classes, y) + weight(number) * mse_loss(pixels, x)

    setup.loss_of = loss_of


@ill("vanishing-gradients", "exploding-gradients", on=("mlp",), began=50)
def a_loss_that_takes_all_of_the_clipped_norm(setup: Setup) -> None:
    with_two_losses(setup, lambda step: 1.0 if step < 50 else 3e6)
    setup.clip(1.0)


def adversarial(setup: Setup, zeroes_critic: bool) -> None:
    generator, critic = layers(16, 64, 64, 64), layers(64, 64, 64, 1, activation=nn.LeakyReLU)
    setup.model = model = nn.ModuleDict({"generator": generator, "critic": critic})
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

    setup.step = step


@ill("growing-gradients", on=("mlp",))
def a_critic_whose_gradients_nobody_zeroes(setup: Setup) -> None:
    adversarial(setup, zeroes_critic=False)


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


def in_microbatches(setup: Setup, divisor: int = 8, zeroes: bool = False) -> None:
    """Take eight of them a step. zeroes: gradients, before each."""
    setup.steps = 40

    def step(number: int) -> torch.Tensor:
        total = torch.zeros(())
        for microbatch in range(8):
            if zeroes or not microbatch:
                setup.optimizer.zero_grad()
            loss = setup.loss_of(number) / divisor
            loss.backward()
            total += loss.detach()
        setup.optimizer.step()
        return total

    setup.step = step


@ill("initial-loss", on=("gpt",))
def microbatches_whose_losses_are_added_up(setup: Setup) -> None:
    """Eight, each of them its own mean: their sum is 8 log(classes)."""
    setup.make_optimizer = adam(1e-3)
    in_microbatches(setup, divisor=1)


@ill("no-progress", on=("tanh",))
def a_training_that_forgets_all(setup: Setup) -> None:
    """The model has learned by step 100; then labels are random, and the loss is where it began."""
    setup.steps = 420
    setup.damage = lambda step, x, y: (x, y if step < 130 else torch.randint(10, y.shape))


# Buffers


def by_chance(size: int) -> torch.Tensor:
    """Return what torch.empty gives where memory was used before."""
    return torch.randint(-(2**31), 2**31, (size,)).to(torch.int32).view(torch.float32)


@ill("uninitialised-buffer", on=("gpt",), where="inv_freq")
def rotary_frequencies_that_nobody_computes(setup: Setup) -> None:
    """A model that is made on the meta device has such ones: no checkpoint holds them."""
    setup.model, setup.steps = Rotating(by_chance(16)), 30


@ill("uninitialised-buffer", on=("gpt",), where="inv_freq")
def rotary_frequencies_of_fresh_memory(setup: Setup) -> None:
    setup.model, setup.steps = Rotating(torch.zeros(16)), 30


@ill("uninitialised-buffer", on=("mlp",), where="scale")
def a_table_that_nobody_computes(setup: Setup) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = layers(64, 64, 10)
            self.register_buffer("scale", by_chance(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x + 1e-30 * self.scale.clamp(-1, 1))

    setup.model, setup.steps = Scaled(), 30


def momentum_of(setup: Setup, momentum: float) -> None:
    for module in setup.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = momentum


@ill("still-statistics", on=("resnet",))
def batch_norms_without_momentum(setup: Setup) -> None:
    momentum_of(setup, 0.0)


@ill("still-statistics", on=("resnet",))
def batch_norms_in_evaluation_mode_from_the_beginning(setup: Setup) -> None:
    for module in setup.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


@ill("runaway-statistics", on=("resnet",))
def a_momentum_above_1(setup: Setup) -> None:
    momentum_of(setup, 1.9)


@ill("runaway-statistics", on=("resnet",), where="1.norm1")
def activations_that_a_norm_hides(setup: Setup) -> None:
    """The input of a batch norm doubles from step to step, and is divided by that."""
    setup.steps = 60
    setup.before = always(lambda step: setup.model[1].conv1.weight.mul_(2) if step >= 20 else None)
