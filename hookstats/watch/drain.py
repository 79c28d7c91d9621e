"""Device state to host numbers, without waiting.

On a GPU: a copy (or one launch that folds all channels of each site: their totals are kilobytes) and a clear on the
compute stream, then the copy travels on a side stream into pinned memory; an event says when it is there. The CPU takes
the same path, where every copy is complete at once.
"""

from __future__ import annotations

import itertools
import time
from typing import TypeAlias

import numpy as np
import torch

from hookstats import _native
from hookstats.modules.sharding import LocalShard
from hookstats.numbers.fields import Counts, Site
from hookstats.numbers.frame import COUNTERS, StepFrame
from hookstats.numbers.given import Given
from hookstats.numbers.ranks import ALONE, StepRanks
from hookstats.watch.layout import Layout, sites_at
from hookstats.watch.memory import TOTALS, Entry, StateStore
from hookstats.watch.scalars import Copy, Kept, by_step, sample_ids_by_step

Key: TypeAlias = tuple[torch.device, int]  # a block of state, by device and number
Sign: TypeAlias = list[tuple[object, ...]]  # of how all sites lie: equal while nothing has moved
Held: TypeAlias = dict[Site, LocalShard]  # by this process; the same object while nothing of it has changed
_LARGE = 1 << 20  # bytes
_SCALARS = -2  # the "block" of the scalars on a device

assert COUNTERS == _native.COUNTERS


class PendingScalars:
    """Scalars on their way to the host, and what else travels with them."""

    def __init__(self, kept: Kept) -> None:
        self._rows = kept.rows
        self._scalars: dict[Key, list[Copy]] = {}
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

    def send_scalars(self, device: torch.device, copies: list[Copy], side: torch.cuda.Stream | None) -> None:
        """Sends all that lie on a device as one tensor."""
        if copies:
            self._scalars[device, _SCALARS] = copies
            self.send((device, _SCALARS), torch.stack([copy.number for copy in copies]).view(torch.int64), side)

    def record_event(self, side: torch.cuda.Stream) -> None:
        """Note that all copies of this stream have been launched."""
        event = torch.cuda.Event()
        event.record(side)
        self._events.append(event)

    def ready(self) -> bool:
        return all(event.query() for event in self._events)

    def arrays(self) -> dict[Key, Counts]:
        """Return the arrays that have come; waits if it must. The scalars are complete then.

        What is small is copied out of pinned memory, whose blocks are few. What is large stays there for as long as
        somebody has it: fresh memory takes seven times as long to write as memory that was used before, and torch keeps
        the block for a later step.
        """
        for event in self._events:
            event.synchronize()
        pinned = bool(self._events)
        arrays: dict[Key, Counts] = {
            key: (copy.clone() if pinned and copy.nbytes < _LARGE else copy).numpy()
            for key, copy in self._copies.items()
        }
        for key, copies in self._scalars.items():
            for copy, value in zip(copies, arrays[key].view("float64").tolist(), strict=True):
                copy.numbers[copy.place] = value
        return arrays

    def read(self) -> Given:
        """Return what came with steps that are not measured. Waits if it must."""
        self.arrays()
        return Given(by_step(self._rows), sample_ids_by_step(self._rows))


class Pending(PendingScalars):
    """A closed step on its way to the host, with the scalars of those before it that were not measured."""

    def __init__(
        self,
        layout: Layout,
        keys: list[Key],
        entries: list[Entry],
        held: Held,
        kept: Kept,
        ranks: StepRanks,
        every: int,
    ) -> None:
        """layout: of the copies that are sent under these keys. kept: of the steps before, and at last of this one.
        every: so-many-th row was read of activations and their gradients.
        """
        super().__init__(kept)
        self.held = held
        self.layout = layout
        self._keys = keys
        self._hidden = [entry.hidden_if_silent for entry in entries]
        self._readings = [entry.reading for entry in entries]
        self._ranks = ranks
        self._every = every
        self._time = time.time()

    def finish(self) -> StepFrame:
        """Return the finished step; waits if it must."""
        arrays = self.arrays()
        *earlier, last = self._rows
        of_scaler = last.numbers[len(last.names) :]
        scale, overflowed = (of_scaler[0], bool(of_scaler[1])) if of_scaler else (None, None)
        ids = sample_ids_by_step(self._rows)
        return self.layout.frame(
            [arrays[key] for key in self._keys],
            self._hidden,
            self._readings,
            scale,
            step=last.step,
            time=self._time,
            scalars=last.named,
            # Numbers that are not smaller were trained anew since.
            earlier_scalars={number: each for number, each in by_step(earlier).items() if number < last.step},
            sample_ids={number: each for number, each in ids.items() if number <= last.step},
            overflowed=overflowed,
            ranks=self._ranks,
            rows=self._every,
        )


class Drain:
    """Empties a store, step by step."""

    def __init__(self, store: StateStore, ranks: StepRanks = ALONE) -> None:
        """ranks: whose numbers these are."""
        self._store = store
        self._ranks = ranks
        self._sign: Sign = []  # for which the next two are
        self._layouts: dict[bool, tuple[Layout, list[Key]]] = {}  # of totals, and of channels
        self._held: Held = {}
        self._sides: dict[torch.device, torch.cuda.Stream] = {}

    def _side(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type != "cuda":
            return None
        if device not in self._sides:
            self._sides[device] = torch.cuda.Stream(device)
        return self._sides[device]

    def begin(self, kept: Kept, clear: bool = True, totals_only: bool = False) -> Pending:
        """Copies the state, or its totals, as it stands on the current streams (and clears it), and sends the copy.

        kept: the scalars of the steps before that have not been sent, and at last those of this step.
        """
        with self._store.lock:  # no site is made or moved meanwhile
            return self._begin(kept, clear, totals_only)

    def _begin(self, kept: Kept, clear: bool, totals_only: bool) -> Pending:
        self._store.fold_left()
        every, _ = self._store.flags.enabled.sampling
        pending = Pending(*self._find_layout(totals_only), kept, self._ranks, every)
        for device in {**self._store.blocks, **kept.copies}:
            side = self._side(device)
            if totals_only:
                totals = self._store.take_totals(device, clear)
                copies = {} if totals is None else {TOTALS: totals}
            else:
                copies = dict(enumerate(self._store.take(device, clear)))
            for number, copy in copies.items():
                pending.send((device, number), copy, side)
            pending.send_scalars(device, kept.copies.get(device, []), side)
            if side is not None:
                pending.record_event(side)
        if clear:
            self._store.forget_left()
        return pending

    def _find_layout(self, totals_only: bool) -> tuple[Layout, list[Key], list[Entry], Held]:
        """Return where all sites lie, computed anew only if something has moved."""
        entries = self._store.entries
        sign: Sign = [(e.place, e.folded is None, e.keep_channels, e.channel_dim, e.sharding) for e in entries]
        if sign != self._sign:
            self._sign, self._layouts, self._held = sign, {}, {e.site: e.held for e in entries}
        if totals_only not in self._layouts:
            self._layouts[totals_only] = _layout(entries, self._store, totals_only)
        return *self._layouts[totals_only], entries, self._held

    def begin_scalars(self, kept: Kept) -> PendingScalars:
        """Sends scalars alone."""
        pending = PendingScalars(kept)
        for device, copies in kept.copies.items():
            side = self._side(device)
            pending.send_scalars(device, copies, side)
            if side is not None:
                pending.record_event(side)
        return pending


def _layout(entries: list[Entry], store: StateStore, totals_only: bool) -> tuple[Layout, list[Key]]:
    places = [entry.read[0] for entry in entries]
    if totals_only:
        numbers = {device: itertools.count() for device in store.blocks}
        places = [place.totals(next(numbers[place.device])) for place in places]
    keys = list(dict.fromkeys((place.device, place.block) for place in places))
    number = {key: i for i, key in enumerate(keys)}
    devices = list(dict.fromkeys(device for device, _ in keys))
    found = [(number[p.device, p.block], p.offset, p.channels, p.bins) for p in places]
    keeps = [e.keeps_now for e in entries]
    sites = sites_at(
        np.array(found, np.int64).reshape(-1, 4),
        [e.site for e in entries],
        [each and not totals_only for each in keeps],
        [e.channel_dim if each else None for e, each in zip(entries, keeps, strict=True)],
        [e.group_size for e in entries],
        store.histogram,
    )
    return Layout([devices.index(device) for device, _ in keys], sites), keys
