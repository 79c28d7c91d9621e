"""The state of measuring, in Python: which monitors are open, for whom, which rows count, and the time that it takes.

It does what now.h and times.h of csrc do for a torch that no glue fits, see hook.py.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch

from hookstats._native.operators import MadeOn, Operators, backward_is_running

_Found = TypeVar("_Found")
_THREAD = "hookstats.thread"  # where the identity of a thread that ignores rows is left for those of its backward
_ops: Operators  # of `load`


def load(ops: Operators) -> None:
    """Use these operators, which know in which CUDA graph a stream captures."""
    global _ops
    _ops = ops


def name_thread(ident: int) -> None:
    """Leave this thread's identity for the threads of its backward."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(ident))  # torch 2.11 takes a reference that it was not given
    torch._C._stash_obj_in_tls(_THREAD, ident)


class _Numbered(threading.local):
    """The number of a thread, which no other has had."""

    _numbers = itertools.count(1)

    def __init__(self) -> None:
        self.number = next(self._numbers)


_numbered = _Numbered()


def place_in_autograd() -> tuple[int, int, int, int]:
    """Return where a thread is in autograd's graphs. A node does not tell Python its thread."""
    node = torch._C._current_autograd_node() if backward_is_running() else None
    return _numbered.number, 0, -1 if node is None else node._sequence_nr(), torch._C._autograd._get_sequence_nr()


def _here(found: Callable[[int], _Found | None]) -> _Found | None:
    """Return what is found for this thread, or, in a backward, for the thread that called it."""
    own = found(threading.get_ident())
    if own is not None or not backward_is_running():
        return own
    return found(torch._C._get_obj_in_tls(_THREAD)) if torch._C._is_key_in_tls(_THREAD) else None


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Times:
    """The host's time that hookstats itself takes of a step."""

    def __init__(self) -> None:
        self.calls = 0
        self._host_ns = 0
        self._lock = threading.Lock()

    @property
    def host_us(self) -> float:
        return self._host_ns / 1e3

    def span(self, calls: int = 0) -> Span:
        return Span(self, calls)


class Span:
    """Counts its own life; inside another span of the thread, that is already counted."""

    _depths = threading.local()

    def __init__(self, times: Times, calls: int) -> None:
        self._times, self._calls = times, calls

    def __enter__(self) -> None:
        self._depth = getattr(self._depths, "value", 0)
        self._depths.value = self._depth + 1
        self._begin = time.perf_counter_ns()

    def __exit__(self, *error: object) -> None:
        took = time.perf_counter_ns() - self._begin
        self._depths.value = self._depth
        if self._depth == 0:
            with self._times._lock:
                self._times._host_ns += took
                self._times.calls += self._calls


class Rows(NamedTuple):
    """The rows that count of the tensors that a mask is about: csrc/ops.h."""

    row_index: torch.Tensor
    kept: torch.Tensor
    made: MadeOn | None = None  # None: who launches has seen to it

    def prepare_use(self) -> None:
        if self.made is not None:
            self.made.prepare_use(self[:2])


def _mark_written(rows: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Rows]:
    """Rows that were just written on the current streams."""
    found = []
    for row_index, kept in rows:
        made = MadeOn(_ops, row_index.device)
        made.mark_written()
        found.append(Rows(row_index, kept, made))
    return found


class Counted:
    """The rows that count of the tensors that a thread measures, where it ignores some: for each device."""

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.rows: list[Rows] = []
        self.sampled: list[Rows] = []  # of these some, for what is read in part
        self.met = 0, 0  # tensors that met these rows: those that they are about, and others

    def set_rows(
        self,
        rows: Sequence[tuple[torch.Tensor, torch.Tensor]],
        sampled: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self.rows, self.sampled = _mark_written(rows), _mark_written(sampled)

    def on(self, device: torch.device, is_sampled: bool) -> Rows | None:
        given = self.sampled if is_sampled else self.rows
        return next((rows for rows in given if rows.row_index.device == device), None)

    def note(self, concerned: bool) -> None:
        self.met = self.met[0] + concerned, self.met[1] + (not concerned)


class Enabled:
    """The state that all hooks of a monitor share: whether and what they measure."""

    def __init__(self, open: torch.Tensor) -> None:
        """open: one int32 on the CPU, zero while nothing is to be measured."""
        if open.device.type != "cpu" or open.dtype != torch.int32 or open.numel() != 1:
            raise TypeError(
                "Enabled: expected one int32 on the CPU that says whether anything is measured, got "
                f"{open.dtype} {list(open.shape)} on {open.device}"
            )
        self.open = open
        self._is_open = ctypes.c_int32.from_address(open.data_ptr())
        self.is_paused = False
        self.sampling = 1, 0  # of the open step: of activations and gradients, every so-many-th row from one on is read
        self.times: Times | None = None
        self._root: weakref.ref[torch.nn.Module] | None = None
        self._counted: Sequence[Counted] = ()

    def decide_by(self, root: torch.nn.Module | None) -> None:
        """Let a module's `training` decide; None: nothing does."""
        self._root = None if root is None else weakref.ref(root)

    def count(self, all: Sequence[Counted]) -> None:
        """Set the rows that count, of all threads; the innermost last."""
        self._counted = tuple(all)

    @property
    def is_open(self) -> bool:
        return bool(self._is_open.value)

    @property
    def leaves_out(self) -> bool:
        """Return whether a forward that runs now is evaluation, which is not measured."""
        root = None if self._root is None else self._root()
        return root is not None and vars(root).get("training") is False

    def counts_now(self) -> bool:
        """Return whether a forward that runs now counts. A recomputation belongs to a forward that did."""
        return not self.leaves_out or backward_is_running()

    def is_open_here(self) -> bool:
        """Return whether to measure here. A CUDA graph captures always: in a replay the flag on the device decides."""
        return self.is_open or (not self.is_paused and _is_capturing())

    def find_counted(self) -> Counted | None:
        """The innermost of this thread; in a backward that another thread called, of that one. None: all counts."""
        if not self._counted:
            return None
        return _here(lambda thread: next((each for each in self._counted[::-1] if each.thread == thread), None))

    def span(self, calls: int = 0) -> Any:
        times = self.times  # another thread may close the step
        return nullcontext() if times is None else times.span(calls)
