"""The reference for hookstats: independent hooks of plain PyTorch that keep every tensor."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hookstats
from tests.conftest import check

OF_OUTPUTS = ("output", "grad_output")
NOTHING_TO_SEE = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)


class Plain:
    """Every output, and every gradient of an output."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[tuple[str, str], list[torch.Tensor]] = {}
        self.by_default = default_modules(model)
        self.handles = [m.register_forward_hook(self.hook(n)) for n, m in model.named_modules() if n]

    def hook(self, name: str) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                self.seen.setdefault((name, "output"), []).append(output.detach().clone())
                if output.requires_grad:
                    keep_gradient = self.seen.setdefault((name, "grad_output"), []).append
                    output.register_hook(lambda g: keep_gradient(g.clone()))

        return keep


def default_modules(model: nn.Module) -> set[str]:
    """The modules that hookstats is to watch where nothing is chosen, by name."""
    named = dict(model.named_modules())
    leaves = {n for n, m in named.items() if not any(True for _ in m.children()) and not isinstance(m, NOTHING_TO_SEE)}
    parents = {n: named[n.rpartition(".")[0]] for n in named if n}
    return leaves | {n for n, parent in parents.items() if isinstance(parent, nn.ModuleList)}


@contextmanager
def hearing() -> Iterator[list[str]]:
    """Collect the warnings of hookstats inside, without turning them into errors."""
    heard: list[str] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield heard
    heard += [str(each.message) for each in told if "hookstats" in str(each.message)]


def together(tensors: list[torch.Tensor], channel_dim: int) -> torch.Tensor:
    """All tensors as one [values, channels]."""
    return torch.cat([t.movedim(channel_dim, -1).reshape(-1, t.shape[channel_dim]) for t in tensors])


def check_against(plain: Plain, snapshot: hookstats.Snapshot) -> None:
    """All default sites of outputs, none missing and no other one."""
    sites = {tuple(site) for site in snapshot if site.tensor in OF_OUTPUTS}
    assert sites == {site for site in plain.seen if site[0] in plain.by_default}
    for site in sites:
        tensors = plain.seen[site]
        dim = 1 if tensors[0].dim() == 4 else -1
        assert snapshot[site].calls == len(tensors)
        check(snapshot[site], together(tensors, dim), -1)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The floating tensors of an output with their paths, as the README names them."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield path, value
    elif isinstance(value, (Mapping, tuple, list)):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from leaves(each, f"{path}.{key}")


class Operators(TorchDispatchMode):
    """The names of the operators that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))
