"""Trainings whose loss is a cross entropy over tokens, some with a wrong denominator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hookstats
from hookstats import Snapshot

TENSORS = ("output", "grad_output", "token_weights")
CLASSES, PADDING, MICROBATCHES = 32, -100, 4
# Of the logits, the targets, and how many tokens the whole step has: what is differentiated.
Loss = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


def mean(logits: torch.Tensor, targets: torch.Tensor, **how: Any) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING, **how)


def summed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return mean(logits, targets, reduction="sum")


HEALTHY: dict[str, Loss] = {
    "mean of means": lambda logits, targets, count: mean(logits, targets) / MICROBATCHES,
    "mean over all tokens": lambda logits, targets, count: summed(logits, targets) / count,
}
FAULTS: dict[str, Loss] = {
    "losses_that_are_summed": lambda logits, targets, count: summed(logits, targets) / MICROBATCHES,
    "microbatches_that_are_added_up": lambda logits, targets, count: mean(logits, targets),
    "losses_that_are_divided_by_tokens_twice": lambda logits, targets, count: (
        mean(logits, targets) / MICROBATCHES / int((targets != PADDING).sum())
    ),
    "losses_that_are_divided_by_microbatches_twice": lambda logits, targets, count: (
        mean(logits, targets) / MICROBATCHES**2
    ),
    "losses_times_1.2": lambda logits, targets, count: 1.2 * mean(logits, targets) / MICROBATCHES,
}


def snapshots(
    loss_of: str | Loss,
    padded: bool = False,
    lengths: tuple[int, ...] = (12,) * MICROBATCHES,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    compiled: bool = False,
    steps: int = 6,
    given: Callable[[torch.Tensor], Any] = lambda loss: loss,
    tensors: tuple[str, ...] = TENSORS,
) -> list[Snapshot]:
    """Each step has 4 microbatches of 8 rows of so many tokens; given: to the monitor, of the mean loss of the last."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(CLASSES, 24), nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, CLASSES)).to(dtype)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    optimizer, taken = torch.optim.AdamW(model.parameters(), 3e-3), list[Snapshot]()
    loss = FAULTS[loss_of] if isinstance(loss_of, str) else loss_of
    with hookstats.attach(model, tensors=tensors, every=1, sinks=taken.append) as monitor:
        for step in range(steps):
            source = torch.Generator().manual_seed(step)
            batches = [torch.randint(CLASSES, (8, length), generator=source) for length in lengths]
            targets = [(each + 1) % CLASSES for each in batches]
            for i, each in enumerate(targets if padded else ()):
                each[:, each.shape[1] - i - 2 :] = PADDING
            count = sum(int((each != PADDING).sum()) for each in targets)
            for each, target in zip(batches, targets, strict=True):
                with nullcontext() if autocast is None else torch.autocast("cpu", autocast):
                    logits = run(each)
                    own = loss(logits, target, count)
                    shown = mean(logits, target)
                (own if scaler is None else scaler.scale(own)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            monitor.step(loss=given(shown))
    return taken
