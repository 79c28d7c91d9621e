"""The watched parameters, found by identity; and those that come at one time, measured by one call."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch.optim.optimizer import Optimizer

from hookstats import _native
from hookstats.modules.channels import find_parameter_channels
from hookstats.modules.selection import Slot
from hookstats.modules.sharding import explain_unreduced, find_sharding
from hookstats.watch.binding import SiteBinder
from hookstats.watch.flags import is_capturing
from hookstats.watch.memory import Entry, SiteState, StateStore, accumulate, local_part

PLAIN = (torch.nn.Parameter, torch.Tensor)  # types of which this process has the whole
_MOST_BATCHED = 8  # times that a site is in a batch, on average: optimizers that are made anew do not pile up


class Parameter:
    """A watched parameter: where the model keeps it, and its sites by kind. It does not keep the model alive."""

    def __init__(self, number: int, name: str, slot: Slot, keeps_channels: bool, group_size: int | None) -> None:
        self.number = number
        self.name = name
        self.keeps_channels = keeps_channels
        self.group_size = group_size
        self.module = weakref.ref(slot.module)
        self.key = slot.key
        self.is_buffer = slot.is_buffer
        self.entries: dict[str, Entry] = {}  # of what is still measured
        self.copy_bytes = 0  # of the budget
        self.measured: dict[str, bool] = {}  # by kind, in the open step: whether by an optimizer
        self.is_unclipped = False  # its gradient was read before clipping, in the open step
        self.captured: set[str] = set()  # kinds that a CUDA graph measures, in each replay

    def measures(self, kind: str) -> bool:
        """Return whether it has a site of this kind that was not given up."""
        return kind in self.entries and not self.entries[kind].given_up

    def slot(self) -> Slot | None:
        module = self.module()
        return None if module is None else Slot(module, self.key, self.is_buffer)

    def get(self) -> torch.Tensor | None:
        """Return the tensor that an optimizer steps: the parameter, or its attribute `main_param`, if it has one.

        Megatron-LM keeps there the copy in fp32 that its optimizer steps, and whose `grad` it sets. Where ranks share
        the optimizer's work (`main_param_sharded`), it is a flat part of the copy, or None: this rank has none of it.
        """
        module = self.module()
        if module is None:
            return None
        kept = module._buffers if self.is_buffer else module._parameters
        tensor = kept[self.key] if self.key in kept else None  # noqa: SIM401, a ScriptModule's have no `get`
        if tensor is None or self.is_buffer:
            return tensor
        stepped: torch.Tensor | None = getattr(tensor, "main_param", tensor)
        return stepped


Owner: TypeAlias = tuple[Parameter, str]  # of a site: the parameter, and which of its tensors


class Stepping(threading.local):
    """The optimizers of watched parameters that a thread is in: of one inside another one, the outer counts."""

    def __init__(self) -> None:
        self.optimizers: list[int] = []  # ids, the innermost last
        self.copies: dict[Parameter, torch.Tensor] = {}  # of parameters' values, while the outer one steps
        self.sampled: list[Parameter] = []  # before it steps

    def begin(self, optimizer: Optimizer) -> bool:
        """Note that a step begins; return whether it is an outer one."""
        self.optimizers.append(id(optimizer))
        return len(self.optimizers) == 1

    def ends(self, optimizer: Optimizer) -> bool:
        """Note that a step ends; return whether an outer one ends that began while something was measured."""
        if not self.optimizers or self.optimizers[-1] != id(optimizer):
            return False
        self.optimizers.pop()
        return not self.optimizers


class ByIdentity:
    """Finds the watched parameters among those of an optimizer, at a cost that depends on the optimizer alone.

    A model may replace its parameters at any time: what is found is checked, and what is not found is looked for once
    more, unless it is known to be somebody else's.
    """

    def __init__(self) -> None:
        self.all: list[Parameter] = []
        self.may_be_outdated = True
        self._keepers: dict[int, list[Parameter]] = {}  # by id of the tensor; several where it is shared
        self._strangers: dict[int, weakref.ref[torch.Tensor]] = {}  # by id, too, which a later tensor may have

    def find(self, tensors: Iterable[torch.Tensor]) -> list[Parameter]:
        """Return the parameters that these tensors are, in the order of the model."""
        tensors = list(tensors)
        if self.may_be_outdated or not all(map(self._is_known, tensors)):
            self._look_again()
            self._strangers |= {id(t): weakref.ref(t) for t in tensors if id(t) not in self._keepers}
        found = {each.number: each for tensor in tensors for each in self._keepers.get(id(tensor), [])}
        return [found[number] for number in sorted(found)]

    def _is_known(self, tensor: torch.Tensor) -> bool:
        """Return whether it is still known to be one of ours, or to be a stranger."""
        keepers = self._keepers.get(id(tensor))
        if keepers:
            return all(each.get() is tensor for each in keepers)
        stranger = self._strangers.get(id(tensor))
        return stranger is not None and stranger() is tensor

    def _look_again(self) -> None:
        """Reads from the model which tensors its parameters are now."""
        self._keepers = {}
        for each in self.all:
            tensor = each.get()
            if tensor is not None:
                self._keepers.setdefault(id(tensor), []).append(each)
        self.may_be_outdated = False
        self._strangers = {key: ref for key, ref in self._strangers.items() if ref() is not None}


class Batches:
    """Sites whose tensors come at one time: one call into the extension, and on a GPU launches for them alone."""

    def __init__(self, store: StateStore, binder: SiteBinder) -> None:
        self._store = store
        self._binder = binder
        self._known: dict[tuple[int, ...], Any] = {}  # by the sites' Entry.index
        self._members = 0  # of all that are known
        self._measured: list[tuple[int, ...]] = []  # since the state was taken away last, which was the number
        self._clears = 0

    def accumulate(self, owners: list[Owner], tensors: list[torch.Tensor | None]) -> set[int]:
        """A tensor for each owner; None: nothing of it. The numbers of those for which the states were not as they had
        to be.
        """
        if all(tensor is None for tensor in tensors):
            return set()
        entries = [owner.entries[kind] for owner, kind in owners]
        key = tuple(entry.index for entry in entries)
        batch = self._known.get(key)
        if batch is None:
            batch = self._new(key, [entry.state for entry in entries])
        if self._clears != self._store.clears:
            self._measured, self._clears = [], self._store.clears
        failures = batch.accumulate(tensors)
        for number, problem in failures:
            owner, kind = owners[number]
            try:
                self._rebind(owner, kind, tensors[number], problem)
            except Exception as error:
                if self._store.strict:
                    raise
                self._binder.leave_out([owner.entries[kind]], error)
        self._measured.append(key)
        return {number for number, _ in failures}

    def _new(self, key: tuple[int, ...], states: list[SiteState]) -> Any:
        if self._members > _MOST_BATCHED * len(self._store.entries):
            self._forget()
        batch = self._known[key] = _native.Batch(list(map(_native.Site, states)))
        self._members += len(key)
        return batch

    def _forget(self) -> None:
        """States have moved, sites were given up, or there are too many."""
        self._known.clear()
        self._members = 0

    def _rebind(self, owner: Parameter, kind: str, tensor: torch.Tensor | None, problem: str) -> None:
        """A tensor could not be measured: puts a state in place that fits it, or gives the site up."""
        entry, slot = owner.entries[kind], owner.slot()
        assert tensor is not None
        assert slot is not None
        if is_capturing():
            owner.captured.discard(kind)
            return self._binder.leave_out([entry], problem)
        self._forget()
        if tensor.layout == torch.strided and tensor.dtype in _native.DTYPES:
            device, width, dim = find_place(slot, tensor, entry.keep_channels, tensor.device)
            is_empty = kind not in owner.captured and not any(entry.index in key for key in self._measured)
            with self._store.lock:
                if (entry.left and not is_empty) or not self._store.make_room_to_move(device, width, 1):
                    width, entry.keep_channels = 1, False
                moves = (device, width) != (entry.place.device, entry.place.channels)
                has_room = self._store.make_room_to_move(device, width, 1)
                if moves and has_room:
                    self._store.move(entry, device, width, dim, is_empty)
            if moves and has_room:
                accumulate(tensor, entry.state)
                return
            if moves:
                problem = self._store.explain_no_room(width, 1, entry.has_bins)
        self._binder.leave_out([entry], problem)


def in_pieces(tensors: dict[Owner, torch.Tensor], most: int) -> Iterator[list[Owner]]:
    """Yield the owners, together as many as have at most so many bytes, but one at least."""
    piece, size = list[Owner](), 0
    for owner, tensor in tensors.items():
        if piece and size + tensor.nbytes > most:
            yield piece
            piece, size = [], 0
        piece.append(owner)
        size += tensor.nbytes
    if piece:
        yield piece


def find_part(binder: SiteBinder, each: Parameter, kind: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the part of a parameter or gradient that this process measures, and note where it lies. None: nothing.

    A gradient that is yet to be reduced is left out: norms under sequence parallelism have some until they step.
    """
    if tensor is None:
        return None
    entry = each.entries[kind]
    if type(tensor) in PLAIN:
        entry.sharding = None
        return tensor
    part = local_part(tensor)
    problem = explain_unreduced(tensor)
    if problem is not None:
        each.measured[kind] = True
        binder.leave_out([entry], problem, reason=problem)  # of many norms at once
        return None
    entry.sharding = None if part is tensor else find_sharding(tensor, entry.channel_dim or 0)
    return part


def find_place(
    slot: Slot, tensor: torch.Tensor, keep_channels: bool, default: torch.device
) -> tuple[torch.device, int, int]:
    """Device, width and channel dimension of the state for a parameter or a gradient; `default` for a meta tensor."""
    local = local_part(tensor)
    channels = find_parameter_channels(slot, tensor if local is None else local)
    width = channels.width if keep_channels and channels.width else 1
    device = tensor.device if tensor.device.type in ("cpu", "cuda") else default
    return device, width, channels.dim or 0
