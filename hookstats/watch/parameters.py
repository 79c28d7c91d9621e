"""The parameters of a model and their gradients: read in one launch for each dtype when an optimizer steps.

Then gradients are whole: accumulated over microbatches, reduced over ranks, clipped, and not yet zeroed. What an
optimizer unscales itself (a fused one, with a GradScaler) is unscaled here, too; what a closure computes is read behind
its first call; of an optimizer inside another one, the outer counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hookstats import _native
from hookstats.modules.channels import parameter_channels
from hookstats.modules.selection import Slot
from hookstats.numbers.fields import Site
from hookstats.watch.binding import SiteBinder
from hookstats.watch.memory import Entry, SiteState, Store, accumulate, local_part
from hookstats.watch.scaling import Scaling

_MOST_PLACES = 8  # widths that a site has memory for; then it keeps totals
_MOST_BATCHED = 8  # times that a site is in a batch, on average: optimizers that are made anew do not pile up


class Parameter:
    """One watched parameter: where the model keeps it, its sites by tensor kind. It does not keep the model alive."""

    def __init__(self, number: int, slot: Slot) -> None:
        self.number = number
        self.module = weakref.ref(slot.module)
        self.key = slot.key
        self.entries: dict[str, Entry] = {}  # of what is still measured
        self.copy_bytes = 0  # of the budget
        self.measured: dict[str, bool] = {}  # by kind, in the open step: whether by an optimizer
        self.is_unclipped = False  # its gradient was read before clipping, in the open step

    def measures(self, kind: str) -> bool:
        """Whether it has such a site that was not given up."""
        return kind in self.entries and not self.entries[kind].given_up

    def slot(self) -> Slot | None:
        module = self.module()
        return None if module is None else Slot(module, self.key)

    def get(self) -> torch.Tensor | None:
        slot = self.slot()
        return None if slot is None else slot.get()


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

    def among(self, tensors: Iterable[torch.Tensor]) -> list[Parameter]:
        """Those that these tensors are, in the order of the model."""
        if self.may_be_outdated:
            self._look_again()
        found = {each.number: each for tensor in tensors for each in self._who_keeps(tensor)}
        return [found[number] for number in sorted(found)]

    def _who_keeps(self, tensor: torch.Tensor) -> list[Parameter]:
        keepers = self._keepers.get(id(tensor), [])
        if keepers and all(each.get() is tensor for each in keepers):
            return keepers
        stranger = self._strangers.get(id(tensor))
        if not keepers and stranger is not None and stranger() is tensor:
            return []
        self._look_again()
        if id(tensor) not in self._keepers:
            self._strangers[id(tensor)] = weakref.ref(tensor)
        return self._keepers.get(id(tensor), [])

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

    def __init__(self, store: Store, binder: SiteBinder) -> None:
        self._store = store
        self._binder = binder
        self._known: dict[tuple[int, ...], Any] = {}  # by the sites' Entry.index
        self._members = 0  # of all that are known
        self._captured: list[Any] = []  # no longer used, but CUDA graphs read what they have

    def accumulate(self, owners: list[tuple[Parameter, str]], tensors: list[torch.Tensor | None]) -> None:
        """A tensor for each owner; None: nothing of it."""
        if all(tensor is None for tensor in tensors):
            return
        entries = [owner.entries[kind] for owner, kind in owners]
        key = tuple(entry.index for entry in entries)
        batch = self._known.get(key)
        if batch is None:
            batch = self._new(key, [entry.state for entry in entries])
        for number, problem in batch.accumulate(tensors):
            owner, kind = owners[number]
            self._rebind(owner, kind, tensors[number], problem)

    def _new(self, key: tuple[int, ...], states: list[SiteState]) -> Any:
        if self._members > _MOST_BATCHED * len(self._store.entries):
            self._forget()
        batch = self._known[key] = _native.Batch(
            [state.moments for state in states],
            [state.counters for state in states],
            [state.histogram for state in states],
            [state.active for state in states],
            [state.channel_dim for state in states],
            states[0].low,
            states[0].high,
        )
        self._members += len(key)
        return batch

    def _forget(self) -> None:
        """States have moved, sites were given up, or there are too many."""
        self._captured += [batch for batch in self._known.values() if batch.is_captured()]
        self._known.clear()
        self._members = 0

    def _rebind(self, owner: Parameter, kind: str, tensor: torch.Tensor | None, problem: str) -> None:
        """A tensor could not be measured: puts a state in place that fits it, or gives the site up."""
        entry, slot = owner.entries[kind], owner.slot()
        assert tensor is not None
        assert slot is not None
        self._forget()
        if tensor.layout == torch.strided and tensor.dtype in _native.DTYPES:
            device, width, dim = placing(slot, tensor, entry.keep_channels, tensor.device)
            with self._store.lock:
                if not self._has_room(entry, device, width):
                    width, entry.keep_channels = 1, False
                moves = (device, width) != (entry.places[-1].device, entry.places[-1].channels)
                has_room = self._has_room(entry, device, width)
                if moves and has_room:
                    self._store.place(entry, device, width, dim)
            if moves and has_room:
                accumulate(tensor, entry.state)
                return
            if moves:
                problem = self._store.no_room(width, 1)
        self._binder.leave_out([entry], problem)

    def _has_room(self, entry: Entry, device: torch.device, width: int) -> bool:
        if entry.place_at(device, width) is not None:
            return True
        return (width == 1 or len(entry.places) < _MOST_PLACES) and self._store.make_room(device, width, 1)


class Parameters:
    """Measures parameters and gradients, those of an optimizer when it steps, all others when the step ends."""

    def __init__(
        self, store: Store, kinds: tuple[str, ...], binder: SiteBinder, default: torch.device, scaling: Scaling | None
    ) -> None:
        """default: the device of what lies on none."""
        self._store = store
        self._kinds = kinds
        self._binder = binder
        self._device = default
        self._scaling = scaling
        self._parameters = ByIdentity()
        self._batches = Batches(store, binder)
        self._copies: list[tuple[Parameter, torch.Tensor]] = []  # of their values, while an optimizer steps
        self._depth = 0  # of optimizers that step inside each other
        self._readings = 0

    def add(self, name: str, slot: Slot, keep_channels: bool) -> None:
        """Watches a parameter."""
        tensor = slot.get()
        assert tensor is not None
        device, width, dim = placing(slot, tensor, keep_channels, self._device)
        parameter = Parameter(len(self._parameters.all), slot)
        for kind in kinds_of(tensor, self._kinds):
            entry = self._store.add(Site(name, kind), device, width, dim, keep_channels and width > 1)
            entry.is_parameter = True
            entry.channel_dim = dim
            parameter.entries[kind] = entry
        is_there = not isinstance(tensor, nn.parameter.UninitializedParameter) and not tensor.is_meta
        if "param_update" in parameter.entries and is_there:
            self._may_copy(parameter, local_part(tensor))
        self._parameters.all.append(parameter)

    def _may_copy(self, each: Parameter, local: torch.Tensor) -> bool:
        """Whether a copy stays inside the budget, once and for all copies of this size; else the update is skipped."""
        if local.nbytes <= each.copy_bytes:
            return True
        if self._store.claim(local.device, local.nbytes - each.copy_bytes):
            each.copy_bytes = local.nbytes
            return True
        problem = (
            f"a copy of it would not fit into what is left of memory_budget={self._store.memory_budget} bytes, it is "
            f"of {local.nbytes}: raise it, or choose fewer modules="
        )
        self._binder.give_up([each.entries["param_update"]], problem)
        return False

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
        stepping = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if "param_update" in self._kinds:
            with self._store.flags.span(self._device):
                self._carefully(self._copy, stepping)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self.measure(stepping, getattr(optimizer, "grad_scale", None))
            return None
        first = True

        def measured_closure() -> Any:
            nonlocal first
            loss = closure()
            if first:
                first = False
                self.measure(stepping)
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
        if self._depth == 0 and self._copies:
            with self._store.flags.span(self._device):
                self._carefully(self._measure_updates)

    def measure(self, stepping: list[torch.Tensor] | None = None, grad_scale: torch.Tensor | None = None) -> None:
        """Measures the watched parameters among those that step; None: all that were not measured in this step."""
        if self._store.flags.value:
            with nullcontext() if stepping is None else self._store.flags.span(self._device):
                self._carefully(self._measure, stepping, grad_scale)

    def _measure(self, stepping: list[torch.Tensor] | None, grad_scale: torch.Tensor | None) -> None:
        self._readings += 1
        owners: list[tuple[Parameter, str]] = []
        values: list[torch.Tensor | None] = []
        for each in self._parameters.all if stepping is None else self._parameters.among(stepping):
            tensor = each.get()
            for kind, entry in each.entries.items():
                if kind == "param_update" or entry.given_up:
                    continue
                value = None
                if tensor is not None and self._is_wanted(each, kind, by_optimizer=stepping is not None):
                    value = local_part(tensor if kind == "param" else tensor.grad)
                if value is not None:
                    if kind not in each.measured:
                        entry.reading = self._readings
                    each.measured[kind] = stepping is not None
                    if kind == "param_grad" and grad_scale is not None:
                        value = value / grad_scale.to(value.device)
                owners.append((each, kind))
                values.append(value)
        self._batches.accumulate(owners, values)

    def measure_gradients(self) -> None:
        """Measures the gradients that are there and were not, in this step; optimizers do not measure them again."""
        if self._store.flags.value:
            with self._store.flags.span(self._device):
                self._carefully(self._measure_gradients)

    def _measure_gradients(self) -> None:
        self._readings += 1
        owners = [(each, "param_grad") for each in self._parameters.all if each.measures("param_grad")]
        gradients: list[torch.Tensor | None] = []
        for each, kind in owners:
            tensor = None if kind in each.measured else each.get()
            gradient = None if tensor is None else local_part(tensor.grad)
            if gradient is not None:
                each.measured[kind] = each.is_unclipped = True
                each.entries[kind].reading = self._readings
            gradients.append(gradient)
        self._batches.accumulate(owners, gradients)

    @staticmethod
    def _is_wanted(each: Parameter, kind: str, by_optimizer: bool) -> bool:
        if kind == "param_grad" and each.is_unclipped:
            return False
        if not by_optimizer:
            return kind not in each.measured
        if each.measured.get(kind) is False:  # already in this step, when somebody asked
            each.measured[kind] = True
            return False
        return True

    def _copy(self, stepping: list[torch.Tensor]) -> None:
        self._copies = []
        for each in self._parameters.among(stepping):
            local = local_part(each.get())
            if local is not None and each.measures("param_update") and self._may_copy(each, local):
                self._copies.append((each, local.detach().clone()))

    def _measure_updates(self) -> None:
        copies, self._copies = self._copies, []
        differences: list[torch.Tensor | None] = []
        for each, before in copies:
            now = local_part(each.get())
            if now is not None and now.shape == before.shape:
                differences.append(torch.sub(now.detach(), before, out=before))
            else:
                differences.append(None)
        self._batches.accumulate([(each, "param_update") for each, _ in copies], differences)

    def _carefully(self, measure: Callable[..., None], *args: Any) -> None:
        """An internal failure stops the measuring, not the training."""
        if not self._parameters.all:
            return
        try:
            measure(*args)
        except Exception as error:
            if self._store.strict:
                raise
            self._binder.give_up(
                [entry for each in self._parameters.all for entry in each.entries.values()], f"{error!r}"
            )
            self._parameters, self._copies = ByIdentity(), []

    def close_step(self) -> None:
        """What was not measured before is; then the next step begins."""
        self.measure()
        self.reset()

    def begin_step(self) -> None:
        """No optimizer is stepping: one that raised did not say that it ended."""
        self._depth = 0

    def reset(self) -> None:
        """Nothing was measured in the open step; parameters may have been replaced since, or shared."""
        for each in self._parameters.all:
            each.measured.clear()
            each.is_unclipped = False
        self._copies = []
        self._parameters.may_be_outdated = True


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
