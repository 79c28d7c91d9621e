"""Trainings that look ill and are healthy, by which no threshold was set: they were run once the rules stood."""

from __future__ import annotations

import math
from copy import deepcopy

import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, mse_loss, normalize

from tests.rules.fleet.models import GPT, Flow, Recurrent, cnn, layers, resnet
from tests.rules.fleet.training import Training, lines, plain, set_lr, some, text, unseen
from tests.rules.fleet.unusual import dqn_of


@unseen
def averaged_weights() -> Training:
    """Swapped in at times: of the weights, the mean so far."""
    model = layers(64, 64, 64, 10)
    mean = deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)

    def average(number: int) -> None:
        with torch.no_grad():
            for slow, fast in zip(mean.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        if number and number % 50 == 0:
            model.load_state_dict(mean.state_dict())

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some()
        return cross_entropy(model(pixels), labels)

    return Training(model, plain(model, loss_of, optimizer, before=average), 220)


@unseen
def distillation() -> Training:
    teacher = layers(64, 128, 10)
    learns = torch.optim.Adam(teacher.parameters(), 1e-2)
    for _ in range(60):
        pixels, labels = some(64)
        learns.zero_grad()
        cross_entropy(teacher(pixels), labels).backward()
        learns.step()
    model = layers(64, 32, 10)

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some()
        wanted, said = (teacher(pixels) / 4).softmax(1).detach(), model(pixels)
        return 16 * kl_div((said / 4).log_softmax(1), wanted, reduction="batchmean") + 0.1 * cross_entropy(said, labels)

    return Training(model, plain(model, loss_of, torch.optim.Adam(model.parameters(), 3e-3)), 200)


@unseen
def contrast_with_temperature() -> Training:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.temperature = layers(64, 64, 32), nn.Parameter(torch.tensor(math.log(1 / 0.07)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return normalize(self.net(x), dim=1)

    model = Pairs()

    def loss_of(number: int) -> torch.Tensor:
        pixels = some(64)[0]
        one, two = (model(pixels + 0.3 * torch.randn_like(pixels)) for _ in range(2))
        return cross_entropy(model.temperature.exp() * one @ two.T, torch.arange(64))

    return Training(model, plain(model, loss_of, torch.optim.Adam(model.parameters(), 3e-3)), 150)


@unseen
def truncated_backpropagation() -> Training:
    """An RNN over one long text, its state kept from step to step, and emptied at times."""
    model = Recurrent()
    state: list[tuple[torch.Tensor, torch.Tensor] | None] = [None]

    def loss_of(number: int) -> torch.Tensor:
        at = 20 * (number % 80)
        if number % 80 == 0:
            state[0] = None
        ids = torch.stack([text()[at + 2000 * i : at + 2000 * i + 21] for i in range(8)])
        said, (hidden, cell) = model(ids[:, :-1], state[0])
        state[0] = hidden.detach(), cell.detach()
        return cross_entropy(said.flatten(0, 1), ids[:, 1:].flatten())

    return Training(model, plain(model, loss_of, torch.optim.Adam(model.parameters(), 5e-3), clip=1.0), 240)


@unseen
def double_descent() -> Training:
    """Train with as many parameters as data, a fifth of it mislabelled, until all are known by heart."""
    pixels, labels = some(100)
    labels = torch.where(torch.rand(100) < 0.2, torch.randint(10, (100,)), labels)
    model = layers(64, 200, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    return Training(model, plain(model, lambda i: cross_entropy(model(pixels), labels), optimizer), 400)


@unseen
def label_noise() -> Training:
    model = cnn()

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some(16, 1, 8, 8)
        return cross_entropy(model(pixels), torch.where(torch.rand(16) < 0.4, torch.randint(10, (16,)), labels))

    return Training(model, plain(model, loss_of, torch.optim.Adam(model.parameters(), 3e-3)), 250)


class LAMB(torch.optim.Adam):
    """Each tensor's step of Adam, as long as a share of the tensor."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        before = [[each.clone() for each in group["params"]] for group in self.param_groups]
        super().step()
        for group, olds in zip(self.param_groups, before, strict=True):
            for each, old in zip(group["params"], olds, strict=True):
                update = (each - old) / group["lr"]
                trust = old.norm().clamp(max=10) / update.norm() if old.norm() > 0 and update.norm() > 0 else 1.0
                each.copy_(old + group["lr"] * trust * update)


@unseen
def lamb() -> Training:
    model = GPT()
    optimizer = LAMB(model.parameters(), 0.02)
    step = plain(
        model,
        lambda i: model.loss(lines(32)),
        optimizer,
        before=lambda i: set_lr(optimizer, 0.02 * min(1, i / 20 + 0.05)),
    )
    return Training(model, step, 120)


@unseen
def sgd_of_lr_one_with_clipping() -> Training:
    model = Recurrent(nn.GRU)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    return Training(model, plain(model, lambda i: model.loss(lines()), optimizer, clip=0.25), 200)


@unseen
def float16_with_a_scaler() -> Training:
    """The scale begins far too high, and is found."""
    model = layers(64, 64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scale = [2.0**24]

    def step(number: int) -> float:
        pixels, labels = some()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(pixels).float(), labels)
        (scale[0] * loss).backward()
        if any(each.grad.abs().max() > 65504 for each in model.parameters()):
            scale[0] /= 2  # what float16 could not hold; the step is left out
            return loss.item()
        for each in model.parameters():
            each.grad.div_(scale[0])
        optimizer.step()
        return loss.item()

    return Training(model, step, 150)


@unseen
def double_dqn() -> Training:
    return dqn_of(80, 1e-2, double=True)


@unseen
def regression_added_without_a_head() -> Training:
    """The only head learns a second thing, whose weight is 5."""
    model = layers(64, 64, 64, 11)

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some()
        said = model(pixels)
        loss = cross_entropy(said[:, :10], labels)
        return loss if number < 120 else loss + 5 * mse_loss(said[:, 10], 10 * pixels.mean(1))

    return Training(model, plain(model, loss_of, torch.optim.Adam(model.parameters(), 2e-3)), 200)


@unseen
def warm_restarts_of_gpt() -> Training:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def restart(number: int) -> None:
        set_lr(optimizer, 5e-3 * (1 + math.cos(math.pi * (number % 75) / 75)) + 1e-5)

    return Training(model, plain(model, lambda i: model.loss(lines()), optimizer, before=restart), 225)


@unseen
def flow_with_heavy_tails() -> Training:
    model, noise = Flow(4), torch.distributions.StudentT(1.5)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    return Training(model, plain(model, lambda i: model(noise.sample((64, 4))).mean(), optimizer, clip=5.0), 300)


@unseen
def actor_and_critic() -> Training:
    """A policy's loss with a value's, and an entropy that is paid for."""
    model = layers(4, 32, 4, activation=nn.Tanh)

    def loss_of(number: int) -> torch.Tensor:
        states = torch.randn(64, 4)
        said = model(states)
        policy = torch.distributions.Categorical(logits=said[:, :3])
        actions = policy.sample()
        gains = states.gather(1, actions[:, None])[:, 0] + 0.5 * torch.randn(64)
        advantage = gains - said[:, 3]
        return (-(policy.log_prob(actions) * advantage.detach()) + advantage.square() - 0.01 * policy.entropy()).mean()

    return Training(model, plain(model, loss_of, torch.optim.Adam(model.parameters(), 3e-3)), 250)


@unseen
def fine_tuning_on_other_data() -> Training:
    """Digits upside down, from the middle on."""
    model = resnet(1)

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some(32, 1, 8, 8)
        return cross_entropy(model(pixels if number < 100 else pixels.flip(2)), labels)

    return Training(model, plain(model, loss_of, torch.optim.Adam(model.parameters(), 5e-3)), 180)
