"""Chooses which modules and parameters are watched, and under which names. No device work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from hookstats.numbers.selection import Globs, as_globs, matches

Modules: TypeAlias = Globs | Callable[[str, nn.Module], bool] | None

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


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, FullyShardedDataParallel, a compiled module and other wrappers."""
    while _wraps(model):
        inside = [child for name, child in model.named_children() if name in _WRAPPERS]
        if not inside:
            break
        model = inside[0]
    return model


def _wraps(module: nn.Module) -> bool:
    return any(cls.__name__ in _WRAPPER_TYPES for cls in type(module).__mro__)


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
        wraps = _wraps(module)
        if not wraps:
            named.setdefault(".".join(path), module)
        children = [(path if wraps and name in _WRAPPERS else (*path, name), m) for name, m in module.named_children()]
        waiting += reversed(children)
    return named


def select(
    model: nn.Module, modules: Modules, exclude: Modules, parameters: bool, buffers: bool = False
) -> tuple[dict[str, nn.Module], dict[str, Slot]]:
    """The watched modules, and (if wanted) the watched parameters and buffers, by clean name.

    None: the leaves that do something, and the children of every ModuleList, and of a ModuleDict whose keys are
    numbers; all parameters. Else what was asked for, and the parameters that are directly in it; globs may name
    parameters, too. Buffers are chosen as parameters are. Modules that are never called (ModuleList and the like) or
    take no hooks (of TorchScript) are left out whatever was asked for, and so is what `exclude` names, with all inside
    it.
    """
    named = clean_names(model)
    slots = (_list_slots(named) if parameters else {}) | (_list_slots(named, of_buffers=True) if buffers else {})
    left = _match_excluded(named, _list_all_slots(named), exclude)
    if modules is None:
        chosen = _list_default_modules(named)
    else:
        globs, chosen = _match_modules(modules, named, [*named, *slots])
        inside = {id(module) for module in chosen.values()}
        slots = {name: slot for name, slot in slots.items() if id(slot.module) in inside or matches(name, globs)}
    unhooked = (*_NEVER_CALLED, torch.jit.RecursiveScriptModule)  # type: ignore[attr-defined]
    chosen = {name: module for name, module in chosen.items() if name not in left and not isinstance(module, unhooked)}
    slots = {name: slot for name, slot in slots.items() if name not in left}
    if not chosen and not slots:
        hint = "; modules='*' selects those that only pass on what they are given, too" if modules is None else ""
        raise ValueError(f"modules: expected to select at least one of {len(named)} modules, selected none{hint}")
    return chosen, slots


def list_modules(model: nn.Module, exclude: Modules) -> dict[str, nn.Module]:
    """Return the modules that `exclude` does not name, by clean name."""
    named = clean_names(model)
    left = _match_excluded(named, _list_all_slots(named), exclude)
    return {name: module for name, module in named.items() if name not in left}


def _match_modules(
    modules: Modules, named: Mapping[str, nn.Module], names: Iterable[str], argument: str = "modules"
) -> tuple[list[str], dict[str, nn.Module]]:
    """The globs over these names, if they are globs; and the modules."""
    if isinstance(modules, type) or not (callable(modules) or isinstance(modules, Iterable)):
        raise TypeError(f"{argument}: expected globs, or a callable (name, module) -> bool; got {modules!r}")
    if callable(modules):
        return [], {name: module for name, module in named.items() if modules(name, module)}
    globs = as_globs(argument, modules, names)
    return globs, {name: module for name, module in named.items() if matches(name, globs)}


def _match_excluded(named: Mapping[str, nn.Module], slots: Mapping[str, Slot], exclude: Modules) -> set[str]:
    """The names of the modules and parameters that are excluded, and of all that is in these modules."""
    if exclude is None:
        return set()
    globs, chosen = _match_modules(exclude, named, [*named, *slots], "exclude")
    inside = tuple(f"{root}." for root in chosen if root)
    return {
        name
        for name in (*named, *slots)
        if name in chosen or matches(name, globs) or "" in chosen or name.startswith(inside)
    }


def find_root(model: nn.Module, exclude: Modules) -> nn.Module | None:
    """The module inside all wrappers, whose inputs are the model's; None: it is excluded, or takes no hook."""
    root = list_modules(model, exclude).get("")
    return None if isinstance(root, (*_NEVER_CALLED, torch.jit.ScriptModule)) else root


class Slot(NamedTuple):
    """The place of a parameter or buffer in a module. The tensor itself may be replaced."""

    module: nn.Module
    key: str
    is_buffer: bool = False

    def get(self) -> torch.Tensor | None:
        kept = self.module._buffers if self.is_buffer else self.module._parameters
        if self.key not in kept:  # a ScriptModule's have no `get`
            return None
        return kept[self.key]


def _list_slots(named: Mapping[str, nn.Module], of_buffers: bool = False) -> dict[str, Slot]:
    """The parameters of modules by clean name, or their buffers; a shared one by its first name."""
    slots: dict[str, Slot] = {}
    seen: set[int] = set()
    for name, module in named.items():
        for key, tensor in (module._buffers if of_buffers else module._parameters).items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                slots[f"{name}.{key}" if name else key] = Slot(module, key, of_buffers)
    return slots


def _list_all_slots(named: Mapping[str, nn.Module]) -> dict[str, Slot]:
    return _list_slots(named) | _list_slots(named, of_buffers=True)


def find_modules_at(model: nn.Module, modules: Modules, exclude: Modules) -> dict[str, nn.Module]:
    """The modules that are chosen, by clean name. For hooks that must not miss what was asked for.

    Raises:
        TypeError: for a model, globs or a callable that are none. ValueError: for a glob that matches no module, or
            none that is ever called; where nothing is chosen.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise TypeError("expected a model without DataParallel, whose replicas would share hooks across devices")
    named = clean_names(model)
    globs, chosen = _match_modules(modules, named, named)
    silent = find_never_called(model)
    for glob in globs:
        found = [name for name in named if matches(name, [glob])]
        if all(name in silent for name in found):
            raise ValueError(f"modules: {glob!r} matches only {found[0]!r}, whose hooks never run: {silent[found[0]]}")
    left = {*silent, *_match_excluded(named, {}, exclude)}
    chosen = {name: module for name, module in chosen.items() if name not in left}
    if not chosen:
        raise ValueError(f"modules: expected to choose at least one of {len(named)} modules, chose none")
    return chosen


def find_never_called(model: nn.Module) -> dict[str, str]:
    """The modules whose forward is never called, as far as their types tell, by clean name, each with the reason."""
    silent: dict[str, str] = {}
    for name, module in clean_names(model).items():
        if isinstance(module, _NEVER_CALLED):
            silent[name] = f"a {type(module).__name__} is never called, only its children are"
        elif isinstance(module, nn.MultiheadAttention):
            silent[f"{name}.out_proj".lstrip(".")] = "MultiheadAttention uses its weight without calling it"
    return silent


def _list_default_modules(named: dict[str, nn.Module]) -> dict[str, nn.Module]:
    in_list = {id(unwrap(child)) for module in named.values() for child in _list_children(module)}
    inside = {id(m) for module in named.values() if _is_opaque(module) for m in module.modules() if m is not module}
    return {
        name: module
        for name, module in named.items()
        if not isinstance(module, torch.jit.ScriptModule)  # takes no hooks
        and id(module) not in inside
        and (id(module) in in_list or _is_leaf(module))
    }


def _list_children(module: nn.Module) -> Iterable[nn.Module]:
    """The children of a ModuleList, or of a ModuleDict that numbers them."""
    if isinstance(module, nn.ModuleList):
        return module
    return module.values() if isinstance(module, nn.ModuleDict) and all(key.isdigit() for key in module) else ()


def _is_leaf(module: nn.Module) -> bool:
    is_leaf = _is_opaque(module) or next(module.children(), None) is None
    return is_leaf and not isinstance(module, _TRANSPARENT)


def _is_opaque(module: nn.Module) -> bool:
    """A leaf for its users, whatever it is made of: some of its children are never called as modules."""
    return isinstance(module, nn.MultiheadAttention) or "parametrizations" in module._modules
