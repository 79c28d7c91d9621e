"""Plan of what attach will measure: the chosen modules and parameters, their sites, and the memory that these take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from hookstats.modules.channels import ChannelAxis, find_channels, find_input_channels, is_vector, match_names
from hookstats.modules.heads import NO_GROUPS, GroupSizes, group_sizes
from hookstats.modules.selection import Modules, Slot, clean_names, find_root, select
from hookstats.modules.sharding import find_flattened
from hookstats.numbers.kinds import kind_of
from hookstats.watch.arguments import OF_LANGUAGE, OF_PARAMETERS, Channels, channel_names, device_of
from hookstats.watch.batches import find_place
from hookstats.watch.hooks import InputHook, Kinds, ModelInputHook, SiteHook, SiteSpec
from hookstats.watch.local_gradients import SAMPLES as OF_REDUCTION
from hookstats.watch.memory import StateStore
from hookstats.watch.samples import OF_BUFFERS, may_be_sampled
from hookstats.watch.states import KIND as STATES

BUFFER = "buffer"


class TooMuch(NamedTuple):
    """Too little memory: what keeps totals only, and the bytes on a device that channels would have taken."""

    which: str
    size: int


class Plan:
    """The plan for one model. ValueError where there is nothing to measure."""

    def __init__(
        self,
        model: nn.Module,
        modules: Modules,
        exclude: Modules,
        kinds: tuple[str, ...],
        channels: Channels,
    ) -> None:
        self.kinds = kinds
        self.of_parameters = tuple(kind for kind in kinds if kind in OF_PARAMETERS)
        self._of_outputs = _pair(kinds, "output", "grad_output")
        self._of_inputs = _pair(kinds, "input", "grad_input")
        has_buffers = any(kind_of(kind).of == "buffer" for kind in self.of_parameters)
        self.modules, chosen = select(model, modules, exclude, bool(self.of_parameters), has_buffers)
        self.parameters = {name: slot for name, slot in chosen.items() if self._is_measured(slot)}
        if not any(self._of_outputs + self._of_inputs) and "adjoint" not in kinds:
            self.modules = {}
        self._root = find_root(model, exclude) if "model_input" in kinds else None
        if "" in self.modules and self._of_inputs[0]:
            self._root = None  # it is measured as any other module's
        is_of_modules = not set(kinds) <= set(OF_LANGUAGE)
        if is_of_modules and not self.modules and not self.parameters and self._root is None:
            raise ValueError(f"modules: expected to select something that has {' or '.join(kinds)}, selected nothing")
        is_root_given = self._root is not None and isinstance(channels.dim, Mapping) and "" in channels.dim
        names = [*self.modules, *([""] if is_root_given else [])]
        self._dims = match_names("Channels.dim", channels.dim, names)
        self._channels = {name: find_channels(name, m, self._dims.get(name)) for name, m in self.modules.items()}
        self.device = device_of(model) or torch.device("cpu")  # of what lies on none
        self._devices = {name: device_of(module) or self.device for name, module in self.modules.items()}
        self.keeping = channel_names(channels.which, self.modules, self.parameters)  # modules and parameters
        self.keeping |= {""} if is_root_given else set()
        cut = find_flattened(model)  # what is left there of a weight is no vector of channels
        self.keeping -= {name for name, slot in self.parameters.items() if slot.module in cut and not slot.is_buffer}
        self._groups = group_sizes(clean_names(model)) | self._match_groups(channels)
        self.trained = frozenset(
            name for name, m in self.modules.items() if any(parameter.requires_grad for parameter in m.parameters())
        )

    def _is_measured(self, slot: Slot) -> bool:
        """Return whether a parameter, or a buffer, has sites: of buffers, samples are taken of some alone."""
        tensor = slot.get()
        return not slot.is_buffer or (tensor is not None and bool(kinds_of(slot, tensor, self.of_parameters)))

    def _match_groups(self, channels: Channels) -> dict[str, GroupSizes]:
        """The caller's, of outputs and parameters."""
        given = match_names("Channels.group_size", channels.group_size, [*self.modules, *self.parameters])
        for name, size in given.items():
            width = self._channels[name].width if name in self._channels else None
            if width is not None and width % size:
                raise ValueError(
                    f"Channels.group_size: expected a number that divides the {width} channels of {name!r}, got {size}"
                )
        return {name: GroupSizes(size, None) for name, size in given.items()}

    def group_size_of(self, parameter: str) -> int | None:
        """Return how many of its channels belong together: of a module's weight, as many as of the module's output."""
        module, _, key = parameter.rpartition(".")
        found = self._groups.get(parameter) or (self._groups.get(module) if key == "weight" else None)
        return (found or NO_GROUPS).outputs

    def hooks(self) -> Iterator[tuple[nn.Module, SiteSpec, type[SiteHook], torch.device]]:
        """Each hook's module, sites, kind and device."""
        if self._root is not None:
            channels = find_input_channels(self._root, self._dims.get("")) or ChannelAxis(None, None)
            spec = SiteSpec("", "", channels, "" in self.keeping, ("input", None), self._root)
            yield self._root, spec, ModelInputHook, self.device
        for name, module in self.modules.items():
            inputs = find_input_channels(module, self._dims.get(name))
            keeps, device, groups = name in self.keeping, self._devices[name], self._groups.get(name, NO_GROUPS)
            if any(self._of_outputs):
                outputs, kinds = self._channels[name], self._of_outputs
                yield module, SiteSpec(name, "", outputs, keeps, kinds, module, groups.outputs), SiteHook, device
            if any(self._of_inputs) and inputs is not None:
                kinds = self._of_inputs
                yield module, SiteSpec(name, "", inputs, keeps, kinds, module, groups.inputs), InputHook, device

    def reserve(self, store: StateStore) -> TooMuch | None:
        """Takes the memory. Where channels would go beyond the budget, vectors keep totals only; then all sites do.

        ValueError if these do, too.
        """
        too_much = None
        found = {name: slot.get() for name, slot in self.parameters.items() if not slot.is_buffer}
        vectors = {name for name, tensor in found.items() if tensor is not None and is_vector(tensor)}
        for which, left in (("vectors (biases, the weights of norms)", vectors), ("all sites", self.keeping)):
            size = max((n for device, n in self._sizes(store).items() if n > store.budget_on(device)), default=None)
            if size is not None and left & self.keeping:
                self.keeping = self.keeping - left
                too_much = TooMuch(which, max(size, 0 if too_much is None else too_much.size))
        for device, size in self._sizes(store).items():
            if size > store.budget_on(device):
                needed = size + store.memory_budget - store.budget_on(device)
                raise ValueError(
                    f"memory_budget: expected at least {needed} bytes on {device}, for the totals alone with histogram="
                    f"{store.histogram}, got {store.memory_budget}: raise it, choose fewer modules= or tensors=, or a "
                    "histogram= of fewer bins, or None"
                )
            store.reserve(device, size // 8)
        return too_much

    def _sizes(self, store: StateStore) -> dict[torch.device, int]:
        total: dict[torch.device, int] = {}
        for _, spec, _, device in self.hooks():
            width = (spec.channels.width or 1) if spec.keep_channels else 1
            total[device] = total.get(device, 0) + len(spec.sites) * store.site_bytes(width)
        for name, slot in self.parameters.items():
            tensor = slot.get()
            assert tensor is not None
            device, width, _ = find_place(slot, tensor, name in self.keeping, self.device)
            for kind in kinds_of(slot, tensor, self.of_parameters):
                is_sample = kind_of(kind).is_sample
                size = store.site_bytes(1 if is_sample else width, has_bins=not is_sample)
                total[device] = total.get(device, 0) + size
        return total


def _pair(kinds: tuple[str, ...], tensor: str, gradient: str) -> Kinds:
    return tensor if tensor in kinds else None, gradient if gradient in kinds else None


def kinds_of(slot: Slot, tensor: torch.Tensor, kinds: tuple[str, ...]) -> list[str]:
    """Return the sites that a parameter has, or a buffer, before an optimizer shows what it keeps.

    One that is frozen has no gradient, and nothing updates it.
    """
    if slot.is_buffer:
        return [kind for kind in kinds if kind == BUFFER or (kind == OF_BUFFERS and may_be_sampled(tensor))]
    return [
        kind
        for kind in kinds
        if kind_of(kind).of == "parameter"
        and kind not in (STATES, OF_REDUCTION)
        and (kind == "param" or tensor.requires_grad)
    ]
