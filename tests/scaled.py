"""Steps of a GradScaler that change nothing but what is known of it."""

from __future__ import annotations

import torch
from torch import nn


def show(scaler: torch.amp.GradScaler, model: nn.Module) -> None:
    """Steps an optimizer of the model, so that who watches the model knows its scaler."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    scaler.scale(torch.zeros(()))  # it makes its scale when it is first used
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.0))
