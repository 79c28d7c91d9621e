"""Attention functions, replaced while somebody watches attention: they compute what they did, and show their q and k.

Whose attention it is, a stack says: forward hooks of the attention modules push to it, and pop.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

_log = logging.getLogger("hookstats")


class Watcher(Protocol):
    """What a monitor has of an attention module."""

    def see(self, q: Any, k: Any, mask: Any, is_causal: bool, scale: float | None, softcap: float) -> None:
        """The attention that its module computes now. Never raises, but under strict."""

    def see_logits(self, logits: Any) -> None:
        """The same, of which a softmax over the last dimension is taken."""


class Entered(Protocol):
    """An attention module whose forward runs."""

    @property
    def watchers(self) -> tuple[Watcher, ...]:
        """Those of all monitors."""


class _Running(threading.local):
    """The attention modules whose forwards this thread is in, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Entered] = []


_running = _Running()
_traced: list[Entered] = []  # the same while a graph is traced, which one thread does at a time


def enter(module: Entered) -> None:
    """Its forward begins. Can be traced."""
    if torch.compiler.is_compiling():
        _traced.append(module)
    else:
        _running.stack.append(module)


def leave(module: Entered) -> None:
    """It has ended; those inside that were left by an exception have ended, too. Can be traced."""
    if torch.compiler.is_compiling():
        if _traced:
            _traced.pop()
    elif module in _running.stack:
        while _running.stack.pop() is not module:
            pass


def forget_those_left() -> None:
    """What an exception, or a graph that broke inside of an attention, has left behind in this thread."""
    _running.stack.clear()
    _traced.clear()


def _show(q: Any, k: Any, mask: Any, is_causal: bool, scale: float | None, softcap: float = 0.0) -> None:
    stack = _traced if torch.compiler.is_compiling() else _running.stack
    for watcher in stack[-1].watchers if stack else ():
        watcher.see(q, k, mask, is_causal, scale, softcap)


class _Unseen:
    """Inside, the innermost module shows nothing more: what runs there is what was shown."""

    def __enter__(self) -> None:
        self._stack = _traced if torch.compiler.is_compiling() else _running.stack
        self._hidden = [self._stack.pop()] if self._stack else []

    def __exit__(self, *error: object) -> None:
        self._stack.extend(self._hidden)


def _softmax(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def shown(input: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
        stack = _traced if torch.compiler.is_compiling() else _running.stack
        if stack and isinstance(input, torch.Tensor) and isinstance(dim, int) and dim in (-1, input.dim() - 1):
            for watcher in stack[-1].watchers:
                watcher.see_logits(input)
        return original(input, dim, *args, **kwargs)

    return shown


def _scaled_dot_product_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def shown(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        _show(query, key, attn_mask, is_causal, scale)
        dispatch = getattr(attn_mask, "_dispatch", None)  # of a CausalBias: it would look for the function by its name
        if dispatch is not None:
            with _Unseen():
                return dispatch(
                    query, key, value, attn_mask, dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
                )
        return original(
            query, key, value, attn_mask, dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )

    return shown


def _get_interface(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def get_interface(self: Any, attn_implementation: Any, default: Any) -> Any:
        found = original(self, attn_implementation, default)
        if attn_implementation == "sdpa":  # which calls torch's function
            return found

        def shown(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
            is_causal = attention_mask is None and attn_implementation != "eager" and _is_causal(module, query, kwargs)
            scale = args[0] if args and not isinstance(args[0], bool) else kwargs.get("scaling")
            mask = attention_mask if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 4 else None
            _show(query, key, mask, is_causal, scale, kwargs.get("softcap") or 0.0)
            with _Unseen():
                return found(module, query, key, value, attention_mask, *args, **kwargs)

        return shown

    return get_interface


def _is_causal(module: Any, query: Any, kwargs: dict[str, Any]) -> bool:
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given) and query.shape[-2] > 1


class _Replaced:
    """Names that hold another function for now."""

    def __init__(self) -> None:
        self._names: list[tuple[Any, str, Any, Any]] = []  # where, name, what it was, what it is

    def replace(self, where: Any, name: str, new: Any) -> None:
        self._names.append((where, name, getattr(where, name), new))
        setattr(where, name, new)

    def put_back(self) -> None:
        for where, name, old, new in reversed(self._names):
            if getattr(where, name, None) is new:  # else somebody has replaced it since, and calls ours
                setattr(where, name, old)
        self._names = []


_changing = threading.RLock()  # garbage that is collected meanwhile may end another one
_users = 0
_replaced = _Replaced()
_FUNCTIONS: list[tuple[Any, str, Callable[..., Any], Callable[..., Any]]] = [  # where, name, original, what shows
    (where, name, getattr(where, name), make(getattr(where, name)))
    for where, name, make in (
        (functional, "scaled_dot_product_attention", _scaled_dot_product_attention),
        (functional, "softmax", _softmax),
        (torch, "softmax", _softmax),
    )
]


class Interception:
    """Shows attention until it is removed; the last one puts everything back, in whatever order they end."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """modules: those that are watched. Where the file of one's class took a function by name (``from
        torch.nn.functional import scaled_dot_product_attention``), it is replaced there, too.
        """
        global _users
        self._is_on = True
        with _changing:
            _users += 1
            _replace_functions({type(module).__module__ for module in modules})

    def remove(self) -> None:
        global _users
        with _changing:
            if self._is_on:
                self._is_on = False
                _users -= 1
                if _users == 0:
                    _replaced.put_back()


def _replace_functions(files: set[str]) -> None:
    for where, name, original, shown in _FUNCTIONS:
        if getattr(where, name) is original:
            _replaced.replace(where, name, shown)
        elif getattr(where, name) is not shown:
            _log.info("%s.%s was replaced by somebody else: it is not watched", where.__name__, name)
        for file in (vars(sys.modules[file]) for file in files if file in sys.modules):
            for own in [own for own, value in file.items() if value is original]:
                _replaced.replace(sys.modules[file["__name__"]], own, shown)
    interface: Any = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
    if hasattr(interface, "get_interface") and not hasattr(interface.get_interface, "__wrapped__"):
        _replaced.replace(interface, "get_interface", _get_interface(interface.get_interface))
