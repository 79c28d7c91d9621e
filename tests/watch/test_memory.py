"""memory_budget bounds all that is kept on a device, and sites that move use their memory again."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import hookstats
from hookstats import LinearBins, _native
from hookstats._native import COUNTERS
from hookstats.numbers.fields import FIELDS
from hookstats.watch import binding
from hookstats.watch.memory import StateStore
from tests.conftest import check
from tests.models import THREE_KINDS
from tests.plain import OF_OUTPUTS
from tests.watch.parameters import check_site, grad_of


@pytest.mark.parametrize("per_channel", [False, True])
def test_totals_that_fit_in_no_way_are_refused_at_attach(per_channel: bool) -> None:
    model = nn.Linear(4, 8)
    bins = LinearBins(0, 1, 2**14, per_channel)
    needed = 2 * 8 * (len(FIELDS) + COUNTERS + 2**14 + 2)
    with pytest.raises(ValueError, match=rf"memory_budget: expected at least {needed} bytes on cpu.*LinearBins.*raise"):
        hookstats.attach(model, tensors=OF_OUTPUTS, histogram=bins, options=hookstats.Options(memory_budget=needed - 1))
    assert not model._forward_hooks
    mon = hookstats.attach(
        model, tensors=OF_OUTPUTS, histogram=bins, options=hookstats.Options(memory_budget=needed), every=1
    )
    assert mon.state_bytes == needed
    model(torch.rand(3, 4)).sum().backward()
    assert mon.snapshot()["", "output"].channels is None
    assert mon.skipped == {}


def test_scratch_is_part_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(_native, "reserve_scratch", lambda device: 4_000_000)
    store = StateStore(None, 10_000_000, False)
    assert not store.claim(gpu, 6_000_001)
    assert store.claim(gpu, 6_000_000)
    assert store.claim(torch.device("cpu"), 10_000_000)


def test_the_most_bins_that_there_are_do_not_fit_into_the_budget() -> None:
    with pytest.raises(ValueError, match="memory_budget: expected at least 34359738816 bytes"):
        hookstats.attach(nn.Linear(4, 8), tensors=THREE_KINDS, histogram=LinearBins(0, 1, 2**30))


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
            model,
            "*",
            tensors=kinds,
            histogram=LinearBins(-1, 1, 70),
            every=1,
            options=hookstats.Options(memory_budget=budget),
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
    assert all(stats.calls > 0 for stats in snapshot.values())  # all others are told
    missing = {("tapped", "output"), ("", "output.z"), ("lazy.weight", "param_update")} - set(snapshot)
    assert all("memory_budget" in mon.skipped[site].reason for site in missing)
    if budget == 21_000:
        assert missing
    if budget == 200_000:
        assert not missing
        check_site(snapshot, "first.weight", "param_grad", grad_of(model.first.weight))


def test_a_tap_that_does_not_fit_is_skipped_with_its_reason() -> None:
    model = nn.Linear(4, 8)
    mon = hookstats.attach(model, tensors=OF_OUTPUTS, every=1, options=hookstats.Options(memory_budget=10_000))
    with pytest.warns(UserWarning, match="not measured: scores output and scores grad_output: its state of") as told:
        mon.tap(model(torch.randn(3, 4)), "scores")
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mon.tap(model(torch.randn(3, 4)), "scores")
    assert mon.state_bytes <= 10_000
    assert "memory_budget=10000" in mon.skipped["scores", "output"].reason
    with pytest.raises(RuntimeError, match="scores output and scores grad_output cannot be measured: its state of"):
        hookstats.attach(
            model, tensors=OF_OUTPUTS, every=1, options=hookstats.Options(memory_budget=10_000, strict=True)
        ).tap(model(torch.randn(3, 4)), "scores")


def test_a_parameter_that_no_longer_fits_is_skipped_and_the_others_are_measured() -> None:
    model = nn.Linear(4, 3)
    needed = 8 * (6 * len(FIELDS) + 2 * COUNTERS)
    mon = hookstats.attach(
        model, tensors="param", every=1, histogram=None, options=hookstats.Options(memory_budget=needed)
    )
    model.weight = nn.Parameter(torch.randn(5, 4))
    with pytest.warns(UserWarning, match="not measured: weight param: its state of 96 bytes would not fit"):
        snapshot = mon.step()
    assert list(mon.skipped) == [("weight", "param")]
    check_site(snapshot, "bias", "param", model.bias)


def test_a_parameter_whose_width_alternates_takes_no_more_memory_and_keeps_its_channels() -> None:
    model = nn.Linear(4, 3)
    mon = hookstats.attach(model, tensors="param", every=1, options=hookstats.Options(strict=True))
    for step in range(300):
        model.weight = nn.Parameter(torch.randn(3 + step % 2, 4))
        snapshot = mon.step()
        check_site(snapshot, "weight", "param", model.weight)
        assert snapshot["weight", "param"].calls == 1
        if step == 1:
            before = mon.state_bytes
    assert mon.state_bytes == before


def test_a_parameter_of_many_widths_keeps_totals_when_they_have_filled_the_budget() -> None:
    model = nn.Linear(4, 3)
    options = hookstats.Options(strict=True, memory_budget=100_000)
    mon = hookstats.attach(model, tensors="param", every=1, options=options)
    for step in range(50):
        model.weight = nn.Parameter(torch.randn(3 + step, 4))
        snapshot = mon.step()
        assert snapshot["weight", "param"].total.count == model.weight.numel()
        if step == 1:
            check_site(snapshot, "weight", "param", model.weight)
    assert snapshot["weight", "param"].channels is None
    assert mon.state_bytes <= 100_000


@pytest.mark.filterwarnings("ignore:hookstats. .* had")
def test_a_module_whose_width_alternates_takes_no_more_memory() -> None:
    model = nn.ReLU()
    mon = hookstats.attach(model, every=1, options=hookstats.Options(strict=True))
    for step in range(300):
        x = torch.randn(5, 3 + step % 2, requires_grad=True)
        model(x).sum().backward()
        snapshot = mon.step()
        for tensor in ("output", "grad_output"):
            assert snapshot["", tensor].calls == 1
            assert snapshot["", tensor].total.count == x.numel()
        if step == 5:
            before = mon.state_bytes
    assert mon.state_bytes == before


class Fresh(nn.Module):
    """Puts out tensors under names that change with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor, **more: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {"same": x * 2, f"call{self.calls}": x * self.calls}


def test_a_container_whose_keys_change_with_every_call_shares_a_site_past_a_number_of_them() -> None:
    model = Fresh()
    mon = hookstats.attach(model, every=1, options=hookstats.Options(strict=True))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(300):
            x = torch.randn(3, 4, requires_grad=True)
            sum(y.sum() for y in model(x).values()).backward()  # type: ignore[union-attr]
            if step == binding.MOST_PARTS:
                before = mon.state_bytes, len(mon.sites)
            snapshot = mon.step()
    assert [str(w.message) for w in told if "share" in str(w.message)] == [
        "hookstats: '' has had 128 tensors of other names: all later ones share the site (model) output.*"
    ]
    assert (mon.state_bytes, len(mon.sites)) == before
    check(snapshot["", "output.same"], x * 2, -1)
    rest = snapshot["", "output.*"]
    assert rest.channels is None
    assert rest.calls == 1
    assert rest.total.rms == pytest.approx((x * 300).double().square().mean().sqrt().item(), rel=1e-6)
    assert snapshot["", "grad_output.*"].total.mean == 1
    assert [site for site in snapshot.order if site.tensor.startswith("output")] == [
        ("", "output.same"),
        ("", "output.*"),
    ]


def test_inputs_whose_names_change_share_a_site_too() -> None:
    model = Fresh()
    mon = hookstats.attach(model, tensors=("input", "grad_input"), every=1, options=hookstats.Options(strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(200):
            x, y = torch.randn(3, 4, requires_grad=True), torch.randn(3, 5, requires_grad=True)
            model(x, **{f"name{step}": y})["same"].sum().backward()
            snapshot = mon.step()
    check(snapshot["", "input.0"], x, -1)
    assert snapshot["", "input.*"].total.count == 15
    assert snapshot["", "input.*"].total.mean == pytest.approx(y.double().mean().item(), rel=1e-5, abs=1e-7)
    assert ("", "grad_input.*") not in snapshot
    assert len(mon.sites) < 300


def test_a_compiled_container_counts_what_has_no_site_of_its_own() -> None:
    class Keys(nn.Module):
        def forward(self, x: torch.Tensor, key: str) -> dict[str, torch.Tensor]:
            return {key: x + 1}

    model = Keys()
    mon = hookstats.attach(model, every=1, options=hookstats.Options(strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(140):
            model(torch.randn(3, 4), f"key{number}")
        mon.step()
        x = torch.randn(3, 4)
        torch.compile(model, backend="aot_eager")(x, "another")
        snapshot = mon.step()
    assert snapshot["", "output.*"].calls == 1
    assert snapshot["", "output.*"].total.mean == pytest.approx((x + 1).double().mean().item(), rel=1e-6)


def wide() -> tuple[nn.Module, hookstats.Monitor]:
    model = nn.Linear(4, 8192).requires_grad_(False)
    return model, hookstats.attach(model, every=1, tensors="output")


def test_the_memory_of_a_step_that_nobody_holds_any_more_is_used_again() -> None:
    model, monitor = wide()
    model(torch.randn(2, 4))
    kept: list[Any] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for _ in range(9):
            monitor.step()  # after which there are two copies: the monitor keeps the last, and one is used next
        kept += [monitor.step() for _ in range(5)]
        kept.clear()
        monitor.step()
        monitor.reset()
        monitor.step()
    size = monitor.state_bytes
    # What is allocated inside of the operator is told twice.
    events = [event for event in profile.events() if event.name != "hookstats::take_copies"]
    found = [event.cpu_memory_usage // size for event in events if abs(event.cpu_memory_usage) == size]
    steps, keeping, let_go, reset, after_reset = [1, 1], [1, 1, 1], [-1, -1, -1], [-1], [1, -1]
    assert found == [*steps, *keeping, *let_go, *reset, *after_reset]


def state_in(kept: Any) -> Any:
    if isinstance(kept, hookstats.Snapshot):
        kept = kept["", "output"]
    return kept._measured if isinstance(kept, hookstats.results.SiteStats) else np.asarray(kept)


def test_what_is_kept_of_a_step_never_changes() -> None:
    model, monitor = wide()
    kept, before = [], []
    for number in range(12):
        model(torch.full((2, 4), float(number)))
        snapshot = monitor.step()
        state = state_in(snapshot)
        kept.append([snapshot, snapshot["", "output"], state[:, 5:9], torch.from_numpy(state)][number % 4])
        before.append(state_in(kept[-1]).copy())
        del snapshot, state
    assert len({state.tobytes() for state in before}) == 12
    for each, state in zip(kept, before, strict=True):
        np.testing.assert_array_equal(state_in(each), state)


def test_a_monitor_that_the_garbage_collector_takes_while_a_program_is_traced_is_no_part_of_it() -> None:
    """Its memory is given back by operators; inductor traces parts of a graph twice, and fails where they differ."""

    def traced(function: Any) -> list[Any]:
        graph = make_fx(function, tracing_mode="fake")(torch.ones(2)).graph
        return [node.target for node in graph.nodes]

    def program(x: torch.Tensor) -> torch.Tensor:
        gc.collect()
        return x + 1

    gc.collect()
    gc.disable()
    try:
        model = nn.Linear(4, 4)
        monitor = hookstats.attach(model, every=1)
        model(torch.randn(2, 4)).sum().backward()
        monitor.step()
        monitor.detach()
        monitor.itself, gone = monitor, weakref.ref(monitor)  # type: ignore[attr-defined]
        del model, monitor
        assert gone() is not None
        assert traced(program) == traced(lambda x: x + 1)
        assert gone() is None
    finally:
        gc.enable()
