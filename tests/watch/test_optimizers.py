"""Tests of optimizers' steps: which gradients are read, at which moment, and by how much the weights changed."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import hookstats
from hookstats.watch import parameters
from tests.watch.parameters import BOTH, check_site, grad_of, loss_of, residual


def test_two_optimizers_each_bring_their_own() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors="param_grad", every=1)
    head = torch.optim.SGD(model.head.parameters(), lr=0.1)
    body = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    loss_of(model).backward()
    gradient = grad_of(model.head.weight).clone()
    head.step()
    model.head.weight.grad.mul_(100)
    body.step()
    snapshot = mon.step()
    check_site(snapshot, "head.weight", "param_grad", gradient)
    assert {stats.calls for stats in snapshot.values()} == {1}


def test_an_optimizer_that_is_no_torch_optimizer_is_no_obstacle() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors=BOTH, every=1)
    loss_of(model).backward()
    gradient = grad_of(model.head.weight).clone()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    snapshot = mon.step()
    check_site(snapshot, "head.weight", "param_grad", gradient)
    check_site(snapshot, "head.weight", "param", model.head.weight)
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    stranger.step()
    assert mon.snapshot().step == 0  # nothing of ours is in the open step


def test_gradients_that_overflowed_are_seen_though_the_optimizer_does_not_step_and_changes_nothing() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors=("param_grad", "param_update"), every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    scaler.scale(loss_of(model) * 1e6).backward()
    scaler.step(optimizer)
    scaler.update()
    snapshot = mon.step()
    assert snapshot["head.weight", "param_grad"].total.nans > 0
    assert [snapshot["head.weight", kind].calls for kind in ("param_grad", "param_update")] == [1, 0]
    assert not np.isfinite(snapshot.grad_norm)


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_seen_unscaled(fused: bool) -> None:
    model = residual()
    mon = hookstats.attach(model, tensors="param_grad", every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)  # a fused one unscales them itself
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(model)).backward()
    scaler.step(optimizer)
    snapshot = mon.step()
    twin = residual()
    loss_of(twin).backward()
    check_site(snapshot, "head.weight", "param_grad", grad_of(twin.head.weight))


def test_gradients_of_a_closure_are_those_that_it_computes() -> None:
    for optimizer_type in (torch.optim.SGD, torch.optim.LBFGS):
        model, twin = residual(), residual()
        mon = hookstats.attach(model, tensors=("param_grad", "param_update"), every=1)
        optimizers = [optimizer_type(m.parameters(), lr=0.1) for m in (model, twin)]
        for seed in range(3):
            twin.zero_grad()
            loss_of(twin, seed).backward()
            gradient = grad_of(twin.head.weight).clone()

            def closure(m: nn.Module, o: Any, seed: int) -> torch.Tensor:
                o.zero_grad()
                loss = loss_of(m, seed)
                loss.backward()
                return loss

            for m, o in zip((model, twin), optimizers, strict=True):
                if m is model:
                    o.step(closure=partial(closure, m, o, seed))
                else:
                    o.step(partial(closure, m, o, seed))
            taken = mon.step()
            check_site(taken, "head.weight", "param_grad", gradient)
            assert taken["head.weight", "param_update"].calls == 1
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        mon.detach()


def test_an_optimizer_inside_another_one_counts_once() -> None:
    class Outer(torch.optim.SGD):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.inner = torch.optim.SGD(*args, **kwargs)

        def step(self, closure: Any = None) -> None:
            self.inner.step()

    model = residual()
    mon = hookstats.attach(model, tensors=(*BOTH, "param_update"), every=1)
    loss_of(model).backward()
    norm = clip_grad_norm_(model.parameters(), float("inf"))
    Outer(list(model.parameters()), lr=0.1).step()
    taken = mon.step()
    assert taken.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    assert {stats.calls for stats in taken.values()} == {1}


def test_an_optimizer_step_that_raised_does_not_hide_the_next_one() -> None:
    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure: Any = None) -> None:
            if self.fails:
                raise RuntimeError("no")
            super().step(closure)

    model = residual()
    mon = hookstats.attach(model, tensors="param_grad", every=2)
    assert mon.step() is not None
    optimizer = Failing(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="no"):  # in a step that is not measured, which no close cleans up after
        optimizer.step()
    mon.step()
    optimizer.fails = False
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    taken = mon.step()
    assert taken["head.weight", "param_grad"].calls == 1


def test_the_norm_over_several_optimizer_steps_is_that_of_one() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors="param_grad", every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss_of(model).backward()
    norm = clip_grad_norm_(model.parameters(), float("inf"))
    optimizer.step()
    optimizer.step()
    taken = mon.step()
    assert taken["head.weight", "param_grad"].calls == 2
    assert taken.grad_norm == pytest.approx(norm.item(), rel=1e-6)


def test_gradients_that_a_fused_optimizer_unscales_are_never_all_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = residual()
    mon = hookstats.attach(model, tensors=BOTH, every=1)
    largest = max(p.nbytes for p in model.parameters())
    monkeypatch.setattr(parameters, "_UNSCALED_BYTES", 2 * largest)
    together: list[int] = []
    accumulate = mon._parameters._batches.accumulate

    def noted(owners: Any, values: Any) -> None:
        own = {id(p) for p in model.parameters()}
        together.append(sum(value.nbytes for value in values if value is not None and id(value) not in own))
        accumulate(owners, values)

    monkeypatch.setattr(mon._parameters._batches, "accumulate", noted)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    optimizer.grad_scale = torch.tensor(8.0)  # type: ignore[attr-defined]  # as a GradScaler does
    (8 * loss_of(model)).backward()
    gradients = {name: grad_of(p) / 8 for name, p in model.named_parameters()}
    optimizer.step()
    assert max(together) <= 2 * largest < sum(gradient.nbytes for gradient in gradients.values())
    snapshot = mon.step()
    for name, gradient in gradients.items():
        check_site(snapshot, name, "param_grad", gradient)
    assert {stats.calls for stats in snapshot.values()} == {1}


def test_an_update_whose_copy_does_not_fit_is_skipped() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(400, 400))
    with pytest.warns(UserWarning, match=r"not measured: 1.weight param_update: a copy of it would not fit"):
        mon = hookstats.attach(model, tensors="param_update", every=1, options=hookstats.Options(memory_budget=200_000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0](torch.randn(3, 4)).sum().backward()
    optimizer.step()
    taken = mon.step()
    assert taken["0.weight", "param_update"].calls == 1
    assert taken["0.weight", "param_update"].total.l2_norm > 0


def test_a_compiled_optimizer_is_measured_when_the_step_ends() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors="param_grad", every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    loss_of(model).backward()
    gradient = grad_of(model.head.weight).clone()
    step()
    snapshot = mon.step()
    check_site(snapshot, "head.weight", "param_grad", gradient)
    assert snapshot["head.weight", "param_grad"].calls == 1
