"""Which tensors of which modules are watched, and along which dimension their channels lie. No device work."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

Modules: TypeAlias = str | Iterable[str] | Callable[[str, nn.Module], bool] | None

# Put into a module's path by what wraps it.
_WRAPPERS = {"_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
_WRAPPER_TYPES = {
    "OptimizedModule",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "ActivationWrapper",
    "AveragedModel",
}
# They pass values on, or drop some: nothing to see. Containers of this kind are never called.
_TRANSPARENT = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Channels(NamedTuple):
    """Where a tensor's channels lie. ``dim`` None: known when the tensor is seen. ``width`` None: likewise."""

    dim: int | None
    width: int | None


def clean_names(model: nn.Module) -> dict[str, nn.Module]:
    """Every module by its path without wrappers' parts; a shared module by its first path, a wrapper not at all."""
    named: dict[str, nn.Module] = {}
    seen: set[int] = set()
    waiting: list[tuple[tuple[str, ...], nn.Module]] = [((), model)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        wraps = any(cls.__name__ in _WRAPPER_TYPES for cls in type(module).__mro__)
        if not wraps:
            named.setdefault(".".join(path), module)
        children = [(path if wraps and name in _WRAPPERS else (*path, name), m) for name, m in module.named_children()]
        waiting += reversed(children)
    return named


def matches(name: str, globs: Iterable[str]) -> bool:
    """Whether a clean name matches one of the globs (``*`` crosses dots)."""
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def as_globs(argument: str, globs: str | Iterable[str], names: Iterable[str]) -> list[str]:
    """The globs as a list; ValueError for one that matches no name."""
    if not isinstance(globs, Iterable):
        raise TypeError(f"{argument}: expected globs over names, got {globs!r}")
    listed = [globs] if isinstance(globs, str) else list(globs)
    known = list(names)
    for glob in listed:
        if not isinstance(glob, str):
            raise TypeError(f"{argument}: expected globs over names, got {glob!r}")
        if not fnmatch.filter(known, glob):
            some = ", ".join(repr(name) for name in known[:8])
            raise ValueError(f"{argument}: the glob {glob!r} matches nothing; the names are {some}, ...")
    return listed


def select(model: nn.Module, modules: Modules, parameters: bool) -> tuple[dict[str, nn.Module], dict[str, Slot]]:
    """The watched modules, and (if wanted) the watched parameters, by clean name.

    None: the leaves that do something, and the children of every ModuleList; all parameters. Else what was asked for,
    and the parameters that are directly in it; globs may name parameters, too. Modules that are never called
    (ModuleList and the like) are left out whatever was asked for.
    """
    if isinstance(modules, type) or not (modules is None or callable(modules) or isinstance(modules, Iterable)):
        raise TypeError(f"modules: expected globs, a callable (name, module) -> bool, or None; got {modules!r}")
    named = clean_names(model)
    slots = _slots(named) if parameters else {}
    if modules is None:
        return _default_modules(named), slots
    if callable(modules):
        chosen = {name: module for name, module in named.items() if modules(name, module)}
        globs = []
    else:
        globs = as_globs("modules", modules, [*named, *slots])
        chosen = {name: module for name, module in named.items() if matches(name, globs)}
    inside = {id(module) for module in chosen.values()}
    slots = {name: slot for name, slot in slots.items() if id(slot.module) in inside or matches(name, globs)}
    chosen = {name: module for name, module in chosen.items() if not isinstance(module, _NEVER_CALLED)}
    if not chosen and not slots:
        raise ValueError(f"modules: expected to select at least one of {len(named)} modules, selected none")
    return chosen, slots


class Slot(NamedTuple):
    """Where a module keeps a parameter. The parameter itself may be replaced."""

    module: nn.Module
    key: str

    def get(self) -> torch.Tensor | None:
        return self.module._parameters.get(self.key)


def _slots(named: Mapping[str, nn.Module]) -> dict[str, Slot]:
    """The parameters of modules by clean name; a shared one by its first name."""
    slots: dict[str, Slot] = {}
    seen: set[int] = set()
    for name, module in named.items():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                slots[f"{name}.{key}" if name else key] = Slot(module, key)
    return slots


def parameter_channels(slot: Slot, parameter: torch.Tensor) -> Channels:
    """A weight's channels are its outputs: dimension 0, of a transposed convolution 1. One of width 1 has no channels.

    A vector (a bias, the weight of a norm) is one channel: its entries would each be a channel of one value.
    """
    if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.dim() < 2:
        return Channels(0, 1)
    dim = 1 if isinstance(slot.module, nn.modules.conv._ConvTransposeNd) else 0
    return Channels(dim, max(parameter.shape[dim], 1))


def modules_at(model: nn.Module, where: str | Iterable[str]) -> dict[str, nn.Module]:
    """The modules that one glob or several choose, by clean name. For hooks that must not miss what was asked for.

    Raises:
        TypeError: for a model or globs that are none. ValueError: for a glob that matches no module, or none that is
            ever called.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise TypeError("expected a model without DataParallel, whose replicas would share hooks across devices")
    named = clean_names(model)
    globs = as_globs("where", where, named)
    silent = never_called(model)
    for glob in globs:
        found = [name for name in named if matches(name, [glob])]
        if all(name in silent for name in found):
            raise ValueError(f"where: {glob!r} matches only {found[0]!r}, whose hooks never run: {silent[found[0]]}")
    return {name: module for name, module in named.items() if matches(name, globs) and name not in silent}


def never_called(model: nn.Module) -> dict[str, str]:
    """The modules whose forward is never called, as far as their types tell, by clean name, each with the reason."""
    silent: dict[str, str] = {}
    for name, module in clean_names(model).items():
        if isinstance(module, _NEVER_CALLED):
            silent[name] = f"a {type(module).__name__} is never called, only its children are"
        elif isinstance(module, nn.MultiheadAttention):
            silent[f"{name}.out_proj".lstrip(".")] = "MultiheadAttention uses its weight without calling it"
    return silent


def _default_modules(named: dict[str, nn.Module]) -> dict[str, nn.Module]:
    in_list = {id(child) for module in named.values() if isinstance(module, nn.ModuleList) for child in module}
    inside = {id(m) for module in named.values() if _is_opaque(module) for m in module.modules() if m is not module}
    return {
        name: module
        for name, module in named.items()
        if not isinstance(module, torch.jit.ScriptModule)  # takes no hooks
        and id(module) not in inside
        and (id(module) in in_list or _is_leaf(module))
    }


def _is_leaf(module: nn.Module) -> bool:
    is_leaf = _is_opaque(module) or next(module.children(), None) is None
    return is_leaf and not isinstance(module, _TRANSPARENT)


def _is_opaque(module: nn.Module) -> bool:
    """A leaf for its users, whatever it is made of: some of its children are never called as modules."""
    return isinstance(module, nn.MultiheadAttention) or "parametrizations" in module._modules


def _spatial_dims(module: nn.Module) -> int | None:
    """1, 2 or 3 for modules that are made for a number of spatial dimensions."""
    kinds = (nn.modules.conv._ConvNd, nn.modules.instancenorm._InstanceNorm, nn.modules.batchnorm._BatchNorm)
    named_pool = type(module).__module__ == nn.MaxPool1d.__module__
    if isinstance(module, kinds) or named_pool:
        for cls in type(module).__mro__:
            for spatial in (1, 2, 3):
                if cls.__name__.endswith(f"{spatial}d"):
                    return spatial
    return None


def natural_channels(module: nn.Module) -> Channels:
    """Where the channels of a module's output lie, from its type. Widths come from its own attributes."""
    spatial = _spatial_dims(module)
    if isinstance(module, (nn.Linear, nn.Bilinear)):
        found = Channels(-1, module.out_features)
    elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        found = Channels(-1, module.embedding_dim)
    elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        found = Channels(-1, module.normalized_shape[-1])
    elif isinstance(module, nn.modules.batchnorm._BatchNorm):
        found = Channels(1, module.num_features)
    elif isinstance(module, nn.GroupNorm):
        found = Channels(1, module.num_channels)
    elif isinstance(module, nn.modules.conv._ConvNd) and spatial:
        found = Channels(-1 - spatial, module.out_channels)
    elif isinstance(module, nn.modules.instancenorm._InstanceNorm) and spatial:
        found = Channels(-1 - spatial, module.num_features)
    else:
        found = Channels(-1 - spatial if spatial else None, None)
    lazy = not found.width or not isinstance(found.width, int)  # a Lazy module before its first forward
    return Channels(found.dim, None) if lazy else found


def input_channels(module: nn.Module, wanted: int | None) -> Channels | None:
    """The channels of a module's input; None for a module whose inputs are indices."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return None
    if wanted is not None:
        return Channels(wanted, None)
    natural = natural_channels(module)
    if isinstance(module, nn.Linear):
        return Channels(-1, module.in_features or None)  # 0: a Lazy module before its first forward
    if isinstance(module, nn.modules.conv._ConvNd):
        return Channels(natural.dim, module.in_channels or None)
    keeps_them = isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)) or _is_normalisation(module)
    return natural if keeps_them else Channels(natural.dim if _spatial_dims(module) else None, None)


def _is_normalisation(module: nn.Module) -> bool:
    return isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm))


def channels_of(name: str, module: nn.Module, wanted: int | None) -> Channels:
    """The channels of a module's output, `wanted` being the caller's channel_dim for it.

    ValueError where the module's type fixes the number of dimensions and `wanted` is not among them.
    """
    natural = natural_channels(module)
    if wanted is None:
        return natural
    spatial = _spatial_dims(module)
    if spatial is not None:
        ndim = spatial + 2
        if not -ndim <= wanted < ndim:
            raise ValueError(
                f"channel_dim: expected {-ndim} to {ndim - 1} for {name!r} ({type(module).__name__}, whose output has "
                f"{ndim} dimensions), got {wanted}"
            )
        same = natural.dim is not None and wanted % ndim == natural.dim % ndim
    else:
        same = wanted == natural.dim
    return Channels(wanted, natural.width if same else None)


def channel_dim_of(tensor: torch.Tensor, dim: int | None) -> int:
    """The channel dimension of a tensor that is at hand: what is known of it, else by its number of dimensions."""
    if dim is not None:
        return dim
    return 1 if tensor.dim() in (4, 5) else -1


def wanted_channel_dims(channel_dim: int | Mapping[str, int] | None, names: Iterable[str]) -> dict[str, int]:
    """The caller's channel_dim for each name that has one. TypeError for what is neither int nor {glob: int}."""
    known = list(names)
    if channel_dim is None:
        return {}
    rules = channel_dim if isinstance(channel_dim, Mapping) else {"*": channel_dim}
    for glob, dim in rules.items():
        if not isinstance(dim, int) or isinstance(dim, bool) or not isinstance(glob, str):
            raise TypeError(f"channel_dim: expected an int or {{glob: int}}, got {channel_dim!r}")
        if isinstance(channel_dim, Mapping):
            as_globs("channel_dim", glob, known)
    return {name: dim for name in known for glob, dim in rules.items() if matches(name, [glob])}


def walk(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in tuples, lists, mappings and dataclasses, each with its path (".0", ".logits.1", "" itself)."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from walk(item, f"{path}.{key}")
    elif isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", None) or range(len(value))
        for name, item in zip(names, value, strict=True):
            yield from walk(item, f"{path}.{name}")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in dataclass_fields(value):
            yield from walk(getattr(value, field.name), f"{path}.{field.name}")


def rebuilt(value: Any, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """`value` with every tensor replaced by what `change` makes of it and its path; `walk` says which those are.

    What changes in no place stays the very object that it was. TypeError for a mapping or dataclass that cannot be
    made anew with other items.
    """
    return _rebuilt(value, change, "")[0]


def _rebuilt(value: Any, change: Callable[[str, torch.Tensor], torch.Tensor], path: str) -> tuple[Any, bool]:
    """And whether it is another object (torch.compile compares the identity of tensors, but not of every container)."""
    if isinstance(value, torch.Tensor):
        tensor = change(path, value)
        return tensor, tensor is not value
    if isinstance(value, Mapping):
        items = {key: _rebuilt(item, change, f"{path}.{key}") for key, item in value.items()}
        if not any(changed for _, changed in items.values()):
            return value, False
        return _mapping_with(value, {key: item for key, (item, _) in items.items()}), True
    if isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", None) or range(len(value))
        pairs = [_rebuilt(item, change, f"{path}.{name}") for name, item in zip(names, value, strict=True)]
        if not any(changed for _, changed in pairs):
            return value, False
        listed = [item for item, _ in pairs]
        return type(value)(*listed) if hasattr(value, "_fields") else type(value)(listed), True
    if is_dataclass(value) and not isinstance(value, type):
        items = {f.name: _rebuilt(getattr(value, f.name), change, f"{path}.{f.name}") for f in dataclass_fields(value)}
        if not any(changed for _, changed in items.values()):
            return value, False
        return replace(value, **{name: item for name, (item, _) in items.items()}), True
    return value, False


def _mapping_with(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return items
    if not isinstance(value, MutableMapping):
        raise TypeError(f"expected a mapping whose items can be set, got {type(value).__name__}")
    changed = copy(value)
    for key, item in items.items():
        changed[key] = item
    return changed
