"""A GradScaler's part in a step: by what it multiplied the gradients, and whether it let the optimizers step."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from hookstats.snapshot import GRAD_SCALE, OVERFLOWED


class Scaling:
    """Of one model's gradients. Waits for nothing: what lies on a device travels with the step's scalars."""

    def __init__(self, scaler: Any, model: nn.Module) -> None:
        self._scaler = scaler
        self._model = weakref.ref(model)
        self._scale: float | torch.Tensor = 1.0
        self._stepped = False
        self._found_inf: list[torch.Tensor] = []  # of optimizers that step in any case, and look at it themselves

    def begin_step(self) -> None:
        """The scale that the gradients of this step will have; the scaler changes its own when it is updated."""
        now = getattr(self._scaler, "_scale", None)  # on the device; None before its first use, or if it is disabled
        self._scale = float(self._scaler.get_scale()) if now is None else now.detach().clone()
        self._stepped = False
        self._found_inf = []

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """Notes it if the optimizer is one of the model's."""
        model = self._model()
        own = set() if model is None else {id(parameter) for parameter in model.parameters()}
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            return
        self._stepped = True
        found_inf = getattr(optimizer, "found_inf", None)
        if isinstance(found_inf, torch.Tensor):
            self._found_inf.append(found_inf.detach().clone())

    def scalars(self) -> dict[str, Any]:
        """Of the open step, to travel with it."""
        overflowed: Any = not self._stepped
        if self._found_inf:
            device = self._found_inf[0].device
            found = [each.to(device, non_blocking=True).reshape(()) for each in self._found_inf]
            overflowed = torch.stack(found).amax()
        return {GRAD_SCALE: self._scale, OVERFLOWED: overflowed}


def check_scaler(scaler: Any) -> None:
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise TypeError(f"grad_scaler: expected a torch.amp.GradScaler or None, got {type(scaler).__name__}")
