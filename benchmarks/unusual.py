"""Identities in trainings that are unusual and right: ``python -m benchmarks.unusual [NAME ...]``.

Each in float32, under autocast, with bfloat16 parameters and under float16 autocast with a scaler: the largest z
of ten measured steps, of which more than 8 is a break.
"""

from __future__ import annotations

import statistics
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hookstats
from benchmarks.identities import HEALTHY_PRECISIONS, z_of
from hookstats.rules import identity, judge
from tests.identities.models import Llama

STEPS = 10
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of logits and targets


def plain(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, targets)


def of_one(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[-1:], targets[-1:])


def with_z(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, targets) + 1e-2 * logits.logsumexp(-1).square().mean()


def smoothed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, targets, label_smoothing=0.2)


def tiny(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 1e-4 * F.cross_entropy(logits, targets)


def biased(model: Any) -> None:
    for layer in model.layers:
        nn.init.constant_(layer.attention.q_proj.bias, 30.0)


def with_large_channel(model: Any) -> None:
    with torch.no_grad():
        model.embedding.weight[:, 3] *= 300


def multiplied(factor: float) -> Callable[[Any], None]:
    def prepare(model: Any) -> None:
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(factor if each.dim() > 1 else 1.0)

    return prepare


def recomputed(model: Any) -> None:
    for layer in model.layers:
        forward = layer.forward
        layer.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)


class Unusual(NamedTuple):
    """``before``: steps that are not measured. ``same``: each batch is the first one."""

    prepare: Callable[[Any], None] = lambda model: None
    loss: Loss = plain
    microbatches: int = 1
    shape: tuple[int, int] = (4, 16)
    before: int = 0
    same: bool = False
    lr: float = 3e-3
    decay: float = 0.01
    dropout: float = 0.0
    clip: float = 0.0
    make: Any = torch.optim.AdamW


UNUSUAL = {
    "biases of queries of 30": Unusual(biased),
    "a channel of the stream x 300": Unusual(with_large_channel),
    "weights x 5": Unusual(multiplied(5.0)),
    "weights x 0.01": Unusual(multiplied(0.01)),
    "learned by heart": Unusual(before=300, same=True),
    "labels that contradict each other, all data in each batch": Unusual(before=200, same=True, shape=(8, 1)),
    "diverging": Unusual(lr=0.5, before=20),
    "64 microbatches": Unusual(microbatches=64, shape=(1, 8)),
    "one token": Unusual(shape=(1, 1)),
    "all tokens but one are padding": Unusual(loss=of_one),
    "a z-loss": Unusual(loss=with_z),
    "smoothed labels": Unusual(loss=smoothed),
    "a loss of 1e-4": Unusual(loss=tiny),
    "dropout": Unusual(dropout=0.3),
    "checkpoints": Unusual(recomputed),
    "clipped to a hundredth, decay 1, SGD": Unusual(clip=0.01, decay=1.0, make=torch.optim.SGD),
}


def trained(how: Unusual, precision: str) -> list[hookstats.Snapshot]:
    torch.manual_seed(0)
    model: Any = Llama(dropout=how.dropout)
    how.prepare(model)
    dtype = {"autocast": torch.bfloat16, "float16": torch.float16}.get(precision)
    if precision == "bfloat16":
        model.bfloat16()
    ids = torch.randint(0, 50, how.shape)
    found = hookstats.find_identities(model, lambda: model(ids))
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "float16")
    optimizer, taken = how.make(model.parameters(), lr=how.lr, weight_decay=how.decay), list[hookstats.Snapshot]()
    measured = lambda step: step >= how.before  # noqa: E731
    options = hookstats.Options(identities=found, strict=True)
    with hookstats.attach(model, every=measured, sinks=taken.append, options=options) as monitor:
        for step in range(how.before + STEPS):
            for microbatch in range(how.microbatches):
                seed = 0 if how.same else 100 * step + microbatch
                tokens = torch.randint(0, 50, how.shape, generator=torch.Generator().manual_seed(seed))
                targets = torch.arange(tokens.numel()) % 2 if how.shape[1] == 1 else tokens.roll(1).flatten()
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    logits = model(tokens // 50 if how.shape[1] == 1 else tokens).flatten(0, 1)
                scaler.scale(how.loss(logits.float(), targets) / how.microbatches).backward()
            scaler.unscale_(optimizer)
            if how.clip:
                monitor.clip_grad_norm_(model.parameters(), how.clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            monitor.step()
    return taken[-STEPS:]


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or UNUSUAL
    print(f"| largest z in {STEPS} steps (findings) | {' | '.join(HEALTHY_PRECISIONS)} |\n|---|---|---|---|---|")
    every = dict.fromkeys(HEALTHY_PRECISIONS, 0)
    for name in chosen:
        cells = []
        for precision in HEALTHY_PRECISIONS:
            taken = trained(UNUSUAL[name], precision)
            z, found = z_of(taken), judge(taken, [identity])
            every[precision] += len(z)
            cells.append(f"{max(z, default=float('nan')):.2g}, median {statistics.median(z or [0]):.2g} ({len(found)})")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(f"| evaluations | {' | '.join(map(str, every.values()))} |")


if __name__ == "__main__":
    main()
