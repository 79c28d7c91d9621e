"""Shared code of the tests of parameters and of optimizers."""

from __future__ import annotations

import torch
from torch import nn

from hookstats import Snapshot
from hookstats.numbers import fields
from tests.conftest import check, compare
from tests.models import Residual

BOTH = ("param", "param_grad")


def loss_of(model: nn.Module, seed: int = 0) -> torch.Tensor:
    x = torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(seed))
    return model(x).square().sum()


def residual() -> Residual:
    torch.manual_seed(0)
    return Residual()


def grad_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def check_site(snapshot: Snapshot, name: str, kind: str, value: torch.Tensor, channel_dim: int = 0) -> None:
    stats = snapshot[name, kind]
    assert (stats.channels is None) == (value.numel() == 1)  # a vector's entries are channels
    if value.numel() == 1:
        got = {name: getattr(stats.total, name) for name in fields.STATISTICS}
        compare(got, value.detach().double().numpy(), f"{name} {kind}", 1e-5)
    else:
        check(stats, value, channel_dim)
