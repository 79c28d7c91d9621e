"""The rows that `Monitor.ignore` leaves, as kernels and graphs read them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from hookstats import _native
from hookstats._warn import WarnOnce
from hookstats.modules.order import has_compiled
from hookstats.watch import guards
from hookstats.watch.flags import is_capturing
from hookstats.watch.guards import Rows
from hookstats.watch.memory import StateStore, local_part

_SAMPLED = "sampled "  # before the name of a monitor: of the rows that count, those that are read


def rows_on(device: torch.device, monitor: str, is_sampled: bool = False) -> Rows | None:
    """Return the rows that count of a tensor there; None: all. Can be traced.

    monitor: Flags.monitor. is_sampled: of a tensor of which some rows alone are read, where the monitor does that.

    From a global, because of whatever hangs on a module graphs take the address to stay the same, and
    mode="reduce-overhead" would record them anew for each new set of rows.
    """
    found, given = None, guards.now.rows
    name = _SAMPLED + monitor if is_sampled and _SAMPLED + monitor in given else monitor
    for rows in given.get(name, ()):
        if rows[0].device == device:
            found = rows
    return found


class _Entered:
    """Rows that a thread ignores until it leaves the context, and where hooks find what counts."""

    def __init__(self, ignored: torch.Tensor) -> None:
        self.ignored = ignored
        self.thread = threading.get_ident()
        self.counted = _native.Counted(self.thread)
        _native.name_thread(self.thread)


class Ignoring:
    """A monitor's ignored rows. Each thread has its own; of those that it has entered the innermost are in force."""

    def __init__(self, store: StateStore, warn_once: WarnOnce) -> None:
        self._store = store
        self._warn_once = warn_once
        self._entered: list[_Entered] = []

    @contextlib.contextmanager
    def ignore(self, rows: torch.Tensor) -> Iterator[None]:
        """Leave out rows where `rows` is True, while it is entered."""
        entered = _Entered(check_rows(rows))
        try:
            with self._store.lock:
                self._entered.append(entered)
                self.refresh()
            yield
        finally:
            with self._store.lock:
                self._entered.remove(entered)
                self._set_rows(entered, [], [])
                self.refresh()
            concerned, others = entered.counted.met
            if others and not concerned and not has_compiled():  # what a graph measures is not seen here
                self._warn_once(
                    "ignore",
                    "ignore: no tensor that was measured begins with the shape of the rows, "
                    f"{tuple(rows.shape)}, or has all {rows.numel()} of them in its first dimension: every row counted",
                )

    def refresh(self) -> None:
        """Renew what hooks and graphs read: when rows, a device, or a step (measured or not, or sampled) change."""
        with self._store.lock:
            for entered in {entered.thread: entered for entered in self._entered}.values():
                rows = self._select_counted(entered)
                sampled = [self._sample_rows(each) for each in rows]
                entered.counted.set_rows(rows, sampled)
                self._set_rows(entered, rows, sampled)
            self._store.flags.enabled.count([entered.counted for entered in self._entered])

    def _set_rows(self, entered: _Entered, rows: list[Rows], sampled: list[Rows]) -> None:
        """Tell graphs."""
        guards.now.set_rows(entered.thread, self._store.flags.monitor, rows)
        if self._store.may_sample:
            guards.now.set_rows(entered.thread, _SAMPLED + self._store.flags.monitor, sampled)

    def _sample_rows(self, rows: Rows) -> Rows:
        """Return those that are read in this step; all of them for a CUDA graph, which is of all steps."""
        every, phase = self._store.flags.enabled.sampling
        return rows if every == 1 or is_capturing() else _take_every(rows, every, phase)

    def _select_counted(self, entered: _Entered) -> list[Rows]:
        try:
            return [_rows(entered.ignored, device, self._store.flags.is_open()) for device in self._store.devices()]
        except Exception as error:  # no memory, say
            if self._store.strict:
                raise
            self._warn_once("ignore failed", f"ignore: every row counts: {error!r}")
            return []


def check_rows(rows: torch.Tensor) -> torch.Tensor:
    """The rows; of a DTensor, this process's part."""
    if not isinstance(rows, torch.Tensor) or rows.dtype != torch.bool:
        got = rows.dtype if isinstance(rows, torch.Tensor) else type(rows).__name__
        raise TypeError(
            f"ignore: expected a bool tensor, True for rows to leave out, got {got}; with an attention_mask that is 1 "
            "for what counts: attention_mask == 0"
        )
    part = local_part(rows)
    if part.layout != torch.strided or _native.has_no_data(part) or part.dim() == 0:
        raise ValueError(
            "ignore: expected a dense tensor with data, of one or more dimensions, such as [batch, sequence], got "
            f"{type(part).__name__} of shape {tuple(part.shape)}, layout {part.layout} on {part.device}"
        )
    return part


def _take_every(rows: Rows, every: int, phase: int) -> Rows:
    """Every so-many-th of the rows that count; all where they are fewer. Waits for nothing."""
    row_index, kept = rows
    with torch.inference_mode(False), torch.no_grad():
        listed = row_index.reshape(-1)
        places = torch.arange(phase, phase + every * len(listed), every, device=listed.device)
        some = listed[places.clamp(max=len(listed) - 1)]
        some = torch.where(kept < every, listed, some).reshape(row_index.shape)
        return some, torch.where(kept < every, kept, (kept - phase + every - 1) // every)


def _rows(ignored: torch.Tensor, device: torch.device, wanted: bool) -> Rows:
    """The rows that are left; if nothing is measured, none, for graphs that expect some. Waits for nothing."""
    with torch.inference_mode(False), torch.no_grad():
        if not wanted:
            nothing = torch.zeros(ignored.shape, dtype=torch.int32, device=device)
            return nothing, torch.zeros(1, dtype=torch.int32, device=device)
        ignored = ignored.to(device, non_blocking=device.type != "cpu")  # the CPU would not wait for what it reads
        return rows_of(ignored.logical_not())


def rows_of(counted: torch.Tensor) -> Rows:
    """The rows of a mask that count, before the others."""
    first = counted.reshape(-1).logical_not().to(torch.uint8).argsort(stable=True).to(torch.int32)
    return first.reshape(counted.shape), counted.sum(dtype=torch.int32).reshape(1)
