"""A sample of each parameter's values, and by how much it has changed since it was taken last: one launch for all.

Read are the elements that csrc/sample.h says, of what this process has of a parameter, as they lie in memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hookstats import _native
from hookstats.numbers import kinds
from hookstats.watch.batches import PLAIN, Parameter, find_part
from hookstats.watch.binding import SiteBinder
from hookstats.watch.flags import is_capturing
from hookstats.watch.memory import StateStore, local_part
from hookstats.watch.skipping import InsideCapture

SIZE = 4096  # elements of a parameter, at most
KINDS = tuple(kind.name for kind in kinds.KINDS.values() if kind.is_sample)
OF_BUFFERS = "buffer_sample"


class Sample(NamedTuple):
    """Some elements of a parameter, which has `numel` of them."""

    values: torch.Tensor
    differences: torch.Tensor
    numel: int

    @property
    def bytes(self) -> int:
        return self.values.nbytes + self.differences.nbytes

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether it is of such a tensor."""
        return (self.numel, self.values.dtype, self.values.device) == (tensor.numel(), _dtype(tensor), tensor.device)


class Samples:
    """Takes them. What each parameter is worth was taken, and when, is up to the caller."""

    def __init__(self, store: StateStore, binder: SiteBinder) -> None:
        self._store = store
        self._binder = binder
        self._samples: dict[Parameter, Sample] = {}
        self.taken: dict[Parameter, Sample] = {}  # those whose values are known
        self._together: dict[bool, dict[Parameter, Sample]] = {}  # by changes: those that were last taken, by one call

    def make_room(self, each: Parameter, tensor: torch.Tensor) -> bool:
        """Memory for the sample of a tensor. False: none inside the budget, which is told; its sites are given up."""
        known = self._samples.get(each)
        if known is not None and known.fits(tensor):
            return True
        if is_capturing():
            raise InsideCapture
        self.taken.pop(each, None)
        if known is not None:
            self._store.claim(known.values.device, -self._samples.pop(each).bytes)
        size, dtype = min(tensor.numel(), SIZE), _dtype(tensor)
        needed = 2 * size * dtype.itemsize
        if not self._store.claim(tensor.device, needed):
            problem = (
                f"a sample of it would not fit into what is left of memory_budget={self._store.memory_budget} bytes, "
                f"it takes {needed}: raise it, or choose fewer modules="
            )
            self._binder.give_up([each.entries[kind] for kind in KINDS if kind in each.entries], problem)
            return False
        with torch.inference_mode(False):
            values, differences = (torch.zeros(size, dtype=dtype, device=tensor.device) for _ in range(2))
        self._samples[each] = Sample(values, differences, tensor.numel())
        return True

    def take(self, parameters: list[Parameter], changes: bool) -> dict[Parameter, Sample]:
        """Take samples; return those that could be taken. changes: differences from the samples before, if any."""
        if not parameters:
            return {}
        together = self._together.get(changes)
        if together and list(together) == parameters and self._take_together(together, changes):
            return together
        self._together.pop(changes, None)
        found: dict[torch.device, list[tuple[Parameter, torch.Tensor]]] = {}
        for each in parameters:
            try:
                tensor = self._local(each)
                if tensor is not None and self.make_room(each, tensor) and (not changes or each in self.taken):
                    found.setdefault(tensor.device, []).append((each, tensor))
            except Exception as error:
                self._leave_out(each, error)
        taken: dict[Parameter, Sample] = {}
        for members in found.values():
            taken |= self._read(members, changes)
        self.taken |= taken
        if len(found) == 1 and len(taken) == len(parameters):
            self._together[changes] = taken
        return taken

    def _take_together(self, samples: dict[Parameter, Sample], changes: bool) -> bool:
        """Take the usual way: parameters of the last step, which lie where they did. False: one does not."""
        tensors: list[torch.Tensor] = []
        for each, sample in samples.items():
            tensor = each.get()
            if tensor is None or type(tensor) not in PLAIN:
                return False
            tensor = values_of(each, tensor)
            if tensor.numel() != sample.numel:
                return False
            if self._samples.get(each) is not sample or (changes and each not in self.taken):
                return False
            tensors.append(tensor)
        try:
            self._sample(tensors, list(samples.values()), changes)
        except Exception:  # it is looked at again, one by one
            return False
        return True

    def _local(self, each: Parameter) -> torch.Tensor | None:
        tensor, found = each.get(), None
        if tensor is None or torch.nn.parameter.is_lazy(tensor):
            return None
        if each.is_buffer and (tensor.is_meta or not may_be_sampled(tensor)):
            return None
        for kind in KINDS:
            if each.measures(kind):
                found = find_part(self._binder, each, kind, tensor)
        if found is None or found.numel() == 0:
            return None
        if _native.has_no_data(found):
            raise TypeError("expected a plain tensor with data, got a wrapper or a mere shape")
        return values_of(each, found)

    def _read(self, members: list[tuple[Parameter, torch.Tensor]], changes: bool) -> dict[Parameter, Sample]:
        """Read samples of parameters on one device; return those that could be read."""
        samples = {each: self._samples[each] for each, _ in members}
        try:
            self._sample([tensor for _, tensor in members], list(samples.values()), changes)
        except Exception as error:
            if len(members) == 1:
                self._leave_out(members[0][0], error)
                return {}
            alone = [self._read([member], changes) for member in members]  # one of them cannot be read: which one?
            return {each: sample for found in alone for each, sample in found.items()}
        return samples

    def _sample(self, tensors: list[torch.Tensor], samples: list[Sample], changes: bool) -> None:
        _native.sample(
            tensors,
            [sample.values for sample in samples],
            self._store.flags.on(tensors[0].device),
            [sample.differences for sample in samples] if changes else [],
        )

    def _leave_out(self, each: Parameter, error: Exception) -> None:
        if self._store.strict:
            raise error
        entries = [each.entries[kind] for kind in KINDS if each.measures(kind)]
        self._binder.leave_out(entries, error)


def may_be_sampled(buffer: torch.Tensor) -> bool:
    """Return whether a buffer has a sample. Of parameters whoever has none is told; models hold buffers of all sorts.

    Counts and masks of integers, empty ones, and views whose elements do not lie side by side have none.
    """
    if torch.nn.parameter.is_lazy(buffer):
        return True  # it will have values
    local = local_part(buffer)
    if type(local) not in PLAIN or local.layout != torch.strided or local.is_conj() or local.numel() == 0:
        return False
    as_in_memory = local.permute(sorted(range(local.dim()), key=local.stride, reverse=True))
    return (local.dtype in _native.DTYPES or local.is_complex()) and as_in_memory.is_contiguous()


def values_of(each: Parameter, tensor: torch.Tensor) -> torch.Tensor:
    """Return the real numbers of a tensor: a rotary table may be complex."""
    return torch.view_as_real(tensor) if each.is_buffer and tensor.is_complex() else tensor


def _dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
