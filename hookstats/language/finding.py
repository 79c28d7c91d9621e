"""Finds by evidence which modules of a model compute attention, and which are routers."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import nn

from hookstats.modules.heads import ATTENTION, read_number

_CALLS = {
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
    "flex_attention",
    "ALL_ATTENTION_FUNCTIONS",
    "attention_interface",
}


def attentions(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Find modules whose forward calls a function of attention, or whose class is named after it."""
    return {name: module for name, module in modules.items() if any(map(_may_attend, type(module).__mro__))}


def _may_attend(kind: type) -> bool:
    if ATTENTION.search(kind.__name__):
        return True
    forward = vars(kind).get("forward")
    code = None if forward is None else getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and not _CALLS.isdisjoint(_list_names(code))


def _list_names(code: types.CodeType) -> set[str]:
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return {*code.co_names, *code.co_varnames}.union(*map(_list_names, inner))


class Router(NamedTuple):
    """A module that chooses the experts of a mixture."""

    module: nn.Module
    gate: nn.Module  # what computes its logits: itself, or a module inside it
    experts: int
    top_k: int | None  # experts that a token goes to; None: nobody says


def routers(modules: Mapping[str, nn.Module]) -> dict[str, Router]:
    """Find routers: beside a module named "experts", or of such a class, with a weight that has a row for each."""
    found: dict[str, Router] = {}
    for name, parent in modules.items():
        children = dict(parent.named_children())
        experts = _find_experts(parent, children)
        for own, child in children.items() if experts > 1 else ():
            path = f"{name}.{own}" if name else own
            gate = None if _EXPERT.search(own) or path not in modules else _find_gate(child, experts)
            if gate is not None:
                found[path] = Router(child, gate, experts, _find_top_k((gate, child, parent), experts))
    return found


_EXPERT = re.compile("expert", re.IGNORECASE)
_NUMBERS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_experts")
_TOP_K = (
    "top_k",
    "topk",
    "num_experts_per_tok",
    "num_experts_per_token",
    "num_selected_experts",
    "n_activated_experts",
    "experts_per_token",
    "moe_top_k",
    "moe_topk",
    "moe_k",
)


def _find_experts(parent: nn.Module, children: Mapping[str, nn.Module]) -> int:
    """Return how many experts it has, beside shared ones; 0: none."""
    for name, child in children.items():
        if not (_EXPERT.search(name) or "Experts" in type(child).__name__) or "shared" in name:
            continue
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            return len(child)
        said = read_number((child, parent), _NUMBERS)
        if said is not None:
            return said
        for parameter in child.parameters():
            if not nn.parameter.is_lazy(parameter) and parameter.dim() == 3:
                return parameter.shape[0]
    return 0


def _find_gate(router: nn.Module, experts: int) -> nn.Module | None:
    for module in router.modules():
        for parameter in module.parameters(recurse=False):
            if not nn.parameter.is_lazy(parameter) and parameter.dim() == 2 and parameter.shape[0] == experts:
                return module
    return None


def _find_top_k(modules: Iterable[nn.Module], experts: int) -> int | None:
    said = read_number(modules, _TOP_K)
    return said if said is not None and said <= experts else None
