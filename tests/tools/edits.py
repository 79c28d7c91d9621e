"""Shared code of tests of edits: running a model, and comparing two runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.models import Residual


def clip_to(low: float | None, high: float | None) -> Callable[[torch.Tensor], torch.Tensor]:
    def clip(x: torch.Tensor) -> torch.Tensor:
        return x.clamp(low, high)

    return clip


def scale_by(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    return scale


def zero_below(threshold: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def zero(x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(x.abs() <= threshold, 0)

    return zero


def compile_with(model: Any, backend: str | None) -> Any:
    return torch.compile(model, fullgraph=True, backend=backend) if backend else model


def run(model: nn.Module, forward: Any = None, steps: int = 2, device: str = "cpu") -> list[torch.Tensor]:
    """Outputs, and the gradients of the input and of every parameter, over a few steps."""
    forward = model if forward is None else forward
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    outputs = []
    for _ in range(steps):
        y = forward(x)
        y.square().sum().backward()
        outputs.append(y.detach())
    return [*outputs, x.grad, *(p.grad for p in model.parameters())]


def residual(device: str = "cpu") -> Residual:
    torch.manual_seed(0)
    return Residual(depth=2).to(device)


def assert_close(got: list[torch.Tensor], want: list[torch.Tensor], exact: bool = False) -> None:
    tolerance: Any = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def differ(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return any(not torch.allclose(a, b, rtol=1e-3) for a, b in zip(some, others, strict=True))
