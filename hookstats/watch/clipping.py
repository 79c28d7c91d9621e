"""Clipping gradients by the norm that was just measured of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import nn

from hookstats import _native
from hookstats.modules.sharding import is_dtensor
from hookstats.numbers.fields import FIELDS
from hookstats.watch.memory import Entry
from hookstats.watch.parameters import Parameters


def clip_grad_norm_(
    watched: Parameters, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float
) -> torch.Tensor:
    """See `hookstats.Monitor.clip_grad_norm_`."""
    given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    given = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(each, torch.Tensor) for each in given):
        raise TypeError(f"clip_grad_norm_: expected a tensor or several, got {parameters!r}")
    measured = watched.measure_before_clipping(given)
    if not measured or _is_on_ranks([gradient for _, gradient in measured]):
        return nn.utils.clip_grad_norm_(given, max_norm)
    norms = _norms([entry for entry, _ in measured], measured[0][1].device)
    dtype = functools.reduce(torch.promote_types, (gradient.dtype for _, gradient in measured))
    total: torch.Tensor = torch.linalg.vector_norm(norms).to(dtype)
    nn.utils.clip_grads_with_norm_(given, max_norm, total)
    return total


def _is_on_ranks(gradients: list[torch.Tensor]) -> bool:
    """Return whether other ranks have a part in it: where these measure other steps, norms differ in the last bit."""
    dist = torch.distributed
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return several or any(map(is_dtensor, gradients))


def _norms(entries: list[Entry], device: torch.device) -> torch.Tensor:
    """Return the norms, float64 on one device."""
    by_device: dict[torch.device, list[int]] = {}
    for number, entry in enumerate(entries):
        by_device.setdefault(entry.state.moments.device, []).append(number)
    places, squares = [], []
    for numbers in by_device.values():
        states = [entries[number].state for number in numbers]
        table = _native.Totals([state.moments for state in states], [state.counters for state in states])
        fields = table.take([])[:, : len(FIELDS)].view(torch.float64)
        of = {name: fields[:, place] for place, name in enumerate(FIELDS)}
        infinite = torch.where(of["posinfs"] + of["neginfs"] > 0, torch.inf, 0.0)
        unknown = torch.where(of["nans"] > 0, torch.nan, 0.0)
        mean = torch.where(of["count"] > 0, of["mean"], 0.0)
        squares.append((of["m2"] + of["count"] * mean * mean + infinite + unknown).to(device))
        places += numbers
    found = torch.cat(squares).sqrt()
    return found if len(squares) == 1 else found[torch.tensor(places).argsort()]
