"""Tests of the optimizer law: a step changes an element as the optimizer's formula says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

import hookstats
from hookstats.rules import Finding, judge, optimizer_formula
from tests.rules.outside import halving, snapshots

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: SGD(p, 0.1),
    "SGD, weight decay": lambda p: SGD(p, 0.1, weight_decay=0.1, maximize=True),
    "momentum": lambda p: SGD(p, 0.1, momentum=0.9, dampening=0.3, foreach=False),
    "nesterov": lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD, fused": lambda p: SGD(p, 0.1, weight_decay=0.1, fused=True),
    "Adam": lambda p: Adam(p, 1e-2, weight_decay=0.1),
    "Adam, amsgrad": lambda p: Adam(p, 1e-2, amsgrad=True, foreach=True),
    "AdamW": lambda p: AdamW(p, 1e-2, betas=(0.8, 0.9), eps=1e-3),
    "AdamW, fused": lambda p: AdamW(p, 1e-2, amsgrad=True, maximize=True, fused=True),
    "AdamW, groups": lambda p: AdamW([{"params": [each], "lr": 1e-2 / (i + 1)} for i, each in enumerate(p)]),
    "AdamW, lr as a tensor": lambda p: AdamW(p, torch.tensor(1e-2)),
}


def nothing(step: int, model: nn.Module) -> None:
    pass


def findings(make: Make) -> list[Finding]:
    return judge(snapshots(nothing, make_optimizer=make), rules=[optimizer_formula])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_what_the_formula_says(name: str, dtype: torch.dtype) -> None:
    if name == "SGD, fused" and dtype == torch.bfloat16:
        pytest.skip("torch 2.13 leaves most elements as they are, on a CPU")
    taken = snapshots(nothing, make_optimizer=OPTIMIZERS[name], dtype=dtype, steps=10)
    totals = [each[site].total for each in taken for site in each.order if site.tensor == "optimizer_law"]
    assert len(totals) == 4 * 10
    assert {(each.min, each.max) for each in totals} == {(1.0, 1.0)}


def with_hooks(make: Make, before: Callable[[Any], None], after: Callable[[Any], None] = lambda o: None) -> Make:
    """Give an optimizer hooks that change something while it steps, without our knowledge."""

    def made(parameters: Any) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        optimizer.register_step_pre_hook(lambda o, *_: (before(o), None)[1])
        optimizer.register_step_post_hook(lambda o, *_: after(o))
        return optimizer

    return made


def set_lr(lr: float) -> Callable[[Any], None]:
    return lambda o: o.param_groups[0].update(lr=lr)


def zero_second_moment(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg_sq"].zero_()


def no_gradient(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"][1].grad = None


def test_a_fault_is_found_with_its_place_and_factor() -> None:
    (half,) = findings(halving)
    assert (half.site.name, half.severity, half.step, half.since) == ("2.weight", "critical", 13, 12)
    assert half.value == pytest.approx(0.5, rel=0.02)
    assert "by 0.5 times what the optimizer's formula says" in half.sentence
    (never,) = findings(with_hooks(OPTIMIZERS["AdamW"], no_gradient))
    assert (never.site.name, never.severity, never.step) == ("0.bias", "critical", 1)
    assert "does not change" in never.sentence
    far = findings(with_hooks(lambda p: AdamW(p, 1e-2), set_lr(0.1), set_lr(1e-2)))[0]
    assert far.value == pytest.approx(10, rel=0.02)
    assert len(far.sites) == 4
    assert findings(with_hooks(OPTIMIZERS["Adam"], zero_second_moment))[0].value > 1.5
    clipped = findings(with_hooks(OPTIMIZERS["SGD"], lambda o: o.param_groups[0]["params"][0].grad.mul_(0.8)))[0]
    assert (clipped.site.name, clipped.severity) == ("0.weight", "warning")


def test_a_second_moment_that_stays_0_is_found() -> None:
    found = findings(with_hooks(OPTIMIZERS["Adam"], lambda o: None, zero_second_moment))
    first = {each.site.name: each for each in reversed(found) if each.severity == "critical"}
    assert {"0.weight", "0.bias", "2.bias"} <= set(first)
    assert (first["0.weight"].step, first["0.weight"].since) == (2, 1)


def test_an_optimizer_that_is_not_known_is_left_out() -> None:
    class Own(SGD):
        pass

    for make in (lambda p: Own(p, 0.1), lambda p: torch.optim.RMSprop(p, 1e-3)):
        taken = snapshots(nothing, make_optimizer=make, steps=2)
        assert not [site for each in taken for site in each.order if site.tensor == "optimizer_law"]


def resumed(path: Path, lr: float) -> Any:
    """The findings of one attempt, and its scalars."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = AdamW(
        [{"params": [model.weight]}, {"params": [model.bias], "lr": torch.tensor(lr, dtype=torch.float64)}], lr
    )
    tensors = ("param_sample", "update_sample", "optimizer_law")
    first = 0 if not path.exists() else 5
    with hookstats.attach(model, tensors=tensors, every=1, sinks=[hookstats.record(path, on_finding=None)]) as monitor:
        for step in range(first, first + 5):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(step)
        return [each for each in monitor.check() if each.rule == "optimizer-formula"]


def test_a_learning_rate_that_a_resume_has_changed_is_found(tmp_path: Path) -> None:
    assert resumed(tmp_path / "run", 1e-4) == []
    assert resumed(tmp_path / "run", 1e-4) == []
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (found,) = resumed(tmp_path / "copy", 1e-3)
    assert (found.severity, found.site, found.value) == ("warning", None, pytest.approx(10))
    assert "is 0.001 since the run was resumed, and was 0.0001 before (optimizer.0.lr, and 1 other group)" in (
        found.sentence
    )
    scalars = hookstats.load(tmp_path / "run")[0].scalars
    assert scalars["optimizer.0.lr"] == pytest.approx(1e-4)
    assert scalars["optimizer.1.beta2"] == 0.999
