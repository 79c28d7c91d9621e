"""Which rows count: the masks that are in force, as kernels and graphs read them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import torch

from hookstats.state import Rows, Store
from hookstats.telling import WarnOnce

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


class Masks:
    """A monitor's masks: the innermost one is in force."""

    _numbers = itertools.count()

    def __init__(self, store: Store, warn_once: WarnOnce) -> None:
        self.number = next(self._numbers)
        self._store = store
        self._warn_once = warn_once
        self._entered: list[torch.Tensor] = []

    @contextlib.contextmanager
    def within(self, mask: torch.Tensor) -> Iterator[None]:
        """Inside, rows where the mask is True do not count."""
        check(mask)
        self._entered.append(mask)
        self.refresh()
        try:
            yield
        finally:
            concerned, others = self._store.flags.gate.met
            if others and not concerned:
                self._warn_once(
                    "mask",
                    f"mask: no tensor that was measured begins with its shape {tuple(mask.shape)}, or with all its "
                    f"{mask.numel()} rows: nothing was left out",
                )
            last = max(i for i, each in enumerate(self._entered) if each is mask)
            del self._entered[last]
            self.refresh()

    def refresh(self) -> None:
        """To be called when another mask, another device, or another step (measured or not) comes."""
        mask = self._entered[-1] if self._entered else None
        if mask is None and self.number not in IN_FORCE:
            return
        rows: list[Rows] = []
        try:
            if mask is not None:
                rows = [_rows(mask, device, self._store.flags.value) for device in self._store.devices()]
        except Exception as error:  # no memory, say
            if self._store.strict:
                raise
            rows = []
            self._warn_once("mask failed", f"mask: not applied: {error!r}")
        self._store.flags.gate.set_rows(rows)
        if rows:
            IN_FORCE[self.number] = tuple(rows)
        else:
            IN_FORCE.pop(self.number, None)


def check(mask: object) -> None:
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise TypeError(
            f"mask: expected a bool tensor, True for rows to leave out, got {got}; of an attention_mask that is 1 for "
            "what counts: attention_mask == 0"
        )
    if mask.layout != torch.strided or mask.is_meta or mask.dim() == 0:
        raise ValueError(
            "mask: expected a dense tensor of one or more dimensions, such as [batch, sequence], got shape "
            f"{tuple(mask.shape)}, layout {mask.layout} on {mask.device}"
        )


def _rows(mask: torch.Tensor, device: torch.device, wanted: bool) -> Rows:
    """The rows that the mask leaves; if nothing is measured, none, for graphs that expect some. Waits for nothing."""
    with torch.inference_mode(False), torch.no_grad():
        if not wanted:
            nothing = torch.zeros(mask.shape, dtype=torch.int32, device=device)
            return nothing, torch.zeros(1, dtype=torch.int32, device=device)
        mask = mask.to(device, non_blocking=True)
        left_first = mask.reshape(-1).to(torch.uint8).argsort(stable=True).to(torch.int32).reshape(mask.shape)
        return left_first, mask.logical_not().sum(dtype=torch.int32).reshape(1)
