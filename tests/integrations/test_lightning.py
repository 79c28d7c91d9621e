"""hookstats.integrations.lightning with the real packages, on scikit-learn's digits: what a plain loop measures."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

import hookstats
from hookstats import FindingError, Snapshot
from hookstats.integrations import lightning as integration
from tests.models import small_cnn
from tests.rules.test_judging import Found, Recorder
from tests.snapshots import same

integration = importlib.reload(integration)  # for both packages, whatever was imported before
HookStats = integration.HookStats
PACKAGES = {"lightning": lightning.pytorch, "pytorch_lightning": pytorch_lightning}
KINDS = ("output", "grad_output", "param", "param_grad", "param_update")
EVERYTHING = {"tensors": KINDS, "every": 1, "options": hookstats.Options(strict=True)}

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (".isinstance.treespec, LeafSpec", "You defined a .validation_step", "Be aware that when using .ckpt")
]


@pytest.fixture(scope="module")
def digits() -> TensorDataset:
    data = pytest.importorskip("sklearn.datasets").load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(images[:96], torch.tensor(data.target)[:96])


def batches(data: TensorDataset) -> DataLoader[Any]:
    """12 of 8 images. With a generator of its own, so that nobody draws from the one that dropout draws from."""
    return DataLoader(data, 8, generator=torch.Generator())


class Training:
    """A LightningModule's part, for either package."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = small_cnn()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


class Digits(Training, lightning.pytorch.LightningModule):
    pass


class OlderDigits(Training, pytorch_lightning.LightningModule):
    pass


MODULES: dict[str, Callable[[], Any]] = {"lightning": Digits, "pytorch_lightning": OlderDigits}


def trainer(folder: Path, callbacks: Any, package: Any = lightning.pytorch, **settings: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1, "default_root_dir": folder}
    return package.Trainer(callbacks=callbacks, **quiet | settings)


def groups(loader: Iterable[Any], size: int) -> Iterator[list[Any]]:
    each = iter(loader)
    while group := list(islice(each, size)):
        yield group


def plain(
    module: Any,
    data: TensorDataset,
    accumulate: int = 1,
    clip: float | None = None,
    before: bool = False,
    scaler: torch.amp.GradScaler | None = None,
) -> list[Snapshot]:
    """The loop that the trainer runs, with `hookstats.attach`."""
    torch.manual_seed(1)
    snapshots: list[Snapshot] = []
    options = hookstats.Options(strict=True, training_only=True)
    monitor = hookstats.attach(module, sinks=snapshots.append, **EVERYTHING | {"options": options})
    [optimizer], [scheduler] = module.configure_optimizers()
    for number, group in enumerate(groups(batches(data), accumulate)):
        total, rate = torch.zeros(()), optimizer.param_groups[0]["lr"]
        optimizer.zero_grad()
        for batch in group:
            with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
                loss = module.training_step(batch, 0) / accumulate
            (loss if scaler is None else scaler.scale(loss)).backward()
            total = total + loss.detach()
        if scaler is not None:
            scaler.unscale_(optimizer)
        if before:
            monitor.measure_gradients()
        if clip is not None:
            clip_grad_norm_(module.parameters(), clip)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        scheduler["scheduler"].step()
        monitor.step(number, loss=total, lr=rate)
    monitor.detach()
    return snapshots


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("before", [False, True])
def test_a_trainer_measures_what_a_plain_loop_does(
    name: str, before: bool, digits: TensorDataset, tmp_path: Path
) -> None:
    """With accumulation, sanity checks, evaluation in the middle of an accumulation, clipping, a scheduler."""
    snapshots: list[Snapshot] = []
    callback = HookStats(before_clipping=before, sinks=snapshots.append, **EVERYTHING)
    settings = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5, "val_check_interval": 4}
    module = MODULES[name]()
    torch.manual_seed(1)  # what dropout draws
    trainer(tmp_path, callback, PACKAGES[name], **settings).fit(module, batches(digits), batches(digits))
    wanted = plain(MODULES[name](), digits, 3, 0.5, before)
    same(snapshots, wanted)
    assert [snapshot.step for snapshot in snapshots] == [0, 1, 2, 3]
    assert {stats.calls for (_, kind), stats in snapshots[0].items() if kind == "grad_output"} == {3}
    norms = [snapshot.grad_norm for snapshot in snapshots]
    assert all(norm is not None and (norm > 0.51 if before else norm < 0.51) for norm in norms)
    assert not any(each._forward_hooks for each in module.modules())


class EvaluatesInTrainingMode(Digits):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.train()
        self.net(batch[0])


class RunsTheModel(lightning.pytorch.Callback):
    """Between batches, in training mode, as somebody does who looks at an image at the end of each step."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        pl_module.net(torch.zeros(1, 1, 8, 8))

    on_train_epoch_end = on_train_epoch_start = on_train_batch_end


@pytest.mark.parametrize("is_refused", [False, True])
def test_what_runs_between_training_batches_is_left_out_whatever_mode_the_model_is_in(
    is_refused: bool, digits: TensorDataset, tmp_path: Path
) -> None:
    snapshots: list[Snapshot] = []
    module = EvaluatesInTrainingMode()
    if is_refused:  # the rest of an epoch, as soon as its third batch begins
        module.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == 2 else None
    callbacks = [HookStats(sinks=snapshots.append, every=1), RunsTheModel()]
    trainer(tmp_path, callbacks, max_epochs=2, val_check_interval=1.0).fit(module, batches(digits), batches(digits))
    assert [snapshot.step for snapshot in snapshots] == list(range(4 if is_refused else 24))
    assert {stats.calls for snapshot in snapshots for stats in snapshot.values()} == {1}


def test_only_fit_attaches(digits: TensorDataset, tmp_path: Path) -> None:
    callback, module = HookStats(), Digits()
    trainer(tmp_path, callback).validate(module, batches(digits), verbose=False)
    assert callback.monitor is None


def test_the_scaler_of_a_trainer_is_found(digits: TensorDataset, tmp_path: Path) -> None:
    snapshots: list[Snapshot] = []
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    callback = HookStats(before_clipping=True, sinks=snapshots.append, **EVERYTHING)
    module = Digits()
    torch.manual_seed(1)
    trainer(tmp_path, callback, plugins=[plugin], gradient_clip_val=0.5).fit(module, batches(digits))
    same(snapshots, plain(Digits(), digits, 1, 0.5, True, torch.amp.GradScaler("cpu", init_scale=1024.0)))
    assert {snapshot.grad_scale for snapshot in snapshots} == {1024.0}


def test_a_run_that_is_resumed_goes_on_with_its_numbers_in_a_new_attempt(digits: TensorDataset, tmp_path: Path) -> None:
    """The second epoch is trained twice: as it goes on, and from the checkpoint between the two."""
    whole: list[Snapshot] = []
    saving = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    kept = [HookStats(sinks=[hookstats.record(tmp_path / "run"), whole.append], every=1, before_clipping=True), saving]
    settings = {"max_epochs": 2, "accumulate_grad_batches": 3, "gradient_clip_val": 0.5}
    without_dropout = Digits()
    without_dropout.net[5].p = 0.0
    trainer(tmp_path, kept, enable_checkpointing=True, **settings).fit(without_dropout, batches(digits))
    resumed: list[Snapshot] = []
    callback = HookStats(sinks=[hookstats.record(tmp_path / "run"), resumed.append], every=1, before_clipping=True)
    another = Digits()
    another.net[5].p = 0.0
    trainer(tmp_path, callback, **settings).fit(another, batches(digits), ckpt_path=tmp_path / "epoch=0.ckpt")
    same(resumed, whole[4:])
    run = hookstats.load(tmp_path / "run")
    assert run.steps == list(range(8))
    assert [(each["records"], each["ended"]) for each in run.attempts] == [(8, "closed"), (4, "closed")]


class TwoOptimizers(Digits):
    """Manual optimization: each batch is stepped by both, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        losses = []
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            losses.append(super().training_step(batch, batch_idx))
            self.manual_backward(losses[-1])
            optimizer.step()
        return {"loss": losses[0] + losses[1], "accuracy": 0.5}

    def configure_optimizers(self) -> Any:
        halves = (self.net[:4], self.net[4:])
        return [torch.optim.SGD(half.parameters(), lr=rate) for half, rate in zip(halves, (0.3, 0.1), strict=True)]


def test_a_batch_of_several_optimizers_is_one_step_and_its_number_goes_on_behind_a_checkpoint(
    digits: TensorDataset, tmp_path: Path
) -> None:
    snapshots: list[Snapshot] = []
    callbacks = [HookStats(sinks=snapshots.append, **EVERYTHING), HookStats(tensors="output")]  # two do not collide
    fitting = trainer(tmp_path, callbacks)
    fitting.fit(TwoOptimizers(), batches(digits))
    fitting.save_checkpoint(tmp_path / "two.ckpt")
    assert [snapshot.step for snapshot in snapshots] == list(range(12))
    assert fitting.global_step == 24
    assert snapshots[0].scalars.keys() == {"loss", "lr"}
    assert snapshots[0].scalars["lr"] == 0.3
    assert {snapshots[0][site].calls for site in snapshots[0].order if site.tensor == "output"} == {2}
    updated = {site.name for site in snapshots[0].order if site.tensor == "param_update"}
    assert {"net.0.weight", "net.3.weight", "net.7.weight"} < updated
    snapshots.clear()
    callback, module = HookStats(sinks=snapshots.append, every=1), TwoOptimizers()
    trainer(tmp_path, callback, max_epochs=2).fit(module, batches(digits), ckpt_path=tmp_path / "two.ckpt")
    assert [snapshot.step for snapshot in snapshots] == list(range(12, 24))


def test_manual_optimization_cannot_be_read_before_clipping(digits: TensorDataset, tmp_path: Path) -> None:
    callback = HookStats(before_clipping=True)
    with pytest.raises(ValueError, match="before_clipping: expected automatic optimization, got manual"):
        trainer(tmp_path, callback).fit(TwoOptimizers(), batches(digits))
    assert callback.monitor is None


class Fails(Digits):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3:
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)


def test_an_error_takes_the_hooks_off_and_the_record_says_died(digits: TensorDataset, tmp_path: Path) -> None:
    callback, module = HookStats(sinks=hookstats.record(tmp_path / "run"), every=1), Fails()
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, callback).fit(module, batches(digits))
    assert not any(each._forward_hooks for each in module.modules())
    assert [each["ended"] for each in hookstats.load(tmp_path / "run").attempts] == ["died: ZeroDivisionError"]


class FindsAtTheEnd(Recorder):
    def findings(self) -> list[Found]:
        return [Found("critical", "found when training had failed")] if self.closed else []


def test_what_training_failed_of_is_raised_whatever_comes_of_detaching(digits: TensorDataset, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, HookStats(sinks=FindsAtTheEnd(on_finding="raise"))).fit(Fails(), batches(digits))


def test_fit_is_called_twice(digits: TensorDataset, tmp_path: Path) -> None:
    """The same callback, trainer and recording."""
    callback, module = HookStats(sinks=hookstats.record(tmp_path / "run"), every=4), Digits()
    fitting = trainer(tmp_path, callback)
    fitting.fit(module, batches(digits))
    first = callback.monitor
    fitting.fit_loop.max_epochs = 2
    fitting.fit(module, batches(digits))
    run = hookstats.load(tmp_path / "run")
    assert run.steps == [0, 4, 8, 12, 16, 20]
    assert [each["ended"] for each in run.attempts] == ["closed", "closed"]
    assert callback.monitor is not first
    fitting.fit(module, batches(digits))  # nothing is left to train
    assert not any(each._forward_hooks for each in module.modules())


def test_a_callback_that_has_trained_can_be_copied_and_the_copy_trains(digits: TensorDataset, tmp_path: Path) -> None:
    """``save_hyperparameters`` and searches for hyperparameters copy callbacks."""
    callback, module = HookStats(sinks=hookstats.record(tmp_path / "run"), every=4), Digits()
    trainer(tmp_path, callback).fit(module, batches(digits))
    for other in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert callback.monitor is not None
        assert other.monitor is None
        trainer(tmp_path, other).fit(module, batches(digits))
    run = hookstats.load(tmp_path / "run")
    assert [each["ended"] for each in run.attempts] == ["closed"] * 3


def test_a_record_that_somebody_else_goes_on_with_is_left_alone(digits: TensorDataset, tmp_path: Path) -> None:
    recording, module = hookstats.record(tmp_path / "run"), Digits()
    fitting = trainer(tmp_path, HookStats(sinks=recording, every=4))
    fitting.fit(module, batches(digits))
    with hookstats.attach(module, sinks=recording, every=1) as monitor:
        fitting.validate(module, batches(digits), verbose=False)
        module.train().training_step(digits[:8], 0).backward()
        monitor.step(30)
    assert hookstats.load(tmp_path / "run").steps == [0, 4, 8, 30]


def test_a_finding_can_stop_training(digits: TensorDataset, tmp_path: Path) -> None:
    recorder = Recorder(lambda step: [Found("critical", "it exploded")] if step == 2 else [], on_finding="raise")
    callback, module = HookStats(sinks=recorder, every=1), Digits()
    with pytest.raises(FindingError, match="it exploded"):
        trainer(tmp_path, callback).fit(module, batches(digits))
    assert [frame.step for frame in recorder.taken] == [0, 1, 2]
    assert callback.monitor is not None
    assert [finding.sentence for finding in callback.monitor.findings] == ["it exploded"]
    assert recorder.closed == 1
    assert isinstance(recorder.error, FindingError)


def test_an_argument_that_attach_does_not_have_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'evry'"):
        HookStats(evry=10)
    with pytest.raises(TypeError, match=r"options: expected hookstats.Options\(...\), got 3"):
        HookStats(options=3)._attach(torch.nn.Linear(2, 2))


def test_options_that_are_given_keep_what_they_say_of_evaluation() -> None:
    kept: list[hookstats.Options] = []
    really = hookstats.attach

    def attach(model: Any, modules: Any = None, *, options: hookstats.Options, **settings: Any) -> hookstats.Monitor:
        kept.append(options)
        return really(model, modules, options=options, **settings)

    for given in (
        {},
        {"options": hookstats.Options(strict=True)},
        {"options": hookstats.Options(training_only=False)},
    ):
        callback = HookStats(**given)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hookstats.integrations.attached.hookstats.attach", attach)
            callback._attach(torch.nn.Linear(2, 2))
        callback._detach()
    assert [(each.strict, each.training_only) for each in kept] == [(False, True), (True, True), (False, False)]


def test_the_group_of_all_processes_is_the_one_that_is_there_when_training_begins(
    digits: TensorDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, really = [], hookstats.attach

    def attach(model: Any, modules: Any = None, *, process_group: Any = None, **settings: Any) -> hookstats.Monitor:
        given.append(process_group)
        return really(model, modules, **settings)

    monkeypatch.setattr(hookstats, "attach", attach)
    callbacks = [HookStats(process_group="world"), HookStats(process_group="world"), HookStats()]
    trainer(tmp_path, callbacks[0]).fit(Digits(), batches(digits))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        trainer(tmp_path, callbacks[1:]).fit(Digits(), batches(digits))
        assert given == [None, torch.distributed.group.WORLD, None]
        assert given[1] is not None
    finally:
        torch.distributed.destroy_process_group()


def test_the_callback_is_of_the_package_that_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert issubclass(HookStats, lightning.pytorch.Callback)
    assert issubclass(HookStats, pytorch_lightning.Callback)
    older = SimpleNamespace(Callback=int)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", older)
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    assert integration._callbacks() == [int]
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    with pytest.raises(ImportError, match=r"needs lightning: pip install 'hookstats\[lightning\]'"):
        integration._callbacks()
