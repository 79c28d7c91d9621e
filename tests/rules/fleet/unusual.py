"""Trainings that look ill and are healthy."""

from __future__ import annotations

import math
from copy import deepcopy

import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from tests.rules.fleet.models import GPT, Flow, cnn, layers
from tests.rules.fleet.training import Training, lines, plain, set_lr, some, unusual
from tests.rules.trainings import Experts


@unusual
def warm_restarts() -> Training:
    model = layers(64, 64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 50)

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some()
        return cross_entropy(model(pixels), labels)

    step = plain(model, loss_of, optimizer)

    def with_schedule(number: int) -> float:
        loss = step(number)
        schedule.step()
        return loss

    return Training(model, with_schedule, 250)


@unusual
def warm_restarts_of_adam() -> Training:
    model = layers(64, 64, 64, 10)
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)

    def restart(number: int) -> None:
        set_lr(optimizer, 1e-2 * (1 + math.cos(math.pi * (number % 60) / 60)))

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some()
        return cross_entropy(model(pixels), labels)

    return Training(model, plain(model, loss_of, optimizer, before=restart), 240)


class Muon(torch.optim.Optimizer):
    """Updates of matrices are made orthogonal; others go along the sign."""

    def __init__(self, parameters: object, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
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


@unusual
def muon_like() -> Training:
    model = layers(64, 64, 64, 10, activation=nn.GELU)
    with torch.no_grad():
        model[4].weight.mul_(0.1)

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some()
        return cross_entropy(model(pixels), labels)

    return Training(model, plain(model, loss_of, Muon(model.parameters(), 0.1)))


@unusual
def muon_like_on_gpt() -> Training:
    model = GPT()
    with torch.no_grad():
        for block in model.blocks:
            block.proj.weight.normal_(std=0.002)
            block.mlp[2].weight.normal_(std=0.002)
    return Training(model, plain(model, lambda i: model.loss(lines()), Muon(model.parameters(), 0.05)), 120)


@unusual
def batch_of_one_sequence() -> Training:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return Training(model, plain(model, lambda i: model.loss(lines(1, 20)), optimizer), 400)


@unusual
def batch_of_one_image() -> Training:
    model = cnn()

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some(1, 1, 8, 8)
        return cross_entropy(model(pixels), labels)

    return Training(model, plain(model, loss_of, torch.optim.SGD(model.parameters(), 0.01)), 500)


@unusual
def task_added() -> Training:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.classes, self.parity = layers(64, 64, 64), nn.Linear(64, 10), nn.Linear(64, 10)

        def forward(self, x: torch.Tensor, both: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
            x = self.trunk(x).relu()
            return self.classes(x), self.parity(x) if both else None

    model = Two()
    shuffled = torch.randperm(10)

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some()
        one, two = model(pixels, number >= 100)
        loss = cross_entropy(one, labels)
        return loss if two is None else loss + cross_entropy(two, shuffled[labels])

    return Training(model, plain(model, loss_of, torch.optim.Adam(model.parameters(), 2e-3)), 200)


@unusual
def heavy_task_added() -> Training:
    """A regression whose loss is ten times as large as that of the classes ever was."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.classes, self.sum = layers(64, 64, 64), nn.Linear(64, 10), nn.Linear(64, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.trunk(x).relu()
            return self.classes(x), self.sum(x)[:, 0]

    model = Two()

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some()
        one, two = model(pixels)
        return cross_entropy(one, labels) + (number >= 100) * mse_loss(two, labels.float())

    return Training(model, plain(model, loss_of, torch.optim.Adam(model.parameters(), 2e-3)), 200)


class Walk:
    """An agent on a ring of 16 places, one of which gives a reward."""

    def __init__(self) -> None:
        self.place = 0

    def move(self, action: int) -> tuple[int, float, int]:
        before, self.place = self.place, (self.place + (1, -1, 4)[action]) % 16
        return before, float(self.place == 8), self.place


def dqn_of(every: int, lr: float, double: bool = False) -> Training:
    model = layers(16, 64, 64, 3)
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

    return Training(model, plain(model, loss_of, torch.optim.Adam(model.parameters(), lr)), 400)


@unusual
def dqn() -> Training:
    return dqn_of(50, 3e-3)


@unusual
def normalising_flow_of_moons() -> Training:
    model = Flow(2)

    def loss_of(number: int) -> torch.Tensor:
        angle, upper = math.pi * torch.rand(128), torch.rand(128) < 0.5
        x = torch.where(upper, angle.cos(), 1 - angle.cos())
        y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
        return model(torch.stack([x, y], 1) + 0.05 * torch.randn(128, 2)).mean()

    return Training(model, plain(model, loss_of, torch.optim.Adam(model.parameters(), 1e-3)), 200)


@unusual
def normalising_flow_of_digits() -> Training:
    model = Flow(64)
    return Training(
        model, plain(model, lambda i: model(some(64)[0]).mean(), torch.optim.Adam(model.parameters(), 1e-3))
    )


@unusual
def normalising_flow_that_keeps_volumes() -> Training:
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

    model = Additives()

    def loss_of(number: int) -> torch.Tensor:
        one = torch.randn(128, 2)
        return model(torch.cat([one, one.square() + 0.2 * torch.randn(128, 2)], 1)).mean()

    return Training(model, plain(model, loss_of, torch.optim.Adam(model.parameters(), 2e-3)), 200)


@unusual
def cauchy_losses() -> Training:
    """A regression with noise that has no mean."""
    model, noise = layers(8, 32, 1), torch.distributions.Cauchy(0.0, 0.3)

    def loss_of(number: int) -> torch.Tensor:
        x = torch.randn(16, 8)
        return (model(x)[:, 0] - x[:, 0] - noise.sample((16,))).abs().mean()

    return Training(model, plain(model, loss_of, torch.optim.Adam(model.parameters(), 3e-3)), 500)


@unusual
def student_losses() -> Training:
    """Squares of errors with noise of Student's t with 2 degrees of freedom."""
    model, noise = layers(8, 32, 1), torch.distributions.StudentT(2.0, scale=0.3)

    def loss_of(number: int) -> torch.Tensor:
        x = torch.randn(32, 8)
        return mse_loss(model(x)[:, 0], x[:, 0] + noise.sample((32,)))

    return Training(model, plain(model, loss_of, torch.optim.Adam(model.parameters(), 3e-3)), 500)


@unusual
def gan() -> Training:
    generator, critic = layers(8, 64, 64), layers(64, 64, 1, activation=nn.ELU)
    model = nn.ModuleDict({"generator": generator, "critic": critic})
    makes = torch.optim.Adam(generator.parameters(), 2e-3, betas=(0.5, 0.999))
    judges = torch.optim.Adam(critic.parameters(), 2e-3, betas=(0.5, 0.999))

    def step(number: int) -> float:
        real, fake = some()[0], generator(torch.randn(32, 8))
        judges.zero_grad()
        loss = binary_cross_entropy_with_logits(critic(real), torch.ones(32, 1))
        loss = loss + binary_cross_entropy_with_logits(critic(fake.detach()), torch.zeros(32, 1))
        loss.backward()
        judges.step()
        makes.zero_grad()
        fooled = binary_cross_entropy_with_logits(critic(generator(torch.randn(32, 8))), torch.ones(32, 1))
        fooled.backward()
        makes.step()
        return fooled.item()

    return Training(model, step, 250)


@unusual
def vae_with_kl_annealing() -> Training:
    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.outside = layers(64, 64, 16), layers(8, 64, 64)

        def forward(self, x: torch.Tensor, beta: float) -> torch.Tensor:
            mean, log = self.inside(x).chunk(2, 1)
            kl = 0.5 * (mean.square() + log.exp() - 1 - log).sum(1)
            seen = self.outside(mean + (log / 2).exp() * torch.randn_like(mean))
            return (10 * (seen - x).square().sum(1) + beta * kl).mean()

    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    return Training(model, plain(model, lambda i: model(some()[0], min(1.0, (i % 100) / 50)), optimizer), 250)


@unusual
def policy_gradient() -> Training:
    """REINFORCE; its loss has both signs and says nothing."""
    model = layers(16, 32, 3)
    eye = torch.eye(16)

    def loss_of(number: int) -> torch.Tensor:
        world, logs, rewards = Walk(), [], []
        for _ in range(24):
            policy = Categorical(logits=model(eye[world.place][None])[0])
            action = policy.sample()
            logs.append(policy.log_prob(action))
            rewards.append(world.move(int(action))[1])
        gains = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
        return -(torch.stack(logs) * (gains - gains.mean())).sum()

    return Training(model, plain(model, loss_of, torch.optim.Adam(model.parameters(), 1e-2)), 120)


@unusual
def curriculum() -> Training:
    """Two classes, then four, then all; then with noise."""
    model = layers(64, 64, 64, 10)

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some(256)
        few = labels < (2, 4, 10, 10)[number // 60]
        pixels = pixels + (0.5 * torch.randn_like(pixels) if number >= 180 else 0)
        return cross_entropy(model(pixels[few]), labels[few])

    return Training(model, plain(model, loss_of, torch.optim.Adam(model.parameters(), 3e-3)), 240)


@unusual
def progressive_unfreezing() -> Training:
    model = layers(64, 64, 64, 64, 10)
    model[:6].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def unfreeze(number: int) -> None:
        if number and number % 50 == 0 and number <= 150:
            model[6 - 2 * (number // 50)].requires_grad_(True)

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some()
        return cross_entropy(model(pixels), labels)

    return Training(model, plain(model, loss_of, optimizer, before=unfreeze), 220)


@unusual
def large_then_small_lr() -> Training:
    model = layers(64, 128, 128, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some()
        return cross_entropy(model(pixels), labels)

    step = plain(model, loss_of, optimizer, before=lambda i: set_lr(optimizer, 0.1 if i < 100 else 0.001))
    return Training(model, step, 200)


@unusual
def accumulation_of_changing_sizes() -> Training:
    model = layers(64, 64, 10)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)

    def loss_of(number: int) -> torch.Tensor:
        loss = torch.zeros(())
        for _ in range((1, 2, 4, 8, 1, 16)[number % 6]):
            pixels, labels = some((4, 32, 8)[number % 3])
            loss = loss + cross_entropy(model(pixels), labels)
        return loss

    return Training(model, plain(model, loss_of, optimizer), 200)


@unusual
def dropout_of_nine_tenths() -> Training:
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.9), nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.9),
        nn.Linear(256, 10),
    )  # fmt: skip

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some()
        return cross_entropy(model(pixels), labels)

    return Training(model, plain(model, loss_of, torch.optim.Adam(model.parameters(), 1e-3)), 250)


@unusual
def sparse_embeddings() -> Training:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.things = nn.Embedding(2000, 16, sparse=True), nn.Embedding(500, 16, sparse=True)

        def forward(self, users: torch.Tensor, things: torch.Tensor) -> torch.Tensor:
            return (self.users(users) * self.things(things)).sum(1)

    model = Bags()
    tastes = torch.randn(2000, 4) @ torch.randn(4, 500)

    def loss_of(number: int) -> torch.Tensor:
        users, things = (2000 * torch.rand(64) ** 2).long(), (500 * torch.rand(64) ** 2).long()
        return mse_loss(model(users, things), tastes[users, things])

    return Training(model, plain(model, loss_of, torch.optim.SparseAdam(list(model.parameters()), 0.05)), 250)


@unusual
def mixture_of_experts() -> Training:
    model = Experts()

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some(64)
        return cross_entropy(model(pixels), labels) + 0.1 * model.balance

    return Training(model, plain(model, loss_of, torch.optim.Adam(model.parameters(), 2e-3)))


@unusual
def losses_that_are_mixed_by_turns() -> Training:
    """A contrast, a reconstruction and classes, each in its step, of very different sizes."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.classes, self.back = layers(64, 64, 32), nn.Linear(32, 10), nn.Linear(32, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.trunk(x)

    model = Three()

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some()
        hidden = model(pixels)
        if number % 10 == 9:
            return 20 * (model.back(hidden) - pixels).square().sum(1).mean()
        return cross_entropy(model.classes(hidden), labels)

    return Training(model, plain(model, loss_of, torch.optim.Adam(model.parameters(), 1e-3)), 300)
