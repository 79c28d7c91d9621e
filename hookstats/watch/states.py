"""Optimizers' states of parameters, such as Adam's moments: looked for when one has stepped."""

from __future__ import annotations

from typing import Any

import torch

from hookstats import _native
from hookstats.modules.sharding import is_dtensor
from hookstats.numbers.fields import Site
from hookstats.numbers.kinds import is_of_kind
from hookstats.watch.batches import Owner, Parameter, find_part, find_place
from hookstats.watch.binding import SiteBinder
from hookstats.watch.flags import is_capturing
from hookstats.watch.memory import StateStore
from hookstats.watch.skipping import InsideCapture
from hookstats.watch.wrappers import is_wrapper

KIND = "optimizer"


class States:
    """Their sites: "optimizer.exp_avg" of a parameter is what its optimizer has under that name."""

    def __init__(self, store: StateStore, binder: SiteBinder, default: torch.device) -> None:
        """default: the device of what lies on none."""
        self._store = store
        self._binder = binder
        self._default = default
        self._refused: set[Site] = set()

    def of(self, each: Parameter, optimizer: Any) -> list[tuple[Owner, torch.Tensor]]:
        """Return an optimizer's states of a parameter that can be measured; the sites are there."""
        try:
            return self._find(each, optimizer)
        except Exception as error:
            if self._store.strict:
                raise
            self._binder.leave_out([entry for kind, entry in each.entries.items() if is_of_kind(kind, KIND)], error)
            return []

    def _find(self, each: Parameter, optimizer: Any) -> list[tuple[Owner, torch.Tensor]]:
        tensor = each.get()
        if tensor is None:
            return []
        found = []
        for name, value in optimizer.state.get(tensor, {}).items():
            if not isinstance(name, str) or not isinstance(value, torch.Tensor):
                continue
            if value.numel() == 1 and (name == "step" or value.shape != tensor.shape):
                continue  # a number of steps, a scale, a step of a line search
            kind = f"{KIND}.{name}"
            problem = _problem(value, tensor)
            if problem is not None:
                self._refuse(Site(each.name, kind), *problem)
            elif (kind in each.entries or self._add(each, kind, value)) and each.measures(kind):
                part = find_part(self._binder, each, kind, value)
                if part is not None:
                    found.append(((each, kind), part))
        return found

    def _add(self, each: Parameter, kind: str, value: torch.Tensor) -> bool:
        """Makes its site."""
        slot, site = each.slot(), Site(each.name, kind)
        if slot is None or site in self._refused:
            return False
        if is_capturing():
            self._binder.skipping.leave_out([site], InsideCapture())
            return False
        device, width, dim = find_place(slot, value, each.keeps_channels, self._default)
        if not self._store.make_room(device, width, 1):
            width = 1
            if not self._store.make_room(device, width, 1):
                self._refuse(site, "memory", self._store.explain_no_room(width, 1))
                return False
        entry = self._store.add(site, device, width, dim, each.keeps_channels and width > 1)
        entry.channel_dim, entry.group_size = dim, each.group_size
        each.entries[kind] = entry
        return True

    def _refuse(self, site: Site, reason: str, problem: str) -> None:
        if site not in self._refused:
            self._refused.add(site)
            self._binder.skipping.give_up([site], problem, f"{KIND} {reason}")


def _problem(value: torch.Tensor, parameter: torch.Tensor) -> tuple[str, str] | None:
    """Say why it is not measured, in a word and in full; None: it is."""
    if value.shape != parameter.shape:
        got = tuple(value.shape)
        return "shape", f"expected a tensor of the parameter's shape, {tuple(parameter.shape)}, got {got}"
    if is_wrapper(value) and not is_dtensor(value):
        return "type", f"expected a plain tensor or a DTensor, got {type(value).__name__}"
    if value.dtype not in _native.DTYPES:
        return "dtype", f"expected one of {', '.join(map(str, _native.DTYPES))}; got {value.dtype}"
    return None
