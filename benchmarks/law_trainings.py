"""Healthy trainings that laws are held against beside those of the fleet: models of transformers, and of the clients.

Each takes a few steps on random data. Every third one in float32, the next under autocast with two microbatches, the
next with parameters in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import hookstats
from hookstats import Snapshot
from tests.clients.standins import megatron, torchtitan
from tests.clients.standins.megatron_training import Training
from tests.language import zoo as languages
from tests.modules import zoo as others

STEPS = 8
PRECISIONS = ("float32", "autocast", "bfloat16")
Loss = Callable[[int], torch.Tensor]


def train(model: nn.Module, loss_of: Loss, precision: str, number: int, tensors: tuple[str, ...]) -> list[Snapshot]:
    """number: by which the optimizer and the clipping differ."""
    if precision == "bfloat16":
        model.bfloat16()
    microbatches = 2 if precision == "autocast" else 1
    learned = [each for each in model.parameters() if each.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(learned, 1e-3)
    if number % 2:
        optimizer = torch.optim.SGD(learned, 1e-2, momentum=0.9, weight_decay=0.01)
    taken: list[Snapshot] = []
    with hookstats.attach(model, tensors=tensors, every=1, sinks=taken.append) as monitor:
        for step in range(STEPS):
            optimizer.zero_grad()
            losses = []
            for microbatch in range(microbatches):
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
                    loss = loss_of(microbatches * step + microbatch)
                (loss / microbatches).backward()
                losses.append(loss)
            if number % 4 > 1:
                nn.utils.clip_grad_norm_(learned, 0.1)
            optimizer.step()
            monitor.step(loss=losses[0] if microbatches == 1 else torch.stack(losses).mean())
    return taken


def of_language(name: str, precision: str, number: int, tensors: tuple[str, ...]) -> list[Snapshot]:
    model = languages.make(name)

    def loss_of(step: int) -> torch.Tensor:
        ids = torch.randint(3, 64, (2, 24), generator=torch.Generator().manual_seed(step))
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    return train(model, loss_of, precision, number, tensors)


def of_others(name: str, precision: str, number: int, tensors: tuple[str, ...]) -> list[Snapshot]:
    animal = {**others.TUNED, **others.OTHERS}[name]
    torch.manual_seed(0)
    model = animal.make().train()
    for each in model.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0

    def loss_of(step: int) -> torch.Tensor:
        torch.manual_seed(step)
        dtype = next(model.parameters()).dtype
        inputs = {key: each.to(dtype) if each.is_floating_point() else each for key, each in animal.inputs().items()}
        outputs = [each for each in tree_leaves(model(**inputs)) if isinstance(each, torch.Tensor)]
        return sum(each.float().square().mean() for each in outputs if each.requires_grad)  # type: ignore[return-value]

    return train(model, loss_of, precision, number, tensors)


def of_torchtitan(precision: str, number: int, tensors: tuple[str, ...]) -> list[Snapshot]:
    trainer = torchtitan.Trainer(None)
    (model,) = trainer.model_parts
    model.to(torch.bfloat16 if precision == "bfloat16" else torch.float32)
    taken: list[Snapshot] = []
    with hookstats.attach(model, tensors=tensors, every=1, sinks=taken.append) as monitor:
        for step in range(4 * STEPS):
            ids = torch.randint(32, (2, 4, torchtitan.SEQUENCE + 1), generator=torch.Generator().manual_seed(step))
            loss = trainer.train_step([(each[:, :-1], each[:, 1:]) for each in ids], 2 * 4 * torchtitan.SEQUENCE)
            monitor.step(loss=loss)
    return taken


def of_megatron(precision: str, number: int, tensors: tuple[str, ...]) -> list[Snapshot]:
    alone = megatron.Region(None, 0, 1)
    how: dict[str, Any] = {"dtype": torch.bfloat16, "copies": torch.float32} if precision == "bfloat16" else {}
    training = Training(alone, alone, **how)
    taken: list[Snapshot] = []
    channels = hookstats.Channels(dim=-1)
    with hookstats.attach(
        training.unwrapped, tensors=tensors, channels=channels, every=1, sinks=taken.append
    ) as monitor:
        for step in range(4 * STEPS):
            ids = torch.randint(
                megatron.WORDS, (2, 4, megatron.SEQUENCE + 1), generator=torch.Generator().manual_seed(step)
            )
            monitor.step(loss=training.train_step([(each[:, :-1], each[:, 1:]) for each in ids]))
    return taken


Make = Callable[[tuple[str, ...]], list[Snapshot]]
LANGUAGE: dict[str, Make] = {}
OTHERS: dict[str, Make] = {}
CLIENTS: dict[str, Make] = {}


def _register(where: dict[str, Make], name: str, number: int, run: Callable[..., list[Snapshot]], *given: Any) -> None:
    for turn in range(3):
        precision = PRECISIONS[(number + turn) % 3]
        where[f"{name}, {precision}"] = lambda tensors, precision=precision: run(  # type: ignore[misc]
            *given, precision, number, tensors
        )


for _number, _name in enumerate(languages.TYPES):
    _register(LANGUAGE, _name, _number, of_language, _name)
for _number, _name in enumerate((*others.TUNED, *others.OTHERS)):
    _register(OTHERS, _name, _number, of_others, _name)
_register(CLIENTS, "torchtitan", 0, of_torchtitan)
_register(CLIENTS, "megatron", 0, of_megatron)
