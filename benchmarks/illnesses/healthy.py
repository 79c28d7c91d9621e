"""Healthy trainings in which a rule of learning or of data might see an illness."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from benchmarks.illnesses.ill import drop
from benchmarks.illnesses.models import Around, layers
from benchmarks.illnesses.training import Setup, adam, by, healthy, sgd


@healthy("mlp", "tanh", "cnn", "resnet", "gpt", "lstm")
def as_it_is(setup: Setup) -> None:
    """The training that others break."""


@healthy("mlp", "gpt")
def frozen_on_purpose(setup: Setup) -> None:
    first = next(each for each in setup.model.modules() if isinstance(each, nn.Linear))
    first.requires_grad_(False)
    setup.optimizer = setup.make_optimizer(setup.model)
    drop(setup.optimizer, first.parameters())


@healthy("gpt")
def warmup_from_zero(setup: Setup) -> None:
    setup.before = [lambda step: setup.set_lr(3e-3 * min(step / 30, 1.0))]


@healthy("mlp")
def restarts_to_zero(setup: Setup) -> None:
    setup.before = [lambda step: setup.set_lr(0.03 * abs(1 - step % 40 / 20))]


@healthy("gpt")
def gradient_accumulation_in_calls_of_step(setup: Setup) -> None:
    """Monitor.step after each of four microbatches."""
    setup.zeroes = False
    setup.before = [lambda step: setup.optimizer.zero_grad() if step % 4 == 0 else None]
    setup.steps_optimizer = lambda step: step % 4 == 3


@healthy("mlp")
def bfloat16_with_float32_copies(setup: Setup) -> None:
    masters = [each.detach().clone().requires_grad_() for each in setup.model.parameters()]
    setup.cast(torch.bfloat16)
    inner = torch.optim.AdamW(masters, 3e-4)

    class Masters(torch.optim.Optimizer):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model.parameters(), {})

        def step(self, closure: Any = None) -> None:
            here = self.param_groups[0]["params"]
            for master, each in zip(masters, here, strict=True):
                master.grad = each.grad.float()
            inner.step()
            with torch.no_grad():
                for master, each in zip(masters, here, strict=True):
                    each.copy_(master)

    setup.make_optimizer = Masters


@healthy("cnn")
def pixels_behind_a_batch_norm(setup: Setup) -> None:
    setup.model = nn.Sequential(nn.BatchNorm2d(1), *setup.model.children())
    setup.damage = lambda step, x, y: (255 * x, y)


@healthy("mlp")
def weight_decay_as_usual(setup: Setup) -> None:
    setup.make_optimizer = sgd(0.05, weight_decay=5e-4)


@healthy("gpt")
def weight_decay_of_language_models(setup: Setup) -> None:
    setup.make_optimizer = adam(3e-3, weight_decay=0.1)


@healthy("mlp")
def a_head_that_is_not_used(setup: Setup) -> None:
    body, head = layers(64, 64, 64), nn.Linear(64, 10)
    setup.model = Around(nn.Sequential(body, head), lambda model, x: model(x))
    setup.model.other = nn.Linear(64, 10)


@healthy("mlp")
def a_copy_by_moving_average(setup: Setup) -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = layers(64, 64, 64, 10)
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = self.teacher(x)
                for mine, its in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    mine.lerp_(its, 0.05)
            y: torch.Tensor = self.student(x)
            return y + 0.01 * (y - target)

    setup.model = Teacher()


@healthy("mlp")
def a_loss_of_all_data(setup: Setup) -> None:
    """One batch all the time, without noise."""
    batch = setup.data(0)
    setup.data = lambda step: batch


@healthy("tanh")
def a_regression_by_lbfgs(setup: Setup) -> None:
    setup.loss = lambda out, y: mse_loss(out.mean(1), y / 10)
    setup.make_optimizer = by(torch.optim.Rprop, 1e-3)


@healthy("resnet")
def images_that_become_brighter(setup: Setup) -> None:
    setup.damage = lambda step, x, y: (x * (1 + step / 100), y)


@healthy("mlp")
def two_optimizers_in_turn(setup: Setup) -> None:
    class Turns:
        def __init__(self, model: nn.Module) -> None:
            parameters = list(model.parameters())
            self.each = [torch.optim.SGD(parameters[:4], 0.05), torch.optim.SGD(parameters[4:], 0.05)]
            self.number = 0

        def zero_grad(self) -> None:
            for each in self.each:
                each.zero_grad()

        def step(self) -> None:
            self.each[self.number // 3 % 2].step()
            self.number += 1

    setup.make_optimizer = Turns


@healthy("cnn")
def random_erasing_and_noise(setup: Setup) -> None:
    def augment(step: int, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * (torch.rand(len(x), 1, 1, 1) > 0.1) + 0.1 * torch.randn_like(x), y

    setup.damage = augment


@healthy("mlp")
def label_smoothing(setup: Setup) -> None:
    setup.loss = lambda out, y: cross_entropy(out, y, label_smoothing=0.1)
