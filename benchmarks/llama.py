"""A Llama-shaped language model: what the training benchmark trains."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu


class Shape(NamedTuple):
    """Sizes of the model and of its batches."""

    width: int
    hidden: int  # between the projections of the feed-forward part
    heads: int
    blocks: int
    vocabulary: int
    batch: int
    length: int


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary positions: x [batch, heads, length, size], angles [length, size / 2]."""
    even, odd = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([even * cos - odd * sin, even * sin + odd * cos], dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q, self.k, self.v, self.out = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        q, k, v = (project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in (self.q, self.k, self.v))
        y = scaled_dot_product_attention(rotated(q, angles), rotated(k, angles), v, is_causal=True)
        out: torch.Tensor = self.out(y.transpose(1, 2).flatten(-2))
        return out


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(shape.width) for _ in range(2))
        self.attention = Attention(shape)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), angles)
        y: torch.Tensor = x + self.feed_forward(self.norm2(x))
        return y


class Llama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.pairs = shape.width // shape.heads // 2

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss of the next token. ids: int64 [batch, length]."""
        frequencies = 10000 ** -(torch.arange(self.pairs, device=ids.device) / self.pairs)
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * frequencies
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, angles)
        logits = self.head(self.norm(x))
        return cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
