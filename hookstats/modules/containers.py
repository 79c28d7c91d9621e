"""Tensors inside tuples, lists, mappings and dataclasses: how they are found, and put in the place of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass, replace
from typing import Any

import torch

REST = ".*"  # stands for the paths of a container that are too many for a site each


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


def rebuild(value: Any, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """`value` with every tensor replaced by what `change` makes of it and its path; `walk` says which those are.

    What changes in no place stays the very object that it was. TypeError for a mapping or dataclass that cannot be
    made anew with other items.
    """
    return _rebuild(value, change, "")[0]


def _rebuild(value: Any, change: Callable[[str, torch.Tensor], torch.Tensor], path: str) -> tuple[Any, bool]:
    """Rebuild a container, and say whether it is another object: torch.compile compares no identities of these."""
    if isinstance(value, torch.Tensor):
        tensor = change(path, value)
        return tensor, tensor is not value
    if isinstance(value, Mapping):
        items = {key: _rebuild(item, change, f"{path}.{key}") for key, item in value.items()}
        if not any(changed for _, changed in items.values()):
            return value, False
        return _mapping_with(value, {key: item for key, (item, _) in items.items()}), True
    if isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", None) or range(len(value))
        pairs = [_rebuild(item, change, f"{path}.{name}") for name, item in zip(names, value, strict=True)]
        if not any(changed for _, changed in pairs):
            return value, False
        listed = [item for item, _ in pairs]
        return type(value)(*listed) if hasattr(value, "_fields") else type(value)(listed), True
    if is_dataclass(value) and not isinstance(value, type):
        items = {f.name: _rebuild(getattr(value, f.name), change, f"{path}.{f.name}") for f in dataclass_fields(value)}
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
