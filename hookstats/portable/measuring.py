"""Whether anything is measured now, and what counts of it: csrc/now.h and csrc/times.h, in Python."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from hookstats.portable.devices import Devices, MadeOn, is_capturing
from hookstats.portable.sites import Rows, backward_is_running

_Found = TypeVar("_Found")
_THREAD = "hookstats.thread"  # where the identity of a thread that ignores rows is left for those of its backward


def name_thread(ident: int) -> None:
    """For the threads of this one's backward."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(ident))  # torch 2.11 takes a reference that it was not given
    torch._C._stash_obj_in_tls(_THREAD, ident)


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


class Counted:
    """What counts of the tensors that a thread measures, where it has rows ignored: for each device."""

    def __init__(self, devices: Devices, thread: int) -> None:
        self._devices, self.thread = devices, thread
        self.rows: list[Rows] = []
        self.concerned = self.others = 0  # tensors that met these rows: whether they are about them

    @property
    def met(self) -> tuple[int, int]:
        return self.concerned, self.others

    def set_rows(self, rows: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.rows = []
        for row_index, kept in rows:
            made = MadeOn(self._devices, row_index.device)
            made.written()
            self.rows.append(Rows(row_index, kept, made))

    def on(self, device: torch.device) -> Rows | None:
        return next((rows for rows in self.rows if rows.row_index.device == device), None)

    def note(self, concerned: bool) -> None:
        self.concerned += concerned
        self.others += not concerned


class Enabled:
    """What all hooks of a monitor share: whether and what they measure."""

    def __init__(self, open: torch.Tensor) -> None:
        """open: one int32 on the CPU, zero while nothing is to be measured."""
        if open.device.type != "cpu" or open.dtype != torch.int32 or open.numel() != 1:
            raise TypeError(
                "Enabled: expected one int32 on the CPU that says whether anything is measured, got "
                f"{open.dtype} {list(open.shape)} on {open.device}"
            )
        self.open = open
        self.is_open = ctypes.c_int32.from_address(open.data_ptr())
        self.is_paused = False
        self.times: Times | None = None
        self._root: weakref.ref[torch.nn.Module] | None = None
        self._counted: Sequence[Counted] = ()

    def decide_by(self, root: torch.nn.Module | None) -> None:
        """Its `training` decides; None: nothing does."""
        self._root = None if root is None else weakref.ref(root)

    def count(self, all: Sequence[Counted]) -> None:
        """Of all threads; the innermost last."""
        self._counted = tuple(all)

    @property
    def leaves_out(self) -> bool:
        """Whether a forward that runs now is evaluation, which is not measured."""
        root = None if self._root is None else self._root()
        return root is not None and vars(root).get("training") is False

    def counts_now(self) -> bool:
        """Whether a forward that runs now counts. A recomputation belongs to a forward that did."""
        return not self.leaves_out or backward_is_running()

    def is_open_here(self) -> bool:
        """What a CUDA graph captures is in every step: in each replay the flag on the device decides."""
        return bool(self.is_open.value) or (not self.is_paused and is_capturing())

    def counted_here(self) -> Counted | None:
        """The innermost of this thread; in a backward that another thread called, of that one. None: all counts."""
        if not self._counted:
            return None
        return _here(lambda thread: next((each for each in self._counted[::-1] if each.thread == thread), None))


def _here(found: Callable[[int], _Found | None]) -> _Found | None:
    """What is found for this thread, or, in a backward, for the one that called it."""
    own = found(threading.get_ident())
    if own is not None or not backward_is_running():
        return own
    return found(torch._C._get_obj_in_tls(_THREAD)) if torch._C._is_key_in_tls(_THREAD) else None


class Part:
    """One monitor's part of `Now`."""

    left_out = False

    def __init__(self, now: Now, enabled: Enabled) -> None:
        self._now, self._enabled = now, enabled

    def remove(self) -> None:
        self._now._monitors = [each for each in self._now._monitors if each is not self._enabled]


class Now:
    """What compiled graphs look at before they run: here, that nothing is measured in them."""

    measured = False

    def __init__(self) -> None:
        self._monitors: list[Enabled] = []
        self._rows: dict[int, dict[str, tuple[tuple[torch.Tensor, torch.Tensor], ...]]] = {}  # by thread and monitor

    @property
    def monitors(self) -> int:
        return len(self._monitors)

    def add(self, enabled: Enabled, always: bool) -> Part:
        self._monitors.append(enabled)
        return Part(self, enabled)

    def set_rows(self, thread: int, monitor: str, rows: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """The rows that count of what a thread measures for a monitor; none: all."""
        after = {name: kept for name, kept in self._rows.get(thread, {}).items() if name != monitor}
        if rows:
            after[monitor] = tuple(rows)
        self._rows[thread] = after
        if not after:
            del self._rows[thread]

    @property
    def rows(self) -> dict[str, tuple[tuple[torch.Tensor, torch.Tensor], ...]]:
        """By monitor."""
        return _here(self._rows.get) or {}
