"""Cases of models and training steps that are no matter of another file, a test for each.

What other files hold in depth is there alone: containers and inputs, recomputation, threads, widths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from tests.conftest import check


class Calls(nn.Module):
    """Returns what a function makes of its input."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))


def run(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().sum().backward()


# Passes through modules.


def test_an_unused_output_has_fewer_gradients_than_outputs() -> None:
    model = mlp()
    mon = hookstats.attach(model)
    model(batch())
    run(model, batch())
    assert mon.snapshot()["2", "output"].calls == 2
    assert mon.snapshot()["2", "grad_output"].calls == 1


def test_backward_twice_counts_twice() -> None:
    model = mlp()
    mon = hookstats.attach(model)
    loss = model(batch()).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert [mon.snapshot()["0", kind].calls for kind in ("output", "grad_output")] == [1, 2]


# In place.


def test_an_output_that_is_overwritten_after_the_hook_was_measured_before_and_its_gradient_is_its_own() -> None:
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.inner(x)
            return y.mul_(3)

    model = Overwrites()
    mon = hookstats.attach(model)
    model(batch()).sum().backward()
    check(mon.snapshot()["inner", "output"], model.inner(batch()).detach(), -1)
    check(mon.snapshot()["inner", "grad_output"], torch.full((5, 4), 3.0), -1)


# Outputs and inputs.


def test_an_output_is_passed_on_as_it_is() -> None:
    kept = batch()
    model = Calls(lambda _: kept)
    hookstats.attach(model)
    assert model(batch()) is kept


def test_hooks_of_others_see_what_they_saw_before() -> None:
    model = mlp()
    seen: list[Any] = []
    model[0].register_forward_hook(lambda m, a, y: y * 2)
    model[0].register_full_backward_hook(lambda m, gi, go: seen.append(go[0].clone()))
    mon = hookstats.attach(model)
    run(model, batch())
    unhooked = mlp()[0](batch()).detach()
    check(mon.snapshot()["0", "output"], 2 * unhooked, -1)  # what the module puts out in the end
    assert len(seen) == 1


# Dtypes, layouts, shapes.


def test_a_negated_view_is_measured_as_what_it_shows() -> None:
    x = torch.complex(batch(), batch(1)).conj().imag
    assert x.is_neg()
    mon = hookstats.attach(model := Calls(lambda _: x))
    model(batch())
    check(mon.snapshot()["", "output"], -batch(1), -1)


# Tensors without data of their own.


class Wrapper(torch.Tensor):
    """Holds its data in another tensor."""

    inner: torch.Tensor
    refuses = False

    @staticmethod
    def __new__(cls: type[Wrapper], inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if cls.refuses:
            raise NotImplementedError(f"no {func} here")
        unwrapped = [arg.inner if isinstance(arg, Wrapper) else arg for arg in args]
        result = func(*unwrapped, **(kwargs or {}))
        return Wrapper(result) if isinstance(result, torch.Tensor) else result


class Refusing(Wrapper):
    refuses = True


def test_a_wrapper_subclass_is_measured_through_the_dispatcher_gradient_too() -> None:
    model = nn.Sequential(Calls(lambda x: x * 2), Calls(lambda x: x.inner * 3 if isinstance(x, Wrapper) else x * 3))
    mon = hookstats.attach(model)
    x = Wrapper(batch()).requires_grad_()
    y = model[0](x)
    y.backward(Wrapper(torch.full((5, 6), 7.0)))
    check(mon.snapshot()["0", "output"], 2 * batch(), -1)
    check(mon.snapshot()["0", "grad_output"], torch.full((5, 6), 7.0), -1)
    assert mon.skipped == {}


def test_a_wrapper_that_refuses_is_skipped_with_its_reason_and_the_step_goes_on() -> None:
    mon = hookstats.attach(model := Calls(lambda x: Refusing(x)))
    with pytest.warns(UserWarning, match=r"not measured.*NotImplementedError: no hookstats.observe"):
        model(batch())
    assert set(mon.skipped) == {("", "output")}  # it has no gradient


def test_a_tapped_wrapper_is_measured() -> None:
    mon = hookstats.attach(mlp())
    mon.tap(Wrapper(batch()), "wrapped")
    check(mon.snapshot()["wrapped", "output"], batch(), -1)
