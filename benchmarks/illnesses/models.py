"""Models that more than one training uses."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn


class Attention(nn.Module):
    """A block of a transformer: attention and an MLP, each behind a norm."""

    def __init__(self, width: int, heads: int = 2, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)
        self.heads, self.causal = heads, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length, width = x.shape
        q, k, v = (
            each.view(size, length, self.heads, -1).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.drop(self.proj(mixed.transpose(1, 2).reshape(size, length, width)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self, width: int = 32, depth: int = 2, dropout: float = 0.0, causal: bool = True) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(129, width), nn.Embedding(64, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        self.blocks = nn.ModuleList(Attention(width, causal=causal, dropout=dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Rotating(nn.Module):
    """A language model whose attention turns queries and keys by their places, without a block after it."""

    def __init__(self, frequencies: torch.Tensor) -> None:
        super().__init__()
        self.tokens, self.qkv, self.proj = nn.Embedding(129, 32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 128)
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.register_buffer("mask", torch.full((64, 64), -torch.inf).triu(1), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, length = self.tokens(ids), ids.shape[1]
        angles = torch.outer(torch.arange(length).float(), self.inv_freq)
        cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k = (each * cos + torch.cat([-each[..., 16:], each[..., :16]], -1) * sin for each in (q, k))
        logits = q @ k.transpose(-1, -2) / 32**0.5 + self.mask[:length, :length]
        return self.head(x + self.proj(logits.softmax(-1) @ v))


def frequencies() -> torch.Tensor:
    return 1e4 ** -(torch.arange(16) / 16)


class Recurrent(nn.Module):
    """A language model with an LSTM or a GRU."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, width: int = 48) -> None:
        super().__init__()
        self.tokens = nn.Embedding(128, 24)
        self.rnn = kind(24, width, batch_first=True)
        self.head = nn.Linear(width, 128)

    def forward(self, ids: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
        x, state = self.rnn(self.tokens(ids), state)
        return self.head(x), state


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(x + self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x))))))


def resnet(blocks: int = 2, channels: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1), *(Residual(channels) for _ in range(blocks)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10),
    )  # fmt: skip


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def layers(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear ones, with an activation between them."""
    made: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        made += [nn.Linear(inside, outside), activation()]
    return nn.Sequential(*made[:-1])


class Several(nn.Module):
    """Answers of several heads, which are named, of one body."""

    def __init__(self, body: nn.Module, **heads: nn.Module) -> None:
        super().__init__()
        self.body, self.names = body, list(heads)
        for name, head in heads.items():
            self.add_module(name, head)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.body(x).relu()
        return tuple(self.get_submodule(name)(hidden) for name in self.names)


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Around(nn.Module):
    """A model, and something around it."""

    def __init__(self, model: nn.Module, forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.model, self._forward = model, forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(self.model, x)


class Coupling(nn.Module):
    """Coupling layer of a normalising flow: the masked values scale and shift the others."""

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.masked = nn.Identity()
        self.net = layers(len(mask), 64, 64, 2 * len(mask))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = self.masked(x * self.mask)
        scale, shift = ((1 - self.mask) * each for each in self.net(given).chunk(2, 1))
        scale = scale.tanh()
        return given + (1 - self.mask) * (x * scale.exp() + shift), scale.sum(1)


class Flow(nn.Module):
    def __init__(self, width: int, depth: int = 4) -> None:
        super().__init__()
        even = (torch.arange(width) % 2).float()
        self.layers = nn.ModuleList(Coupling(even if i % 2 else 1 - even) for i in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(x))
        for layer in self.layers:
            x, one = layer(x)
            total = total + one
        return 0.5 * (x.square() + math.log(2 * math.pi)).sum(1) - total
