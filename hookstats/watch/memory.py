"""Where statistics accumulate: blocks of device memory, a view of them per site.

Nothing here runs inside a hook, except where a tensor is seen for the first time: one whose width or device could not
be known before, one in a container, a tapped one.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from hookstats import _native
from hookstats.modules.sharding import LocalShard, Sharding
from hookstats.numbers.fields import FIELDS, Bins, LinearBins, Site, histogram_shape, kernel_block
from hookstats.numbers.kinds import has_rows
from hookstats.watch.flags import Flags

TOTALS = -1  # the "block" of a device that `Store.take_totals` returns
_SLOTS = 1024  # made at a time
_SLOT_WORDS = 2  # apart: torch copies what lies at no whole 16 bytes, and a CUDA graph may then not write to it
_LATER_BLOCK_BYTES = 1 << 16  # room for sites whose width is learned one by one; twice as much each time


class SiteState(NamedTuple):
    """What a hook hands to the extension. csrc/hook.cpp knows these names."""

    moments: torch.Tensor  # float64 [fields, channels]
    counters: torch.Tensor  # int64 [2]: calls, place in the order of execution
    histogram: torch.Tensor | None  # int64, of fields.histogram_shape
    active: torch.Tensor  # int32 [1] on the device: zero stops the kernel, in compiled graphs too
    enabled: _native.Enabled  # the same on the host: eager hooks do not even launch
    channel_dim: int
    site: int  # Entry.index
    strict: bool
    low: float  # of linear bins; equal: there are none
    high: float
    block: int  # of values whose exponents are compared, as csrc/kernels.h has it; 0: none
    is_sampled: bool  # some of a tensor's rows alone are read, where `Enabled.sampling` says so


# What counts of the tensors that a mask is about: the numbers of its rows that do, at the beginning of a tensor of the
# mask's shape, and how many they are; both int32, on one device. Kernels read them, nobody waits.
Rows: TypeAlias = tuple[torch.Tensor, torch.Tensor]


def accumulate(x: torch.Tensor, state: SiteState, rows: Rows | None = None) -> None:
    """Folds a tensor into a SiteState, by the operator."""
    row_index, kept = rows or (None, None)
    every, phase = state.enabled.sampling if state.is_sampled else (1, 0)
    _native.accumulate(
        x,
        state.moments,
        state.counters,
        state.histogram,
        state.active,
        state.channel_dim,
        state.low,
        state.high,
        row_index,
        kept,
        state.block,
        every,
        phase,
    )


_Tensor = TypeVar("_Tensor", torch.Tensor, torch.Tensor | None)


def local_part(tensor: _Tensor) -> _Tensor:
    """The tensor itself; of a DTensor, this process's part."""
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, torch.Tensor) else tensor


class Place(NamedTuple):
    """Where a site's state lies, in units of 8 bytes: moments, counters, histogram, one after another."""

    device: torch.device
    block: int
    offset: int
    channels: int
    bins: int
    number: int  # on its device

    def totals(self) -> Place:
        """Where the same lies in what `Store.take_totals` returns."""
        offset = self.number * (len(FIELDS) + _native.COUNTERS)
        return self._replace(block=TOTALS, offset=offset, channels=1, bins=0)


class Entry:
    """One site: where its state is, and what the hooks are given.

    A site may move, to another width or device, and back. What it left behind is still read, because gradients may be
    on their way there: `places` holds all, one for each width on each device, the present one last.
    """

    _indices = itertools.count()  # over all monitors

    def __init__(self, site: Site, keep_channels: bool, has_bins: bool = True) -> None:
        self.site = site
        self.has_bins = has_bins  # if the monitor's sites have a histogram
        self.index = next(self._indices)
        self.keep_channels = keep_channels
        self.channel_dim: int | None = None  # where its channels are, for people
        self.group_size: int | None = None  # channels that belong together
        self.reading = 0  # the latest of these, see StepFrame.readings
        self.is_container = False  # the output was one, whose tensors have sites of their own
        self.left_out = False  # tensors of it could not be measured
        self.given_up = False
        self.sharding: Sharding | None = None  # of the latest of its tensors, if these are DTensors
        self.sharded_in = -1  # when that was measured: Store.clears
        self.places: list[Place] = []
        self.state: SiteState

    @property
    def held(self) -> LocalShard:
        """What this process holds of it."""
        return LocalShard(self.places[-1].channels if self.keep_channels else None, self.sharding)

    @property
    def hidden_if_silent(self) -> bool:
        """Whether a step in which nothing of it was measured says nothing of it.

        So of samples, which have no bins: they are taken when a step ends, and an open one has none.
        """
        return self.is_container or self.left_out or self.given_up or not self.has_bins

    def place_at(self, device: torch.device, channels: int) -> Place | None:
        """Where it is, or was, on this device with this width."""
        return next((place for place in self.places if (place.device, place.channels) == (device, channels)), None)


def _zeros(size: int, device: torch.device) -> torch.Tensor:
    """int64. On a GPU made by another thread: before mode="reduce-overhead" captures a CUDA graph, torch takes all that
    this one makes out of the graph's own memory, which replays write over."""

    def make() -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.zeros(size, dtype=torch.int64, device=device)

    def make_on(stream: torch.cuda.Stream) -> torch.Tensor:
        with torch.cuda.stream(stream):
            return make()

    if device.type != "cuda":
        return make()
    with ThreadPoolExecutor(1) as another:
        return another.submit(make_on, torch.cuda.current_stream(device)).result()


def _give_away(blocks: dict[torch.device, list[torch.Tensor]]) -> None:
    """Of a store that is no more: launches on other streams may still write into them."""
    for each in blocks.values():
        with suppress(RuntimeError):  # of a device that has failed, which garbage cannot tell anybody
            _native.untraced(_native.give_away, each)


class Store:
    """The state of all sites of a monitor.

    Memory is taken at attach, and in a few large blocks for sites whose width is learned later; a block is never moved,
    because compiled graphs and waiting gradients hold tensors over it. All that is taken on a device stays inside the
    budget: `make_room` says no, `place` raises.
    """

    def __init__(self, histogram: Bins | None, memory_budget: int, strict: bool, may_sample: bool = False) -> None:
        """may_sample: whether there may be steps of which some rows alone are read."""
        self.histogram = histogram
        self.may_sample = may_sample
        self.memory_budget = memory_budget
        self.strict = strict
        self.flags = Flags()
        self.lock = threading.RLock()  # around making, placing and binding a site, and copying what there is
        self.entries: list[Entry] = []
        self.clears = 0  # how often the state was taken away, which ends a step
        self.blocks: dict[torch.device, list[torch.Tensor]] = {}
        self._free: dict[torch.device, tuple[int, int]] = {}  # in the last block: next offset, end
        self._claimed: dict[torch.device, int] = {}  # bytes that others may take while a step is measured
        self._scratch: dict[torch.device, int] = {}  # bytes of CUDA's own memory
        self._states: dict[torch.device, list[SiteState]] = {}  # of all places, by Place.number
        self._tables: dict[torch.device, tuple[int, Any]] = {}  # of so many of them: _native.Totals
        self._slots: dict[torch.device, tuple[torch.Tensor, int]] = {}  # memory for them, and how many are used
        self._copies = _native.Copies()
        weakref.finalize(self, _give_away, self.blocks).atexit = False

    def devices(self) -> set[torch.device]:
        """Where sites are now; where they were, no more."""
        return {entry.places[-1].device for entry in self.entries}

    def bytes_on(self, device: torch.device) -> int:
        return 8 * sum(block.numel() for block in self.blocks.get(device, []))

    @property
    def bytes(self) -> int:
        return sum(map(self.bytes_on, self.blocks))

    def site_bytes(self, channels: int, has_bins: bool = True) -> int:
        return 8 * self._size(channels, has_bins)

    def _bins(self, channels: int, has_bins: bool) -> int:
        return math.prod(histogram_shape(self.histogram if has_bins else None, channels))

    def _size(self, channels: int, has_bins: bool) -> int:
        return len(FIELDS) * channels + _native.COUNTERS + self._bins(channels, has_bins)

    def budget_on(self, device: torch.device) -> int:
        """What scratch on this device leaves of the budget, in bytes. The first time, the scratch is made."""
        if device.type == "cuda" and device not in self._scratch:
            self._scratch[device] = _native.reserve_scratch(device)
        return self.memory_budget - self._scratch.get(device, 0)

    def _bytes_left(self, device: torch.device) -> int:
        return self.budget_on(device) - self.bytes_on(device) - self._claimed.get(device, 0)

    def claim(self, device: torch.device, size: int) -> bool:
        """Leaves this many bytes of the budget to somebody else. False: so many are not left, and none are given."""
        if size > self._bytes_left(device):
            return False
        self._claimed[device] = self._claimed.get(device, 0) + size
        return True

    def make_room(self, device: torch.device, channels: int, sites: int, has_bins: bool = True) -> bool:
        """Takes memory for that many more sites of this width. False: they would not stay inside the budget."""
        needed = sites * self._size(channels, has_bins)
        offset, end = self._free.get(device, (0, 0))
        if needed <= end - offset:
            return True
        left = self._bytes_left(device) // 8
        if needed > left:
            return False
        later = _LATER_BLOCK_BYTES // 8 << len(self.blocks.get(device, []))
        self.reserve(device, max(needed, min(later, left // 2)))  # others may need some, too
        return True

    def reserve(self, device: torch.device, size: int) -> None:
        """Adds a block of `size` x 8 bytes, from which the next sites on this device are taken."""
        self.blocks.setdefault(device, []).append(_zeros(size, device))
        self._free[device] = (0, size)
        if device.type == "cuda":
            self._scratch[device] = _native.reserve_scratch(device)  # of this stream

    def slots(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Two numbers, int64 [1] each, that nobody else has: `_native.lay_slots` says what for."""
        memory, used = self._slots.get(device, (None, _SLOTS))
        if memory is None or used == _SLOTS:
            memory, used = _zeros(_SLOTS * _SLOT_WORDS, device), 0
        self._slots[device] = memory, used + 2
        with torch.inference_mode(False):
            places = (used * _SLOT_WORDS, (used + 1) * _SLOT_WORDS)
            first, second = (_native.part(memory, at, (1,), torch.int64) for at in places)
        return first, second

    def add(
        self,
        site: Site,
        device: torch.device,
        channels: int,
        channel_dim: int,
        keep_channels: bool,
        has_bins: bool = True,
    ) -> Entry:
        """has_bins: False for a site that keeps no histogram, whatever the others keep."""
        entry = Entry(site, keep_channels, has_bins)
        with self.lock:
            self.place(entry, device, channels, channel_dim)
            self.entries.append(entry)
        return entry

    def place(self, entry: Entry, device: torch.device, channels: int, channel_dim: int) -> None:
        """Gives a site a state of this width on this device, the one that it had there if it had one.

        What it leaves behind stays and is read, too. MemoryError where it would not stay inside the budget.
        """
        earlier = entry.place_at(device, channels)
        if earlier is not None:
            entry.places = [place for place in entry.places if place is not earlier] + [earlier]
            entry.state = self._states[device][earlier.number]._replace(channel_dim=channel_dim)
            return
        if not self.make_room(device, channels, 1, entry.has_bins):
            raise MemoryError(self.no_room(channels, 1, entry.has_bins))
        offset, end = self._free[device]
        block = len(self.blocks[device]) - 1
        states = self._states.setdefault(device, [])
        entry.places.append(Place(device, block, offset, channels, self._bins(channels, entry.has_bins), len(states)))
        self._free[device] = (offset + self._size(channels, entry.has_bins), end)
        counters = offset + len(FIELDS) * channels
        bins = counters + _native.COUNTERS
        histogram = self.histogram if entry.has_bins else None
        linear = self.histogram if isinstance(self.histogram, LinearBins) else None  # of a batch all sites have these
        with torch.inference_mode(False):
            memory = self.blocks[device][block]
            entry.state = SiteState(
                moments=_native.part(memory, offset, (len(FIELDS), channels), torch.float64),
                counters=_native.part(memory, counters, (_native.COUNTERS,), torch.int64),
                histogram=None
                if histogram is None
                else _native.part(memory, bins, histogram_shape(histogram, channels), torch.int64),
                active=self.flags.on(device),
                enabled=self.flags.enabled,
                channel_dim=channel_dim,
                site=entry.index,
                strict=self.strict,
                low=float(linear.lo) if linear else 0.0,
                high=float(linear.hi) if linear else 0.0,
                block=kernel_block(self.histogram),
                is_sampled=self.may_sample and has_rows(*entry.site),
            )
        states.append(entry.state)

    def no_room(self, channels: int, sites: int, has_bins: bool = True) -> str:
        """Why `make_room` said no."""
        size = sites * self.site_bytes(channels, has_bins)
        return f"its state of {size} bytes would not fit into what is left of memory_budget={self.memory_budget} bytes"

    def take(self, device: torch.device, clear: bool) -> list[torch.Tensor]:
        """Copies of the blocks on a device, each site as it is between two of its tensors; then they may be cleared.

        On the CPU the memory of a copy that nobody holds any more is used again: one for each block is kept for it.
        """
        self.clears += clear
        return self._copies.take(self.blocks.get(device, []), clear)

    def take_totals(self, device: torch.device, clear: bool) -> torch.Tensor | None:
        """All channels of each place on a device together, in one launch; None where there is no place."""
        self.clears += clear
        states = self._states.get(device)
        if not states:
            return None
        known, table = self._tables.get(device, (0, None))
        if known != len(states):
            table = _native.Totals([state.moments for state in states], [state.counters for state in states])
            self._tables[device] = (len(states), table)
        totals: torch.Tensor = table.take(self.blocks[device] if clear else [])
        return totals.view(-1)

    def clear_gpus(self) -> None:
        """Before a step that is measured behind one that was not.

        A kernel on another stream may have met the flag while it changed: its moments are dropped then, but what some
        of its blocks have counted is not.
        """
        with self.lock:
            for device, blocks in self.blocks.items():
                if device.type != "cpu":
                    _native.clear(blocks)

    def clear(self) -> None:
        with self.lock:
            self.clears += 1
            self._copies.give_up_spares()
            for blocks in self.blocks.values():
                _native.clear(blocks)
