"""One optimizer for each parameter, which steps inside backward: what each costs, and whose parameters it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats import _native
from hookstats.watch import parameters
from tests.watch.parameters import BOTH, check_site, grad_of, loss_of, residual

KINDS = (*BOTH, "param_update")


def step_in_backward(model: nn.Module) -> dict[str, tuple[torch.Tensor, ...]]:
    """An optimizer for each parameter; returns by name what the last one read and did: value, gradient, update."""
    seen: dict[str, tuple[torch.Tensor, ...]] = {}

    def made(name: str, parameter: nn.Parameter) -> Any:
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(p: torch.Tensor) -> None:
            before, gradient = p.detach().clone(), grad_of(p).clone()
            optimizer.step()
            optimizer.zero_grad()
            seen[name] = before, gradient, p.detach() - before

        return step

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(made(name, parameter))
    return seen


def test_each_parameter_is_what_its_own_optimizer_is_given() -> None:
    model = residual()
    seen = step_in_backward(model)
    mon = hookstats.attach(model, tensors=KINDS, every=1, options=hookstats.Options(strict=True))
    for seed in range(3):
        loss_of(model, seed).backward()
        taken = mon.step()
        assert {stats.calls for stats in taken.values()} == {1}
        for name, values in seen.items():
            for kind, value in zip(KINDS, values, strict=True):
                check_site(taken, name, kind, value)


def work_of_a_step(monkeypatch: pytest.MonkeyPatch, layers: int) -> tuple[int, int]:
    """Count, in the third step, the look-ups of parameters and the entries given to the extension."""
    work = [0, 0]
    get, batch = parameters.Parameter.get, _native.Batch

    def counted_get(each: parameters.Parameter) -> torch.Tensor | None:
        work[0] += 1
        return get(each)

    class Counted:
        def __init__(self, *args: Any) -> None:
            self.batch = batch(*args)

        def accumulate(self, tensors: list[torch.Tensor | None]) -> Any:
            work[1] += len(tensors)
            return self.batch.accumulate(tensors)

    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
    step_in_backward(model)
    with monkeypatch.context() as patch:
        patch.setattr(parameters.Parameter, "get", counted_get)
        patch.setattr(_native, "Batch", Counted)
        mon = hookstats.attach(model, tensors=KINDS, every=1)
        for _ in range(3):
            work[:] = 0, 0
            model(torch.randn(2, 3)).sum().backward()
            taken = mon.step()
            assert {stats.calls for stats in taken.values()} == {1}
    return work[0], work[1]


def test_an_optimizer_costs_what_its_own_parameters_cost_however_many_the_model_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_up, given = work_of_a_step(monkeypatch, 5)
    looked_up_of_many, given_of_many = work_of_a_step(monkeypatch, 40)
    assert given == 2 * 5 * len(KINDS)
    assert given_of_many == 8 * given
    assert looked_up_of_many < 9 * looked_up  # but for what is looked up once a step, 8 times


def test_optimizers_of_another_model_are_looked_up_in_this_one_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = residual(), residual()
    mon = hookstats.attach(model, tensors=BOTH, every=1)
    step_in_backward(other)
    get, lookups = parameters.Parameter.get, []
    loss_of(other).backward()
    monkeypatch.setattr(parameters.Parameter, "get", lambda each: lookups.append(each) or get(each))
    loss_of(other).backward()
    assert lookups == []
    mon.detach()


def test_a_grad_scaler_does_not_read_the_whole_model_at_each_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = residual()
    optimizers = [torch.optim.SGD([each], lr=0.1) for each in model.parameters()]
    mon = hookstats.attach(model, tensors=BOTH, every=1)
    scaler = torch.amp.GradScaler("cpu")
    parameters, listings = model.parameters, []
    monkeypatch.setattr(model, "parameters", lambda: listings.append(1) or parameters())
    for seed in range(3):
        scaler.scale(loss_of(model, seed)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        mon.step()
    assert len(listings) == 3  # once in each step


def test_a_parameter_replaced_between_two_optimizers_of_a_step_is_found() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors=BOTH, every=1)
    body = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    loss_of(model).backward()
    body.step()
    body.zero_grad()
    model.head.weight = nn.Parameter(torch.randn(9, 16))
    model.head.bias = nn.Parameter(torch.randn(9))
    head = torch.optim.SGD(model.head.parameters(), lr=0.1)
    loss_of(model).backward()
    weight, gradient = model.head.weight.detach().clone(), grad_of(model.head.weight).clone()
    head.step()
    head.zero_grad()
    taken = mon.step()
    assert taken["head.weight", "param_grad"].calls == 1
    check_site(taken, "head.weight", "param", weight)
    check_site(taken, "head.weight", "param_grad", gradient)


def test_what_was_replaced_is_no_longer_read_when_its_optimizer_steps() -> None:
    model = residual()
    mon = hookstats.attach(model, "head", tensors=BOTH, every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    optimizer.step()
    assert mon.step() is not None
    model.head.weight = nn.Parameter(torch.randn_like(model.head.weight))
    optimizer.step()  # it still has the old one, and its gradient
    loss_of(model).backward()
    taken = mon.step()
    assert taken["head.weight", "param_grad"].calls == 1
    check_site(taken, "head.weight", "param_grad", grad_of(model.head.weight))


def test_a_strangers_parameter_that_the_model_takes_over_is_found() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors="param_grad", every=1)
    weight = nn.Parameter(torch.randn_like(model.head.weight))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.step()
    assert mon.step() is not None
    model.head.weight = weight
    loss_of(model).backward()
    gradient = grad_of(weight).clone()
    optimizer.step()
    optimizer.zero_grad()
    taken = mon.step()
    check_site(taken, "head.weight", "param_grad", gradient)


def test_parameters_that_are_shared_later_are_found_under_both_names() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors="param_grad", every=1)
    for shared in (False, True):
        if shared:
            model.blocks[1].up.weight = model.blocks[0].up.weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model).backward()
        gradient = grad_of(model.blocks[1].up.weight).clone()
        optimizer.step()
        optimizer.zero_grad()
        taken = mon.step()
    for name in ("blocks.0.up.weight", "blocks.1.up.weight"):
        assert taken[name, "param_grad"].calls == 1
        check_site(taken, name, "param_grad", gradient)


def test_optimizers_that_are_made_anew_for_other_parameters_do_not_pile_up() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors=BOTH, every=1)
    everything = list(model.parameters())
    sites = len(mon.sites)
    for seed in range(100):
        chosen = torch.randperm(len(everything), generator=torch.Generator().manual_seed(seed))[:5].tolist()
        optimizer = torch.optim.SGD([everything[i] for i in chosen], lr=0.01)
        loss_of(model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()
        for parameter in everything:
            parameter.grad = None
        taken = mon.step()
        assert sum(stats.calls for site, stats in taken.items() if site.tensor == "param_grad") == 5
    assert sum(map(len, mon._parameters._batches._known)) < 10 * sites
