"""Trainings that look ill and are healthy, by which no threshold was set: they were run once the rules stood."""

from __future__ import annotations

import math
from copy import deepcopy

import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, mse_loss, normalize
from torch.optim import SGD, Adam

from benchmarks.illnesses.models import GPT, Flow, Recurrent, cnn, layers, resnet
from benchmarks.illnesses.training import Setup, adam, by, digits, healthy, sgd, some, text, words
from benchmarks.illnesses.unusual import dqn_of


@healthy("digits")
def averaged_weights(setup: Setup) -> None:
    """Swapped in at times: of the weights, the mean so far."""
    setup.model, setup.make_optimizer, setup.steps = layers(64, 64, 64, 10), sgd(0.2), 220
    mean = deepcopy(setup.model)

    def average(number: int) -> None:
        with torch.no_grad():
            for slow, fast in zip(mean.parameters(), setup.model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        if number and number % 50 == 0:
            setup.model.load_state_dict(mean.state_dict())

    setup.before = [average]


@healthy("digits")
def distillation(setup: Setup) -> None:
    teacher = layers(64, 128, 10)
    learns = Adam(teacher.parameters(), 1e-2)
    for _ in range(60):
        pixels, labels = some(64)
        learns.zero_grad()
        cross_entropy(teacher(pixels), labels).backward()
        learns.step()
    setup.model, setup.make_optimizer, setup.steps = layers(64, 32, 10), by(Adam, 3e-3), 200

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some()
        wanted, said = (teacher(pixels) / 4).softmax(1).detach(), setup.model(pixels)
        return 16 * kl_div((said / 4).log_softmax(1), wanted, reduction="batchmean") + 0.1 * cross_entropy(said, labels)

    setup.loss_of = loss_of


@healthy("digits")
def contrast_with_temperature(setup: Setup) -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.temperature = layers(64, 64, 32), nn.Parameter(torch.tensor(math.log(1 / 0.07)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return normalize(self.net(x), dim=1)

    setup.model, setup.make_optimizer = Pairs(), by(Adam, 3e-3)

    def loss_of(number: int) -> torch.Tensor:
        pixels = some(64)[0]
        one, two = (setup.model(pixels + 0.3 * torch.randn_like(pixels)) for _ in range(2))
        return cross_entropy(setup.model.temperature.exp() * one @ two.T, torch.arange(64))

    setup.loss_of = loss_of


@healthy("text")
def truncated_backpropagation(setup: Setup) -> None:
    """An RNN over one long text, its state kept from step to step, and emptied at times."""
    setup.model, setup.make_optimizer, setup.steps = Recurrent(), by(Adam, 5e-3), 240
    setup.clip(1.0)
    state: list[tuple[torch.Tensor, torch.Tensor] | None] = [None]

    def loss_of(number: int) -> torch.Tensor:
        at = 20 * (number % 80)
        if number % 80 == 0:
            state[0] = None
        ids = torch.stack([text()[at + 2000 * i : at + 2000 * i + 21] for i in range(8)])
        said, (hidden, cell) = setup.model(ids[:, :-1], state[0])
        state[0] = hidden.detach(), cell.detach()
        return cross_entropy(said.flatten(0, 1), ids[:, 1:].flatten())

    setup.loss_of = loss_of


@healthy("digits")
def double_descent(setup: Setup) -> None:
    """Train with as many parameters as data, a fifth of it mislabelled, until all are known by heart."""
    pixels, labels = some(100)
    batch = pixels, torch.where(torch.rand(100) < 0.2, torch.randint(10, (100,)), labels)
    setup.model, setup.make_optimizer, setup.steps = layers(64, 200, 10), sgd(0.3), 400
    setup.data = lambda step: batch


@healthy("digits")
def label_noise(setup: Setup) -> None:
    setup.model, setup.make_optimizer, setup.steps = cnn(), by(Adam, 3e-3), 250
    setup.data = digits(16, 1, 8, 8)
    setup.damage = lambda step, x, y: (x, torch.where(torch.rand(16) < 0.4, torch.randint(10, (16,)), y))


class LAMB(Adam):
    """Each tensor's step of Adam, as long as a share of the tensor."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        before = [[each.clone() for each in group["params"]] for group in self.param_groups]
        super().step()
        for group, olds in zip(self.param_groups, before, strict=True):
            for each, old in zip(group["params"], olds, strict=True):
                update = (each - old) / group["lr"]
                trust = old.norm().clamp(max=10) / update.norm() if old.norm() > 0 and update.norm() > 0 else 1.0
                each.copy_(old + group["lr"] * trust * update)


@healthy("text")
def lamb(setup: Setup) -> None:
    setup.model, setup.make_optimizer, setup.steps = GPT(), by(LAMB, 0.02), 120
    setup.data = words(32)
    setup.before = [lambda i: setup.set_lr(0.02 * min(1, i / 20 + 0.05))]


@healthy("text")
def sgd_of_lr_one_with_clipping(setup: Setup) -> None:
    setup.model, setup.make_optimizer, setup.steps = Recurrent(nn.GRU), by(SGD, 1.0), 200
    setup.clip(0.25)


@healthy("digits")
def float16_with_a_scaler(setup: Setup) -> None:
    """The scale begins far too high, and is found."""
    setup.model, setup.make_optimizer = layers(64, 64, 64, 10), sgd(0.1)
    scale = [2.0**24]

    def step(number: int) -> float:
        pixels, labels = some()
        setup.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(setup.model(pixels).float(), labels)
        (scale[0] * loss).backward()
        if any(each.grad.abs().max() > 65504 for each in setup.model.parameters()):
            scale[0] /= 2  # what float16 could not hold; the step is left out
            return loss.item()
        for each in setup.model.parameters():
            each.grad.div_(scale[0])
        setup.optimizer.step()
        return loss.item()

    setup.step = step


@healthy("digits")
def double_dqn(setup: Setup) -> None:
    dqn_of(setup, 80, 1e-2, double=True)


@healthy("digits")
def regression_added_without_a_head(setup: Setup) -> None:
    """The only head learns a second thing, whose weight is 5."""
    setup.model, setup.make_optimizer, setup.steps = layers(64, 64, 64, 11), by(Adam, 2e-3), 200

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some()
        said = setup.model(pixels)
        loss = cross_entropy(said[:, :10], labels)
        return loss if number < 120 else loss + 5 * mse_loss(said[:, 10], 10 * pixels.mean(1))

    setup.loss_of = loss_of


@healthy("text")
def warm_restarts_of_gpt(setup: Setup) -> None:
    setup.model, setup.make_optimizer, setup.steps = GPT(), adam(1e-2), 225
    setup.before = [lambda i: setup.set_lr(5e-3 * (1 + math.cos(math.pi * (i % 75) / 75)) + 1e-5)]


@healthy("digits")
def flow_with_heavy_tails(setup: Setup) -> None:
    setup.model, setup.make_optimizer, setup.steps = Flow(4), by(Adam, 1e-3), 300
    noise = torch.distributions.StudentT(1.5)
    setup.loss_of = lambda number: setup.model(noise.sample((64, 4))).mean()
    setup.clip(5.0)


@healthy("digits")
def actor_and_critic(setup: Setup) -> None:
    """A policy's loss with a value's, and an entropy that is paid for."""
    setup.model, setup.make_optimizer, setup.steps = layers(4, 32, 4, activation=nn.Tanh), by(Adam, 3e-3), 250

    def loss_of(number: int) -> torch.Tensor:
        states = torch.randn(64, 4)
        said = setup.model(states)
        policy = torch.distributions.Categorical(logits=said[:, :3])
        actions = policy.sample()
        gains = states.gather(1, actions[:, None])[:, 0] + 0.5 * torch.randn(64)
        advantage = gains - said[:, 3]
        return (-(policy.log_prob(actions) * advantage.detach()) + advantage.square() - 0.01 * policy.entropy()).mean()

    setup.loss_of = loss_of


@healthy("digits")
def fine_tuning_on_other_data(setup: Setup) -> None:
    """Digits upside down, from the middle on."""
    setup.model, setup.make_optimizer, setup.steps = resnet(1), by(Adam, 5e-3), 180
    setup.data = digits(32, 1, 8, 8)
    setup.damage = lambda step, x, y: (x if step < 100 else x.flip(2), y)
