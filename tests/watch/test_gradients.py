"""Parameters' gradients: before clipping, their norm, their place in the order; where a step first is not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import hookstats
from hookstats import Site
from tests.watch.parameters import check_site, grad_of, loss_of, residual


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: grad_of(p).clone() for name, p in model.named_parameters()}


def test_a_gradient_that_comes_after_measure_gradients_is_read_when_its_optimizer_steps() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors="param_grad", every=1)
    model.head.requires_grad_(False)
    loss_of(model).backward()
    mon.measure_gradients()
    model.head.requires_grad_(True)
    loss_of(model).backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    snapshot = mon.step()
    check_site(snapshot, "head.weight", "param_grad", grad_of(model.head.weight))
    assert {stats.calls for stats in snapshot.values()} == {1}


def test_measure_gradients_does_nothing_in_other_steps_paused_or_where_none_are_watched() -> None:
    model = residual()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    mon = hookstats.attach(model, tensors=("param_grad", "param"), every=2)
    without = hookstats.attach(model, tensors="output")
    loss_of(model).backward()
    with mon.paused():
        mon.measure_gradients()
        assert not mon.snapshot().order
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert mon.step().grad_norm == pytest.approx(1.0, rel=1e-5)  # not measured before, so clipped
    mon.measure_gradients()  # of a step that is not due
    optimizer.step()
    assert mon.step() is None
    optimizer.step()  # and nothing of it is left in the one that is
    assert {stats.calls for stats in mon.step().values()} == {1}
    without.measure_gradients()
    assert {site.tensor for site in without.snapshot().order} == {"output"}


def test_measure_gradients_that_fails_does_not_stop_training(monkeypatch: pytest.MonkeyPatch) -> None:
    model = residual()
    mon = hookstats.attach(model, tensors="param_grad", every=1)
    loss_of(model).backward()
    monkeypatch.setattr(mon._parameters._batches, "accumulate", lambda owners, tensors: 1 / 0)
    with pytest.warns(UserWarning, match="ZeroDivisionError"):
        mon.measure_gradients()


def test_gradients_of_parameters_are_watched_by_default() -> None:
    mon = hookstats.attach(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
    expected = {"output", "grad_output", "param_sample", "param_grad", "update_sample"}
    assert {site.tensor for site in mon.sites} == expected  # of the input nothing is known yet
    assert Site("0.bias", "param_grad") in mon.sites


def test_gradients_stand_in_the_order_of_their_optimizers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    mon = hookstats.attach(model, every=1)
    optimizers: dict[torch.Tensor, torch.optim.Optimizer] = {}

    def step(parameter: torch.Tensor) -> None:  # in backward, as it comes
        optimizers[parameter].step()

    for module in model:
        for parameter in module.parameters():
            optimizers[parameter] = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(step)
    model(torch.randn(5, 4)).sum().backward()
    order = mon.step().order
    places = [order.index((f"{i}.weight", "param_grad")) for i in (2, 1, 0)]
    assert places == sorted(places)
    assert order.index(("1.weight", "param_grad")) < order.index(("0", "grad_output"))


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def test_where_everything_is_finite_there_is_no_first_nonfinite() -> None:
    model = two_layers()
    mon = hookstats.attach(model)
    model(torch.randn(5, 4)).sum().backward()
    assert mon.snapshot().first_nonfinite is None
    assert mon.snapshot().compact().first_nonfinite is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("where", "site"),
    [("2.weight", ("2", "output")), ("0.bias", ("0", "output"))],
)
def test_first_nonfinite_is_the_first_in_order_of_execution(value: float, where: str, site: tuple[str, str]) -> None:
    model = two_layers()
    with torch.no_grad():
        model.get_parameter(where).view(-1)[0] = value
    mon = hookstats.attach(model)
    model(torch.ones(5, 4)).sum().backward()
    assert mon.snapshot().first_nonfinite == Site(*site)
    assert mon.snapshot().compact().first_nonfinite == Site(*site)


def test_first_nonfinite_names_gradients_one_step_before_outputs_show_it() -> None:
    model = two_layers()
    mon = hookstats.attach(model, every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []
    for times in (1.0, torch.inf, 1.0):
        optimizer.zero_grad()
        (model(torch.ones(5, 4)).sum() * times).backward()
        optimizer.step()
        found.append(mon.step().first_nonfinite)
    assert found == [None, Site("2", "grad_output"), Site("0", "output")]


def test_first_nonfinite_is_a_gradient_of_parameters_where_that_alone_overflows() -> None:
    model = two_layers()
    mon = hookstats.attach(model, every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(5, 4)).sum().backward()
    grad_of(model[2].weight)[1, 2] = -float("inf")
    optimizer.step()
    snapshot = mon.step()
    assert snapshot.first_nonfinite == Site("2.weight", "param_grad")
    np.testing.assert_equal(snapshot.grad_norm, float("inf"))
