"""Samples of parameters and of what a step changes in them; and what the model is given."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats import Site, Snapshot
from hookstats.numbers import fields
from hookstats.watch.samples import SIZE
from tests.conftest import compare
from tests.kernels.test_samples import in_memory, places
from tests.watch.parameters import loss_of, residual

SAMPLES = ("param_sample", "update_sample")
ALL = ("output", "grad_output", "model_input", "param_grad", *SAMPLES)
Values = dict[str, torch.Tensor]


def values_of(model: nn.Module) -> Values:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def check_samples(snapshot: Snapshot, before: Values, after: Values, kinds: tuple[str, ...] = SAMPLES) -> None:
    for name, old in before.items():
        at = places(old.numel())
        wide = torch.float64 if old.dtype == torch.float64 else torch.float32
        change = in_memory(after[name]).to(wide) - in_memory(old).to(wide)
        for kind, value in (("param_sample", in_memory(old)), ("update_sample", change)):
            if kind in kinds:
                stats = snapshot[name, kind]
                assert (stats.calls, stats.channels, stats.histogram) == (1, None, None)
                got = {each: getattr(stats.total, each) for each in fields.STATISTICS}
                compare(got, value.double()[at].numpy(), f"{name} {kind}", 1e-5)


class Wide(nn.Module):
    """Parameters around the size of a sample, of several shapes."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(1,), (4095,), (64, 64), (17, 241), (90, 130), (3, 5, 7, 11), ()]
        self.all = nn.ParameterList(torch.randn(shape) for shape in shapes)
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self) -> torch.Tensor:
        return torch.stack([p.square().sum() for p in self.all]).sum() + self.empty.sum()


def step_of(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_values_before_a_step_and_what_it_changes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Wide().to(dtype)
    model.all[4].data = model.all[4].data.t().contiguous().t()  # memory is not in the order of elements
    mon = hookstats.attach(model, tensors=SAMPLES, every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        before = values_of(model)
        step_of(optimizer, model())
        snapshot = mon.step()
        after = values_of(model)
        assert ("empty", "param_sample") not in snapshot
        for each in (before, after):
            del each["empty"]
        check_samples(snapshot, before, after)
        assert snapshot["all.4", "param_sample"].total.count == SIZE


def test_they_are_measured_by_default_beside_the_others() -> None:
    model = residual()
    mon = hookstats.attach(model, every=1)
    names = [name for name, _ in model.named_parameters()]
    assert {site for site in mon.sites if site.tensor in SAMPLES} == {Site(n, kind) for n in names for kind in SAMPLES}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = values_of(model)
    step_of(optimizer, loss_of(model))
    snapshot = mon.step()
    check_samples(snapshot, before, values_of(model))
    assert snapshot["head.weight", "param_grad"].histogram is not None
    assert snapshot["", "input"].total.count == 4 * 5 * 16


def test_parameters_that_no_optimizer_steps_are_compared_with_the_last_measured_step() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors=SAMPLES, every=2)
    seen = [values_of(model)]
    first = mon.step()
    assert first["head.weight", "param_sample"].calls == 1
    assert ("head.weight", "update_sample") not in first
    for step in range(1, 5):
        with torch.no_grad():
            for p in model.parameters():  # an optimizer of one's own
                p.add_(0.25 if step < 3 else 0)
        snapshot = mon.step()
        assert (snapshot is None) == bool(step % 2)
        if snapshot is not None:
            now = values_of(model)
            check_samples(snapshot, seen[-1], now, ("update_sample",))
            check_samples(snapshot, now, now, ("param_sample",))
            assert (snapshot["head.bias", "update_sample"].total.zeros == 4) == (step == 4) or step == 2
            seen.append(now)


def test_the_optimizer_of_another_model_changes_nothing() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors=SAMPLES, every=1)
    optimizer = torch.optim.AdamW(copy.deepcopy(model).parameters(), lr=0.1)
    snapshots = []
    for seed in range(3):
        loss_of(model, seed).backward()
        optimizer.step()
        snapshots.append(mon.step())
    for snapshot in snapshots[1:]:
        for site, stats in snapshot.items():
            assert site.tensor != "update_sample" or stats.total.zeros == stats.total.count > 0


def test_nothing_happens_between_measured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = residual()
    mon = hookstats.attach(model, tensors=ALL, every=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    calls = []
    take = hookstats.watch.samples.Samples.take

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return take(self, *args, **kwargs)

    monkeypatch.setattr(hookstats.watch.samples.Samples, "take", counted)
    for seed in range(9):
        step_of(optimizer, loss_of(model, seed))
        mon.step()
        if seed == 0:
            assert calls
            calls.clear()
    assert not calls


class Raising(torch.optim.SGD):
    fails = True

    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        super().step(closure)
        if self.fails:
            raise OSError("as if")


def test_an_optimizer_that_raises_spoils_no_later_step() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors=SAMPLES, every=1)
    optimizer = Raising(model.parameters(), lr=0.01)
    for fails in (True, False):
        optimizer.fails = fails
        before = values_of(model)
        optimizer.zero_grad()
        loss_of(model).backward()
        try:
            optimizer.step()
        except OSError:
            assert fails
        check_samples(mon.step(), before, values_of(model))


def test_a_closure_is_compared_from_its_beginning() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors=SAMPLES, every=1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    before = values_of(model)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    optimizer.step(closure)
    check_samples(mon.step(), before, values_of(model))


def test_a_scaler_that_skips_the_step_leaves_no_change() -> None:
    model = residual()
    scaler = torch.amp.GradScaler("cpu")
    mon = hookstats.attach(model, tensors=SAMPLES, every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale(loss_of(model) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        total = mon.step()["head.weight", "update_sample"].total
        assert (total.zeros == total.count) == (factor != 1.0)


def test_parameters_may_be_replaced_frozen_and_made_wider() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mon = hookstats.attach(model, tensors=SAMPLES, every=1)
    for step in range(4):
        if step == 1:
            model[0].weight.requires_grad_(False)
        if step == 2:
            model[1].weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
            model.double()
        if step == 3:
            model[1] = nn.Linear(4, 4).double()
            model[0].weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = values_of(model[0])
        step_of(optimizer, model(torch.ones(1, 4, dtype=model[0].weight.dtype)).sum())
        check_samples(
            mon.step(), {f"0.{k}": v for k, v in before.items()}, {f"0.{k}": v for k, v in values_of(model[0]).items()}
        )
    assert not mon.skipped


def test_what_cannot_be_sampled_is_told_and_the_others_are() -> None:
    model = nn.ParameterDict({"good": torch.ones(30), "gaps": torch.ones(8, 8)})
    model["gaps"].data = torch.ones(8, 16)[:, ::2]
    mon = hookstats.attach(model, tensors=SAMPLES, every=1)
    with pytest.warns(UserWarning, match="side by side"):
        snapshot = mon.step()
    assert snapshot["good", "param_sample"].total.count == 30
    assert "side by side" in snapshot.skipped[Site("gaps", "param_sample")].reason


def test_meta_and_lazy_parameters_do_no_harm() -> None:
    for model in (nn.Linear(4, 4, device="meta"), nn.LazyLinear(4)):
        mon = hookstats.attach(model, tensors=ALL, every=1)
        mon.step()
        mon.detach()
    model = nn.LazyLinear(4)
    mon = hookstats.attach(model, tensors=SAMPLES, every=1)
    model(torch.ones(2, 3))
    assert mon.step()["weight", "param_sample"].total.count == 12


def test_samples_count_in_the_budget() -> None:
    model = nn.Linear(100, 100)
    sites = hookstats.attach(model, tensors=SAMPLES).state_bytes
    needed = sites + 2 * 4 * (4096 + 100)
    assert not hookstats.attach(model, tensors=SAMPLES, options=hookstats.Options(memory_budget=needed)).skipped
    with pytest.warns(UserWarning, match="a sample of it would not fit"):
        mon = hookstats.attach(model, tensors=SAMPLES, options=hookstats.Options(memory_budget=needed - 1))
    assert {site.name for site in mon.skipped} == {"bias"}


def test_sites_without_a_histogram_take_no_memory_for_one() -> None:
    model = nn.Linear(8, 8)
    none = hookstats.attach(model, tensors=SAMPLES, histogram=None).state_bytes
    for bins in (hookstats.ExponentBins(), hookstats.ExponentBins(per_channel=True), hookstats.LinearBins(-1, 1, 20)):
        mon = hookstats.attach(model, tensors=(*SAMPLES, "param_grad"), histogram=bins, every=1)
        assert hookstats.attach(model, tensors=SAMPLES, histogram=bins).state_bytes == none
        model(torch.ones(1, 8)).sum().backward()
        snapshot = mon.step()
        assert snapshot["weight", "param_sample"].histogram is None
        assert snapshot["weight", "param_grad"].histogram is not None


# What the model is given.


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, pixels: torch.Tensor, ids: Any = None, *, scale: Any = None) -> torch.Tensor:
        return self.inner(pixels.float()) * (1.0 if scale is None else scale)


def test_floating_inputs_of_the_model_alone() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    mon = hookstats.attach(model, tensors=("output", "model_input"), every=1)
    x = torch.randn(3, 6)
    model(x)
    snapshot = mon.step()
    assert [site for site in snapshot if site.tensor.startswith("input")] == [Site("", "input")]
    assert snapshot.order[0] == Site("", "input")
    assert snapshot["", "input"].total.rms == pytest.approx(x.square().mean().sqrt().item())
    assert Site("", "input") in mon.sites


@pytest.mark.parametrize("compiled", ["", "before", "after"])
@pytest.mark.parametrize("named", [False, True])
def test_inputs_by_name_and_indices_make_no_site_and_no_complaint(compiled: str, named: bool) -> None:
    torch._dynamo.reset()
    model: Any = Named()
    if compiled == "before":
        model = torch.compile(model, backend="eager", fullgraph=True)
    mon = hookstats.attach(model, tensors="model_input", every=1)
    if compiled == "after":
        model = torch.compile(model, backend="eager", fullgraph=True)
    ids = torch.arange(6)
    floating = torch.randn(2, 6)
    if named:
        model(pixels=floating, ids=ids, scale=torch.ones(2, 6))
        expected = {Site("", "input.pixels"), Site("", "input.scale")}
    else:
        model(torch.arange(12).view(2, 6))
        expected = set()
    snapshot = mon.step()
    assert set(snapshot) == set(mon.sites) == expected
    assert not mon.skipped
    assert not snapshot.skipped


def test_compiled_models_are_not_compiled_again_for_them() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    mon = hookstats.attach(model, tensors=ALL, every=1)
    called: Any = torch.compile(model, backend=counter, fullgraph=True)
    for seed in range(4):
        called(torch.randn(3, 6, generator=torch.Generator().manual_seed(seed))).sum().backward()
        snapshot = mon.step()
        assert snapshot["", "input"].total.count == 18
    assert counter.frame_count == 1


def test_inputs_of_all_modules_are_not_measured_twice_at_the_root() -> None:
    model = Named()
    mon = hookstats.attach(model, "*", tensors=("input", "model_input"), every=1)
    model(torch.randn(2, 6))
    assert mon.step()["", "input"].calls == 1


def test_a_parameter_of_another_size_is_not_compared_with_the_one_before() -> None:
    """Their samples have the same size, and the parameters the same dtype."""
    model = nn.Linear(100, 100, bias=False)
    mon = hookstats.attach(model, tensors=SAMPLES, every=1)
    for step in range(4):
        if step == 2:
            model.weight = nn.Parameter(torch.randn(100, 110))
        before = values_of(model)
        step_of(torch.optim.SGD(model.parameters(), lr=0.1), model(torch.ones(1, model.weight.shape[1])).sum())
        check_samples(mon.step(), before, values_of(model))
