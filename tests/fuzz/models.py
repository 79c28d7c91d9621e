"""Random models of tokens [batch, length, width], of what has gone wrong in real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz.chance import Chance


class Part(nn.Module):
    """Modules, and a function that runs them."""

    def __init__(self, run: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


class Cut(Part):
    """Its module inside gets the first channels alone, as many as ``width`` says: now these, now those."""

    def __init__(self, width: int) -> None:
        super().__init__(lambda s, x: nn.functional.pad(s.act(x[..., : s.width]), (0, width - s.width)), act=nn.Tanh())
        self.whole = self.width = width


def named(width: int) -> Part:
    """A module that takes tensors by name, and returns a dict; a gradient of it is used by nobody."""
    inner = Part(lambda s, x, scale: {"y": s.linear(x) * scale, "unused": x.exp()}, linear=nn.Linear(width, width))
    return Part(lambda s, x: s.inner(x, scale=x.tanh())["y"], inner=inner)


def shared(width: int) -> Part:
    """The same module twice, a frozen one, one that never runs; residual."""
    twice, frozen = nn.Linear(width, width), nn.Linear(width, width, bias=False).requires_grad_(False)
    run = lambda s, x: x + s.twice(s.act(s.twice(s.frozen(x))))  # noqa: E731
    return Part(run, twice=twice, frozen=frozen, act=nn.GELU(), never=nn.Linear(3, 3))


def block(chance: Chance, w: int) -> nn.Module:
    reentrant = chance.comes(0.5)
    conv = {"conv": nn.Conv1d(w, w, 3, padding=1), "norm": nn.BatchNorm1d(w)}
    made: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(w, w),
        lambda: nn.Sequential(nn.Linear(w, 2 * w), nn.ReLU(inplace=True), nn.Linear(2 * w, w)),
        lambda: nn.LayerNorm(w),
        lambda: nn.RMSNorm(w),
        lambda: nn.Dropout(0.2),
        lambda: Part(lambda s, x: s.norm(s.conv(x.mT)).mT, **conv),  # channels in the middle
        lambda: Part(lambda s, x: s.cell(x)[0], cell=nn.GRU(w, w, batch_first=True)),  # returns a tuple
        lambda: named(w),
        lambda: shared(w),
        lambda: Part(
            lambda s, x: checkpoint(s.inner, x, use_reentrant=reentrant),  # what runs again does not count again
            inner=nn.Sequential(nn.Linear(w, w), nn.Tanh()),
        ),
        lambda: Cut(w),
    ]
    return chance.of(made)()


class Model(nn.Module):
    def __init__(self, chance: Chance, width: int) -> None:
        super().__init__()
        self.is_table = chance.comes(0.3)
        self.first = nn.Embedding(11, width) if self.is_table else nn.Linear(width, width)
        self.blocks = nn.ModuleList(block(chance, width) for _ in range(1 + chance.upto(3)))
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for each in self.blocks:
            x = each(x)
        return self.head(x)
