"""Transformers: `HookStats`, a TrainerCallback.

A callback is given neither the loss nor the moment before gradients are clipped. Both pass through the Accelerator of
the trainer, which a callback is not given either: so two methods of its class are wrapped while a trainer trains.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from hookstats.integrations.attached import Attached

try:
    from accelerate import Accelerator
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "hookstats.integrations.transformers needs transformers and accelerate: pip install 'hookstats[transformers]' "
        f"({error})"
    ) from None

_log = logging.getLogger("hookstats")


class HookStats(Attached, TrainerCallback):  # type: ignore[misc]
    """``Trainer(callbacks=[HookStats(sinks=hookstats.record("runs/a"))])``.

    Attaches when training begins, with the model as `accelerate` has prepared it, and detaches when it ends. Evaluation
    and whatever runs between two steps are left out; ``evaluate`` and ``predict`` attach nothing.

    A step is one of the optimizer, with all microbatches of ``gradient_accumulation_steps``. It has the number by which
    Trainer logs it, from 1 on: ``state.global_step`` behind it. Its scalars are "loss", the sum of what backward gets
    on this process, and "lr". ``monitor`` is what `hookstats.attach` returned for the latest training, None before the
    first.

    Trainer does not tell a callback when training raises: hooks stay on the model then, until it trains again with a
    HookStats, or ``callback.monitor.detach()`` is called: keep the callback.
    """

    _is_in_step = False
    _are_gradients_read = False  # before they are clipped; or it was told why they are not
    _training: _Training

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__() | {"_is_in_step": False, "_are_gradients_read": False}
        state.pop("_training", None)
        return state

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        if args.n_gpu > 1:
            raise ValueError(
                f"expected one GPU in a process, got {args.n_gpu}, for which Trainer takes DataParallel: start it with "
                "torchrun, or let CUDA_VISIBLE_DEVICES name one"
            )
        training = _Training.of(model, state)
        for callback in {self, *_listening}:
            if callback is self or callback._training.has_raised(training):
                callback._leave(RuntimeError("training was left before its end"))
        self._training = training
        self._attach(model)
        _listen(self)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._is_in_step = True
        self._begin_batch()

    def before_backward(self, loss: Any) -> None:
        """Note the loss that `accelerate` is given to go backward from."""
        if self._is_in_step:
            self._add_loss(loss)

    def measure_before_clip(self) -> None:
        """Measure the gradients when they are unscaled."""
        if self._is_in_step and self._before_clipping and self.monitor is not None:
            self.monitor.measure_gradients()
            self._are_gradients_read = True

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self._note_learning_rate(optimizer)
        if self._before_clipping and not self._are_gradients_read:
            self._are_gradients_read = True  # said once
            _log.warning(
                "before_clipping: expected that Trainer clips by accelerator.clip_grad_norm_, but did not: parameters' "
                "gradients are read as the optimizer gets them"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._is_in_step = False
        self._close_step(state.global_step)
        self._end_batch()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._leave()

    def _leave(self, error: BaseException | None = None) -> None:
        self._is_in_step = False
        _listening.discard(self)
        _put_back()
        self._detach(error)


class _Training(NamedTuple):
    """The training that a callback belongs to."""

    last: weakref.ref[torch.nn.Module]  # of the model's modules: the same whatever the model is wrapped in
    state: weakref.ref[Any]  # the trainer has a new one for each training, and gives it to all callbacks

    @classmethod
    def of(cls, model: torch.nn.Module, state: Any) -> _Training:
        *_, last = model.modules()
        return cls(weakref.ref(last), weakref.ref(state))

    def has_raised(self, now: _Training) -> bool:
        """Return whether another training of the same model has begun before this one ended."""
        return self.last() is now.last() and self.state() is not now.state()


_listening: weakref.WeakSet[HookStats] = weakref.WeakSet()  # those whose trainers train
_wrapped: dict[str, Any] = {}  # what was there before, by name; kept for a call that is under way when it is put back
_in_place: set[str] = set()  # the names of those that are wrapped now


def _listen(callback: HookStats) -> None:
    _listening.add(callback)
    weakref.finalize(callback, _put_back)  # training raised, and nobody kept it
    for name, method in _METHODS.items():
        if name not in _in_place:
            _in_place.add(name)
            _wrapped[name] = getattr(Accelerator, name)
            setattr(Accelerator, name, method)


def _put_back() -> None:
    """Puts back what was there as soon as no trainer trains, unless somebody has wrapped it once more."""
    if list(_listening):  # not those that are on their way out
        return
    for name, method in _METHODS.items():
        if getattr(Accelerator, name) is method:
            setattr(Accelerator, name, _wrapped[name])
            _in_place.discard(name)


@functools.wraps(Accelerator.backward)
def _backward(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
    for callback in list(_listening):
        callback.before_backward(loss)
    return _wrapped["backward"](self, loss, *args, **kwargs)


@functools.wraps(Accelerator.clip_grad_norm_)
def _clip_grad_norm_(self: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(parameters, torch.Tensor):
        parameters = _notify_unscaled(parameters)
    return _wrapped["clip_grad_norm_"](self, parameters, *args, **kwargs)


def _notify_unscaled(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Accelerate asks for the parameters when it has unscaled their gradients."""
    for callback in list(_listening):
        callback.measure_before_clip()
    yield from parameters


_METHODS = {"backward": _backward, "clip_grad_norm_": _clip_grad_norm_}
