"""Evaluation is left out by itself: only forwards in training mode are measured."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import hookstats
from hookstats import Monitor
from hookstats.watch import guards
from tests.models import Residual
from tests.plain import OF_OUTPUTS, hearing


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(seed))


def train_and_evaluate(model: nn.Module, run: Any, mon: Monitor, evaluations: int = 3) -> hookstats.Snapshot:
    """One step with two microbatches, and evaluation between and behind them, with gradients and without."""
    for _ in range(2):
        model.train()
        run(batch()).square().sum().backward()
        model.eval()
        for _ in range(evaluations):
            run(batch()).square().sum().backward()
            with torch.no_grad():
                run(batch())
    model.train()
    snapshot = mon.step()
    assert snapshot is not None
    return snapshot


def calls(snapshot: hookstats.Snapshot) -> set[int]:
    return {stats.calls for stats in snapshot.values()}


@pytest.mark.parametrize(("how", "backend"), [("whole", "aot_eager"), ("blocks", "eager")])
def test_in_compiled_models_evaluation_is_one_program_without_statistics(how: str, backend: str) -> None:
    torch._dynamo.reset()
    model = Residual(depth=2)
    mon = hookstats.attach(model, every=1, tensors=("output", "grad_output"))
    counter = CompileCounterWithBackend(backend)
    run: Any = model
    if how == "whole":
        run = torch.compile(model, backend=counter, fullgraph=True)
    else:
        for block in model.blocks:
            block.compile(backend=counter, fullgraph=True)
    assert calls(train_and_evaluate(model, run, mon)) == {2}
    frames = counter.frame_count
    assert calls(train_and_evaluate(model, run, mon)) == {2}
    assert counter.frame_count == frames


def test_a_frozen_submodule_in_eval_mode_counts() -> None:
    model = Residual()
    model.blocks[0].eval()
    mon = hookstats.attach(model, every=1, tensors=OF_OUTPUTS)
    model(batch()).sum().backward()
    assert mon.snapshot()["blocks.0", "output"].calls == 1


def test_the_flag_of_what_is_inside_wrappers_decides() -> None:
    outer: Any = torch.optim.swa_utils.AveragedModel(torch.compile(Residual(), backend="eager"))
    mon = hookstats.attach(outer, every=1, tensors=OF_OUTPUTS)
    outer.module.eval()  # the wrapper stays in training mode, as trainers leave it
    outer(batch())
    assert outer.training
    assert mon.snapshot().order == []


def test_a_model_in_eval_mode_is_measured_until_it_was_seen_in_training_mode() -> None:
    model = Residual().eval()
    mon = hookstats.attach(model, every=1, tensors=OF_OUTPUTS)
    model(batch())
    assert calls(mon.step()) >= {1}  # type: ignore[arg-type]
    model.train()
    model(batch())
    mon.step()
    model.eval()
    model(batch())
    assert mon.step().order == []  # type: ignore[union-attr]


def test_true_and_false_say_it_outright() -> None:
    model = Residual().eval()
    only, always = (
        hookstats.attach(model, every=1, options=hookstats.Options(training_only=wanted)) for wanted in (True, False)
    )
    model(batch())
    assert only.snapshot().order == []
    model.train()
    for mon in (only, always):
        mon.step()
    model.eval()
    model(batch())
    assert only.snapshot().step == 0
    assert {site.tensor for site in always.snapshot().order} == {"input", "output"}


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_after_eval_belongs_to_its_training_forward(reentrant: bool) -> None:
    model = Residual()
    mon = hookstats.attach(model, every=1, tensors=OF_OUTPUTS)
    x = batch().requires_grad_()
    loss = checkpoint(model, x, use_reentrant=reentrant).square().sum()
    model.eval()
    loss.backward()
    assert {(s.tensor, mon.snapshot()[s].calls) for s in mon.snapshot().order} == {("output", 1), ("grad_output", 1)}


def test_taps_and_wrapped_tensors_are_left_out_of_evaluation() -> None:
    model = nn.Linear(4, 4)
    mon = hookstats.attach(model, every=1, tensors=OF_OUTPUTS)
    model.eval()
    mon.tap(model(torch.randn(2, 4)), "scores")
    assert ("scores", "output") not in mon.sites
    model.train()
    mon.tap(torch.randn(2, 4), "scores")
    model.eval()
    mon.tap(torch.randn(2, 4), "scores")
    assert mon.snapshot()["scores", "output"].calls == 1


def test_detach_and_the_models_end_leave_nothing_behind() -> None:
    gc.collect()
    before = guards.now.monitors
    model, other = Residual(), Residual()
    mon = hookstats.attach(model)
    assert guards.now.monitors == before + 1
    mon.detach()
    assert guards.now.monitors == before
    kept = hookstats.attach(other)
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None
    assert guards.now.monitors == before
    assert kept._binder.measures_now()  # asks no module that is gone


def test_monitors_that_come_and_go_leave_no_finalizers_on_the_model() -> None:
    model = Residual()
    gc.collect()
    before, monitors = len(weakref.finalize._registry), guards.now.monitors  # type: ignore[attr-defined]
    for _ in range(5):
        mon = hookstats.attach(model, tensors="output")
        mon.detach()
        mon.step()
    with pytest.raises(ValueError, match="attention"):
        hookstats.attach(model, tensors=("output", "attention"))
    assert guards.now.monitors == monitors
    del mon  # whose memory has one of its own
    gc.collect()
    assert len(weakref.finalize._registry) == before  # type: ignore[attr-defined]


def test_a_model_that_is_left_in_evaluation_mode_is_told_of_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hearing() as told, hookstats.attach(model, every=1) as monitor:
        for step in range(12):
            if step in (3, 5):  # validations, of which one is ended
                model.eval()
                with torch.no_grad():
                    model(torch.randn(3, 4))
                model.train(step == 3)
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step()
    (text,) = told
    assert "since step 5 the model has been in evaluation mode" in text
    assert "call model.train()" in text


def test_validation_whose_batches_are_steps_too_is_no_mistake() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hearing() as told, hookstats.attach(model, every=1) as monitor:
        for step in range(20):
            model.train(step % 10 < 5)
            loss = model(torch.randn(3, 4)).square().mean()
            if model.training:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            monitor.step()
    assert told == []


@pytest.mark.parametrize("tensors", ["param_grad", "output"])
def test_a_model_that_trains_in_evaluation_mode_on_purpose_is_told_nothing_of_it(tensors: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with (
        hearing() as told,
        hookstats.attach(model, tensors=tensors, every=1, options=hookstats.Options(training_only=False)) as monitor,
    ):
        for step in range(8):
            model.train(step < 2)
            model(torch.randn(3, 4)).square().mean().backward()
            monitor.step()
    assert told == []
