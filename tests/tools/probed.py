"""Models for a probe, small, each with a fault or without."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WORDS, WIDTH, LENGTH = 50, 32, 12


class Attention(nn.Module):
    """sees: how many of the tokens after it a token sees; None: all."""

    def __init__(self, sees: int | None = 0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout, self.sees = nn.Dropout(0.1), sees

    def forward(self, x: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
        rows, tokens, _ = x.shape
        q, k, v = (each.view(rows, tokens, 2, -1).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / 4
        if self.sees is not None:
            seen = torch.ones(tokens, tokens, dtype=torch.bool).tril(self.sees)
            scores = scores.masked_fill(~seen, -torch.inf)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -1e30)
        weights = self.dropout(scores.softmax(-1))
        return self.out((weights @ v).transpose(1, 2).reshape(rows, tokens, WIDTH))


class Block(nn.Module):
    def __init__(self, sees: int | None, mixture: nn.Module | None) -> None:
        super().__init__()
        self.norm, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(sees), nn.LayerNorm(WIDTH)
        self.mlp = mixture or nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
        x = x + self.attention(self.norm(x), allowed)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """fault: "inverted", "no mask", "no documents", "mean" (over padding), "place" (in the batch); or none."""

    def __init__(self, sees: int | None = 0, fault: str = "", mixture: nn.Module | None = None) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH + 1, WIDTH)
        self.blocks = nn.ModuleList(Block(sees, mixture if number else None) for number in range(2))
        self.head, self.fault = nn.Linear(WIDTH, WORDS), fault

    def forward(
        self,
        ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if position_ids is None:
            position_ids = torch.arange(ids.shape[1])
        places = self.places(torch.arange(len(ids)))[:, None] if self.fault == "place" else self.places(position_ids)
        x = self.words(ids) + places
        allowed = None
        if attention_mask is not None and self.fault != "no mask":
            allowed = (attention_mask if self.fault != "inverted" else 1 - attention_mask).bool()[:, None, None]
        if document_ids is not None and self.fault != "no documents":
            allowed = (document_ids[:, None, :, None] == document_ids[:, None, None]) & (allowed is None or allowed)
        for block in self.blocks:
            x = block(x, allowed)
        return x.mean(1) if self.fault == "mean" else self.head(x)


class Experts(nn.Module):
    """Four experts, each with the rows that a router sends it. capacity: how many rows one takes at most."""

    def __init__(self, capacity: int = 1000) -> None:
        super().__init__()
        self.gate, self.capacity = nn.Linear(WIDTH, 4), capacity
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        probabilities, chosen = self.gate(rows).softmax(-1).max(-1)
        result = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            at = (chosen == number).nonzero()[: self.capacity, 0]
            if len(at):
                result[at] = expert(rows[at]) * probabilities[at, None]
        return result.view_as(x)


class SortedExperts(nn.Module):
    """The same weights for all, but the rows lie in the order of their experts, and go through one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.layer, self.activation = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, WIDTH), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        order = self.gate(rows).argmax(-1).argsort(stable=True)
        return self.activation(self.layer(rows[order]))[order.argsort()].view_as(x)


class Images(nn.Module):
    """A vision transformer, with the batch where it belongs, or not."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.places = nn.Parameter(torch.randn(1, 17, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        return {"logits": self.head(self.encoder(x)[:, 0])}


class Counting(nn.Module):
    """A module with everything a forward may change: a buffer, attributes, lists, and a random generator."""

    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.dropout = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.register_buffer("cache", torch.zeros(3))
        self.generator = torch.Generator().manual_seed(3)
        self.calls, self.losses, self.state = 0, [1.0], torch.zeros(2)

    def forward(self, x: torch.Tensor, fails: Any = None) -> tuple[torch.Tensor, list[float]]:
        if fails is not None:
            raise ValueError("this batch is refused")
        self.calls += 1
        self.losses.append(2.0)
        self.state.add_(1)
        self.new = torch.rand(1, generator=self.generator)
        self.cache = self.cache + 1
        x.mul_(2)  # what it was given
        return self.dropout(self.norm(self.layer(x))), self.losses


def ids(rows: int = 4) -> torch.Tensor:
    return torch.randint(1, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(0))


def padding_mask() -> torch.Tensor:
    lengths = torch.tensor([7, 12, 4, 9])
    return (torch.arange(LENGTH) < lengths[:, None]).long()
