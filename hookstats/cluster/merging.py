"""Measured steps of all ranks merged beside training: one thread, which waits for others so that training does not."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from hookstats._warn import WarnOnce
from hookstats.cluster import gloo
from hookstats.cluster.flat import Merge, Section
from hookstats.cluster.protocol import Backlog, Moment, Participant, Tables, Verdict
from hookstats.cluster.tree import FAN, Tree, levels

Step = TypeVar("Step")

# Steps that may wait to be merged: as many as fit into these bytes, but at least _FEW and at most _MANY. From half of
# that on, ranks go on to newer ones; of more, the oldest are delivered alone.
_WAITING_BYTES, _FEW, _MANY = 64 << 20, 8, 256
_PATIENCE = 10.0  # seconds that other ranks are waited for
_LOOK = 0.25  # seconds
_ATTEMPTS = 3  # failures in a row
_mergings: Counter[tuple[int, ...]] = Counter()  # of the same ranks, so far


class Packing(Protocol[Step]):
    """What a step is made of, which merging does not know. Used by the thread alone."""

    merges: Sequence[Merge]  # one for each section
    notes: deque[str]  # messages for the user about how ranks differ

    def table(self, step: Step) -> tuple[int, bytes]:
        """What this rank has, and its checksum, of 64 bits: equal on ranks that have the same."""

    def nbytes(self, step: Step) -> int:
        """The memory that a step takes."""

    def scale(self, step: Step) -> float | None:
        """The grad_scale; steps of ranks where it differs are not merged."""

    def pack(self, step: Step, tables: Tables) -> list[Section]:
        """tables: the distinct ones of all ranks, each with the lowest rank that has it, by that rank.

        Returns arrays ``[rows, elements]`` of 8-byte numbers, of shapes that follow from the tables alone.
        """

    def unpack(self, sections: list[Section], step: Step, tables: Tables) -> Step:
        """A step made of what came of all ranks' sections; `step` is this rank's own."""


@dataclass(frozen=True)
class Merged(Generic[Step]):
    """A step as it is delivered."""

    step: Step
    ranks: tuple[int, ...]  # whose share is in it: all, or this rank alone
    world_size: int  # ranks that were to be merged


@dataclass
class _Slot(Generic[Step]):
    """A step that was submitted, until it is delivered."""

    step: Step
    moment: Moment
    merged: Merged[Step] | None = None


class _Stopped(Exception):
    """The thread is to end."""


class Merging(Generic[Step]):
    """Merges steps of the same number over the ranks of a group. All methods but `wait` and `close` return at once.

    Every rank of the group makes one, in the same order where there are several over the same ranks.
    """

    def __init__(self, ranks: Sequence[int], packing: Packing[Step], fan: int = FAN) -> None:
        """ranks: of torch.distributed, which runs; this one among them.

        RuntimeError where this torch does not have what is needed.
        """
        self.rank = gloo.c10d.get_rank()
        self.ranks = tuple(sorted(ranks))
        if self.rank not in self.ranks:
            raise ValueError(f"process_group: expected ranks with this one, {self.rank}, got {self.ranks}")
        self._packing = packing
        self._fan = fan
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._local = local if local > 0 and gloo.c10d.get_world_size() % local == 0 else 1
        name = f"hookstats/{gloo.name_of(self.ranks)}/{_mergings[self.ranks]}"
        _mergings[self.ranks] += 1
        self._store = gloo.c10d.PrefixStore(name, gloo.default_store())
        # What only training's thread touches, which makes all public calls.
        self._slots: deque[_Slot[Step]] = deque()  # not delivered yet
        self._last = Moment(0, -1)
        self._room = _FEW  # for steps that wait
        self._warn_once = WarnOnce()
        self._process = os.getpid()
        # What both do: a slot's `merged` is set once, by the thread, or when that has ended.
        self._queue: queue.SimpleQueue[_Slot[Step] | None] = queue.SimpleQueue()  # None: the end
        self._told: deque[tuple[str, str]] = deque()
        self._stop = threading.Event()
        # What only the thread touches.
        self._tree: Tree | None = None
        self._epoch = 0  # of the tree, or the next one where it has failed
        self._looked = 0.0  # when the store was last asked whether the groups have failed elsewhere
        self._is_over = False  # a rank has left: nothing will be merged any more
        self._thread = threading.Thread(target=self._run, name="hookstats merging", daemon=True)
        self._thread.start()
        atexit.register(self.close, timeout=0.0)

    def submit(self, step: Step, number: int) -> None:
        """Merges a step with those of the same number on other ranks. Takes some microseconds, whatever they do."""
        begun = self._last.begun + (number <= self._last.number)  # numbers that go back: trained anew, on all ranks
        self._last = Moment(begun, number)
        slot = _Slot(step, self._last)
        self._room = min(max(_FEW, _WAITING_BYTES // max(1, self._packing.nbytes(step))), _MANY)
        if self._thread.is_alive():  # it is not in a fork, where it may have held the queue's lock
            if self._queue.qsize() >= self._room:
                self._give_up_oldest(number)
            self._queue.put(slot)
        self._slots.append(slot)

    def _give_up_oldest(self, number: int) -> None:
        """Of those that wait behind the one in hand."""
        with suppress(queue.Empty):  # the thread took it meanwhile
            oldest = self._queue.get_nowait()
            if oldest is not None:
                oldest.merged = self._alone(oldest)
                self._told.append(("queue", f"{self._room} steps were waiting to be merged when step {number} came"))

    def arrived(self) -> list[Merged[Step]]:
        """What was submitted and is settled, in that order, each once. Tells what went wrong."""
        if not self._thread.is_alive():
            self._settle_all()
        done = []
        while self._slots and (merged := self._slots[0].merged) is not None:
            done.append(merged)
            self._slots.popleft()
        while self._told:
            kind, text = self._told.popleft()
            self._warn_once(kind, f"not merged over ranks: {text}. This rank is alone with such steps.")
        while self._packing.notes:
            note = self._packing.notes.popleft()
            self._warn_once(note, f"merging over ranks: {note}")
        return done

    def wait(self, timeout: float) -> list[Merged[Step]]:
        """What `arrived` returns, once all is settled or `timeout` seconds have passed."""
        end = time.monotonic() + timeout
        while self._unsettled() and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(0.001)
        return self.arrived()

    def close(self, timeout: float = 2.0) -> list[Merged[Step]]:
        """Ends merging: what is not settled after `timeout` seconds is delivered alone. A second call does nothing."""
        if self._process != os.getpid():  # a fork has no thread, and maybe a lock that the thread held
            return []
        atexit.unregister(self.close)
        done = self.wait(timeout)
        self._stop.set()
        self._queue.put(None)
        self._thread.join(2.0)
        self._settle_all()  # also where the thread is stuck, as in a call of a store whose host is frozen
        return done + self.arrived()

    def give_up(self) -> None:
        """Ends the thread when it has merged what is there. Waits for no lock: the garbage collector may call it."""
        if self._process == os.getpid():
            self._queue.put(None)

    def _settle_all(self) -> None:
        for slot in self._slots:
            slot.merged = slot.merged or self._alone(slot)

    def _unsettled(self) -> int:
        return sum(slot.merged is None for slot in self._slots)

    def _alone(self, slot: _Slot[Step]) -> Merged[Step]:
        return Merged(slot.step, (self.rank,), len(self.ranks))

    # What follows runs in the thread.

    def _run(self) -> None:
        try:
            self._merge_all()
        except _Stopped:
            pass
        except Exception as error:  # the store went with the rank that kept it, say
            if not (self._stop.is_set() or self._is_over):  # the store may go with the rank that has left
                text = f"torch.distributed's store failed, nothing is merged from now on: {error!r}"
                self._told.append(("store", text))
        finally:
            atexit.unregister(self.close)

    def _merge_all(self) -> None:
        # Nodes of unlike size say unlike numbers, and there is one tree: that of the rank which came first.
        local = int(self._store.compare_set("local", "", str(self._local)))
        self._plan = levels(self.ranks, self._fan, local)
        self._participant = Participant(self._store, self._plan, self.rank, _PATIENCE, self._pause)
        failures = 0
        why = "it was detached, or has ended"
        try:
            while failures < _ATTEMPTS:
                slot = self._queue.get()
                if slot is None:
                    return
                try:
                    slot.merged = self._settled(slot)
                    if self._is_over:
                        return
                    failures = 0
                except _Failed as failed:
                    failures += 1
                    self._told.append(("failed", str(failed)))
                    slot.merged = self._alone(slot)
            why = f"merging failed {failures} times in a row"
            self._told.append(("left", f"{why}, nothing is merged from now on"))
        finally:
            self._participant.leave(why)

    def _settled(self, slot: _Slot[Step]) -> Merged[Step]:
        try:
            table, scale = self._packing.table(slot.step), self._packing.scale(slot.step)
        except Exception as error:
            raise _Failed(f"step {slot.moment.number}: {error!r}") from error
        verdict, tables = self._participant.settle(slot.moment, table, scale, self._epoch, self._backlog)
        if not verdict.go:
            self._is_over = verdict.kind == "left"
            self._told.append((verdict.kind, verdict.text))
            return self._alone(slot)
        try:
            return Merged(self._merge(slot.step, verdict, tables), self.ranks, len(self.ranks))
        except Exception as error:
            self._tree = None
            self._epoch = verdict.epoch + 1
            self._participant.break_up(verdict.epoch)
            if isinstance(error, _Stopped):
                raise
            raise _Failed(f"step {slot.moment.number}: {error!r}") from error

    def _backlog(self) -> Backlog:
        return Backlog(self._last, self._queue.qsize() >= self._room // 2)

    def _merge(self, step: Step, verdict: Verdict, tables: Tables) -> Step:
        if self._tree is None or self._epoch != verdict.epoch:
            self._epoch = verdict.epoch
            store = gloo.c10d.PrefixStore(f"groups/{verdict.epoch}", self._store)
            self._tree = Tree(self._plan, self.rank, store, _PATIENCE, self._pause_in_collective)
        self._looked = time.monotonic()
        sections = self._packing.pack(step, tables)
        return self._packing.unpack(self._tree.merge(sections, self._packing.merges), step, tables)

    def _pause_in_collective(self, seconds: float) -> None:
        self._pause(seconds)
        if time.monotonic() - self._looked > _LOOK:
            self._looked = time.monotonic()
            if self._participant.is_broken_up(self._epoch):
                raise RuntimeError("another rank could not merge it")

    def _pause(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise _Stopped


class _Failed(Exception):
    """A step could not be merged, though all ranks were there."""
