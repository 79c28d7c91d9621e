"""Tests of hooks, taps, optimizers and step() during the capture of a CUDA graph, which a CPU pretends."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from tests.watch.parameters import grad_of, loss_of, residual

Capture = Any


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Capture:
    """A context, in which torch says that the current stream is captured. Kernels run there as in a first replay."""
    inside = [False]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: inside[0])

    @contextmanager
    def context() -> Iterator[None]:
        inside[0] = True
        try:
            yield
        finally:
            inside[0] = False

    return context


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": x, "b": x + 1}


def model_of_unknown_widths() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.Tanh(), Pair())


def test_widths_and_containers_that_a_capture_shows_first_are_left_out_with_one_warning(captured: Capture) -> None:
    model, x = model_of_unknown_widths(), torch.randn(5, 6)
    mon = hookstats.attach(model, tensors="output", every=1)
    sites, memory = len(mon.sites), mon.state_bytes
    with captured(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model(x)
    assert [str(each.message) for each in told] == [
        "hookstats: not measured: 1 output: a CUDA graph captures its first tensor, or one of another width, and "
        "perhaps others' too: run one eager forward and backward that is measured before the capture"
    ]
    assert (len(mon.sites), mon.state_bytes) == (sites, memory)
    assert {site.name for site in mon.skipped} == {"1", "3", "4"}
    mon.reset()
    model(x)
    snapshot = mon.step()
    for site in (("1", "output"), ("3", "output"), ("4", "output.a"), ("4", "output.b")):
        assert snapshot[site].calls == 1


def test_a_capture_after_one_eager_forward_leaves_nothing_out(captured: Capture) -> None:
    model, x = model_of_unknown_widths(), torch.randn(5, 6)
    mon = hookstats.attach(model, tensors="output", every=1, options=hookstats.Options(strict=True))
    model(x)
    with captured():
        model(x)
    snapshot = mon.step()
    assert {stats.calls for stats in snapshot.values()} == {2}


def test_a_tap_is_not_made_in_a_capture(captured: Capture) -> None:
    mon = hookstats.attach(nn.Linear(6, 8), every=1)
    with captured(), pytest.warns(UserWarning, match="scores output and scores grad_output: a CUDA graph captures"):
        mon.tap(torch.randn(5, 6), "scores")
    mon.tap(torch.randn(5, 6), "scores")
    assert mon.snapshot()["scores", "output"].calls == 1


def test_step_is_refused_in_a_capture_and_the_step_stays_open(captured: Capture) -> None:
    model = nn.Linear(6, 8)
    mon = hookstats.attach(model, every=1)
    model(torch.randn(5, 6))
    with captured(), pytest.raises(RuntimeError, match=r"step: expected a call outside of torch\.cuda\.graph"):
        mon.step()
    snapshot = mon.step()
    assert (snapshot.step, snapshot["", "output"].calls) == (0, 1)


def test_what_a_captured_optimizer_step_measures_is_not_measured_again_when_the_step_ends(captured: Capture) -> None:
    model = residual()
    mon = hookstats.attach(model, tensors=("param", "param_grad", "param_update"), every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with captured():
        loss_of(model).backward()
        optimizer.step()
    first = mon.step()
    assert {stats.calls for stats in first.values()} == {1}
    assert grad_of(model.head.weight) is not None
    second = mon.step()  # no replay in this one, though the gradients are still there
    assert {stats.calls for stats in second.values()} == {0}


def test_gradients_that_a_capture_reads_before_clipping_are_not_measured_again(captured: Capture) -> None:
    model = residual()
    mon = hookstats.attach(model, tensors="param_grad", every=1)
    with captured():
        loss_of(model).backward()
        mon.measure_gradients()
    for calls in (1, 0):
        snapshot = mon.step()
        assert {stats.calls for stats in snapshot.values()} == {calls}


@pytest.mark.parametrize("paused", [False, True])
def test_a_capture_in_a_step_that_is_not_measured_is_one_of_measuring_unless_it_is_paused(
    captured: Capture, monkeypatch: pytest.MonkeyPatch, paused: bool
) -> None:
    """The flag on the device, which is off, decides in each replay."""
    model = residual()
    mon = hookstats.attach(model, tensors=("param_grad", "input"), every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    mon.step()
    batches: list[Any] = []
    accumulate = mon._parameters._batches.accumulate
    monkeypatch.setattr(mon._parameters._batches, "accumulate", lambda *args: (batches.append(args), accumulate(*args)))
    optimizer.step()
    assert not mon._binder.measures_now()
    assert batches == []
    pausing: AbstractContextManager[Any] = mon.paused() if paused else captured()
    with pausing, captured():
        assert mon._binder.measures_now() is not paused
        optimizer.step()
    assert len(batches) == (0 if paused else 1)
