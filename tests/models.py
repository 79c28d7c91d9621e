"""Small models with what real ones have: normalisation, in-place activations, residuals, containers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# What tests watch that are about neither samples of parameters nor what a model is given.
THREE_KINDS = ("output", "grad_output", "param_grad")


def small_cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 12, 3),
        nn.ReLU(inplace=True),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(12 * 16, 10),
    )


def images(count: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Residual(nn.Module):
    """Sequences of `width` features; blocks in a ModuleList, as transformers have them."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass
class Answer:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    loss: torch.Tensor | None = None


class Containers(nn.Module):
    """Returns what is asked for: "tuple", "dict", "dataclass", "nested", "with_ints"."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.inner(x)
        z = y.exp()
        if self.kind == "tuple":
            return y * 2, z
        if self.kind == "dict":
            return {"logits": y * 2, "hidden": z}
        if self.kind == "dataclass":
            return Answer(y * 2, (z, z * 3))
        if self.kind == "with_ints":
            return y * 2, torch.arange(3), None, 7, "text"
        return [{"a": y * 2}, (z,)]
