"""Runs of a model that leave it as it was: random numbers, buffers, attributes, hooks. Over torch alone."""

from __future__ import annotations

import contextlib
import random
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from hookstats.modules.order import STATISTICS, ModuleHook

_OWN = frozenset(vars(nn.Module())) - {"_buffers", "_parameters", "_modules", "training"}  # hooks, by torch itself


class RandomState:
    """The generators of the process, of devices and of a model's own attributes, as they are now."""

    def __init__(self, model: nn.Module, devices: set[torch.device]) -> None:
        held = (each for module in model.modules() for each in vars(module).values())
        self._generators = [each for each in held if isinstance(each, torch.Generator)]
        self._devices = sorted((device for device in devices if device.type not in ("cpu", "meta")), key=str)
        self._python, self._numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
        self._states = self._read()

    def _read(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        states += [
            torch.get_device_module(device).get_rng_state(*_make_device_argument(device)) for device in self._devices
        ]
        return states + [each.get_state() for each in self._generators]

    def put_back(self) -> None:
        """Sets the generators to what they were."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._states[0])
        for device, state in zip(self._devices, self._states[1:], strict=False):
            torch.get_device_module(device).set_rng_state(state, *_make_device_argument(device))
        for generator, state in zip(self._generators, self._states[1 + len(self._devices) :], strict=True):
            generator.set_state(state)

    def has_moved(self) -> bool:
        """Return whether random numbers were drawn since."""
        if any(not torch.equal(now, before) for now, before in zip(self._read(), self._states, strict=True)):
            return True
        name, keys, *rest = np.random.get_state()  # noqa: NPY002
        before, keys_before, *rest_before = self._numpy
        same = name == before and rest == rest_before and np.array_equal(keys, keys_before)
        return not same or random.getstate() != self._python


def _make_device_argument(device: torch.device) -> tuple[torch.device, ...]:
    """Return the argument that a device's module takes: none for MPS, of which there is one."""
    return () if device.type == "mps" else (device,)


class ModuleState:
    """The modes, buffers and plain attributes of a model's modules, as they are now. Parameters are not copied.

    Attributes are put back by name; of lists, dicts and sets among them the items, too. Tensors that are buffers,
    attributes or such items get their values back, if these have changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(module, dict(vars(module))) for module in model.modules()]
        self._modes = [(module, module.training) for module in model.modules()]  # which scripted ones keep elsewhere
        self._parameters = [(name, each, _version(each)) for name, each in model.named_parameters()]
        self._containers = list[tuple[Any, Any]]()
        self._tensors = list[tuple[torch.Tensor, torch.Tensor]]()
        self._versions = list[int]()
        seen = set[int]()
        for _, attributes in self._modules:
            for name, value in attributes.items():
                if name not in _OWN and id(value) not in seen:
                    seen.add(id(value))
                    self._keep(value, seen)

    def _keep(self, value: Any, seen: set[int]) -> None:
        items: list[Any] = [value]
        if type(value) in (dict, list, set, deque) or type(value).__name__ == "OrderedDict":
            self._containers.append((value, value.copy()))
            items = list(value.values() if isinstance(value, dict) else value)
        for tensor in items:
            is_plain = isinstance(tensor, torch.Tensor) and not isinstance(tensor, nn.Parameter)
            if is_plain and not tensor.is_meta and (tensor is value or id(tensor) not in seen):
                seen.add(id(tensor))
                self._tensors.append((tensor, tensor.detach().clone()))
                self._versions.append(_version(tensor))

    def put_back(self) -> None:
        """Makes attributes, containers and tensors what they were."""
        for module, attributes in self._modules:
            now = vars(module)
            for name in [name for name in now if name not in attributes]:
                del now[name]
            now.update(attributes)
        for module, mode in self._modes:
            if module.training != mode:
                module.training = mode
        for container, items in self._containers:
            container.clear()
            (container.update if isinstance(container, dict | set) else container.extend)(items)
        with torch.no_grad():
            for number, (tensor, values) in enumerate(self._tensors):
                if self._versions[number] != _version(tensor) or not torch.equal(tensor, values):
                    tensor.detach().copy_(values)
                    self._versions[number] = _version(tensor)

    def find_written(self) -> list[str]:
        """Return the parameters that forwards have written themselves."""
        return [name for name, each, version in self._parameters if _version(each) != version]

    def set_mode(self, training: bool) -> None:
        """Puts every module into this mode: by its attribute, as `train()` of some merges weights."""
        for module, _ in self._modules:
            module.training = training


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def unwrap_parallel(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel or a compiled module: these communicate, and compile anew."""
    while True:
        inside = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inside = model.module
        if not isinstance(inside, nn.Module):
            return model
        model = inside


@contextlib.contextmanager
def pause_statistics(model: nn.Module) -> Iterator[None]:
    """Take our measuring hooks off for a while. Edits stay: they are part of what the model computes."""
    kept = []
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            kept.append((hooks, list(hooks.items())))
            for key, hook in list(hooks.items()):
                if isinstance(hook, ModuleHook) and hook.stage == STATISTICS:
                    del hooks[key]
    try:
        yield
    finally:
        for hooks, items in kept:
            hooks.clear()
            hooks.update(items)


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Parts that are compiled run as they are written, so that their modules are seen."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def clear_autocast_cache() -> Iterator[None]:
    """Weights that autocast has cast without gradients are not those of training."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
