"""A GradScaler's part in a step: by what it multiplied the gradients, and whether it found an overflow."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from hookstats._warn import WarnOnce

_T = TypeVar("_T")


class Scaling:
    """The scale of one model's gradients. Waits for nothing: what lies on a device travels with the step."""

    def __init__(self, scaler: Any, model: nn.Module, strict: bool, warn_once: WarnOnce) -> None:
        self._scaler = scaler
        self._model = weakref.ref(model)
        self._strict = strict
        self._warn_once = warn_once
        self._own: set[int] = set()  # ids of the model's parameters
        self.begin_step()

    def _now(self) -> float | torch.Tensor:
        scale = getattr(self._scaler, "_scale", None)  # on the device; None before its first use, or if it is disabled
        return float(self._scaler.get_scale()) if scale is None else scale.detach().clone()

    def _asked(self, ask: Callable[[], _T]) -> _T | None:
        """None: the scaler fails."""
        try:
            return ask()
        except Exception as error:
            if self._strict:
                raise
            self._warn_once("scaler", f"grad_scaler failed, gradients are reported with their scale: {error!r}")
            return None

    @property
    def scale(self) -> float | torch.Tensor | None:
        """Return the scale by which the loss of the open step was multiplied; None: it failed."""
        return self._scale

    def begin_step(self) -> None:
        """Notes the scale that the gradients of this step will have, if nobody changes it."""
        self._scale = self._asked(self._now)
        model = self._model()
        self._own = set() if model is None else {id(parameter) for parameter in model.parameters()}

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Notes the scale that they have: it may have been loaded or set, and is changed only behind this."""
        if any(id(parameter) in self._own for group in optimizer.param_groups for parameter in group["params"]):
            self._scale = self._asked(self._now)

    def marks(self) -> tuple[float | torch.Tensor, bool | torch.Tensor] | None:
        """Return the open step's marks: the scale, and whether a step was skipped for an overflow. None: it failed.

        A scaler of itself lowers its scale only then.
        """
        scale = self._scale
        return None if scale is None else self._asked(lambda: (scale, self._now() < scale))


def check_scaler(scaler: Any) -> None:
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise TypeError(f"Options.grad_scaler: expected a torch.amp.GradScaler or None, got {type(scaler).__name__}")
