"""Trainings that look ill and are healthy."""

from __future__ import annotations

import math
from copy import deepcopy

import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import SGD, Adam, SparseAdam

from benchmarks.illnesses.models import GPT, Flow, Several, cnn, layers
from benchmarks.illnesses.training import Setup, adam, by, digits, healthy, sgd, some, words


@healthy("digits")
def warm_restarts(setup: Setup) -> None:
    setup.model, setup.steps = layers(64, 64, 64, 10), 250
    setup.optimizer = sgd(0.1)(setup.model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(setup.optimizer, 50)
    setup.before = [lambda step: schedule.step() if step else None]


@healthy("digits")
def warm_restarts_of_adam(setup: Setup) -> None:
    setup.model, setup.make_optimizer, setup.steps = layers(64, 64, 64, 10), by(Adam, 2e-2), 240
    setup.before = [lambda i: setup.set_lr(1e-2 * (1 + math.cos(math.pi * (i % 60) / 60)))]


class Muon(torch.optim.Optimizer):
    """Updates of matrices are made orthogonal; others go along the sign."""

    def __init__(self, parameters: object, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                kept = self.state[each].setdefault("momentum", torch.zeros_like(each))
                kept.mul_(0.95).add_(each.grad)
                if each.ndim == 2:
                    u, _, v = torch.linalg.svd(each.grad + 0.95 * kept, full_matrices=False)
                    each.sub_(group["lr"] * max(1.0, each.shape[0] / each.shape[1]) ** 0.5 * (u @ v))
                else:
                    each.sub_(0.01 * group["lr"] * kept.sign())


@healthy("digits")
def muon_like(setup: Setup) -> None:
    setup.model, setup.make_optimizer = layers(64, 64, 64, 10, activation=nn.GELU), by(Muon, 0.1)
    with torch.no_grad():
        setup.model[4].weight.mul_(0.1)


@healthy("text")
def muon_like_on_gpt(setup: Setup) -> None:
    setup.model, setup.make_optimizer, setup.steps = GPT(), by(Muon, 0.05), 120
    with torch.no_grad():
        for block in setup.model.blocks:
            block.proj.weight.normal_(std=0.002)
            block.mlp[2].weight.normal_(std=0.002)


@healthy("text")
def batch_of_one_sequence(setup: Setup) -> None:
    setup.model, setup.make_optimizer = GPT(), adam(1e-3)
    setup.data, setup.steps = words(1, 20), 400


@healthy("digits")
def batch_of_one_image(setup: Setup) -> None:
    setup.model, setup.make_optimizer = cnn(), by(SGD, 0.01)
    setup.data, setup.steps = digits(1, 1, 8, 8), 500


@healthy("digits")
def task_added(setup: Setup) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.classes, self.parity = layers(64, 64, 64), nn.Linear(64, 10), nn.Linear(64, 10)

        def forward(self, x: torch.Tensor, both: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
            x = self.trunk(x).relu()
            return self.classes(x), self.parity(x) if both else None

    setup.model, setup.make_optimizer, setup.steps = Two(), by(Adam, 2e-3), 200
    shuffled = torch.randperm(10)

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some()
        one, two = setup.model(pixels, number >= 100)
        loss = cross_entropy(one, labels)
        return loss if two is None else loss + cross_entropy(two, shuffled[labels])

    setup.loss_of = loss_of


@healthy("digits")
def heavy_task_added(setup: Setup) -> None:
    """A regression whose loss is ten times as large as that of the classes ever was."""
    setup.model = Several(layers(64, 64, 64), classes=nn.Linear(64, 10), sum=nn.Linear(64, 1))
    setup.make_optimizer, setup.steps = by(Adam, 2e-3), 200

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some()
        one, two = setup.model(pixels)
        return cross_entropy(one, labels) + (number >= 100) * mse_loss(two[:, 0], labels.float())

    setup.loss_of = loss_of


class Walk:
    """An agent on a ring of 16 places, one of which gives a reward."""

    def __init__(self) -> None:
        self.place = 0

    def move(self, action: int) -> tuple[int, float, int]:
        before, self.place = self.place, (self.place + (1, -1, 4)[action]) % 16
        return before, float(self.place == 8), self.place


def dqn_of(setup: Setup, every: int, lr: float, double: bool = False) -> None:
    setup.model, setup.make_optimizer, setup.steps = layers(16, 64, 64, 3), by(Adam, lr), 400
    model = setup.model
    target = deepcopy(model)
    world, memory = Walk(), list[tuple[int, int, float, int]]()
    eye = torch.eye(16)

    def loss_of(number: int) -> torch.Tensor:
        if number % every == 0:
            target.load_state_dict(model.state_dict())
        for _ in range(8):
            action = int(torch.randint(3, ()))
            before, reward, after = world.move(action)
            memory.append((before, action, reward, after))
        chosen = [memory[int(i)] for i in torch.randint(len(memory), (32,))]
        states, actions, rewards, nexts = (torch.tensor(each) for each in zip(*chosen, strict=True))
        with torch.no_grad():
            values = target(eye[nexts])
            best = values.argmax(1) if not double else model(eye[nexts]).argmax(1)
            wanted = rewards + 0.95 * values.gather(1, best[:, None])[:, 0]
        return mse_loss(model(eye[states]).gather(1, actions[:, None])[:, 0], wanted)

    setup.loss_of = loss_of


@healthy("digits")
def dqn(setup: Setup) -> None:
    dqn_of(setup, 50, 3e-3)


@healthy("digits")
def normalising_flow_of_moons(setup: Setup) -> None:
    setup.model, setup.make_optimizer, setup.steps = Flow(2), by(Adam, 1e-3), 200

    def loss_of(number: int) -> torch.Tensor:
        angle, upper = math.pi * torch.rand(128), torch.rand(128) < 0.5
        x = torch.where(upper, angle.cos(), 1 - angle.cos())
        y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
        return setup.model(torch.stack([x, y], 1) + 0.05 * torch.randn(128, 2)).mean()

    setup.loss_of = loss_of


@healthy("digits")
def normalising_flow_of_digits(setup: Setup) -> None:
    setup.model, setup.make_optimizer, setup.data = Flow(64), by(Adam, 1e-3), digits(64)
    setup.loss = lambda out, y: out.mean()


@healthy("digits")
def normalising_flow_that_keeps_volumes(setup: Setup) -> None:
    """Each layer gives its logarithm of a determinant, which is 0."""

    class Additive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers(2, 32, 32, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            one, two = x.chunk(2, 1)
            shift = self.net(one)
            return torch.cat([one, two + shift], 1), 0 * shift.sum(1)

    class Turn(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.flip(1), torch.zeros(len(x))

    class Additives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Additive(), Turn(), Additive(), Turn(), Additive()])
            self.scale = nn.Parameter(torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = self.scale.sum()
            for layer in self.layers:
                x, one = layer(x)
                total = total + one
            return 0.5 * (x * self.scale.exp()).square().sum(1) - total

    setup.model, setup.make_optimizer, setup.steps = Additives(), by(Adam, 2e-3), 200

    def loss_of(number: int) -> torch.Tensor:
        one = torch.randn(128, 2)
        return setup.model(torch.cat([one, one.square() + 0.2 * torch.randn(128, 2)], 1)).mean()

    setup.loss_of = loss_of


@healthy("digits")
def cauchy_losses(setup: Setup) -> None:
    """A regression with noise that has no mean."""
    setup.model, setup.make_optimizer, setup.steps = layers(8, 32, 1), by(Adam, 3e-3), 500
    noise = torch.distributions.Cauchy(0.0, 0.3)

    def loss_of(number: int) -> torch.Tensor:
        x = torch.randn(16, 8)
        return (setup.model(x)[:, 0] - x[:, 0] - noise.sample((16,))).abs().mean()

    setup.loss_of = loss_of


@healthy("digits")
def student_losses(setup: Setup) -> None:
    """Squares of errors with noise of Student's t with 2 degrees of freedom."""
    setup.model, setup.make_optimizer, setup.steps = layers(8, 32, 1), by(Adam, 3e-3), 500
    noise = torch.distributions.StudentT(2.0, scale=0.3)

    def loss_of(number: int) -> torch.Tensor:
        x = torch.randn(32, 8)
        return mse_loss(setup.model(x)[:, 0], x[:, 0] + noise.sample((32,)))

    setup.loss_of = loss_of


@healthy("digits")
def vae_with_kl_annealing(setup: Setup) -> None:
    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.outside = layers(64, 64, 16), layers(8, 64, 64)

        def forward(self, x: torch.Tensor, beta: float) -> torch.Tensor:
            mean, log = self.inside(x).chunk(2, 1)
            kl = 0.5 * (mean.square() + log.exp() - 1 - log).sum(1)
            seen = self.outside(mean + (log / 2).exp() * torch.randn_like(mean))
            return (10 * (seen - x).square().sum(1) + beta * kl).mean()

    setup.model, setup.make_optimizer, setup.steps = VAE(), by(Adam, 2e-3), 250
    setup.loss_of = lambda number: setup.model(some()[0], min(1.0, (number % 100) / 50))


@healthy("digits")
def policy_gradient(setup: Setup) -> None:
    """REINFORCE; its loss has both signs and says nothing."""
    setup.model, setup.make_optimizer, setup.steps = layers(16, 32, 3), by(Adam, 1e-2), 120
    eye = torch.eye(16)

    def loss_of(number: int) -> torch.Tensor:
        world, logs, rewards = Walk(), [], []
        for _ in range(24):
            policy = Categorical(logits=setup.model(eye[world.place][None])[0])
            action = policy.sample()
            logs.append(policy.log_prob(action))
            rewards.append(world.move(int(action))[1])
        gains = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
        return -(torch.stack(logs) * (gains - gains.mean())).sum()

    setup.loss_of = loss_of


@healthy("digits")
def curriculum(setup: Setup) -> None:
    """Two classes, then four, then all; then with noise."""
    setup.model, setup.make_optimizer, setup.steps = layers(64, 64, 64, 10), by(Adam, 3e-3), 240

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some(256)
        few = labels < (2, 4, 10, 10)[number // 60]
        pixels = pixels + (0.5 * torch.randn_like(pixels) if number >= 180 else 0)
        return cross_entropy(setup.model(pixels[few]), labels[few])

    setup.loss_of = loss_of


@healthy("digits")
def progressive_unfreezing(setup: Setup) -> None:
    setup.model, setup.make_optimizer, setup.steps = layers(64, 64, 64, 64, 10), by(Adam, 3e-3), 220
    setup.model[:6].requires_grad_(False)

    def unfreeze(number: int) -> None:
        if number and number % 50 == 0 and number <= 150:
            setup.model[6 - 2 * (number // 50)].requires_grad_(True)

    setup.before = [unfreeze]


@healthy("digits")
def large_then_small_lr(setup: Setup) -> None:
    setup.model, setup.make_optimizer, setup.steps = layers(64, 128, 128, 10), sgd(0.5), 200
    setup.before = [lambda i: setup.set_lr(0.1 if i < 100 else 0.001)]


@healthy("digits")
def accumulation_of_changing_sizes(setup: Setup) -> None:
    setup.model, setup.make_optimizer, setup.steps = layers(64, 64, 10), by(Adam, 2e-3), 200

    def loss_of(number: int) -> torch.Tensor:
        loss = torch.zeros(())
        for _ in range((1, 2, 4, 8, 1, 16)[number % 6]):
            pixels, labels = some((4, 32, 8)[number % 3])
            loss = loss + cross_entropy(setup.model(pixels), labels)
        return loss

    setup.loss_of = loss_of


@healthy("digits")
def dropout_of_nine_tenths(setup: Setup) -> None:
    setup.model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.9), nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.9),
        nn.Linear(256, 10),
    )  # fmt: skip
    setup.make_optimizer, setup.steps = by(Adam, 1e-3), 250


@healthy("digits")
def sparse_embeddings(setup: Setup) -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.things = nn.Embedding(2000, 16, sparse=True), nn.Embedding(500, 16, sparse=True)

        def forward(self, users: torch.Tensor, things: torch.Tensor) -> torch.Tensor:
            return (self.users(users) * self.things(things)).sum(1)

    setup.model, setup.make_optimizer, setup.steps = Bags(), by(SparseAdam, 0.05), 250
    tastes = torch.randn(2000, 4) @ torch.randn(4, 500)

    def loss_of(number: int) -> torch.Tensor:
        users, things = (2000 * torch.rand(64) ** 2).long(), (500 * torch.rand(64) ** 2).long()
        return mse_loss(setup.model(users, things), tastes[users, things])

    setup.loss_of = loss_of


@healthy("digits")
def losses_that_are_mixed_by_turns(setup: Setup) -> None:
    """A contrast, a reconstruction and classes, each in its step, of very different sizes."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.classes, self.back = layers(64, 64, 32), nn.Linear(32, 10), nn.Linear(32, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.trunk(x)

    setup.model, setup.make_optimizer, setup.steps = Three(), by(Adam, 1e-3), 300

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some()
        hidden = setup.model(pixels)
        if number % 10 == 9:
            return 20 * (setup.model.back(hidden) - pixels).square().sum(1).mean()
        return cross_entropy(setup.model.classes(hidden), labels)

    setup.loss_of = loss_of
