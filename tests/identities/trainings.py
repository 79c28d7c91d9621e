"""Trainings of a small Llama whose identities are measured in each step, and whose gradients somebody changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import nn

import hookstats
from hookstats import Snapshot
from hookstats.results import Identities
from tests.identities.models import Llama, ids, loss_of

Optimizers = Callable[[nn.Module], Iterable[torch.optim.Optimizer]]


@cache
def found_once(offset: float = 0.0) -> tuple[Llama, Identities]:
    torch.manual_seed(0)
    model = Llama(offset=offset)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(0.02 * torch.randn_like(each))
    return model, hookstats.find_identities(model, lambda: model(ids()))


def proved(offset: float = 0.0) -> Identities:
    return found_once(offset)[1]


def one(model: nn.Module) -> Iterable[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), 1e-3)]


def snapshots(
    fault: Callable[[int, Any], None] = lambda step, model: None,
    *,
    steps: int = 4,
    autocast: bool = False,
    dtype: torch.dtype = torch.float32,
    make: Optimizers = one,
    microbatches: int = 1,
    offset: float = 0.0,
    scale: float = 1.0,
    loss: Callable[[Any, torch.Tensor], torch.Tensor] = loss_of,
    before_clipping: bool = False,
    prepare: Callable[[Any], None] = lambda model: None,
    **attached: Any,
) -> list[Snapshot]:
    """fault: what is done after each backward, given the number of the step."""
    torch.manual_seed(1)
    model: Any = Llama(offset=offset).to(dtype)
    prepare(model)
    optimizers, taken = list(make(model)), list[Snapshot]()
    options = attached.pop("options", {})
    with hookstats.attach(
        model,
        every=1,
        sinks=taken.append,
        options=hookstats.Options(identities=proved(offset), strict=True, **options),
        **attached,
    ) as monitor:
        for step in range(steps):
            for number in range(microbatches):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    value = loss(model, ids(2 + step + number)) * scale
                (value / microbatches).backward()
            if before_clipping:
                monitor.measure_gradients()
            fault(step, model)
            for each in optimizers:
                each.step()
            for each in optimizers:
                each.zero_grad()
            monitor.step()
    return taken


def times(name: str, factor: float, begin: int = 0, places: Any = ...) -> Callable[[int, Any], None]:
    """Multiply the gradient of a parameter, or some places of it, from a step on."""

    def change(step: int, model: Any) -> None:
        if step >= begin:
            model.get_parameter(name).grad[places] *= factor

    return change
