"""Which modules of a model compute attention, and which are routers: by evidence."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Mapping

from torch import nn

_CALLS = {
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
    "flex_attention",
    "ALL_ATTENTION_FUNCTIONS",
    "attention_interface",
}
_NAME = re.compile("attention|attn", re.IGNORECASE)


def attentions(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Those whose forward calls a function of attention, or whose class is named after it."""
    return {name: module for name, module in modules.items() if _may_attend(type(module))}


def _may_attend(kind: type[nn.Module]) -> bool:
    if _NAME.search(kind.__name__):
        return True
    forward = inspect.unwrap(kind.forward)
    code = getattr(forward, "__code__", None)
    return code is not None and not _CALLS.isdisjoint(_names_in(code))


def _names_in(code: types.CodeType) -> set[str]:
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return {*code.co_names, *code.co_varnames}.union(*map(_names_in, inner))
