"""Short trainings, each measured at every step: healthy ones, and ones that are truly ill."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

import hookstats
from hookstats import Snapshot

ALL = ("output", "grad_output", "param_grad", "param", "param_update")


def train(
    model: nn.Module,
    loss_of: Callable[[int], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    steps: int,
    before: Callable[[int], None] | None = None,
    tensors: tuple[str, ...] = ALL,
) -> list[Snapshot]:
    """The snapshots of a training; before: is called with the number of each step, and may make it ill."""
    snapshots: list[Snapshot] = []
    with hookstats.attach(model, every=1, tensors=tensors, sinks=snapshots.append) as monitor:
        for step in range(steps):
            if before is not None:
                before(step)
            optimizer.zero_grad()
            loss = loss_of(step)
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
    return snapshots


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 images of 8 x 8 pixels, float32 ``[n, 64]``, and their labels."""
    data = pytest.importorskip("sklearn.datasets").load_digits()
    return torch.tensor(data.data / 16.0, dtype=torch.float32), torch.tensor(data.target)


class OnDigits:
    """The loss of a classifier on random batches of digits, some of which may be bad."""

    def __init__(self, model: nn.Module, bad: range = range(0), shape: tuple[int, ...] = (64,)) -> None:
        """bad: the steps in which images are 20 times as bright and labels are random."""
        self.model = model
        self.bad = bad
        self.images, self.labels = digits()
        self.images = self.images.view(-1, *shape)

    def __call__(self, step: int) -> torch.Tensor:
        chosen = torch.randint(len(self.labels), (64,))
        images, labels = self.images[chosen], self.labels[chosen]
        if step in self.bad:
            images, labels = 20 * images, torch.randint(10, labels.shape)
        return cross_entropy(self.model(images), labels)


def mlp(activation: type[nn.Module] = nn.ReLU, depth: int = 3, width: int = 64) -> nn.Sequential:
    """From 64 pixels to 10 classes; depth: hidden layers."""
    layers: list[nn.Module] = []
    for number in range(depth):
        layers += [nn.Linear(width if number else 64, width), activation()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


class Block(nn.Module):
    """A block of a residual stream, with a growing contribution."""

    def __init__(self, width: int, gain: float, norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.gain * self.down(self.up(self.norm(x)).relu())
        return y


class Stream(nn.Module):
    """A residual stream between a linear layer and a head."""

    def __init__(self, blocks: int = 8, gain: float = 1.0, norm: bool = True) -> None:
        super().__init__()
        self.inside = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(Block(64, gain, norm) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inside(x)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Experts(nn.Module):
    """A mixture of experts, of which each row goes to one, on top of a linear layer."""

    def __init__(self, experts: int = 8) -> None:
        super().__init__()
        self.inside = nn.Linear(64, 32)
        self.router = nn.Linear(32, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(experts)
        )
        self.head = nn.Linear(32, 10)
        self.balance = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inside(x)
        shares = self.router(x).softmax(-1)
        weight, chosen = shares.max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            if len(rows):
                out = out.index_add(0, rows, weight[rows, None] * expert(x[rows]))
        loads = one_hot(chosen, len(self.experts)).float().mean(0)
        self.balance = len(self.experts) * (loads * shares.mean(0)).sum()
        logits: torch.Tensor = self.head(x + out)
        return logits


def llama(dtype: torch.dtype, steps: int) -> list[Snapshot]:
    """A small one learns the characters of Python's own library."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=86, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config).to(dtype)
    ids = torch.tensor(list(Path(os.__file__).read_bytes())).clamp(max=127)

    def loss_of(step: int) -> torch.Tensor:
        starts = torch.randint(len(ids) - 32, (8,)).tolist()
        batch = torch.stack([ids[start : start + 32] for start in starts])
        loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
        return loss

    return train(model, loss_of, torch.optim.AdamW(model.parameters(), lr=1e-3), steps)
