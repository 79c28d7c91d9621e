"""hookstats.integrations.transformers with the real Trainer, on tokens of real text: what a plain loop measures."""

from __future__ import annotations

import copy
import gc
import importlib
import logging
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.nn.utils import clip_grad_norm_
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import hookstats
from hookstats import FindingError, Snapshot
from hookstats.integrations.transformers import HookStats
from tests.conftest import ROOT
from tests.rules.test_judging import Found, Recorder
from tests.snapshots import same

KINDS = ("output", "grad_output", "param", "param_grad", "param_update")
EVERYTHING = {"tensors": KINDS, "every": 1, "options": hookstats.Options(strict=True)}
LENGTH = 16
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def text() -> list[dict[str, torch.Tensor]]:
    """24 sequences, a token for each letter; the labels are the tokens, of which a third is padding in some."""
    tokens = torch.tensor([*(ROOT / "LICENSE").read_bytes()])[2000 : 2000 + 24 * LENGTH].view(24, LENGTH)
    labels = tokens.clone()
    labels[::5, -5:] = -100
    return [{"input_ids": ids, "labels": wanted} for ids, wanted in zip(tokens, labels, strict=True)]


def gpt2(dropout: float = 0.0) -> GPT2LMHeadModel:
    """In eval mode, as from_pretrained returns it."""
    torch.manual_seed(0)
    shape = {"n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, **shape, **rates)).eval()


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no", "use_cpu": True}
    steps = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 4, "max_grad_norm": 0.5}
    rest = {"learning_rate": 0.01, "lr_scheduler_type": "linear"}
    return TrainingArguments(str(folder), **quiet | steps | rest | settings)


class Ordered(Trainer):
    """Batches as they come, so that a plain loop has the same."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def train(
    model: GPT2LMHeadModel, text: list[Any], folder: Path, *callbacks: Any, resume: str | None = None, **settings: Any
) -> Trainer:
    trainer = Ordered(
        model,
        arguments(folder, **settings),
        train_dataset=text,
        eval_dataset=text[:4],
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def plain(model: GPT2LMHeadModel, text: list[Any], before: bool) -> list[Snapshot]:
    """The loop that Trainer runs, with `hookstats.attach`."""
    snapshots: list[Snapshot] = []
    options = hookstats.Options(strict=True, training_only=True)
    monitor = hookstats.attach(model, sinks=snapshots.append, **EVERYTHING | {"options": options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0, fused=True)
    model.train()
    for step in range(4):
        rate = optimizer.param_groups[0]["lr"] = 0.01 * (4 - step) / 4
        group = text[6 * step : 6 * step + 6]
        items = sum(int((each["labels"] != -100).sum()) for each in group)  # as Trainer counts them
        total = torch.zeros(())
        for i in range(0, 6, 2):
            batch = {name: torch.stack([each[name] for each in group[i : i + 2]]) for name in group[0]}
            loss = model(**batch, num_items_in_batch=torch.tensor(items)).loss
            loss.backward()
            total = total + loss.detach()
        if before:
            monitor.measure_gradients()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(step + 1, loss=total, lr=rate)
    monitor.detach()
    return snapshots


@pytest.mark.parametrize("before", [False, True])
def test_a_trainer_measures_what_a_plain_loop_does(before: bool, text: list[Any], tmp_path: Path) -> None:
    """A model that is in eval mode at first, with accumulation, evaluation, clipping, a scheduler."""
    snapshots: list[Snapshot] = []
    callback = HookStats(before_clipping=before, sinks=snapshots.append, **EVERYTHING)
    model, methods = gpt2(), (Accelerator.backward, Accelerator.clip_grad_norm_)
    train(model, text, tmp_path, callback, eval_strategy="steps", eval_steps=1, eval_on_start=True)
    same(snapshots, plain(gpt2(), text, before))
    assert [snapshot.step for snapshot in snapshots] == [1, 2, 3, 4]
    norms = [snapshot.grad_norm for snapshot in snapshots]
    assert all(norm is not None and (norm > 0.51 if before else norm < 0.51) for norm in norms)
    assert not any(each._forward_hooks for each in model.modules())
    assert (Accelerator.backward, Accelerator.clip_grad_norm_) == methods


class RunsTheModel(TrainerCallback):
    """Between steps, in training mode, as somebody does who lets the model write something."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.train()
        model(torch.zeros(1, LENGTH, dtype=torch.long))

    on_train_begin = on_epoch_begin = on_evaluate = on_epoch_end = on_step_end


def test_what_runs_between_steps_is_left_out_whatever_mode_the_model_is_in(text: list[Any], tmp_path: Path) -> None:
    snapshots: list[Snapshot] = []
    callback = HookStats(sinks=snapshots.append, every=1)
    settings = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 7}
    train(gpt2(), text, tmp_path, callback, RunsTheModel(), **settings)  # and into a second epoch
    assert [snapshot.step for snapshot in snapshots] == list(range(1, 8))
    linear = "transformer.h.0.mlp.c_fc"
    assert {snapshot[linear, kind].calls for snapshot in snapshots for kind in ("output", "grad_output")} == {2}


def test_only_training_attaches(text: list[Any], tmp_path: Path) -> None:
    callback = HookStats()
    Ordered(gpt2(), arguments(tmp_path), eval_dataset=text[:4], callbacks=[callback]).evaluate()
    assert callback.monitor is None


def test_a_run_that_is_resumed_goes_on_with_its_numbers_in_a_new_attempt(text: list[Any], tmp_path: Path) -> None:
    """The last two steps are trained twice: as they go on, and from the checkpoint before them."""
    whole, resumed = list[Snapshot](), list[Snapshot]()
    for snapshots, resume in ((whole, None), (resumed, str(tmp_path / "checkpoint-2"))):
        sinks = [hookstats.record(tmp_path / "run"), snapshots.append]
        saving = {"save_strategy": "steps", "save_steps": 2}
        train(gpt2(), text, tmp_path, HookStats(before_clipping=True, sinks=sinks, every=1), resume=resume, **saving)
    same(resumed, whole[2:])
    run = hookstats.load(tmp_path / "run")
    assert run.steps == [1, 2, 3, 4]
    assert [(each["records"], each["ended"]) for each in run.attempts] == [(4, "closed"), (2, "closed")]


class Scaled(Ordered):
    """With the GradScaler that accelerate makes on a GPU only."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp = True
        self.accelerator.state._mixed_precision = "fp16"
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


def test_the_scaler_of_a_trainer_is_found_and_gradients_before_clipping_are_unscaled(
    text: list[Any], tmp_path: Path
) -> None:
    snapshots: list[Snapshot] = []
    callback = HookStats(before_clipping=True, sinks=snapshots.append, **EVERYTHING)
    try:
        Scaled(gpt2(), arguments(tmp_path), train_dataset=text, callbacks=[callback]).train()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert {snapshot.grad_scale for snapshot in snapshots} == {1024.0}
    wanted = plain(gpt2(), text, before=True)[0]
    for site in wanted.order:
        if site.tensor in ("grad_output", "param_grad"):
            assert snapshots[0][site].total.rms == pytest.approx(wanted[site].total.rms, rel=0.02)  # half precision


LEFT = "died: RuntimeError: training was left before its end"


class Fails(RunsTheModel):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise ZeroDivisionError

    on_train_begin = on_epoch_begin = on_evaluate = on_epoch_end = on_step_end


def test_training_that_raised_is_left_when_the_same_callback_trains_again(text: list[Any], tmp_path: Path) -> None:
    """Nobody tells a callback that training raised. The record of the first run says died."""
    callback, methods = HookStats(sinks=hookstats.record(tmp_path / "run"), every=1), Accelerator.backward
    model = gpt2()
    with pytest.raises(ZeroDivisionError):
        train(model, text, tmp_path, callback, Fails())
    first = callback.monitor
    train(model, text, tmp_path, callback)
    assert callback.monitor is not first
    assert not any(each._forward_hooks for each in model.modules())
    attempts = hookstats.load(tmp_path / "run").attempts
    assert [(each["records"], each["ended"]) for each in attempts] == [(2, LEFT), (4, "closed")]
    assert Accelerator.backward is methods


def test_a_callback_that_has_trained_can_be_copied_and_the_copy_trains(text: list[Any], tmp_path: Path) -> None:
    callback, model = HookStats(sinks=hookstats.record(tmp_path / "run"), every=1), gpt2()
    with pytest.raises(ZeroDivisionError):
        train(model, text, tmp_path, callback, Fails())
    copies = copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))
    assert callback.monitor is not None
    for other in copies:
        assert other.monitor is None
        train(model, text, tmp_path, other)
    attempts = hookstats.load(tmp_path / "run").attempts
    assert [each["ended"] for each in attempts] == [LEFT, "closed", "closed"]


def test_training_that_raised_is_left_when_another_callback_trains_its_model(text: list[Any], tmp_path: Path) -> None:
    """A notebook's cell that was interrupted and is run again does so."""
    methods, model = Accelerator.backward, gpt2()
    first, second = (HookStats(sinks=hookstats.record(tmp_path / "run"), every=1) for _ in range(2))
    with pytest.raises(ZeroDivisionError):
        train(model, text, tmp_path, first, Fails())
    train(model, text, tmp_path, second)
    assert not any(each._forward_hooks for each in model.modules())
    attempts = hookstats.load(tmp_path / "run").attempts
    assert [(each["records"], each["ended"]) for each in attempts] == [(2, LEFT), (4, "closed")]
    assert Accelerator.backward is methods


def test_a_callback_that_is_gone_when_training_raised_leaves_accelerate_as_it_was(
    text: list[Any], tmp_path: Path
) -> None:
    methods = (Accelerator.backward, Accelerator.clip_grad_norm_)
    with pytest.raises(ZeroDivisionError):
        train(gpt2(), text, tmp_path, HookStats(), Fails())
    gc.collect()
    assert (Accelerator.backward, Accelerator.clip_grad_norm_) == methods


def test_two_callbacks_do_not_disturb_each_other(text: list[Any], tmp_path: Path) -> None:
    one, other = list[Snapshot](), list[Snapshot]()
    methods = (Accelerator.backward, Accelerator.clip_grad_norm_)
    callbacks = [HookStats(sinks=one.append, every=1), HookStats(sinks=other.append, every=1, before_clipping=True)]
    train(gpt2(), text, tmp_path, *callbacks)
    assert [snapshot.scalars for snapshot in one] == [snapshot.scalars for snapshot in other]
    assert all(a.grad_norm < 0.51 < b.grad_norm for a, b in zip(one, other, strict=True))
    assert (Accelerator.backward, Accelerator.clip_grad_norm_) == methods


class TrainsAnother(TrainerCallback):
    def __init__(self, text: list[Any], folder: Path) -> None:
        self.text, self.folder = text, folder

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            train(gpt2(), self.text, self.folder, HookStats(), max_steps=1)


def test_a_training_inside_of_another_takes_nothing_from_it(text: list[Any], tmp_path: Path) -> None:
    snapshots: list[Snapshot] = []
    callback = HookStats(before_clipping=True, sinks=snapshots.append, **EVERYTHING)
    train(gpt2(), text, tmp_path, callback, TrainsAnother(text, tmp_path))
    same(snapshots, plain(gpt2(), text, before=True))


class ClipsOtherwise(Ordered):
    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        return clip_grad_norm_(model.parameters(), self.args.max_grad_norm)


def test_clipping_that_does_not_go_through_accelerate_is_told_once(
    text: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hookstats"):
        callbacks = [HookStats(before_clipping=True)]
        ClipsOtherwise(gpt2(), arguments(tmp_path), train_dataset=text, callbacks=callbacks).train()
    told = [each.message for each in caplog.records if each.name == "hookstats"]
    assert len(told) == 1
    assert told[0].startswith("before_clipping: expected that Trainer clips by accelerator.clip_grad_norm_")


def test_a_finding_can_stop_training(text: list[Any], tmp_path: Path) -> None:
    recorder = Recorder(lambda step: [Found("critical", "it exploded")] if step == 2 else [], on_finding="raise")
    callback = HookStats(sinks=recorder, every=1)
    with pytest.raises(FindingError, match="it exploded"):
        train(gpt2(), text, tmp_path, callback)
    assert [frame.step for frame in recorder.taken] == [1, 2]
    assert callback.monitor is not None
    callback.monitor.detach()


def test_data_parallel_in_one_process_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one GPU in a process, got 2"):
        HookStats().on_train_begin(SimpleNamespace(n_gpu=2), None, None)


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "hookstats.integrations.transformers")
    with pytest.raises(ImportError, match=r"needs transformers and .* pip install 'hookstats\[transformers\]'"):
        importlib.import_module("hookstats.integrations.transformers")
