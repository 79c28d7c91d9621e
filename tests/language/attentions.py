"""Small models with attention that is no module of torch's, and its logits in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from hookstats import Options, Snapshot
from tests.rules import trainings

ALL_ROWS = Options(strict=True, attention_rows=None)
ORIGINAL = [F.scaled_dot_product_attention]  # in a list: a name of this file would be replaced, too
KINDS = ("attention.max_logit", "attention.entropy", "attention.sink", "attention.bound")


class Attention(nn.Module):
    """Grouped queries, where key heads are fewer."""

    def __init__(self, heads: int = 4, key_heads: int = 4, dropout: float = 0.0, by_name: bool = False) -> None:
        super().__init__()
        self.heads, self.key_heads, self.dropout, self.by_name = heads, key_heads, dropout, by_name
        self.qkv = nn.Linear(32, 8 * (heads + 2 * key_heads))
        self.out = nn.Linear(8 * heads, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = [8 * self.heads, 8 * self.key_heads, 8 * self.key_heads]
        q, k, v = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in self.qkv(x).split(sizes, -1))
        attend: Callable[..., torch.Tensor] = (
            scaled_dot_product_attention if self.by_name else F.scaled_dot_product_attention
        )
        y = attend(q, k, v, dropout_p=self.dropout, is_causal=True, enable_gqa=self.heads != self.key_heads)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, checkpointed: bool | None = None, **options: Any) -> None:
        """checkpointed: use_reentrant; None: not."""
        super().__init__()
        self.attention = Attention(**options)
        self.mlp = nn.Linear(32, 32)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed is None:
            x = x + self.attention(x)
        else:
            x = x + checkpoint(self.attention, x, use_reentrant=self.checkpointed)
        return x + self.mlp(x).relu()


def model_of(blocks: int = 2, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(**options) for _ in range(blocks)))


def batch(items: int = 2, length: int = 20) -> torch.Tensor:
    return torch.randn(items, length, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)


def train(model: nn.Module, steps: int = 1, run: Callable[..., Any] | None = None, **options: Any) -> list[Snapshot]:
    options = {"tensors": ("attention",), "options": ALL_ROWS} | options
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return trainings.train(model, lambda step: (run or model)(batch()).square().mean(), optimizer, steps, **options)


def logits_in_float64(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    """Return the logits of all queries, masked ones -Inf."""
    q, k = q.detach().double(), k.detach().double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = q @ k.mT * (scale or 1 / math.sqrt(q.shape[-1]))
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask.double()
    if is_causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return logits


def logits_of(attention: Attention, x: torch.Tensor) -> torch.Tensor:
    """Return those of a causal attention, in float64."""
    sizes = [8 * attention.heads, 8 * attention.key_heads, 8 * attention.key_heads]
    wide = copy.deepcopy(attention.qkv).double()
    q, k, _ = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in wide(x.double()).split(sizes, -1))
    return logits_in_float64(q, k, is_causal=True)
