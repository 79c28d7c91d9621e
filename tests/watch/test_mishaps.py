"""Tests of failures at one site: it is left out and counted, and no other site, thread or monitor is affected."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats import Site, _native
from hookstats.watch import binding, parameters
from hookstats.watch.batches import find_part
from hookstats.watch.skipping import Skipping
from tests.plain import OF_OUTPUTS, hearing

A, B = Site("a", "output"), Site("b", "output")


def test_sites_are_given_up_under_the_lock_by_which_they_are_read() -> None:
    skipping = Skipping(strict=False)
    given_up: list[list[Site]] = []  # under the lock, before and after

    class Noting:
        def __enter__(self) -> None:
            given_up.append(list(skipping._given_up))

        def __exit__(self, *error: object) -> None:
            given_up.append(list(skipping._given_up))

    with hearing():
        skipping.leave_out([A], "broken")
    skipping.leave_out = lambda *args, **how: None  # type: ignore[method-assign]  # it has the lock, too
    skipping._lock = Noting()  # type: ignore[assignment]
    skipping.give_up([A], "broken")
    assert given_up == [[], [A]]


@pytest.mark.parametrize(
    "problem",
    [
        "hookstats: CUDA: the device had failed before, in any kernel of this process: an illegal memory access",
        torch.AcceleratorError("CUDA error: device-side assert triggered\nCUDA kernel errors might be\nreported later"),
    ],
    ids=["a launch", "an operator"],
)
def test_a_device_that_has_failed_is_told_of_once_and_all_its_sites_are_counted(problem: Any) -> None:
    skipping = Skipping(strict=False)
    with hearing() as heard:
        for site in (A, B, Site("c", "output")):
            skipping.leave_out([site], problem)
        skipping.leave_out([Site("d", "output")], "something else")
    assert len(heard) == 2
    assert "not measured: " in heard[0]
    assert "the device had failed before" in heard[0]
    assert "\n" not in heard[0]
    assert [site.name for site in skipping.list_all()] == ["a", "b", "c", "d"]


class Stranger:
    """Like an array: comparing says nothing about being equal."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> Any:
        raise ValueError("the truth value of an array is ambiguous")

    def __call__(self, snapshot: Any) -> None:
        raise RuntimeError("full")


def test_sinks_that_cannot_be_compared_are_each_told_of_once() -> None:
    model = nn.Linear(3, 3)
    mon = hookstats.attach(model, every=1, sinks=[Stranger(), Stranger()])
    with hearing() as told:
        for _ in range(3):
            model(torch.ones(2, 3))
            mon.step()
    assert len([text for text in told if "the sink" in text and "full" in text]) == 2


def test_failures_of_a_backward_are_told_by_the_monitor_whose_site_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = (nn.Linear(3, 3) for _ in range(3))
    mine, other = hookstats.attach(first, every=1), hookstats.attach(second, every=1)
    dead = hookstats.attach(third, every=1)
    index = {mon: mon._store.entries[0].index for mon in (mine, other, dead)}
    gone = index[dead]
    dead.detach()
    del dead, third
    gc.collect()
    failures = {index[mine]: ("broken", 1), index[other]: ("burnt", 2), gone: ("buried", 3)}
    monkeypatch.setattr("hookstats._native.take_failures", lambda: failures.copy() if failures else {})
    with hearing():
        assert {each.reason: each.times for each in mine.skipped.values()} == {"broken": 1}
        failures.clear()
        assert {each.reason: each.times for each in other.skipped.values()} == {"burnt": 2}
        assert {each.reason: each.times for each in mine.skipped.values()} == {"broken": 1}
    assert not mine._binder._failed
    assert gone not in binding.HOOKS


def test_one_parameter_that_cannot_be_read_is_left_out_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kinds = ("param", "param_grad", "param_update")
    mon = hookstats.attach(model, tensors=kinds, every=1)
    broken = model[0].weight

    def part(binder: Any, each: Any, kind: str, tensor: Any) -> Any:
        if each.get() is broken:
            raise RuntimeError("no such memory")
        return find_part(binder, each, kind, tensor)

    monkeypatch.setattr(parameters, "find_part", part)
    sites = {Site(f"{i}.{name}", kind) for i in (0, 1) for name in ("weight", "bias") for kind in kinds}
    lost = {Site("0.weight", kind) for kind in kinds}
    with hearing() as told:
        for _ in range(4):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            snapshot = mon.step()
            assert {site for site in snapshot if snapshot[site].calls} == sites - lost
            assert set(snapshot.skipped) == lost
            assert all(each.times is not None for each in snapshot.skipped.values())
    assert len([text for text in told if "no such memory" in text]) == len(lost)


def test_what_stops_the_measuring_of_parameters_once_does_not_stop_it_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mon = hookstats.attach(model, tensors=["param"], every=1)
    batches = type(mon._parameters._batches)
    with hearing(), monkeypatch.context() as patched:
        patched.setattr(batches, "accumulate", lambda *args: 1 / 0)
        optimizer.step()
        first = mon.step()
    optimizer.step()
    second = mon.step()
    assert all("ZeroDivisionError" in each.reason for each in first.skipped.values())
    assert second["weight", "param"].calls == second["bias", "param"].calls == 1


class States(nn.Module):
    """An LSTM of which the outputs are used, the last states not; and one of which nothing is."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.LSTM(3, 4), nn.LSTM(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.unused(x)
        return self.used(x)[0]


def test_the_unused_ones_of_several_outputs_are_in_order_but_not_where_none_is_used() -> None:
    model = States()
    mon = hookstats.attach(model, every=1, tensors=OF_OUTPUTS)
    with hearing() as told:
        for _ in range(4):
            model(torch.randn(5, 2, 3)).sum().backward()
            mon.step()
    (silence,) = [text for text in told if "nothing came from" in text]
    assert "unused grad_output.0" in silence
    assert "unused grad_output.1.0" in silence
    assert " used grad_output" not in silence


@pytest.mark.parametrize("dim", [1, -3])
def test_one_axis_has_one_number_in_a_table_however_it_was_known(dim: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Tanh(), nn.Linear(3, 5))
    mon = hookstats.attach(model, every=1, channels=hookstats.Channels(dim={"4": dim}), tensors=OF_OUTPUTS)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    snapshot = mon.snapshot()
    assert [snapshot[str(i), "output"].channel_dim for i in range(6)] == [1, 1, 1, 1, 1, -1]
    assert [snapshot[str(i), "grad_output"].channel_dim for i in range(6)] == [1, 1, 1, 1, 1, -1]


def test_memory_for_scratch_that_torch_keeps_for_later_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    def reserve(device: int) -> int:
        done.append(device)
        if len(done) == 1:
            raise RuntimeError("hookstats: CUDA: expected 4 bytes of device memory for scratch: out of memory")
        return 4

    monkeypatch.setattr(_native.OPS, "reserve_scratch", reserve)
    stream = SimpleNamespace(synchronize=lambda: done.append("waited"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("empty"))
    assert _native.reserve_scratch(torch.device("cuda", 0)) == 4
    assert done == [0, "empty", 0, "waited"]
