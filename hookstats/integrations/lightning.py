"""Lightning: `HookStats`, a Callback. For both packages of it, ``lightning`` and ``pytorch_lightning``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from hookstats.integrations.attached import Attached


def _callbacks() -> list[type]:
    """The class Callback of each of the packages that is imported; where none is, of one that is installed.

    A Callback of the one is none of the other's.
    """
    names = ("lightning.pytorch", "pytorch_lightning")
    found = [sys.modules[name] for name in names if sys.modules.get(name) is not None]
    for name in names:
        try:
            found = found or [import_module(name)]
        except ImportError as error:
            reason = error
    if not found:
        raise ImportError(
            f"hookstats.integrations.lightning needs lightning: pip install 'hookstats[lightning]' ({reason})"
        ) from None
    return [package.Callback for package in found]


class HookStats(Attached, *_callbacks()):  # type: ignore[misc]
    """``Trainer(callbacks=[HookStats(sinks=hookstats.record("runs/a"))])``.

    Attaches when ``fit`` has set up its strategy, detaches when it ends. Validation, sanity checks and whatever runs
    between two training batches are left out; ``validate``, ``test`` and ``predict`` attach nothing.

    A step is what lies between two changes of ``trainer.global_step``: all microbatches of
    ``accumulate_grad_batches``, and with manual optimization a batch with all its optimizers' steps. It has the number
    by which Lightning's loggers show it, from 0 on: the ``global_step`` that its ``training_step`` sees. Where several
    optimizers step in a batch, Lightning's ``global_step`` counts each of them; here, the batch is one step. Its
    scalars are "loss", the sum of what backward gets (of what ``training_step`` returns, with manual optimization), and
    "lr". ``monitor`` is what `hookstats.attach` returned for the latest training, None before the first.

    With manual optimization, ``fit`` raises ValueError for ``before_clipping=True``: Lightning tells too late.
    """

    _step = 0  # the open one
    _global_step = 0  # of the trainer, when it began

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self._before_clipping and not pl_module.automatic_optimization:
            raise ValueError(
                "before_clipping: expected automatic optimization, got manual: Lightning's hook comes after "
                "clip_gradients there; call monitor.measure_gradients() of this callback before it"
            )
        self._attach(pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """A checkpoint has been loaded by now."""
        if self._global_step != trainer.global_step:
            self._step = self._global_step = trainer.global_step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._begin_batch()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Measure gradients before Lightning clips. A fused optimizer that unscales itself is never clipped."""
        self._note_learning_rate(optimizer)
        unscales = getattr(optimizer, "_step_supports_amp_scaling", False)
        if self._before_clipping and self.monitor is not None and not unscales:
            self.monitor.measure_gradients()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._add_loss(outputs.get("loss") if isinstance(outputs, Mapping) else outputs)
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self._step += 1
            self._close_step(self._step - 1)
        self._end_batch()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """End a batch that the module's ``on_train_batch_start`` has refused: it has no end of its own."""
        self._end_batch()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._detach(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Detaches where there was nothing left to train, and ``on_train_end`` is not called."""
        self._detach()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Only where the count is not Lightning's. Not in state_dict, which two callbacks of a class cannot have."""
        if self._step != self._global_step:
            checkpoint["hookstats"] = {"step": self._step, "global_step": self._global_step}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        count = checkpoint.get("hookstats")
        if count is not None:
            self._step, self._global_step = count["step"], count["global_step"]
