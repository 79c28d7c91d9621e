"""Monitor.clip_grad_norm_: torch's norm and torch's gradients, from what was measured of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from tests.plain import Operators

Change = Callable[[nn.Module], object]


def model_with_gradients(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)).to(dtype)
    model(torch.randn(32, 8, dtype=dtype)).square().sum().backward()
    return model


def both(
    model: nn.Module, max_norm: float, change: Change = lambda model: None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """The norm by hookstats and by torch, whose gradients are compared; and the operators that the first one called."""
    twin = copy.deepcopy(model)
    for own, other in zip(twin.parameters(), model.parameters(), strict=True):
        own.grad = None if other.grad is None else other.grad.clone()
    change(model)
    change(twin)
    monitor = hookstats.attach(model, tensors="param_grad", **{"every": 1, **options})
    with Operators() as called:
        found = monitor.clip_grad_norm_(model.parameters(), max_norm)
    wanted = nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        near = {
            "rtol": 8 * torch.finfo(own.dtype).eps,
            "atol": 0.0,
        }  # the norm is rounded to the dtype, and all that follows
        torch.testing.assert_close(own.grad, other.grad, equal_nan=True, **near)
    return found, wanted, called.names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("max_norm", [0.1, 1e9])
def test_norm_and_gradients_are_torchs(dtype: torch.dtype, max_norm: float) -> None:
    found, wanted, called = both(model_with_gradients(dtype), max_norm)
    torch.testing.assert_close(found, wanted)
    assert found.dim() == 0
    assert not any("foreach_norm" in name for name in called)


def filled(value: float) -> Change:
    def fill(model: nn.Module) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.view(-1)[3] = value

    return fill


def shift(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad += 100


CHANGES: dict[str, Change] = {
    "NaN": filled(float("nan")),
    "infinity": filled(float("inf")),
    "the other infinity": filled(-float("inf")),
    "zeros": lambda model: model.zero_grad(set_to_none=False),
    "means far from zero": shift,
    "one parameter without": lambda model: setattr(model[0].bias, "grad", None),  # type: ignore[index]
    "none at all": nn.Module.zero_grad,
}


@pytest.mark.parametrize("change", CHANGES)
def test_of_odd_gradients_the_norm_is_torchs_too(change: str) -> None:
    found, wanted, called = both(model_with_gradients(), 1.0, CHANGES[change])
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert not any("foreach_norm" in name for name in called)


def test_parameters_that_are_not_watched_are_clipped_by_torch() -> None:
    found, wanted, called = both(model_with_gradients(), 0.1, modules="0")
    torch.testing.assert_close(found, wanted)
    assert any("foreach_norm" in name for name in called)


def test_a_parameter_that_is_given_twice_is_clipped_as_torch_does() -> None:
    model, twin = model_with_gradients(), model_with_gradients()
    monitor = hookstats.attach(model, tensors="param_grad", every=1)
    found = monitor.clip_grad_norm_([*model.parameters(), model[0].weight], 1.0)  # type: ignore[index]
    wanted = nn.utils.clip_grad_norm_([*twin.parameters(), twin[0].weight], 1.0)  # type: ignore[index]
    torch.testing.assert_close(found, wanted)


def test_the_step_has_the_gradients_from_before_clipping_once() -> None:
    model = model_with_gradients()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = hookstats.attach(model, tensors="param_grad", every=2)
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(32, 8)).square().sum().backward()
        norms.append(float(monitor.clip_grad_norm_(model.parameters(), 0.1)))
        assert float(nn.utils.get_total_norm([p.grad for p in model.parameters()])) == pytest.approx(0.1, rel=1e-4)  # type: ignore[misc]
        optimizer.step()
        snapshot = monitor.step()
        if snapshot is not None:
            assert snapshot.grad_norm == pytest.approx(norms[-1], rel=1e-5)
            assert {stats.calls for stats in snapshot.values()} == {1}
    assert len(norms) == 3


def test_a_second_call_in_one_step_is_of_the_gradients_as_they_are() -> None:
    model = model_with_gradients()
    monitor = hookstats.attach(model, tensors="param_grad", every=1)
    first = float(monitor.clip_grad_norm_(model.parameters(), 0.5))
    assert first > 1
    assert float(monitor.clip_grad_norm_(model.parameters(), 0.5)) == pytest.approx(0.5, rel=1e-4)
    assert monitor.snapshot().grad_norm == pytest.approx(first, rel=1e-5)


def test_a_single_tensor_and_an_iterator_will_do() -> None:
    model, twin = model_with_gradients(), model_with_gradients()
    monitor = hookstats.attach(model, tensors="param_grad", every=1)
    found = monitor.clip_grad_norm_(model[0].weight, 0.1)  # type: ignore[index]
    torch.testing.assert_close(found, nn.utils.clip_grad_norm_(twin[0].weight, 0.1))  # type: ignore[index]
