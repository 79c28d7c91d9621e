"""What hookstats is compared with: independent hooks of plain PyTorch that keep every tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import hookstats
from tests.conftest import check


class Plain:
    """Every output, and every gradient of an output."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[tuple[str, str], list[torch.Tensor]] = {}
        self.handles = [m.register_forward_hook(self.hook(n)) for n, m in model.named_modules() if n]

    def hook(self, name: str) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                self.seen.setdefault((name, "output"), []).append(output.detach().clone())
                if output.requires_grad:
                    keep_gradient = self.seen.setdefault((name, "grad_output"), []).append
                    output.register_hook(lambda g: keep_gradient(g.clone()))

        return keep


def together(tensors: list[torch.Tensor], channel_dim: int) -> torch.Tensor:
    """All tensors as one [values, channels]."""
    return torch.cat([t.movedim(channel_dim, -1).reshape(-1, t.shape[channel_dim]) for t in tensors])


def check_against(plain: Plain, snapshot: hookstats.Snapshot) -> None:
    for site in snapshot:
        tensors = plain.seen[tuple(site)]
        dim = 1 if tensors[0].dim() == 4 else -1
        assert snapshot[site].calls == len(tensors)
        check(snapshot[site], together(tensors, dim), -1)
