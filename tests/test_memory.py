"""memory_budget bounds all that is kept on a device, and sites that move use their memory again."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats import LinearBins
from hookstats._native import COUNTERS
from hookstats.numbers.fields import FIELDS
from tests.parameters import check_site, grad_of


@pytest.mark.parametrize("per_channel", [False, True])
def test_totals_that_fit_in_no_way_are_refused_at_attach(per_channel: bool) -> None:
    model = nn.Linear(4, 8)
    bins = LinearBins(0, 1, 2**14, per_channel)
    needed = 2 * 8 * (len(FIELDS) + COUNTERS + 2**14 + 2)
    with pytest.raises(ValueError, match=rf"memory_budget: expected at least {needed} bytes on cpu.*LinearBins.*raise"):
        hookstats.attach(model, histogram=bins, memory_budget=needed - 1)
    assert not model._forward_hooks
    mon = hookstats.attach(model, histogram=bins, memory_budget=needed, every=1)
    assert mon.state_bytes == needed
    model(torch.rand(3, 4)).sum().backward()
    assert mon.snapshot()["", "output"].channels is None
    assert mon.skipped == {}


def test_the_most_bins_that_there_are_do_not_fit_into_the_budget() -> None:
    with pytest.raises(ValueError, match="memory_budget: expected at least 17179869"):
        hookstats.attach(nn.Linear(4, 8), histogram=LinearBins(0, 1, 2**30))


class Everything(nn.Module):
    """Widths learned late, a container, taps, a parameter without a shape, and some that are large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lazy, self.act = nn.Linear(8, 40), nn.LazyLinear(24), nn.Tanh()
        self.table = nn.Sequential(nn.Linear(24, 60))
        self.monitor: Any = None

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.act(self.lazy(self.act(self.first(x))))
        if self.monitor is not None:
            y = self.monitor.tap(self.monitor.tap(y, "tapped"), "tapped too")
        return {"y": y, "z": self.table(y)}


@pytest.mark.parametrize("budget", [*range(21_000, 60_000, 3_000), 100_000, 200_000])
def test_state_and_copies_together_stay_inside_the_budget(budget: int) -> None:
    torch.manual_seed(0)
    model = Everything()
    kinds = ("output", "grad_output", "param_grad", "param_update")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mon = hookstats.attach(
            model, "*", tensors=kinds, histogram=LinearBins(-1, 1, 70), every=1, memory_budget=budget
        )
        model.monitor = mon
        for _ in range(3):
            output = model(torch.randn(5, 8))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            (output["y"].sum() + output["z"].sum()).backward()
            optimizer.step()
            snapshot = mon.step()
    copied = sum(p.nbytes for name, p in model.named_parameters() if (name, "param_update") in mon.sites)
    assert mon.state_bytes + copied <= budget
    assert snapshot is not None
    assert all(stats.calls > 0 for stats in snapshot.values())  # all others are told
    missing = {("tapped", "output"), ("", "output.z"), ("lazy.weight", "param_update")} - set(snapshot)
    assert all("memory_budget" in mon.skipped[site] for site in missing)
    if budget == 21_000:
        assert missing
    if budget == 200_000:
        assert not missing
        check_site(snapshot, "first.weight", "param_grad", grad_of(model.first.weight))


def test_a_tap_that_does_not_fit_is_skipped_with_its_reason() -> None:
    model = nn.Linear(4, 8)
    mon = hookstats.attach(model, every=1, memory_budget=10_000)
    with pytest.warns(UserWarning, match="not measured: scores output and scores grad_output: its state of") as told:
        mon.tap(model(torch.randn(3, 4)), "scores")
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mon.tap(model(torch.randn(3, 4)), "scores")
    assert mon.state_bytes <= 10_000
    assert "memory_budget=10000" in mon.skipped["scores", "output"]
    with pytest.raises(RuntimeError, match="'scores' cannot be measured: its state of"):
        hookstats.attach(model, every=1, memory_budget=10_000, strict=True).tap(model(torch.randn(3, 4)), "scores")


def test_a_parameter_that_no_longer_fits_is_skipped_and_the_others_are_measured() -> None:
    model = nn.Linear(4, 3)
    needed = 8 * (4 * len(FIELDS) + 2 * COUNTERS)
    mon = hookstats.attach(model, tensors="param", every=1, histogram=None, memory_budget=needed)
    model.weight = nn.Parameter(torch.randn(5, 4))
    with pytest.warns(UserWarning, match="not measured: weight param: its state of 96 bytes would not fit"):
        snapshot = mon.step()
    assert snapshot is not None
    assert list(mon.skipped) == [("weight", "param")]
    check_site(snapshot, "bias", "param", model.bias)
