"""Device state to host numbers, without waiting.

On a GPU: a copy (or one launch that folds all channels of each site: their totals are kilobytes) and a clear on the
compute stream, then the copy travels on a side stream into pinned memory; an event says when it is there. The CPU takes
the same path, where every copy is complete at once.
"""

from __future__ import annotations

import time
from typing import Any, TypeAlias

import torch

from hookstats import _native
from hookstats.numbers.blocks import Drained
from hookstats.numbers.fields import Counts
from hookstats.numbers.ranks import ALONE, Ranks
from hookstats.watch.layouts import Layouts, Placed
from hookstats.watch.memory import TOTALS, Store, local_part

Key: TypeAlias = tuple[torch.device, int]  # a block of state, by device and number
_SCALARS = -2  # the "block" of the scalars on a device


class Scalars:
    """What travels with a step: numbers, and one-element tensors by device. TypeError, ValueError for anything else.

    Those that the user named, and apart from them, under no name that could be the user's, what a GradScaler gives.
    """

    def __init__(self, named: dict[str, Any], of_scaler: tuple[Any, Any] | None = None) -> None:
        """of_scaler: grad_scale and overflowed; None: there is no GradScaler."""
        self.names = list(named)
        self.numbers: list[float] = []  # then those of the scaler; NaN stands in for tensors
        self.tensors: dict[torch.device, dict[int, torch.Tensor]] = {}  # by place in `numbers`
        for name, value in [*named.items(), *zip(("grad_scale", "overflowed"), of_scaler or (), strict=False)]:
            if isinstance(value, torch.Tensor):
                if value.numel() != 1:
                    raise ValueError(f"step: {name}: expected a number, got a tensor of shape {tuple(value.shape)}")
                value = _plain(value.detach())
                if _native.has_no_data(value):
                    raise TypeError(f"step: {name}: expected a number or a tensor with data, got {value}")
                self.tensors.setdefault(value.device, {})[len(self.numbers)] = value
                self.numbers.append(float("nan"))
            else:
                try:
                    self.numbers.append(float(value))
                except (TypeError, ValueError):
                    raise TypeError(f"step: {name}: expected a number or one-element tensor, got {value!r}") from None


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a DTensor; what an asynchronous collective brings."""
    part = local_part(tensor)
    return part.double() if _native.has_no_data(part) and not part.is_meta else part


class Pending:
    """A closed step on its way to the host."""

    def __init__(self, places: Placed, step: int, scalars: Scalars, ranks: Ranks) -> None:
        self.held = places.held  # what this process has of each site
        self._places = places
        self._ranks = ranks
        self._time = time.time()
        self._step = step
        self._names = scalars.names
        self._numbers = scalars.numbers
        self._travelling = {device: list(tensors) for device, tensors in scalars.tensors.items()}
        self._copies: dict[Key, torch.Tensor] = {}
        self._events: list[torch.cuda.Event] = []

    def send(self, key: Key, memory: torch.Tensor, side: torch.cuda.Stream | None) -> None:
        """Starts the way of a tensor that nobody else holds."""
        if side is None:
            self._copies[key] = memory
            return
        side.wait_stream(torch.cuda.current_stream(memory.device))
        with torch.cuda.stream(side):
            host = torch.empty(memory.shape, dtype=memory.dtype, device="cpu", pin_memory=True)
            host.copy_(memory, non_blocking=True)
        memory.record_stream(side)
        self._copies[key] = host

    def sent(self, side: torch.cuda.Stream) -> None:
        """All that travels on this stream is on its way."""
        event = torch.cuda.Event()
        event.record(side)
        self._events.append(event)

    def ready(self) -> bool:
        return all(event.query() for event in self._events)

    def finish(self) -> Drained:
        """What has come; waits if it must. The pinned memory is given back."""
        for event in self._events:
            event.synchronize()
        pinned = bool(self._events)
        arrays: dict[Key, Counts] = {
            key: (copy.clone() if pinned else copy).numpy() for key, copy in self._copies.items()
        }
        numbers = list(self._numbers)
        for device, places in self._travelling.items():
            for place, number in zip(places, arrays[device, _SCALARS].view("float64").tolist(), strict=True):
                numbers[place] = number
        of_scaler = numbers[len(self._names) :]
        scale, overflowed = (of_scaler[0], bool(of_scaler[1])) if of_scaler else (None, None)
        layout, keys, hidden, readings, _ = self._places
        named = dict(zip(self._names, numbers, strict=False))
        blocks = [arrays[key] for key in keys]
        return Drained(layout, blocks, self._step, self._time, named, scale, overflowed, hidden, readings, self._ranks)


class Drain:
    """Empties a store, step by step."""

    def __init__(self, store: Store, ranks: Ranks = ALONE) -> None:
        """ranks: whose numbers these are."""
        self._store = store
        self._ranks = ranks
        self._layouts = Layouts(store)
        self._sides: dict[torch.device, torch.cuda.Stream] = {}

    def _side(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type != "cuda":
            return None
        if device not in self._sides:
            self._sides[device] = torch.cuda.Stream(device)
        return self._sides[device]

    def begin(self, step: int, scalars: Scalars, clear: bool = True, totals_only: bool = False) -> Pending:
        """Copies the state, or its totals, as it stands on the current streams (and clears it), and sends the copy."""
        with self._store.lock:  # no site is made or moved meanwhile
            return self._begin(step, scalars, clear, totals_only)

    def _begin(self, step: int, scalars: Scalars, clear: bool, totals_only: bool) -> Pending:
        pending = Pending(self._layouts.now(totals_only), step, scalars, self._ranks)
        for device in {**self._store.blocks, **scalars.tensors}:
            side = self._side(device)
            if totals_only:
                totals = self._store.take_totals(device, clear)
                copies = {} if totals is None else {TOTALS: totals}
            else:
                copies = dict(enumerate(self._store.take(device, clear)))
            for number, copy in copies.items():
                pending.send((device, number), copy, side)
            if device in scalars.tensors:
                values = torch.stack([t.detach().double().reshape(()) for t in scalars.tensors[device].values()])
                pending.send((device, _SCALARS), values.view(torch.int64), side)
            if side is not None:
                pending.sent(side)
        return pending
