"""Trainings of small language models and mixtures, healthy and ill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hookstats
from hookstats import Snapshot
from tests.language import zoo
from tests.language.attentions import Block
from tests.rules import trainings


class Language(nn.Module):
    """A small GPT that learns which token comes next."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(32, 32)
        self.blocks = nn.Sequential(Block(**options), Block(**options))
        self.head = nn.Linear(32, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(ids)))


def train(
    model: Language, steps: int, after: int | None = None, begin: int | None = None, scale: float = 1.0
) -> list[Snapshot]:
    """after: from this step on, queries and keys learn at a rate of 1. begin: the token that sequences begin with.

    scale: of the loss.
    """
    generator = torch.Generator().manual_seed(0)
    attending = [parameter for name, parameter in model.named_parameters() if "qkv" in name]
    others = [parameter for name, parameter in model.named_parameters() if "qkv" not in name]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": attending}], 1e-3)

    def loss_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        if step == after:
            optimizer.param_groups[1]["lr"] = 1.0
        ids = (torch.arange(17) * torch.randint(1, 5, (8, 1), generator=generator)) % 32
        if begin is not None:
            ids[:, 0] = begin
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        return loss, loss * scale

    return trainings.train(model, loss_of, optimizer, steps, **hookstats.presets.language_model(model))


def with_a_sink(model: Language) -> Language:
    """Every sequence begins with token 0, whose keys answer to all queries."""
    with torch.no_grad():
        model.tokens.weight[0] = 0
        model.tokens.weight[0, 0] = 4
        for block in model.blocks:
            q, k = block.attention.qkv.bias[:32], block.attention.qkv.weight[32:64, 0]
            q.fill_(0.5)
            k.fill_(0.5)
    return model


def mixture(steps: int, balance: float, without: int | None = None) -> list[Snapshot]:
    """balance: the weight of the balancing loss. without: an expert that the first layer's router never chooses."""
    model = zoo.make("gpt_oss")
    routers, gates = [layer.mlp.router for layer in model.model.layers], dict[Any, torch.Tensor]()
    for each in routers:
        each.register_forward_hook(lambda module, args, output: gates.update({module: output[0]}))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    def loss_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        if without is not None:
            with torch.no_grad():
                routers[0].bias[without] = -50
        loss = model(**zoo.batch()).loss
        imbalances = [logits.softmax(-1).mean(0).square().sum() for logits in gates.values()]
        return loss, loss + balance * sum(imbalances)

    return trainings.train(model, loss_of, optimizer, steps, **hookstats.presets.language_model(model))


ILL: dict[str, Callable[[], list[Snapshot]]] = {
    "a_learning_rate_of_queries_and_keys_that_spikes": lambda: train(Language(), 60, after=30),
    "gradients_below_the_epsilon_of_adam": lambda: train(Language(), 40, scale=1e-8),
    "attention_that_rests_on_the_first_token": lambda: train(with_a_sink(Language()), 20, begin=0),
    "a_balancing_loss_of_the_wrong_sign": lambda: mixture(40, -10),
    "an_expert_that_is_never_chosen": lambda: mixture(60, 0.1, without=3),
}
