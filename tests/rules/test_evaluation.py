"""A model that is trained in evaluation mode is named; what is meant so is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hookstats.results import Finding
from hookstats.rules import evaluation_mode, judge
from tests.rules.trainings import train

STEPS = 24


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(8, 16),
            nn.BatchNorm1d(16),
            nn.Dropout(0.2),
            nn.Linear(16, 3),
        )
        self.is_used = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.is_used:
            x = self.norm(x)
        out: torch.Tensor = self.last(self.drop(x.relu()))
        return out


def findings(after: Callable[[Net, int], None], every: int = 1, zero: bool = False) -> list[Finding]:
    """Train, do something after each step, and return the findings."""
    torch.manual_seed(0)
    model = Net().train()

    def loss_of(step: int) -> torch.Tensor:
        if zero:
            for each in model.parameters():
                each.grad = torch.zeros_like(each)
        return nn.functional.cross_entropy(model(torch.randn(16, 8)), torch.randint(0, 3, (16,)))

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = lambda step: step and after(model, step - 1)  # noqa: E731
    return judge(train(model, loss_of, optimizer, STEPS, before, every=every), [evaluation_mode])


@pytest.mark.parametrize(("every", "said"), [(1, 12), (4, 20)])
def test_a_model_that_was_not_put_back_is_named_since_the_next_measured_step(every: int, said: int) -> None:
    def validate(model: Net, step: int) -> None:
        if step == 9:
            model.eval()

    (found,) = findings(validate, every)
    assert (found.rule, found.severity, found.step) == ("evaluation-mode", "warning", said)
    assert f"the model has been trained in evaluation mode since step {12 if every == 4 else 10}" in found.sentence
    assert "Call model.train() after a validation" in found.sentence


def test_validations_that_end_modules_that_are_left_out_and_frozen_parts_are_silent() -> None:
    def validate(model: Net, step: int) -> None:
        if step % 3 == 2:
            model.eval()
            model(torch.randn(4, 8))
            model.train()

    def leave_out(model: Net, step: int) -> None:
        model.is_used = step < 9

    def freeze(model: Net, step: int) -> None:
        if step == 9:
            model.norm.eval().requires_grad_(False)

    assert findings(validate) == []
    assert findings(leave_out) == []
    assert findings(leave_out, zero=True) == []
    assert findings(freeze) == []
