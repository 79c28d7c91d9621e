"""Parameters and their gradients: what is measured, and when."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import _global_optimizer_pre_hooks

import hookstats
from hookstats import Site, Snapshot, arguments, fields
from tests.conftest import check, compare
from tests.models import Residual, images, small_cnn

BOTH = ("param", "param_grad")


def loss_of(model: nn.Module, seed: int = 0) -> torch.Tensor:
    x = torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(seed))
    return model(x).square().sum()


def residual() -> Residual:
    torch.manual_seed(0)
    return Residual()


def grad_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def check_site(snapshot: Snapshot, name: str, kind: str, value: torch.Tensor, channel_dim: int = 0) -> None:
    stats = snapshot[name, kind]
    if value.dim() < 2:
        assert stats.channels is None
        got = {name: getattr(stats.total, name) for name in fields.STATISTICS}
        compare(got, value.detach().double().numpy(), f"{name} {kind}", 1e-5)
    else:
        check(stats, value, channel_dim)


def test_every_parameter_and_gradient_is_what_the_optimizer_is_given() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors=BOTH, every=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for seed in (2 * step, 2 * step + 1):  # microbatches: the gradients' sum
            loss_of(model, seed).backward()
        seen = {name: (p.detach().clone(), grad_of(p).clone()) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        snapshot = mon.step()
        assert snapshot is not None
        assert snapshot.order == [Site(name, kind) for kind in BOTH for name in seen]
        for name, values in seen.items():
            for kind, value in zip(BOTH, values, strict=True):
                assert snapshot[name, kind].calls == 1
                check_site(snapshot, name, kind, value)


def test_grad_norm_is_what_clip_grad_norm_returns() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors="param_grad", every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        norm = clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        snapshot = mon.step()
        assert snapshot is not None
        assert snapshot.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    for value in (float("inf"), float("nan")):
        optimizer.zero_grad()
        loss_of(model).backward()
        assert model.head.weight.grad is not None
        model.head.weight.grad[1, 2] = value
        norm = clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        snapshot = mon.step()
        assert snapshot is not None
        np.testing.assert_equal(snapshot.grad_norm, norm.item())


def test_clipped_gradients_are_seen_clipped() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors="param_grad", every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    assert clip_grad_norm_(model.parameters(), 0.5) > 0.5
    optimizer.step()
    snapshot = mon.step()
    assert snapshot is not None
    assert snapshot.grad_norm == pytest.approx(0.5, rel=1e-5)


def test_without_gradients_watched_there_is_no_norm() -> None:
    mon = hookstats.attach(residual(), tensors="param", every=1)
    snapshot = mon.step()
    assert snapshot is not None
    assert snapshot.grad_norm is None


def test_only_due_steps_are_measured() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors=("output", *BOTH), every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    taken = []
    for seed in range(4):
        loss_of(model, seed).backward()
        optimizer.step()
        taken.append(mon.step())
    assert [s.step for s in taken if s] == [0, 2]
    assert all(s["head.weight", kind].calls == 1 for s in taken if s for kind in BOTH)


def test_two_optimizers_each_bring_their_own() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors="param_grad", every=1)
    head = torch.optim.SGD(model.head.parameters(), lr=0.1)
    body = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    loss_of(model).backward()
    gradient = grad_of(model.head.weight).clone()
    head.step()
    model.head.weight.grad.mul_(100)
    body.step()
    snapshot = mon.step()
    assert snapshot is not None
    check_site(snapshot, "head.weight", "param_grad", gradient)
    assert {stats.calls for stats in snapshot.values()} == {1}


def test_an_optimizer_that_is_no_torch_optimizer_is_no_obstacle() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors=BOTH, every=1)
    loss_of(model).backward()
    gradient = grad_of(model.head.weight).clone()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    snapshot = mon.step()
    assert snapshot is not None
    check_site(snapshot, "head.weight", "param_grad", gradient)
    check_site(snapshot, "head.weight", "param", model.head.weight)
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    stranger.step()
    assert mon.snapshot().step == 0  # nothing of ours is in the open step


def test_one_backward_can_be_asked_for_without_any_step() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors=BOTH)
    loss_of(model).backward()
    snapshot = mon.snapshot()
    check_site(snapshot, "blocks.1.up.weight", "param_grad", grad_of(model.blocks[1].up.weight))


def test_gradients_that_overflowed_are_seen_though_the_optimizer_does_not_step() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors="param_grad", every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    scaler.scale(loss_of(model) * 1e6).backward()
    scaler.step(optimizer)
    scaler.update()
    snapshot = mon.step()
    assert snapshot is not None
    assert snapshot["head.weight", "param_grad"].total.nans > 0
    assert not np.isfinite(snapshot.grad_norm)


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_seen_unscaled(fused: bool) -> None:
    model = residual()
    mon = hookstats.attach(model, tensors="param_grad", every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)  # a fused one unscales them itself
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(model)).backward()
    scaler.step(optimizer)
    snapshot = mon.step()
    twin = residual()
    loss_of(twin).backward()
    assert snapshot is not None
    check_site(snapshot, "head.weight", "param_grad", grad_of(twin.head.weight))


def test_channels_are_outputs() -> None:
    model = nn.ModuleDict(
        {
            "conv": nn.Conv2d(3, 5, 3),
            "transposed": nn.ConvTranspose2d(3, 5, 2),
            "embedding": nn.Embedding(7, 4),
            "norm": nn.BatchNorm2d(6),
        }
    ).to(memory_format=torch.channels_last)
    mon = hookstats.attach(model, tensors="param", every=1)
    snapshot = mon.step()
    assert snapshot is not None
    check_site(snapshot, "conv.weight", "param", model["conv"].weight)
    check_site(snapshot, "transposed.weight", "param", model["transposed"].weight, channel_dim=1)
    check_site(snapshot, "embedding.weight", "param", model["embedding"].weight)
    check_site(snapshot, "norm.weight", "param", model["norm"].weight)


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ("*.weight", {"0.weight", "1.weight", "3.weight", "7.weight"}),
        ("3", {"3.weight", "3.bias"}),
        (["7.bias", "0"], {"7.bias", "0.weight"}),
        (lambda name, module: isinstance(module, nn.Linear), {"7.weight", "7.bias"}),
        (None, {"0.weight", "1.weight", "1.bias", "3.weight", "3.bias", "7.weight", "7.bias"}),
    ],
)
def test_parameters_are_chosen_by_their_own_names_or_their_modules(modules: Any, expected: set[str]) -> None:
    mon = hookstats.attach(small_cnn(), modules, tensors="param")
    assert {site.name for site in mon.sites} == expected


def test_names_are_clean_and_shared_parameters_have_one() -> None:
    model = residual()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    compiled = torch.compile(model, backend="eager")
    mon = hookstats.attach(compiled, "blocks.*.up*", tensors="param")
    weights = [site.name for site in mon.sites if site.name.endswith("weight")]
    assert weights == ["blocks.0.up.weight", "blocks.2.up.weight"]


def test_frozen_parameters_have_no_gradient_site() -> None:
    model = residual()
    model.blocks.requires_grad_(False)
    mon = hookstats.attach(model, tensors=BOTH)
    assert {site.name for site in mon.sites if site.tensor == "param_grad"} == {"head.weight", "head.bias"}
    assert len([site for site in mon.sites if site.tensor == "param"]) == len(list(model.parameters()))


def test_a_parameter_that_is_replaced_is_followed_to_its_new_width() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors=BOTH, every=1, strict=True)
    loss_of(model).backward()
    assert mon.step() is not None
    model.head = model.head.requires_grad_(False)
    model.head.weight = nn.Parameter(torch.randn(9, 16))
    model.head.bias = nn.Parameter(torch.randn(9))
    loss_of(model).backward()
    snapshot = mon.step()
    assert snapshot is not None
    check_site(snapshot, "head.weight", "param", model.head.weight)
    check_site(snapshot, "head.weight", "param_grad", grad_of(model.head.weight))
    check_site(snapshot, "head.bias", "param_grad", grad_of(model.head.bias))


@pytest.mark.filterwarnings("ignore:hookstats. not measured")
def test_a_sparse_gradient_is_skipped_with_its_reason() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3))
    mon = hookstats.attach(model, tensors="param_grad", every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        snapshot = mon.step()
        assert snapshot is not None
        assert snapshot["1.weight", "param_grad"].calls == 1
        assert ("0.weight", "param_grad") not in snapshot
    assert "expected a dense strided tensor" in mon.skipped["0.weight", "param_grad"]


def test_past_the_memory_budget_parameters_keep_totals() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors=BOTH, every=1, histogram=None, memory_budget=4000)
    loss_of(model).backward()
    snapshot = mon.step()
    assert snapshot is not None
    assert all(stats.channels is None for stats in snapshot.values())
    weight = snapshot["head.weight", "param"].total
    assert weight.mean == pytest.approx(model.head.weight.mean().item(), rel=1e-5)


def test_paused_and_detached_monitors_measure_nothing() -> None:
    model = residual()
    before = len(_global_optimizer_pre_hooks)
    mon = hookstats.attach(model, tensors=BOTH, every=1)
    assert len(_global_optimizer_pre_hooks) == before + 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    with mon.paused():
        optimizer.step()
        assert not mon.snapshot().order
    assert mon.step() is not None  # what was not read before is read when the step ends
    mon.detach()
    assert len(_global_optimizer_pre_hooks) == before
    optimizer.step()
    assert mon.snapshot().step == 0


def test_without_steps_the_last_snapshot_has_the_parameters() -> None:
    got: list[Snapshot] = []
    model = residual()
    with hookstats.attach(model, tensors="param", sinks=got.append):
        pass
    assert got[0]["head.weight", "param"].calls == 1


def test_a_forgotten_monitor_keeps_nothing_alive_and_measures_nothing() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors=BOTH, every=1)
    parameters, head = weakref.ref(mon._parameters), weakref.ref(model.head.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    del mon
    gc.collect()
    assert parameters() is None
    optimizer.step()
    other = hookstats.attach(model, tensors=BOTH)
    del model, optimizer
    gc.collect()
    assert head() is None
    other.step()
    other.detach()


def test_forgotten_monitors_take_their_hooks_with_them() -> None:
    before = len(_global_optimizer_pre_hooks)
    for _ in range(3):
        hookstats.attach(residual(), tensors=BOTH)
    gc.collect()
    assert len(_global_optimizer_pre_hooks) == before


def test_gradients_of_a_closure_are_those_that_it_computes() -> None:
    for optimizer_type in (torch.optim.SGD, torch.optim.LBFGS):
        model, twin = residual(), residual()
        mon = hookstats.attach(model, tensors=("param_grad", "param_update"), every=1)
        optimizers = [optimizer_type(m.parameters(), lr=0.1) for m in (model, twin)]
        for seed in range(3):
            twin.zero_grad()
            loss_of(twin, seed).backward()
            gradient = grad_of(twin.head.weight).clone()

            def closure(m: nn.Module, o: Any, seed: int) -> torch.Tensor:
                o.zero_grad()
                loss = loss_of(m, seed)
                loss.backward()
                return loss

            for m, o in zip((model, twin), optimizers, strict=True):
                if m is model:
                    o.step(closure=partial(closure, m, o, seed))
                else:
                    o.step(partial(closure, m, o, seed))
            taken = mon.step()
            assert taken is not None
            check_site(taken, "head.weight", "param_grad", gradient)
            assert taken["head.weight", "param_update"].calls == 1
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        mon.detach()


def test_an_optimizer_inside_another_one_counts_once() -> None:
    class Outer(torch.optim.SGD):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.inner = torch.optim.SGD(*args, **kwargs)

        def step(self, closure: Any = None) -> None:
            self.inner.step()

    model = residual()
    mon = hookstats.attach(model, tensors=(*BOTH, "param_update"), every=1)
    loss_of(model).backward()
    norm = clip_grad_norm_(model.parameters(), float("inf"))
    Outer(list(model.parameters()), lr=0.1).step()
    taken = mon.step()
    assert taken is not None
    assert taken.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    assert {stats.calls for stats in taken.values()} == {1}


def test_an_optimizer_step_that_raised_does_not_hide_the_next_one() -> None:
    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure: Any = None) -> None:
            if self.fails:
                raise RuntimeError("no")
            super().step(closure)

    model = residual()
    mon = hookstats.attach(model, tensors="param_grad", every=2)
    assert mon.step() is not None
    optimizer = Failing(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="no"):  # in a step that is not measured, which no close cleans up after
        optimizer.step()
    mon.step()
    optimizer.fails = False
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    taken = mon.step()
    assert taken is not None
    assert taken["head.weight", "param_grad"].calls == 1


def test_the_norm_over_several_optimizer_steps_is_that_of_one() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors="param_grad", every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss_of(model).backward()
    norm = clip_grad_norm_(model.parameters(), float("inf"))
    optimizer.step()
    optimizer.step()
    taken = mon.step()
    assert taken is not None
    assert taken["head.weight", "param_grad"].calls == 2
    assert taken.grad_norm == pytest.approx(norm.item(), rel=1e-6)


def test_asking_before_backward_spoils_nothing() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors=BOTH, every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mon.snapshot()
    loss_of(model).backward()
    assert mon.snapshot()["head.weight", "param_grad"].calls == 1
    optimizer.step()
    taken = mon.step()
    assert taken is not None
    assert {stats.calls for stats in taken.values()} == {1}


def test_lazy_parameters_are_read_when_they_are_there() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    mon = hookstats.attach(model, tensors=(*BOTH, "param_update"), every=1)
    model(torch.randn(5, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    taken = mon.step()
    assert taken is not None
    assert {stats.calls for stats in taken.values()} == {1}
    assert taken["0.weight", "param"].total.count == 12


def test_training_is_bit_identical() -> None:
    results = []
    for watched in (False, True):
        model = residual()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        mon = hookstats.attach(model, tensors=arguments.TENSORS, every=2) if watched else None
        for seed in range(6):
            optimizer.zero_grad()
            loss_of(model, seed).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if mon:
                mon.step()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_an_internal_failure_stops_the_measuring_and_not_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    model = residual()
    mon = hookstats.attach(model, tensors="param", every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    monkeypatch.setattr(mon._parameters._values, "accumulate", lambda tensors: 1 / 0)
    with pytest.warns(UserWarning, match="ZeroDivisionError"):
        optimizer.step()
    optimizer.step()
    mon.step()
    assert len(mon.skipped) == len(list(model.parameters()))


def test_updates_are_new_minus_old() -> None:
    model = residual()
    model.head.requires_grad_(False)
    mon = hookstats.attach(model, "*", tensors=("param", "param_update"), every=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        before = {name: p.detach().clone() for name, p in model.blocks.named_parameters()}
        optimizer.step()
        taken = mon.step()
        assert (taken is not None) == (step != 1)
        for name, p in model.blocks.named_parameters():
            if taken:
                check_site(taken, f"blocks.{name}", "param_update", p.detach() - before[name])
                assert taken[f"blocks.{name}", "param_update"].calls == 1
    assert ("head.weight", "param_update") not in mon.sites


def test_an_update_whose_copy_does_not_fit_is_skipped() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(400, 400))
    with pytest.warns(UserWarning, match=r"not measured: 1.weight param_update: a copy of it would not fit"):
        mon = hookstats.attach(model, tensors="param_update", every=1, memory_budget=200_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0](torch.randn(3, 4)).sum().backward()
    optimizer.step()
    taken = mon.step()
    assert taken is not None
    assert taken["0.weight", "param_update"].calls == 1
    assert taken["0.weight", "param_update"].total.l2_norm > 0


def test_an_optimizer_that_does_not_step_makes_no_update() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors=("param_grad", "param_update"), every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    scaler.scale(loss_of(model) * 1e6).backward()
    scaler.step(optimizer)
    taken = mon.step()
    assert taken is not None
    assert taken["head.weight", "param_grad"].calls == 1
    assert taken["head.weight", "param_update"].calls == 0


def test_a_compiled_optimizer_is_measured_when_the_step_ends() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors="param_grad", every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    loss_of(model).backward()
    gradient = grad_of(model.head.weight).clone()
    step()
    snapshot = mon.step()
    assert snapshot is not None
    check_site(snapshot, "head.weight", "param_grad", gradient)
    assert snapshot["head.weight", "param_grad"].calls == 1


def test_a_cnn_with_a_convolution_in_channels_last() -> None:
    torch.manual_seed(0)
    model = small_cnn().to(memory_format=torch.channels_last)
    mon = hookstats.attach(model, tensors=BOTH, every=1)
    model(images()).sum().backward()
    snapshot = mon.snapshot()
    check_site(snapshot, "3.weight", "param_grad", grad_of(model[3].weight))


def test_a_linear_regression_records_the_gradients_that_plain_hooks_see() -> None:
    runs = []
    for watched in (False, True):
        torch.manual_seed(0)
        x, target = torch.randn(64, 3), torch.randn(64, 2)
        model = nn.Linear(3, 2)
        seen: dict[str, torch.Tensor] = {}
        for name, p in model.named_parameters():
            if not watched:
                p.register_hook(partial(seen.__setitem__, name))
        mon = hookstats.attach(model, tensors="param_grad", every=1) if watched else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        record = []
        for _ in range(50):
            optimizer.zero_grad()
            (model(x) - target).square().mean().backward()
            optimizer.step()
            taken = mon.step() if mon else None
            for name, dim in (("weight", 0), ("bias", None)):
                stats = taken[name, "param_grad"] if taken else hookstats.measure(seen[name], dim)
                record.append([getattr(stats.total, each) for each in fields.STATISTICS])
        runs.append((record, [p.detach().clone() for p in model.parameters()]))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
