"""Groups of channels: where the heads of attention lie one behind another, by evidence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import nn

ATTENTION = re.compile("attention|attn", re.IGNORECASE)

_QUERIES = {"q_proj", "q", "query", "wq", "to_q", "q_lin", "query_proj", "q_b_proj"}
_KEYS = {"k_proj", "v_proj", "k", "v", "key", "value", "wk", "wv", "to_k", "to_v", "k_lin", "v_lin"}
_LATENT = {"kv_b_proj"}  # keys and values of each head, from what multi-head latent attention keeps
_TOGETHER = {"qkv_proj", "qkv", "Wqkv", "wqkv", "c_attn", "query_key_value", "att_proj", "W_pack"}
_LAST = {"o_proj", "o", "out_proj", "wo", "dense", "c_proj", "proj", "out_lin"}

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
SIZES_OF_HEADS = ("head_dim", "head_size", "attention_head_size")
_OF_MULTIHEAD = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


class GroupSizes(NamedTuple):
    """Finds how many channels a head has; None: nothing says that there are any."""

    outputs: int | None  # of a module's outputs, and of its weight
    inputs: int | None


NO_GROUPS = GroupSizes(None, None)


def find_heads(attention: nn.Module) -> int | None:
    """Return how many heads an attention's attributes say that it has."""
    return read_number((attention,), HEADS)


def group_sizes(modules: Mapping[str, nn.Module]) -> dict[str, GroupSizes]:
    """Return group sizes of attention's projections, by name, and of nn.MultiheadAttention's parameters in their place.

    Their names and their attention's numbers of heads are the evidence; a width must be a multiple of these. What has
    one head is left out. Where queries, keys and values lie together, a group is a head of one of them.
    """
    found: dict[str, GroupSizes] = {}
    for name, module in modules.items():
        if isinstance(module, nn.MultiheadAttention):
            there = [key for key in _OF_MULTIHEAD if getattr(module, key, None) is not None]
            if module.num_heads > 1:
                found |= {f"{name}.{key}" if name else key: GroupSizes(module.head_dim, None) for key in there}
            continue
        path, _, own = name.rpartition(".")
        parent = modules.get(path)
        sizes = NO_GROUPS if parent is None else _read_sizes(own, module, parent)
        if sizes != NO_GROUPS:
            found[name] = sizes
    return found


def _read_sizes(own: str, module: nn.Module, attention: nn.Module) -> GroupSizes:
    inputs, outputs = read_number((module,), ("in_features", "nx")), read_number((module,), ("out_features", "nf"))
    heads = find_heads(attention)
    if own in _QUERIES | _LATENT:
        return GroupSizes(_find_part(outputs, heads), None)
    if own in _KEYS:
        return GroupSizes(_find_part(outputs, read_number((attention,), KEY_HEADS) or heads), None)
    if own in _TOGETHER:
        size = read_number((attention,), SIZES_OF_HEADS) or _find_part(inputs, heads)
        return GroupSizes(size if size and outputs and outputs % size == 0 and outputs > size else None, None)
    children = {name for name, _ in attention.named_children()}
    if own in _LAST and not children.isdisjoint(_QUERIES | _LATENT | _TOGETHER):
        return GroupSizes(None, _find_part(inputs, heads))
    return NO_GROUPS


def _find_part(width: int | None, count: int | None) -> int | None:
    return width // count if width and count and count > 1 and width % count == 0 and width > count else None


def read_number(modules: Iterable[nn.Module], names: Iterable[str]) -> int | None:
    """The first attribute of these names that is a number: of the modules, or of their configurations."""
    for each in modules:
        for where in (each, getattr(each, "config", None)):
            for name in names:
                value = getattr(where, name, None)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
    return None
