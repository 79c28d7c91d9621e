"""The values that guards of compiled graphs read before the graphs run.

They decide whether the program that measures is to run or the bare one, and which rows count. All monitors share them,
so that of many there are no more programs than of one: what else is different between them is decided on the device.

Activation checkpointing around a compiled block calls it again in backward, and must get the program that its forward
was, or it refuses the backward: the two save different tensors. So each answer is kept with the number that the next
node of the graph will have, and in a backward the running node tells which one was given when its forward ran, in its
thread. Without the compiled hook nobody knows a node's thread: where this one has given no answer, any thread's counts.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from hookstats import _native

# What counts of the tensors that a mask is about: the numbers of its rows that do, at the beginning of a tensor of the
# mask's shape, and how many they are; both int32, on one device. Kernels read them, nobody waits.
Rows: TypeAlias = tuple[torch.Tensor, torch.Tensor]


def _as_in_c(get: Callable[[Any], Any]) -> Any:
    """A property that dynamo does not look into: it guards what is returned, as of one that is C."""
    opaque = ctypes.pythonapi.PyInstanceMethod_New
    opaque.restype, opaque.argtypes = ctypes.py_object, [ctypes.py_object]
    return property(opaque(get))


class _AllRows(NamedTuple):
    """Rows that count, by monitor, and the streams on which they were written. Never changed, as answers hold it."""

    told: dict[str, tuple[Rows, ...]]
    made: dict[str, list[tuple[Any, Rows]]]


_ALL_COUNT = _AllRows({}, {})
_MOST_ANSWERS = 32  # forwards in different states whose backward is still to come


class _Answer(NamedTuple):
    thread: int
    node: int  # the number of the next node of the graph when it was given
    measured: bool
    left_out: tuple[_native.Enabled, ...]
    rows: _AllRows


class Now:
    """Answers to what is measured now, and of whom."""

    def __init__(self) -> None:
        self._monitors: list[_native.Enabled] = []  # each change is one call: garbage may end others
        self._rows: dict[int, _AllRows] = {}  # by thread
        self._answers: tuple[_Answer, ...] = ()  # the latest first
        self._answering = threading.RLock()

    def add(self, enabled: _native.Enabled) -> Part:
        self._monitors.append(enabled)
        return Part(self, enabled)

    def remove(self, enabled: _native.Enabled) -> None:
        if enabled in self._monitors:
            self._monitors.remove(enabled)
        if not self._monitors:
            self._answers = ()

    def set_rows(self, thread: int, monitor: str, rows: Sequence[Rows]) -> None:
        """Set the rows that count of what a thread measures for a monitor, just written; none: all."""
        before = self._rows.get(thread, _ALL_COUNT)
        told, made = before.told | {monitor: ()}, before.made | {monitor: []}
        del told[monitor], made[monitor]
        if rows:
            told[monitor], made[monitor] = tuple(rows), [(_mark_written(each), each) for each in rows]
        if told:
            self._rows[thread] = _AllRows(told, made)
        else:
            self._rows.pop(thread, None)

    @property
    def monitors(self) -> int:
        return len(self._monitors)

    def is_open(self) -> bool:
        """Return whether a step of any monitor is measured, whatever runs; no graph asks."""
        return any(each.is_open for each in self._monitors)

    @_as_in_c
    def measured(self) -> bool:
        """Return whether any monitor measures."""
        return self._answer().measured

    @_as_in_c
    def rows(self) -> dict[str, tuple[Rows, ...]]:
        """Return the rows by Flags.monitor. The caller goes on to use them on the current stream."""
        all = self._answer().rows
        for made in all.made.values():
            for each, rows in made:
                each.prepare_use(rows)
        return all.told

    def leaves_out(self, enabled: _native.Enabled) -> bool:
        """Return whether any monitor measures, but not this one, for which it is evaluation."""
        return any(each is enabled for each in self._answer().left_out)

    def _answer(self) -> _Answer:
        thread, of_forward, node, next_node = _native.place_in_autograd()
        if node >= 0:
            # A reentrant checkpoint's node comes just before what its forward asks.
            given = [each for each in self._answers if each.node <= node + 1]
            own = [each for each in given if each.thread == (of_forward or thread)]
            if own or (given and not of_forward):
                return (own or given)[0]
        measured, rows = False, _ALL_COUNT
        left_out: tuple[_native.Enabled, ...] = ()
        for enabled in tuple(self._monitors):
            if enabled.is_open:
                if enabled.leaves_out:
                    left_out = (*left_out, enabled)
                else:
                    measured = True
        if measured:
            rows = self._rows.get(threading.get_ident(), rows)
        else:
            left_out = ()
        if node < 0:
            for before in self._answers:
                if before.thread == thread:
                    if before.measured == measured and before.rows is rows and before.left_out == left_out:
                        return before
                    break
        now = _Answer(thread, next_node, measured, left_out, rows)
        if node < 0:
            with self._answering:
                self._answers = (now, *self._answers[: _MOST_ANSWERS - 1])
        return now


def _mark_written(rows: Rows) -> Any:
    made = _native.MadeOn(rows[0].device)
    made.mark_written()
    return made


class Part:
    """The part of one monitor, as an object of its own, because guards read attributes."""

    def __init__(self, now: Now, enabled: _native.Enabled) -> None:
        self._now, self._enabled = now, enabled

    @_as_in_c
    def left_out(self) -> bool:
        return self._now.leaves_out(self._enabled)

    def remove(self) -> None:
        self._now.remove(self._enabled)


now = Now()
