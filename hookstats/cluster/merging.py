"""Measured steps of all ranks merged beside training: one thread, which waits for others so that training does not.

All ranks do the same, step by step: they agree on the newest step that anybody has in hand, to which those behind go
on; then they add up what they have. Nothing is settled before that could be settled by the all-reduces themselves: a
rank that is late is waited for, by this thread alone. Where a rank is lost, the job is; until it ends, each rank goes
on alone.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from hookstats._warn import WarnOnce
from hookstats.cluster.drifts import Replicas, drifts
from hookstats.cluster.exchange import Exchange
from hookstats.cluster.packing import CHANGED, FOLDS, Held, Packed, Packer
from hookstats.cluster.union import Local, Placing, Tables, Union, some, whole
from hookstats.numbers.fields import Counts, Site
from hookstats.numbers.frame import StepFrame
from hookstats.numbers.ranks import StepRanks

# Steps that may wait to be merged: as many as fit into these bytes, but at least _FEW and at most _MANY; of more, the
# oldest are delivered alone.
_WAITING_BYTES, _FEW, _MANY = 64 << 20, 8, 256
_BEGUN = 1 << 44  # steps after which numbers would begin anew
_PACKERS = 4  # unions that are kept: of whole states, and of totals, each before and after a change
_END = 1 << 62  # in place of a step: a rank merges no more
_BEHIND = (
    "rank {} holds in a step what rank {} held some measured steps before or after it: monitor.step() is not called as "
    "often on all ranks (uneven inputs, a batch that was left out), and numbers of different moments are put together"
)


@dataclass
class _PendingStep:
    """A step that was submitted, until it is delivered."""

    frame: StepFrame
    placing: Placing
    problems: list[str]  # why it cannot be merged
    begun: int  # how often numbers have begun anew
    merged: StepFrame | None = None


@contextmanager
def _collect_errors(problems: list[str]) -> Iterator[None]:
    """Note an exception and go on: what fails on this rank alone must not keep the others waiting."""
    try:
        yield
    except Exception as error:
        problems.append(repr(error))


class _Over(Exception):
    """Raised when nothing will be merged any more."""


class Merging:
    """Merges steps of the same number over the ranks of a group. All methods but `wait` and `close` return at once.

    Every rank of the group makes one, in the same order where there are several over the same ranks.
    """

    def __init__(self, ranks: Sequence[int], tables: Tables, timeout: float) -> None:
        """ranks: of torch.distributed, which runs; this one among them. timeout: seconds, for ranks that are late.

        RuntimeError where this torch does not have what is needed.
        """
        self._exchange = Exchange("merging", ranks, timeout)
        # What only training's thread touches, which makes all public calls.
        self._slots: deque[_PendingStep] = deque()  # not delivered yet
        self._begun, self._last = 0, -1
        self._room = _FEW  # for steps that wait
        self._warn_once = WarnOnce()
        self._faults = 0  # steps that a rank could not bring
        self._process = os.getpid()
        # What both do: a slot's `merged` is set once, by the thread, or when that has ended.
        self._queue: queue.SimpleQueue[_PendingStep | None] = queue.SimpleQueue()  # None: the end
        self._told: deque[tuple[str, str]] = deque()  # messages for the user, each said once for each key
        # What only the thread touches.
        self._tables = tables
        self._unions = 0  # that all ranks have made so far
        self._packers: dict[bytes, tuple[int, Packer]] = {}  # by a table's text: which of these it is in
        self._apart: dict[Site, None] = {}  # of which ranks have held other values
        self._replicas = Replicas()
        self._thread = threading.Thread(target=self._run, name="hookstats merging", daemon=True)
        self._thread.start()
        atexit.register(self._end_thread)

    def submit(self, frame: StepFrame, placing: Placing = whole, problem: str = "") -> None:
        """Merges a step with those of the same number on other ranks. Takes some microseconds, whatever they do.

        placing: as `Tables.local` has it. problem: why this rank cannot bring its part.
        """
        number = frame.step
        self._begun += number <= self._last  # trained anew, on all ranks
        self._last = number
        slot = _PendingStep(frame, placing, [problem] if problem else [], self._begun)
        size = sum(block.nbytes for block in frame.memory)
        self._room = min(max(_FEW, _WAITING_BYTES // max(1, size)), _MANY)
        if self._thread.is_alive():  # it is not in a fork, where it may have held the queue's lock
            if self._queue.qsize() >= self._room:
                self._give_up_oldest(number)
            self._queue.put(slot)
        self._slots.append(slot)

    def _note(self, key: str, text: str) -> None:
        """Tell the user how ranks differ."""
        self._told.append((key, f"merging over ranks: {text}"))

    def _tell_why_alone(self, key: str, text: str) -> None:
        self._told.append((key, f"not merged over ranks: {text}. This rank is alone with such steps."))

    def _give_up_oldest(self, number: int) -> None:
        """Deliver the oldest alone of those that wait after the one in hand."""
        with suppress(queue.Empty):  # the thread took it meanwhile
            oldest = self._queue.get_nowait()
            if oldest is not None:
                self._leave_alone(oldest)
                text = f"{self._room} steps were waiting to be merged when step {number} came"
                self._tell_why_alone("queue", f"{text}: measure less often (every=)")

    def take_arrived(self) -> list[StepFrame]:
        """Return what was submitted and is settled, in that order, each once. Warns of what went wrong."""
        if not self._thread.is_alive():
            self._settle_all()
        done = []
        while self._slots and (merged := self._slots[0].merged) is not None:
            done.append(merged)
            self._slots.popleft()
        while self._told:
            key, text = self._told.popleft()
            self._faults += key == "failed"
            self._warn_once(key, text)
        return done

    def wait(self, timeout: float) -> list[StepFrame]:
        """Return what `take_arrived` returns, once all is settled or `timeout` seconds have passed."""
        end = time.monotonic() + timeout
        while any(slot.merged is None for slot in self._slots) and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(0.001)
        return self.take_arrived()

    def close(self, timeout: float = 2.0) -> list[StepFrame]:
        """End merging: what is not settled after `timeout` seconds is delivered alone. A second call does nothing.

        The thread may be waiting for other ranks then; it tells them when they have come that this one has left.
        """
        if self._process != os.getpid():  # a fork has no thread, and maybe a lock that the thread held
            return []
        done = self.wait(timeout)
        self._queue.put(None)
        self._thread.join(min(timeout, 2.0))
        self._settle_all()
        done += self.take_arrived()
        if self._faults > 1:
            self._warn_once(
                "faults", f"{self._faults} steps were not merged over ranks, as one could not bring its part"
            )
        return done

    def give_up(self) -> None:
        """End the thread when it has merged what is there. Waits for no lock: the garbage collector may call it."""
        if self._process == os.getpid():
            self._queue.put(None)

    def _end_thread(self) -> None:
        """End the thread with the interpreter, whose end a thread inside of gloo would abort."""
        if self._process == os.getpid():
            self._exchange.is_ending = True
            self._queue.put(None)
            self._thread.join(2.0)

    def _settle_all(self) -> None:
        for slot in self._slots:
            if slot.merged is None:
                self._leave_alone(slot)

    def _leave_alone(self, slot: _PendingStep) -> None:
        slot.frame.ranks = StepRanks((self._exchange.rank,), len(self._exchange.ranks))
        slot.merged = slot.frame

    # What follows runs in the thread.

    def _run(self) -> None:
        try:
            self._merge_all()
        except _Over as over:
            self._tell_why_alone("over", f"{over}, nothing is merged from now on")
        except Exception as error:  # a rank is gone, or did not come in time
            self._exchange.give_up()
            self._tell_why_alone("over", f"merging has failed, nothing is merged from now on: {error!r}")
        finally:
            atexit.unregister(self._end_thread)

    def _merge_all(self) -> None:
        while (slot := self._queue.get()) is not None:
            merged = self._merge_step(slot)
            if merged is None:
                self._leave_alone(slot)
            else:
                slot.merged = slot.merged or merged
        self._exchange.max(_announce(_END, None, -1, False))

    def _merge_step(self, slot: _PendingStep) -> StepFrame | None:
        """Merge a step with those of the others, when all ranks agree that it is merged.

        Waits for ranks with an older one in hand. A rank that has failed says so before anybody adds up: then the step
        is each rank's own, on all alike.
        """
        number, problems = slot.frame.step, slot.problems
        local: Local | None = None
        packed: tuple[Packer, Packed, Held] | None = None
        with _collect_errors(problems):
            local = None if problems else self._tables.local(slot.frame, slot.placing)
        moment, is_united = slot.begun * _BEGUN + number, False
        while True:
            union, packer = self._packers.get(local.text, (-1, None)) if local else (-1, None)
            if local is not None and packer is not None and packed is None and not problems:
                with _collect_errors(problems):
                    packed = packer, *packer.pack(slot.frame, local)
            mine = _announce(moment, slot.frame.grad_scale, union, bool(problems))
            newest, oldest, high, low, last, first, failed = self._exchange.max(mine).tolist()
            if newest == _END:
                raise _Over("a rank was detached, or has ended")
            if moment < newest:
                there = f"another rank is at step {newest % _BEGUN}"
                text = f"{there} without step {number}: measured alike (every=) on all ranks, it would be merged"
                self._tell_why_alone("cadence", text)
                return None
            if newest > -oldest:
                continue
            if failed:
                self._report_fault(slot)
                return None
            if high != -low:
                self._tell_why_alone("scale", f"the grad_scale is not the same on all ranks at step {number}")
                return None
            if last == -first and last >= 0 and packed is not None:
                return self._fold(slot, *packed)
            if local is None or is_united:
                return None
            is_united, packed = True, None
            self._unite(local, problems)

    def _report_fault(self, slot: _PendingStep) -> None:
        why = ", ".join(slot.problems) or "another rank could not bring its part"
        self._tell_why_alone("failed", f"step {slot.frame.step}: {why}")

    def _unite(self, local: Local, problems: list[str]) -> None:
        """Exchange the tables of all ranks, each of which crosses the network once."""
        texts = self._exchange.gather_texts(local.text)
        self._unions += 1
        with _collect_errors(problems):
            union = Union(texts, self._exchange.ranks)
            packer = Packer(union, self._exchange.rank, self._apart)
            for note in union.notes:
                self._note(note, note)
            for old in list(self._packers)[: 1 - _PACKERS]:
                del self._packers[old]
            self._packers[local.text] = self._unions, packer

    def _fold(self, slot: _PendingStep, packer: Packer, mine: Packed, held: Held) -> StepFrame | None:
        mine.compared[CHANGED] = self._replicas.find_changed(packer.union, held)
        packed = Packed(*self._exchange.reduce(mine, FOLDS))
        union, merged, before = packer.union, None, len(self._apart)
        with _collect_errors(slot.problems):
            merged = packer.unpack(packed, slot.frame)
            merged.ranks = StepRanks(self._exchange.ranks, len(self._exchange.ranks))
            self._report_apart(list(self._apart)[before:], union, slot.frame.step)
        if slot.problems:  # the others have what this rank has brought
            self._report_fault(slot)
        if differ := self._replicas.find_differing(union, packed.compared, held):
            found, behind = drifts(union, differ, self._exchange.gather(self._replicas.history(differ)))
            if behind is not None:
                self._note("behind", _BEHIND.format(*behind))
            if merged is not None:
                merged.drifts = found
        return merged

    def _report_apart(self, sites: Sequence[Site], union: Union, number: int) -> None:
        """Tell of sites that are kept apart from now on."""
        if not sites:
            return
        names = " and ".join(str(union.rows[i].site) for i in union.alternatives[sites[0]][:2])
        self._note(
            str(sites),
            f"the ranks hold different values of {some(sites, 5)} at step {number}, and how these plain tensors lie is "
            f"not known. They are kept apart from this step on: {sites[0]} as {names}. Say how they are placed: "
            "placements={glob: Shard(-1)} for a part of the channels, Shard(0) or Shard(-2) for a part of the rows, "
            "one for each dimension of a DeviceMesh that is process_group=",
        )


def _announce(moment: int, grad_scale: float | None, union: int, failed: bool) -> Counts:
    """Return what ranks tell each other before each step, of which the largest counts."""
    scale = int(np.float64(-1.0 if grad_scale is None else grad_scale).view(np.int64)) >> 1
    return np.array([moment, -moment, scale, -scale, union, -union, failed], np.int64)
