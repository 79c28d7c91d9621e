"""Memory in which statistics accumulate: blocks on devices, and a view per site.

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
from typing import Any, NamedTuple, TypeVar

import torch

from hookstats import _native
from hookstats.modules.sharding import LocalShard, Sharding
from hookstats.numbers.fields import FIELDS, Bins, LinearBins, Site, histogram_shape, kernel_block
from hookstats.numbers.kinds import has_rows
from hookstats.watch.flags import Flags
from hookstats.watch.guards import Rows

TOTALS = -1  # the "block" of a device that `StateStore.take_totals` returns
_SLOTS = 1024  # made at a time
_SLOT_WORDS = 2  # apart: torch copies what lies at no whole 16 bytes, and a CUDA graph may then not write to it
_LATER_BLOCK_BYTES = 1 << 16  # room for sites whose width is learned one by one; twice as much each time


class SiteState(NamedTuple):
    """State that a hook hands to the extension. csrc/hook.cpp knows these names."""

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


def accumulate(x: torch.Tensor, state: SiteState, rows: Rows | None = None) -> None:
    """Folds a tensor into a SiteState, by the operator."""
    sampling = state.enabled.sampling if state.is_sampled else (1, 0)
    _native.Site(state).fold(x, *(rows or (None, None)), False, *sampling)


_Tensor = TypeVar("_Tensor", torch.Tensor, torch.Tensor | None)


def local_part(tensor: _Tensor) -> _Tensor:
    """The tensor itself; of a DTensor, this process's part."""
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, torch.Tensor) else tensor


class StatePlace(NamedTuple):
    """Place of a site's state, in units of 8 bytes: moments, counters, histogram, one after another."""

    device: torch.device
    block: int
    offset: int
    channels: int
    bins: int
    room: int  # what it may take

    @property
    def size(self) -> int:
        return len(FIELDS) * self.channels + _native.COUNTERS + self.bins

    def totals(self, number: int) -> StatePlace:
        """Return the place of its totals in what `StateStore.take_totals` returns, by the state's number on its
        device."""
        offset = number * (len(FIELDS) + _native.COUNTERS)
        return self._replace(block=TOTALS, offset=offset, channels=1, bins=0)


class Left(NamedTuple):
    """A state that a site had, to which somebody may still bring what belongs to it."""

    place: StatePlace
    moments: weakref.ref[torch.Tensor]  # held by waiting gradients, and for ever by what a CUDA graph has captured


class Entry:
    """A site: where its state is, and what the hooks are given.

    A site may move, to another width or device. As long as something may come to the states that it has left, these are
    folded into the present one when a step ends; where their widths differ, all are folded into its totals.
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
        self.place: StatePlace
        self.state: SiteState
        self.left: list[Left] = []
        self.folded: tuple[StatePlace, SiteState] | None = None  # its totals, while states of other widths are left

    @property
    def read(self) -> tuple[StatePlace, SiteState]:
        """The state that leaves the device with a step."""
        return self.folded or (self.place, self.state)

    @property
    def keeps_now(self) -> bool:
        """Return whether channels are kept in the open step."""
        return self.keep_channels and self.folded is None

    @property
    def held(self) -> LocalShard:
        """The part of it that this process holds."""
        return LocalShard(self.place.channels if self.keeps_now else None, self.sharding)

    @property
    def hidden_if_silent(self) -> bool:
        """Return whether a step without any of its tensors leaves it out.

        So of samples, which have no bins: they are taken when a step ends, and an open one has none.
        """
        return self.is_container or self.left_out or self.given_up or not self.has_bins


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
    """Give away the blocks of a store that is no more: launches on other streams may still write into them."""
    for each in blocks.values():
        with suppress(RuntimeError):  # of a device that has failed, which garbage cannot tell anybody
            _native.untraced(_native.give_away, each)


class StateStore:
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
        self._tables: dict[torch.device, Any] = {}  # of what is read of the sites there: _native.Totals
        self._moved: list[Entry] = []  # those that have left states
        self._free_again: dict[torch.device, list[StatePlace]] = {}  # those that are zero, the smallest first
        self._slots: dict[torch.device, tuple[torch.Tensor, int]] = {}  # memory for them, and how many are used
        self._copies = _native.Copies()
        self._left = _native.Copies()
        weakref.finalize(self, _give_away, self.blocks).atexit = False

    def devices(self) -> set[torch.device]:
        """Return the devices on which sites are now."""
        return {entry.place.device for entry in self.entries}

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
        """Return how many bytes of the budget scratch on this device leaves. The first call makes the scratch."""
        if device.type == "cuda" and device not in self._scratch:
            self._scratch[device] = _native.reserve_scratch(device)
        return self.memory_budget - self._scratch.get(device, 0)

    def _count_free_bytes(self, device: torch.device) -> int:
        return self.budget_on(device) - self.bytes_on(device) - self._claimed.get(device, 0)

    def claim(self, device: torch.device, size: int) -> bool:
        """Leaves this many bytes of the budget to somebody else. False: so many are not left, and none are given."""
        if size > self._count_free_bytes(device):
            return False
        self._claimed[device] = self._claimed.get(device, 0) + size
        return True

    def make_room(self, device: torch.device, channels: int, sites: int, has_bins: bool = True) -> bool:
        """Takes memory for that many more sites of this width. False: they would not stay inside the budget."""
        return self._make_room(device, [self._size(channels, has_bins)] * sites)

    def make_room_to_move(self, device: torch.device, channels: int, sites: int) -> bool:
        """The same for sites that have a state, and may have to be folded into their totals."""
        return self._make_room(device, [self._size(channels, True), self._size(1, True)] * sites)

    def _make_room(self, device: torch.device, sizes: list[int]) -> bool:
        """sizes: of the states."""
        needed, rooms = 0, [place.room for place in self._free_again.get(device, ())]
        for size in sizes:
            room = next((room for room in rooms if room >= size), None)
            if room is None:
                needed += size
            else:
                rooms.remove(room)
        offset, end = self._free.get(device, (0, 0))
        if needed <= end - offset:
            return True
        left = self._count_free_bytes(device) // 8
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
        """Gives a site a state of this width on this device. MemoryError where it would not stay inside the budget."""
        entry.place = self._take_place(entry, device, channels)
        entry.state = self._state(entry, entry.place, channel_dim)

    def move(
        self,
        entry: Entry,
        device: torch.device,
        channels: int,
        channel_dim: int,
        is_empty: bool,
        is_turned: bool = False,
    ) -> None:
        """The same for a site that has a state. is_turned: its channels lie in another dimension now.

        is_empty: nothing of the open step is in that, and nothing can come. Else what is in it, or will come, counts
        in the steps in which it comes: these have totals alone, where the channels are other ones.
        """
        before, moments = entry.place, weakref.ref(entry.state.moments)
        self.place(entry, device, channels, channel_dim)
        are_others = channels != 1 and (is_turned or channels != before.channels)
        if not is_empty and are_others and entry.folded is None:
            place = self._take_place(entry, device, 1)
            entry.folded = place, self._state(entry, place, 0)
        self._tables.pop(before.device, None)
        if is_empty:
            return self._give_back(before)
        entry.left.append(Left(before, moments))
        if entry not in self._moved:
            self._moved.append(entry)

    def _take_place(self, entry: Entry, device: torch.device, channels: int) -> StatePlace:
        size, bins = self._size(channels, entry.has_bins), self._bins(channels, entry.has_bins)
        self._tables.pop(device, None)
        free = self._free_again.get(device, [])
        again = next((place for place in free if place.room >= size), None)
        if again is not None:
            free.remove(again)
            return again._replace(channels=channels, bins=bins)
        if not self.make_room(device, channels, 1, entry.has_bins):
            raise MemoryError(self.explain_no_room(channels, 1, entry.has_bins))
        offset, end = self._free[device]
        self._free[device] = (offset + size, end)
        return StatePlace(device, len(self.blocks[device]) - 1, offset, channels, bins, size)

    def _give_back(self, place: StatePlace) -> None:
        self._tables.pop(place.device, None)
        free = self._free_again.setdefault(place.device, [])
        free.append(place)
        free.sort(key=lambda each: each.room)

    def _state(self, entry: Entry, place: StatePlace, channel_dim: int) -> SiteState:
        linear = self.histogram if isinstance(self.histogram, LinearBins) else None  # of a batch all sites have these
        with torch.inference_mode(False):
            return SiteState(
                *self._parts(self.blocks[place.device][place.block], place.offset, place, entry.has_bins),
                active=self.flags.on(place.device),
                enabled=self.flags.enabled,
                channel_dim=channel_dim,
                site=entry.index,
                strict=self.strict,
                low=float(linear.lo) if linear else 0.0,
                high=float(linear.hi) if linear else 0.0,
                block=kernel_block(self.histogram),
                is_sampled=self.may_sample and has_rows(*entry.site),
            )

    def _parts(
        self, memory: torch.Tensor, offset: int, place: StatePlace, has_bins: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Moments, counters and histogram of a state that begins there."""
        counters = offset + len(FIELDS) * place.channels
        shape = histogram_shape(self.histogram, place.channels) if has_bins and self.histogram is not None else None
        with torch.inference_mode(False):
            return (
                _native.part(memory, offset, (len(FIELDS), place.channels), torch.float64),
                _native.part(memory, counters, (_native.COUNTERS,), torch.int64),
                None if shape is None else _native.part(memory, counters + _native.COUNTERS, shape, torch.int64),
            )

    def fold_left(self) -> None:
        """Brings what has come to states that sites have left to where it is read."""
        for entry in self._moved:
            place, state = entry.read
            others = [left.place for left in entry.left]
            for each in others if entry.folded is None else [*others, entry.place]:
                memory = self.blocks[each.device][each.block]
                (copy,) = self._left.take([_native.part(memory, each.offset, (each.size,), torch.int64)], True)
                copy = copy.to(place.device)
                moments, counters, histogram = self._parts(copy, 0, each, entry.has_bins)
                left = state._replace(moments=moments, counters=counters, histogram=histogram)
                _native.Site(state).merge(_native.Site(left))

    def forget_left(self) -> None:
        """Free the left states that nothing can come to any more, after all was cleared."""
        for entry in list(self._moved):
            for left in [each for each in entry.left if each.moments() is None]:
                entry.left.remove(left)
                self._give_back(left.place)
            if not entry.left:
                self._moved.remove(entry)
                if entry.folded is not None:
                    self._give_back(entry.folded[0])
                    entry.folded = None

    def explain_no_room(self, channels: int, sites: int, has_bins: bool = True) -> str:
        """Say why `make_room` returned False."""
        size = sites * self.site_bytes(channels, has_bins)
        return f"its state of {size} bytes would not fit into what is left of memory_budget={self.memory_budget} bytes"

    def take(self, device: torch.device, clear: bool) -> list[torch.Tensor]:
        """Copies of the blocks on a device, each site as it is between two of its tensors; then they may be cleared.

        On the CPU the memory of a copy that nobody holds any more is used again: one for each block is kept for it.
        """
        self.clears += clear
        return self._copies.take(self.blocks.get(device, []), clear)

    def take_totals(self, device: torch.device, clear: bool) -> torch.Tensor | None:
        """All channels of each site on a device together, in one launch; None where there is no site."""
        self.clears += clear
        if device not in self._tables:
            states = [state for place, state in (entry.read for entry in self.entries) if place.device == device]
            if not states:
                return None
            self._tables[device] = _native.Totals([state.moments for state in states], [s.counters for s in states])
        totals: torch.Tensor = self._tables[device].take(self.blocks[device] if clear else [])
        return totals.view(-1)

    def clear_gpus(self) -> None:
        """Clear the state on GPUs, before a measured step that follows one that was not.

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
            self.forget_left()
