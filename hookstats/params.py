"""The parameters of a model and their gradients: read in one launch for each dtype when an optimizer steps.

Then gradients are whole: accumulated over microbatches, reduced over ranks, unscaled and clipped, and not yet zeroed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from hookstats import _native
from hookstats.fields import Site
from hookstats.select import Slot, parameter_channels
from hookstats.state import Entry, Store, accumulate

Skip = Callable[[list[Entry], str], None]


class Parameter:
    """One watched parameter: where the model keeps it, its sites by tensor kind. It does not keep the model alive."""

    def __init__(self, slot: Slot, entries: dict[str, Entry]) -> None:
        self.module = weakref.ref(slot.module)
        self.key = slot.key
        self.entries = entries
        self.measured = False  # in the open step

    def get(self) -> torch.Tensor | None:
        module = self.module()
        return None if module is None else Slot(module, self.key).get()


class Parameters:
    """Measures parameters and gradients, those of an optimizer when it steps, all others when the step ends."""

    def __init__(self, store: Store, kinds: tuple[str, ...], skip: Skip) -> None:
        self._store = store
        self._kinds = kinds
        self._skip = skip
        self._parameters: list[Parameter] = []
        self._batch: Any = None  # made when something is first measured, and when a site has moved

    def add(self, name: str, slot: Slot, keep_channels: bool, default: torch.device) -> None:
        """Watches a parameter. Gradients only where they are required."""
        tensor = slot.get()
        assert tensor is not None
        device, width, dim = placing(slot, tensor, keep_channels, default)
        entries = {}
        for kind in kinds_of(tensor, self._kinds):
            entries[kind] = self._store.add(Site(name, kind), device, width, dim, keep_channels and width > 1)
            entries[kind].is_parameter = True
        self._parameters.append(Parameter(slot, entries))

    def before_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """For every optimizer of the process: measures those of its parameters that are watched."""
        if self._store.flags.value and not torch.compiler.is_compiling():
            self.measure({id(parameter) for group in optimizer.param_groups for parameter in group["params"]})

    def measure(self, ids: set[int] | None = None) -> None:
        """Measures the watched parameters among these; None: all that were not measured in this step."""
        if not self._store.flags.value:
            return
        try:
            tensors: list[torch.Tensor | None] = []
            for each in self._parameters:
                tensor = each.get()
                wanted = not each.measured if ids is None else id(tensor) in ids
                each.measured |= wanted
                for kind in each.entries:
                    found = None if tensor is None or not wanted else tensor if kind == "param" else tensor.grad
                    tensors.append(_local(found))
            if any(tensor is not None for tensor in tensors):
                self._accumulate(tensors)
        except Exception as error:
            if self._store.strict:
                raise
            self._skip([e for each in self._parameters for e in each.entries.values()], f"{error!r}")
            self._parameters = []

    def _accumulate(self, tensors: list[torch.Tensor | None]) -> None:
        owners = [(each, kind) for each in self._parameters for kind in each.entries]
        if self._batch is None:
            states = [each.entries[kind].state for each, kind in owners]
            self._batch = _native.Batch(
                [state.moments for state in states],
                [state.counters for state in states],
                [state.histogram for state in states],
                [state.active for state in states],
                [state.channel_dim for state in states],
                states[0].low,
                states[0].high,
            )
        for number, problem in self._batch.accumulate(tensors):
            owner, kind = owners[number]
            self._mend(owner, kind, tensors[number], problem)

    def _mend(self, owner: Parameter, kind: str, tensor: torch.Tensor | None, problem: str) -> None:
        """A tensor could not be measured: puts a state in place that fits it, or gives the site up."""
        entry = owner.entries[kind]
        module = owner.module()
        assert tensor is not None
        assert module is not None
        self._batch = None
        if tensor.layout == torch.strided and tensor.dtype in _native.DTYPES:
            device, width, dim = placing(Slot(module, owner.key), tensor, entry.keep_channels, tensor.device)
            if not self._store.fits(device, width, 1):
                width, entry.keep_channels = 1, False
            if (device, width) != (entry.places[-1].device, entry.places[-1].channels):
                self._store.place(entry, device, width, dim)
                accumulate(tensor, entry.state)
                return
        if self._store.strict:
            raise RuntimeError(f"hookstats: {entry.site} cannot be measured: {problem}")
        del owner.entries[kind]
        self._skip([entry], problem)

    def close_step(self) -> None:
        """What was not measured before is; then the next step begins."""
        self.measure()
        for each in self._parameters:
            each.measured = False


def kinds_of(parameter: torch.Tensor, kinds: tuple[str, ...]) -> list[str]:
    """The sites that a parameter has: one that is frozen has no gradient."""
    return [kind for kind in kinds if kind == "param" or parameter.requires_grad]


def placing(
    slot: Slot, tensor: torch.Tensor, keep_channels: bool, default: torch.device
) -> tuple[torch.device, int, int]:
    """Device, width and channel dimension of the state for a parameter or a gradient; `default` for a meta tensor."""
    local = _local(tensor)
    channels = parameter_channels(slot, tensor if local is None else local)
    width = channels.width if keep_channels and channels.width else 1
    device = tensor.device if tensor.device.type in ("cpu", "cuda") else default
    return device, width, channels.dim or 0


def _local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor itself; of a DTensor, this process's part."""
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, torch.Tensor) else tensor


def watch_optimizers(parameters: Parameters) -> Any:
    """Measures before every optimizer step, until the returned handle is removed or nobody holds `parameters`."""
    held = weakref.ref(parameters)

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found = held()
        if found is not None:
            found.before_optimizer_step(optimizer, args, kwargs)

    return register_optimizer_step_pre_hook(hook)
