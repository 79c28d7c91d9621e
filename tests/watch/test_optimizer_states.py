"""tensors=("optimizer",): what optimizers keep of each parameter, after they have stepped."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats import Options, Site, Snapshot


class Sign(torch.optim.Optimizer):
    """Keeps a tensor of another dtype, a number, and a tensor of one element."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["sign"] = parameter.grad.sign().to(torch.int8)
            state["steps"], state["scale"] = 1, torch.ones(1)
            state["mean"] = parameter.grad.mean(-1)
            parameter -= 0.01 * state["sign"]


def matrices(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [each for each in parameters if each.dim() == 2]


MAKERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], set[str]]] = {
    "for-loop": (lambda p: torch.optim.AdamW(p, foreach=False), {"exp_avg", "exp_avg_sq"}),
    "foreach": (lambda p: torch.optim.AdamW(p, foreach=True), {"exp_avg", "exp_avg_sq"}),
    "fused": (lambda p: torch.optim.AdamW(p, fused=True), {"exp_avg", "exp_avg_sq"}),
    "amsgrad": (lambda p: torch.optim.Adam(p, amsgrad=True), {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    "momentum": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), {"momentum_buffer"}),
    "without momentum": (lambda p: torch.optim.SGD(p, 0.1), set()),
    "muon": (lambda p: torch.optim.Muon(matrices(p)), {"momentum_buffer"}),
    "adafactor": (torch.optim.Adafactor, {"variance"}),
    "another dtype": (Sign, set()),
}


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def several_steps(model: nn.Module, optimizer: torch.optim.Optimizer, monitor: hookstats.Monitor) -> None:
    for _ in range(3):
        step(model, optimizer)
        monitor.step()


def check(snapshot: Snapshot | None, model: nn.Module, optimizer: torch.optim.Optimizer, kept: set[str]) -> None:
    """Every state of a parameter's shape is there, as float64 has it."""
    found = {site for site in snapshot.order if site.tensor.startswith("optimizer.")}
    wanted = {
        Site(name, f"optimizer.{key}")
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if key in kept and value.shape == parameter.shape
    }
    assert found == wanted
    assert bool(kept) == bool(wanted)
    for site in found:
        value = optimizer.state[model.get_parameter(site.name)][site.tensor.split(".")[1]].double()
        stats, tolerance = snapshot[site], 1e-6 * float(value.abs().max())
        assert stats.total.count == value.numel()
        assert abs(stats.total.mean - value.mean()) <= tolerance
        assert abs(stats.total.std - value.std()) <= tolerance
        assert stats.total.max == pytest.approx(value.max().item(), rel=1e-7)
        assert abs(stats.channels.mean - value.reshape(len(value), -1).mean(1).numpy()).max() <= tolerance


@pytest.mark.parametrize("name", MAKERS)
def test_states_are_measured_as_they_are_after_the_step(name: str) -> None:
    make, kept = MAKERS[name]
    model = model_of()
    bare, optimizer = copy.deepcopy(model), make(model.parameters())
    other = make(bare.parameters())
    with hookstats.attach(model, tensors=("output", "optimizer"), every=2) as monitor:
        for number in range(3):
            step(model, optimizer, number)
            step(bare, other, number)
            snapshot = monitor.step()
            if number != 1:
                check(snapshot, model, optimizer, kept)
    for mine, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_what_cannot_be_measured_is_skipped_with_the_reason_once() -> None:
    model = model_of()
    monitor = hookstats.attach(model, tensors=("optimizer",), every=1)
    optimizer = Sign(model.parameters())
    with pytest.warns(UserWarning, match="not measured: ") as told:
        several_steps(model, optimizer, monitor)
    assert "expected one of torch.float32" in monitor.skipped["0.weight", "optimizer.sign"].reason
    assert "got torch.int8" in monitor.skipped["0.weight", "optimizer.sign"].reason
    shape = "expected a tensor of the parameter's shape, (16, 8), got (16,)"
    assert monitor.skipped["0.weight", "optimizer.mean"].reason == shape
    assert {site.tensor for site in monitor.skipped} == {"optimizer.sign", "optimizer.mean"}
    assert len(monitor.skipped) == 6  # of biases, the mean is one number
    assert sorted(str(each.message) for each in told) == [
        "hookstats: not measured: 0.weight optimizer.mean and 2.weight optimizer.mean: " + shape,
        "hookstats: not measured: 0.weight optimizer.sign and 3 more sites: "
        + monitor.skipped["0.weight", "optimizer.sign"].reason,
    ]
    monitor.detach()


@pytest.mark.parametrize("in_backward", [False, True])
def test_factored_states_of_many_layers_are_told_by_one_warning_with_their_number(in_backward: bool) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(40)))
    parameters = list(model.parameters())
    optimizers = [torch.optim.Adafactor([each]) for each in parameters] if in_backward else []
    with hookstats.attach(model, tensors=("optimizer",), every=1) as monitor:

        def train() -> None:
            for _ in range(2):
                model(torch.randn(4, 8)).sum().backward()
                for optimizer in optimizers or [torch.optim.Adafactor(parameters)]:
                    optimizer.step()
                monitor.step()

        with pytest.warns(UserWarning, match="not measured: ") as told:
            train()
        assert len(monitor.skipped) == 80
    (one,) = (str(each.message) for each in told)
    assert "not measured: 0.weight optimizer.row_var and 79 more sites: expected a tensor of the parameter's" in one


class Scaled(nn.Module):
    """A parameter of one value in each shape: the bias has one dimension, the scale none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.scale * self.linear(x)
        return y


def test_the_number_of_steps_is_no_state_of_a_parameter_of_one_value(recwarn: pytest.WarningsRecorder) -> None:
    model = Scaled()
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = hookstats.attach(model, tensors=("optimizer",))
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    snapshot = monitor.step()
    assert {site.tensor for site in snapshot} == {"optimizer.exp_avg", "optimizer.exp_avg_sq"}
    for name, parameter in model.named_parameters():
        kept = optimizer.state[parameter]["exp_avg"]
        assert snapshot[name, "optimizer.exp_avg"].total.max == kept.max()
    assert len(snapshot) == 6
    assert not monitor.skipped
    assert not recwarn.list


def test_states_that_are_loaded_and_optimizers_that_are_made_anew_are_followed() -> None:
    model = model_of()
    with hookstats.attach(model, tensors=("optimizer",), every=1, options=Options(strict=True)) as monitor:
        for _ in range(2):
            optimizer = torch.optim.AdamW(model.parameters())
            step(model, optimizer, 1)
            check(monitor.step(), model, optimizer, {"exp_avg", "exp_avg_sq"})
            saved = copy.deepcopy(optimizer.state_dict())
            step(model, optimizer, 2)
            check(monitor.step(), model, optimizer, {"exp_avg", "exp_avg_sq"})
            optimizer.load_state_dict(saved)
            step(model, optimizer, 3)
            check(monitor.step(), model, optimizer, {"exp_avg", "exp_avg_sq"})


def test_several_optimizers_and_a_closure() -> None:
    model = model_of()
    one, other = torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(model[2].parameters(), 0.1, momentum=0.9)

    def closure() -> torch.Tensor:
        loss = model(torch.ones(2, 8)).square().mean()
        loss.backward()
        return loss

    with hookstats.attach(model, tensors=("optimizer",), every=1) as monitor:
        one.step(closure)
        other.step(closure)
        snapshot = monitor.step()
    names = [(site.name, site.tensor) for site in snapshot.order]
    assert sorted(names) == [
        *((f"0.{part}", f"optimizer.{key}") for part in ("bias", "weight") for key in ("exp_avg", "exp_avg_sq")),
        *((f"2.{part}", "optimizer.momentum_buffer") for part in ("bias", "weight")),
    ]


def test_where_no_memory_is_left_they_are_skipped_with_the_reason() -> None:
    model = model_of()
    with hookstats.attach(model, tensors=("optimizer",), options=Options(memory_budget=9000)) as monitor:
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer)
        with pytest.warns(UserWarning, match="memory_budget"):
            assert monitor.step() is not None
        assert monitor.skipped


def test_a_step_that_is_not_measured_looks_at_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    from hookstats.watch.states import States

    calls: list[int] = []
    look = States.of
    monkeypatch.setattr(States, "of", lambda *args: calls.append(1) or look(*args))
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    with hookstats.attach(model, tensors=("optimizer",), every=4) as monitor:
        for _ in range(4):
            step(model, optimizer)
            monitor.step()
    assert len(calls) == 4  # parameters
