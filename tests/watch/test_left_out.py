"""Tensors that cannot be measured are left out and counted, and others of the same site are measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats import Site
from tests.conftest import check
from tests.plain import OF_OUTPUTS, hearing

OUTPUT, GRADIENT = Site("1", "output"), Site("1", "grad_output")


class Given(nn.Module):
    """Returns what it is told to make of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.make: Callable[[torch.Tensor], Any] = lambda x: x * 2

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(x)


def integers(x: torch.Tensor) -> torch.Tensor:
    return x.argmax(-1)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Given())


@pytest.mark.parametrize(
    "odd",
    [
        integers,
        lambda x: torch.complex(x, x),
        lambda x: torch.nested.nested_tensor([x[:1].detach(), x[:2].detach()]),
        lambda x: x.detach().to_sparse(),
    ],
    ids=["integers", "complex", "nested", "sparse"],
)
def test_one_odd_tensor_is_left_out_and_the_site_goes_on(odd: Any) -> None:
    model = network()
    mon = hookstats.attach(model, tensors=OF_OUTPUTS, every=1)
    x = torch.randn(3, 4)
    wanted = []
    for step in range(6):
        model[1].make = lambda x: x * 2
        y = model(x + step)
        y.sum().backward()
        wanted.append(y.detach())
        with hearing() as told:
            model[1].make = odd
            model(x)
            model(x)
        snapshot = mon.step()
        check(snapshot[OUTPUT], y, -1)
        assert snapshot[GRADIENT].calls == 1
        assert snapshot.skipped.keys() == {OUTPUT, GRADIENT}
        assert snapshot.skipped[OUTPUT].times == 2
        assert "expected a" in snapshot.skipped[OUTPUT].reason
        assert len(told) == (step == 0)
    assert mon.skipped[OUTPUT].times == 12
    assert set(mon.sites) == {Site(name, tensor) for name in "01" for tensor in OF_OUTPUTS}


def test_a_site_of_which_nothing_can_be_measured_is_said_once_and_measured_as_soon_as_it_can_be() -> None:
    model = network()
    mon = hookstats.attach(model, tensors=OF_OUTPUTS, every=2)
    x = torch.randn(3, 4)
    model[1].make = integers
    told: list[str] = []
    for step in range(12):
        with hearing() as heard:
            model(x)
            snapshot = mon.step()
        told += heard
        assert (snapshot is not None) == (step % 2 == 0)
        if snapshot is not None:
            assert snapshot.skipped[OUTPUT].times == 1
            assert OUTPUT not in snapshot
    assert len([text for text in told if "1 output" in text and "not measured" in text]) == 1
    assert mon.skipped[OUTPUT].times == 6
    model[1].make = lambda x: x * 2
    y = model(x)
    y.sum().backward()
    check(mon.snapshot()[OUTPUT], y, -1)
    assert mon.snapshot()[GRADIENT].calls == mon.snapshot()["0", "grad_output"].calls == 1


def test_a_container_whose_module_returns_odd_tensors_too_keeps_its_parts() -> None:
    model = network()
    mon = hookstats.attach(model, tensors=OF_OUTPUTS, every=1)
    for _ in range(4):
        with hearing():
            for make in (integers, lambda x: (x * 2, x)):
                model[1].make = make
                model(torch.randn(3, 4))
            snapshot = mon.step()
        assert snapshot["1", "output.0"].calls == snapshot["1", "output.1"].calls == 1
        assert snapshot.skipped[OUTPUT].times == 1


def test_one_part_of_a_container_that_cannot_be_read_leaves_the_others() -> None:
    class Refuses(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise RuntimeError("not today")

    def with_one_that_refuses(x: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(Refuses, (3, 4)), x * 2

    model = network()
    mon = hookstats.attach(model, tensors="output", every=1)
    model[1].make = with_one_that_refuses
    x = torch.randn(3, 4)
    with hearing():
        wanted = model(x)[1]
    check(mon.snapshot()["1", "output.1"], wanted, -1)
    assert mon.snapshot().skipped.keys() == {("1", "output.0")}


def test_jagged_tensors_are_read_by_their_values() -> None:
    model = network()
    mon = hookstats.attach(model, tensors=OF_OUTPUTS, every=1, options=hookstats.Options(strict=True))
    items = [torch.randn(n, 4) for n in (2, 5, 1)]
    x = torch.nested.nested_tensor(items, layout=torch.jagged)
    y = model(x)
    loss = (y.values() ** 2).sum()
    loss.backward()
    values = 2 * model[0](torch.cat(items)).detach()
    check(mon.snapshot()[OUTPUT], values, -1)
    check(mon.snapshot()[GRADIENT], 2 * values, -1)
    assert mon.snapshot().skipped == {}


def test_a_parameter_whose_gradient_is_sparse_now_and_then_is_measured_when_it_is_not() -> None:
    model = nn.Embedding(10, 4)
    mon = hookstats.attach(model, tensors="param_grad", every=1)
    site = ("weight", "param_grad")
    for step in range(9):
        model.sparse = step % 2 == 0
        model.weight.grad = None
        model(torch.tensor([1, 2])).sum().backward()
        with hearing():
            snapshot = mon.step()
        if model.sparse:
            assert snapshot.skipped[Site(*site)].times == 1
        else:
            assert snapshot[site].total.count == 40
            assert snapshot[site].total.l1_norm == 8


def test_gradients_that_fail_inside_backward_are_counted() -> None:
    model = network()
    mon = hookstats.attach(model, tensors=OF_OUTPUTS, every=1)
    model(torch.randn(3, 4))  # what is learned from a first tensor is
    mon.reset()
    hook = next(iter(model[0]._forward_hooks.values()))
    wrong = {"moments": torch.zeros(10, 3, dtype=torch.float64), "histogram": None}
    hook.bind(hook.output, hook.gradient._replace(**wrong))  # broken on purpose
    for step in range(4):
        for _ in range(2):
            model(torch.randn(3, 4)).sum().backward()
        with hearing() as told:
            snapshot = mon.step()
        assert len(told) == (step == 0)
        assert snapshot.skipped["0", "grad_output"].times == 2
        assert snapshot["0", "output"].calls == 2
    mon.detach()
    hookstats.attach(model, options=hookstats.Options(strict=True))
    model(torch.randn(3, 4))
    hook = next(iter(model[0]._forward_hooks.values()))
    hook.bind(hook.output, hook.gradient._replace(**wrong))
    with pytest.raises(RuntimeError, match="expected 3 channels"):
        model(torch.randn(3, 4)).sum().backward()
