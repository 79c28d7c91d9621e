"""The parameters of a model and their gradients: read in one launch for each dtype when an optimizer steps.

Then gradients are whole: accumulated over microbatches, reduced over ranks, clipped, and not yet zeroed. What an
optimizer unscales itself (a fused one, with a GradScaler) is unscaled here, too; what a closure computes is read behind
its first call; of an optimizer inside another one, the outer counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hookstats import _native
from hookstats.modules.channels import parameter_channels
from hookstats.modules.selection import Slot
from hookstats.numbers.fields import Site
from hookstats.watch.memory import Entry, Store, accumulate, local_part
from hookstats.watch.scaling import Scaling

Skip = Callable[[list[Entry], str], None]


class Parameter:
    """One watched parameter: where the model keeps it, its sites by tensor kind. It does not keep the model alive."""

    def __init__(self, slot: Slot, entries: dict[str, Entry]) -> None:
        self.module = weakref.ref(slot.module)
        self.key = slot.key
        self.entries = entries
        self.measured: dict[str, bool] = {}  # by kind, in the open step: whether by an optimizer
        self.is_unclipped = False  # its gradient was read before clipping, in the open step
        self.before: torch.Tensor | None = None  # a copy, while an optimizer steps

    def slot(self) -> Slot | None:
        module = self.module()
        return None if module is None else Slot(module, self.key)

    def get(self) -> torch.Tensor | None:
        slot = self.slot()
        return None if slot is None else slot.get()


class Together:
    """Sites whose tensors come at one time: one call into the extension."""

    def __init__(self, store: Store, skip: Skip) -> None:
        self.owners: list[tuple[Parameter, str]] = []
        self._store = store
        self._skip = skip
        self._batches: list[Any] = []  # the last one is used; CUDA graphs may still read what others have
        self._stale = True  # states have moved, or sites were given up

    def accumulate(self, tensors: list[torch.Tensor | None]) -> None:
        """A tensor for each owner; None: nothing of it."""
        if all(tensor is None for tensor in tensors):
            return
        owners = list(self.owners)
        if self._stale:
            states = [owner.entries[kind].state for owner, kind in owners]
            self._batches.append(
                _native.Batch(
                    [state.moments for state in states],
                    [state.counters for state in states],
                    [state.histogram for state in states],
                    [state.active for state in states],
                    [state.channel_dim for state in states],
                    states[0].low,
                    states[0].high,
                )
            )
            self._stale = False
        for number, problem in self._batches[-1].accumulate(tensors):
            owner, kind = owners[number]
            self._rebind(owner, kind, tensors[number], problem)

    def _rebind(self, owner: Parameter, kind: str, tensor: torch.Tensor | None, problem: str) -> None:
        """A tensor could not be measured: puts a state in place that fits it, or gives the site up."""
        entry, slot = owner.entries[kind], owner.slot()
        assert tensor is not None
        assert slot is not None
        self._stale = True
        if tensor.layout == torch.strided and tensor.dtype in _native.DTYPES:
            device, width, dim = placing(slot, tensor, entry.keep_channels, tensor.device)
            if not self._store.fits(device, width, 1):
                width, entry.keep_channels = 1, False
            if (device, width) != (entry.places[-1].device, entry.places[-1].channels):
                self._store.place(entry, device, width, dim)
                accumulate(tensor, entry.state)
                return
        if self._store.strict:
            raise RuntimeError(f"hookstats: {entry.site} cannot be measured: {problem}")
        self.owners.remove((owner, kind))
        self._skip([entry], problem)


class Parameters:
    """Measures parameters and gradients, those of an optimizer when it steps, all others when the step ends."""

    def __init__(
        self, store: Store, kinds: tuple[str, ...], skip: Skip, default: torch.device, scaling: Scaling | None
    ) -> None:
        """default: the device of what lies on none."""
        self._store = store
        self._kinds = kinds
        self._skip = skip
        self._device = default
        self._scaling = scaling
        self._parameters: list[Parameter] = []
        self._values = Together(store, skip)
        self._updates = Together(store, skip)
        self._copied_bytes: dict[torch.device, int] = {}
        self._depth = 0  # of optimizers that step inside each other
        self._readings = 0

    def add(self, name: str, slot: Slot, keep_channels: bool) -> None:
        """Watches a parameter."""
        tensor = slot.get()
        assert tensor is not None
        device, width, dim = placing(slot, tensor, keep_channels, self._device)
        parameter = Parameter(slot, {})
        for kind in kinds_of(tensor, self._kinds):
            entry = self._store.add(Site(name, kind), device, width, dim, keep_channels and width > 1)
            entry.is_parameter = True
            parameter.entries[kind] = entry
            if kind != "param_update":
                self._values.owners.append((parameter, kind))
            elif self._may_copy(tensor, device):
                self._updates.owners.append((parameter, kind))
            else:
                self._skip([entry], "a copy of it would not fit into memory_budget: choose fewer modules=")
        self._parameters.append(parameter)

    def _may_copy(self, tensor: torch.Tensor, device: torch.device) -> bool:
        if isinstance(tensor, nn.parameter.UninitializedParameter):
            return True  # nothing yet
        size = self._copied_bytes.get(device, 0) + tensor.numel() * tensor.element_size()
        if size + self._store.bytes_on(device) > self._store.memory_budget:
            return False
        self._copied_bytes[device] = size
        return True

    def before_optimizer_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """For every optimizer of the process: measures those of its parameters that are watched.

        Returns None, or other (args, kwargs) for its step.
        """
        if torch.compiler.is_compiling():
            return None
        self._depth += 1
        if self._depth > 1 or not self._store.flags.value:
            return None
        if self._scaling is not None:
            self._watch_scale(self._scaling, optimizer)
        ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        with self._store.flags.span(self._device):
            self._carefully(self._copy, ids)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self.measure(ids, getattr(optimizer, "grad_scale", None))
            return None
        first = True

        def measured_closure() -> Any:
            nonlocal first
            loss = closure()
            if first:
                first = False
                self.measure(ids)
            return loss

        if len(args) > 1:
            return (args[0], measured_closure, *args[2:]), kwargs
        return args, kwargs | {"closure": measured_closure}

    def _watch_scale(self, scaling: Scaling, optimizer: Optimizer) -> None:
        try:
            scaling.before_optimizer_step(optimizer)
        except Exception:  # the scale of the step's beginning will do
            if self._store.strict:
                raise

    def after_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Measures by how much the step has changed them."""
        if torch.compiler.is_compiling():
            return
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0:
            with self._store.flags.span(self._device):
                self._carefully(self._measure_updates)

    def measure(self, ids: set[int] | None = None, grad_scale: torch.Tensor | None = None) -> None:
        """Measures the watched parameters among these; None: all that were not measured in this step."""
        if self._store.flags.value:
            with nullcontext() if ids is None else self._store.flags.span(self._device):
                self._carefully(self._measure, ids, grad_scale)

    def _measure(self, ids: set[int] | None, grad_scale: torch.Tensor | None) -> None:
        found = {each: each.get() for each in self._parameters}
        if ids is not None and ids.isdisjoint(map(id, found.values())):
            return
        self._readings += 1
        tensors: list[torch.Tensor | None] = []
        for each, kind in self._values.owners:
            tensor = found[each]
            if tensor is None or not self._is_wanted(each, kind, None if ids is None else id(tensor) in ids):
                tensors.append(None)
                continue
            value = local_part(tensor if kind == "param" else tensor.grad)
            if value is not None and kind == "param_grad" and grad_scale is not None:
                value = value / grad_scale.to(value.device)
            if value is not None:
                if kind not in each.measured:
                    each.entries[kind].reading = self._readings
                each.measured[kind] = ids is not None
            tensors.append(value)
        self._values.accumulate(tensors)

    def measure_gradients(self) -> None:
        """Measures the gradients that are there and were not, in this step; optimizers do not measure them again."""
        if self._store.flags.value:
            with self._store.flags.span(self._device):
                self._carefully(self._measure_gradients)

    def _measure_gradients(self) -> None:
        self._readings += 1
        gradients: list[torch.Tensor | None] = []
        for each, kind in self._values.owners:
            tensor = each.get() if kind == "param_grad" and kind not in each.measured else None
            gradient = None if tensor is None else local_part(tensor.grad)
            if gradient is not None:
                each.measured[kind] = each.is_unclipped = True
                each.entries[kind].reading = self._readings
            gradients.append(gradient)
        self._values.accumulate(gradients)

    @staticmethod
    def _is_wanted(each: Parameter, kind: str, by_optimizer: bool | None) -> bool:
        """by_optimizer: whether one has it that steps now; None: none steps."""
        if kind == "param_grad" and each.is_unclipped:
            return False
        if by_optimizer is None:
            return kind not in each.measured
        if by_optimizer and each.measured.get(kind) is False:  # already in this step, when somebody asked
            each.measured[kind] = True
            return False
        return by_optimizer

    def _copy(self, ids: set[int]) -> None:
        for each, _ in self._updates.owners:
            tensor = each.get()
            local = local_part(tensor) if id(tensor) in ids else None
            each.before = None if local is None else local.detach().clone()

    def _measure_updates(self) -> None:
        differences: list[torch.Tensor | None] = []
        for each, _ in self._updates.owners:
            before, each.before = each.before, None
            now = local_part(each.get())
            if before is not None and now is not None and now.shape == before.shape:
                differences.append(torch.sub(now.detach(), before, out=before))
            else:
                differences.append(None)
        self._updates.accumulate(differences)

    def _carefully(self, measure: Callable[..., None], *args: Any) -> None:
        """An internal failure stops the measuring, not the training."""
        if not self._parameters:
            return
        try:
            measure(*args)
        except Exception as error:
            if self._store.strict:
                raise
            self._skip([entry for each in self._parameters for entry in each.entries.values()], f"{error!r}")
            self._parameters = []
            self._values.owners.clear()
            self._updates.owners.clear()

    def close_step(self) -> None:
        """What was not measured before is; then the next step begins."""
        self.measure()
        self.reset()

    def begin_step(self) -> None:
        """No optimizer is stepping: one that raised did not say that it ended."""
        self._depth = 0

    def reset(self) -> None:
        """Nothing was measured in the open step."""
        for each in self._parameters:
            each.measured.clear()
            each.is_unclipped = False
            each.before = None


def kinds_of(parameter: torch.Tensor, kinds: tuple[str, ...]) -> list[str]:
    """The sites that a parameter has: one that is frozen has no gradient, and nothing updates it."""
    return [kind for kind in kinds if kind == "param" or parameter.requires_grad]


def placing(
    slot: Slot, tensor: torch.Tensor, keep_channels: bool, default: torch.device
) -> tuple[torch.device, int, int]:
    """Device, width and channel dimension of the state for a parameter or a gradient; `default` for a meta tensor."""
    local = local_part(tensor)
    channels = parameter_channels(slot, tensor if local is None else local)
    width = channels.width if keep_channels and channels.width else 1
    device = tensor.device if tensor.device.type in ("cpu", "cuda") else default
    return device, width, channels.dim or 0


def watch_optimizers(parameters: Parameters) -> list[Any]:
    """Measures at every optimizer step, until the returned handles are removed or nobody holds `parameters`."""
    held = weakref.ref(parameters)

    def before(*args: Any) -> Any:
        found = held()
        return None if found is None else found.before_optimizer_step(*args)

    def after(*args: Any) -> None:
        found = held()
        if found is not None:
            found.after_optimizer_step(*args)

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    for handle in handles:
        weakref.finalize(parameters, handle.remove)
    return handles
