"""Clipping gradients by the norm that was just measured of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    measured = watched.measure_before_clipping(given)
    if not measured or not _are_alike([gradient for _, gradient in measured]) or _is_replicated(measured[0][1]):
        return nn.utils.clip_grad_norm_(given, max_norm)
    total = _total_norm(measured)
    nn.utils.clip_grads_with_norm_(given, max_norm, total)
    return total


def _is_replicated(gradient: torch.Tensor) -> bool:
    """Return whether ranks that measure different steps would clip replicas by norms that differ in the last bit."""
    dist = torch.distributed
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return several and not is_dtensor(gradient)


def _are_alike(gradients: list[torch.Tensor]) -> bool:
    """Return whether they are no DTensors, or all of one mesh and dtype; else torch computes the norm."""
    kinds = {(each.device_mesh, each.dtype) if is_dtensor(each) else None for each in gradients}  # type: ignore[attr-defined]
    return len(kinds) == 1


def _total_norm(measured: list[tuple[Entry, torch.Tensor]]) -> torch.Tensor:
    """Return the total norm in torch's dtype. Of DTensors it is a DTensor, by the operators that torch uses."""
    gradients = [gradient for _, gradient in measured]
    norms = _norms([entry for entry, _ in measured], gradients[0].device)
    if not is_dtensor(gradients[0]):
        dtype = gradients[0].dtype
        for each in gradients:
            dtype = torch.promote_types(dtype, each.dtype)
        whole: torch.Tensor = torch.linalg.vector_norm(norms)
        return whole.to(dtype)
    from torch.distributed.tensor import DTensor

    placings: dict[Any, Any] = {}  # of norms, by those of their tensors
    parts: list[torch.Tensor] = []
    for norm, each in zip(norms.to(gradients[0].dtype).unbind(), gradients, strict=True):
        mesh, placements = each.device_mesh, tuple(each.placements)  # type: ignore[attr-defined]
        if placements not in placings:
            small = DTensor.from_local(norm.new_zeros([1] * each.dim()), mesh, placements, run_check=False)
            placings[placements] = torch.linalg.vector_norm(small).placements  # communicates nothing
        parts.append(DTensor.from_local(norm, mesh, placings[placements], run_check=False))
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(parts))
    return total


def _norms(entries: list[Entry], device: torch.device) -> torch.Tensor:
    """Return the norms of this process's parts, float64 on one device."""
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
