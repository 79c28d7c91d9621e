"""Which rows count: the masks that are in force, as kernels and graphs read them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import torch

from hookstats import _native
from hookstats._warn import WarnOnce
from hookstats.modules.order import has_compiled
from hookstats.watch.memory import Rows, Store, local_part

# What is in force on every device, by Masks.number: for graphs. A global, because of whatever hangs on a module graphs
# take the address to stay the same, and mode="reduce-overhead" would record them anew for each mask.
IN_FORCE: dict[int, tuple[Rows, ...]] = {}


def rows_on(device: torch.device, number: int) -> Rows | None:
    """What counts of a tensor there; None: all. Can be traced."""
    found = None
    for rows in IN_FORCE.get(number, ()):
        if rows[0].device == device:
            found = rows
    return found


class _Entered:
    """A mask, and how many tensors were measured inside: those that it is about, and others."""

    def __init__(self, mask: torch.Tensor) -> None:
        self.mask = mask
        self.concerned = self.others = 0


class Masks:
    """A monitor's masks: the innermost one is in force."""

    _numbers = itertools.count()

    def __init__(self, store: Store, warn_once: WarnOnce) -> None:
        self.number = next(self._numbers)
        self._store = store
        self._warn_once = warn_once
        self._entered: list[_Entered] = []
        self._in_force: _Entered | None = None

    @contextlib.contextmanager
    def within(self, mask: torch.Tensor) -> Iterator[None]:
        """Inside, rows where the mask is True do not count."""
        entered = _Entered(checked(mask))
        try:
            self._entered.append(entered)
            self.refresh()
            yield
        finally:
            self._entered.remove(entered)
            self.refresh()
            # What a graph measures is not seen here.
            if entered.others and not entered.concerned and not has_compiled():
                self._warn_once(
                    "mask",
                    f"mask: no tensor that was measured begins with its shape {tuple(mask.shape)}, or with all its "
                    f"{mask.numel()} rows: nothing was left out",
                )

    def refresh(self) -> None:
        """To be called when another mask, another device, or another step (measured or not) comes."""
        entered = self._entered[-1] if self._entered else None
        if entered is None and self._in_force is None:
            return
        gate = self._store.flags.gate
        if self._in_force is not None:
            concerned, others = gate.met
            self._in_force.concerned += concerned
            self._in_force.others += others
        rows: list[Rows] = []
        try:
            if entered is not None:
                rows = [_rows(entered.mask, device, self._store.flags.value) for device in self._store.devices()]
        except Exception as error:  # no memory, say
            if self._store.strict:
                raise
            rows = []
            self._warn_once("mask failed", f"mask: not applied: {error!r}")
        gate.set_rows(rows)
        self._in_force = entered
        if rows:
            IN_FORCE[self.number] = tuple(rows)
        else:
            IN_FORCE.pop(self.number, None)


def checked(mask: torch.Tensor) -> torch.Tensor:
    """The mask; of a DTensor, this process's part."""
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise TypeError(
            f"mask: expected a bool tensor, True for rows to leave out, got {got}; of an attention_mask that is 1 for "
            "what counts: attention_mask == 0"
        )
    part = local_part(mask)
    if part.layout != torch.strided or _native.has_no_data(part) or part.dim() == 0:
        raise ValueError(
            "mask: expected a dense tensor with data, of one or more dimensions, such as [batch, sequence], got "
            f"{type(part).__name__} of shape {tuple(part.shape)}, layout {part.layout} on {part.device}"
        )
    return part


def _rows(mask: torch.Tensor, device: torch.device, wanted: bool) -> Rows:
    """The rows that the mask leaves; if nothing is measured, none, for graphs that expect some. Waits for nothing."""
    with torch.inference_mode(False), torch.no_grad():
        if not wanted:
            nothing = torch.zeros(mask.shape, dtype=torch.int32, device=device)
            return nothing, torch.zeros(1, dtype=torch.int32, device=device)
        mask = mask.to(device, non_blocking=device.type != "cpu")  # the CPU would not wait for what it reads
        left_first = mask.reshape(-1).to(torch.uint8).argsort(stable=True).to(torch.int32).reshape(mask.shape)
        return left_first, mask.logical_not().sum(dtype=torch.int32).reshape(1)
