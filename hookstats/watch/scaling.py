"""A GradScaler's part in a step: by what it multiplied the gradients, and whether it found an overflow.

Nobody has to name it: `GradScaler.step` is replaced while a monitor is attached. It tells which scaler steps an
optimizer of the model, before that is done or skipped.
"""

from __future__ import annotations

import threading
import weakref
from functools import wraps
from typing import Any

import torch
from torch import nn

from hookstats._warn import WarnOnce


class Scaling:
    """The scale of one model's gradients. Waits for nothing: what lies on a device travels with the step."""

    def __init__(self, model: nn.Module, strict: bool, warn_once: WarnOnce) -> None:
        self._scaler: Any = None  # the one that stepped an optimizer of the model last
        self._model = weakref.ref(model)
        self._strict = strict
        self._warn_once = warn_once
        self.begin_step(is_measured=True)

    def begin_step(self, is_measured: bool) -> None:
        """Notes the scale that the gradients of a measured step will have, if nobody changes it."""
        self._is_measured = is_measured
        self._scale = self._read_scale() if is_measured else None
        self._own: set[int] | None = None  # ids of the model's parameters, once somebody has asked for them

    def before_step_of(self, scaler: Any, optimizer: Any) -> None:
        """Notes the scale that gradients have: it may have been loaded or set, and is changed only after this."""
        if scaler is self._scaler and not self._is_measured:
            return
        try:
            if self._own is None:
                model = self._model()
                self._own = set() if model is None else {id(parameter) for parameter in model.parameters()}
            stepped = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
            if not self._own.isdisjoint(stepped) and scaler.is_enabled():
                self._scaler = scaler
                self._scale = self._read_scale()
        except Exception as error:
            self._scale = None
            if self._strict:
                raise
            self._warn_once("scaler", f"the GradScaler failed, gradients are reported with its scale: {error!r}")

    @property
    def scale(self) -> float | torch.Tensor | None:
        """Return the scale by which the loss of the open step was multiplied; None: by none that is known."""
        return self._scale

    def marks(self) -> tuple[float | torch.Tensor, bool | torch.Tensor] | None:
        """Return the open step's marks: the scale, and whether a step was skipped for an overflow. None: no scale.

        A scaler of itself lowers its scale only then.
        """
        scale, now = self._scale, self._read_scale()
        return None if scale is None or now is None else (scale, now < scale)

    def _read_scale(self) -> float | torch.Tensor | None:
        if self._scaler is None:
            return None
        scale = self._scaler._scale  # on the device; None before its first use
        return float(self._scaler.get_scale()) if scale is None else scale.detach().clone()


_changing = threading.RLock()  # garbage that is collected meanwhile may end another one
_looking: weakref.WeakSet[Scaling] = weakref.WeakSet()
_original: Any = None  # `GradScaler.step`, while ours is in its place


class LookingForScaler:
    """Handle: the scaler of a model is looked for until ``remove``, or until the monitor is gone."""

    def __init__(self, scaling: Scaling) -> None:
        global _original
        with _changing:
            _looking.add(scaling)
            if torch.amp.GradScaler.step is not _step:
                _original = torch.amp.GradScaler.step
                torch.amp.GradScaler.step = _step  # type: ignore[method-assign]
        self.remove = weakref.finalize(scaling, _stop_looking, weakref.ref(scaling))


def _stop_looking(scaling: weakref.ref[Scaling]) -> None:
    """With the last one, torch's method is back."""
    with _changing:
        ended = scaling()  # None: garbage, of which the set may not know yet
        if ended is not None:
            _looking.discard(ended)
        if not list(_looking) and torch.amp.GradScaler.step is _step:  # else somebody has replaced it since
            torch.amp.GradScaler.step = _original  # type: ignore[method-assign]


@wraps(torch.amp.GradScaler.step)
def _step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    for each in tuple(_looking):
        each.before_step_of(self, optimizer)
    return _original(self, optimizer, *args, **kwargs)
