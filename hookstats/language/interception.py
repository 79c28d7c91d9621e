"""Attention functions, replaced while somebody watches attention: they compute what they did, and show their q and k.

Whose attention it is, a stack says: forward hooks of the attention modules push to it, and pop. While a graph is
traced, functions do the same that the tracer runs without looking into them: inside of a checkpoint no graph may change
a list, and names for the modules would give each block a graph of its own.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import flex_attention as flex

from hookstats.modules import order
from hookstats.watch import guards

_log = logging.getLogger("hookstats")


class Entering(order.ModuleHook):
    """Hook on an attention that notes that its forward begins, for all monitors that watch it."""

    def __init__(self) -> None:
        self.watchers: tuple[Any, ...] = ()  # `hookstats.language.attention.Attention`
        self.handles: list[Any] = []

    def __call__(self, module: Any, args: Any) -> None:
        if torch.compiler.is_compiling():
            if guards.now.measured:
                enter(self)
        elif any(each.is_wanted() for each in self.watchers):
            enter(self)


class Leaving(order.ModuleHook):
    """Hook on an attention that notes that its forward has ended."""

    def __init__(self, entering: Entering) -> None:
        self.entering = entering

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        leave(self.entering)


class _Running(threading.local):
    """The attention modules whose forwards this thread is in, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Entering] = []


_running = _Running()
# The same while a graph is traced, which one thread does at a time: what the tracer has of them; None: one is hidden.
_traced: list[Any] = []
_around: list[Entering] = []  # those whose hooks are traced as frames of their own, as where a compiled model is one


def _trace_enters(context: Any) -> None:
    """Runs while `enter` is traced."""
    try:
        entered = context.get_local("module")._i_will_not_complain_if_bc_breaks_VariableTracker().realize()
        places = [place for place, each in enumerate(_traced) if each is not None and each.value is entered.value]
        if places:  # the trace has begun anew
            del _traced[places[0] :]
        _traced.append(entered)
    except Exception as error:
        _log.info("the attention of a graph is not seen: %r", error)
        _traced.append(None)


def _trace_leaves(context: Any) -> None:
    if _traced:
        _traced.pop()


def _trace_hides(context: Any) -> None:
    _traced.append(None)


def _trace_finds(context: Any) -> None:
    """Runs while `_find_innermost` is traced, and gives it its local variables."""
    if _traced:
        _set_locals(context, is_known=True)
        if _traced[-1] is not None:
            _set_locals(context, module=_traced[-1])


def _trace_looks_around(context: Any) -> None:
    """Runs while `enter` or `leave` is traced, and tells it whether the hook that calls it is what is traced."""
    try:
        tracer = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
        _set_locals(context, is_hook=tracer.parent.f_code is tracer.output.root_tx.f_code)
    except Exception as error:
        _log.info("the attention of a graph is not seen: %r", error)


def _set_locals(context: Any, **values: Any) -> None:
    """Set locals of the function that is traced: to a bool, or to the tracer's variable of something."""
    from torch._dynamo.variables import ConstantVariable  # which nobody needs who compiles nothing

    try:
        known = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().symbolic_locals
        for name, value in values.items():
            known[name] = ConstantVariable.create(value) if isinstance(value, bool) else value
    except Exception as error:
        _log.info("the attention of a graph is not seen: %r", error)


def enter(module: Entering) -> None:
    """Note that its forward begins. Can be traced."""
    if torch.compiler.is_compiling():
        is_hook = False
        torch._dynamo.comptime.comptime(_trace_looks_around)
        if is_hook:
            _around.append(module)
        else:
            torch._dynamo.comptime.comptime(_trace_enters)
    else:
        _running.stack.append(module)


def leave(module: Entering) -> None:
    """Note that it has ended, and with it those inside that were left by an exception. Can be traced."""
    if torch.compiler.is_compiling():
        is_hook = False
        torch._dynamo.comptime.comptime(_trace_looks_around)
        if not is_hook:
            torch._dynamo.comptime.comptime(_trace_leaves)
        elif _around:
            _around.pop()
    elif module in _running.stack:
        while _running.stack.pop() is not module:
            pass


def forget_left_attentions() -> None:
    """Forget attentions of this thread that were left by an exception, or by a graph that broke inside of one."""
    _running.stack.clear()
    _traced.clear()
    _around.clear()


def _find_innermost() -> Entering | None:
    """The attention module whose forward runs. Can be traced."""
    module: Entering | None = None
    is_known = False
    if torch.compiler.is_compiling():
        torch._dynamo.comptime.comptime(_trace_finds)
        if not is_known and _around:
            module = _around[-1]
    elif _running.stack:
        module = _running.stack[-1]
    return module


def _show(q: Any, k: Any, mask: Any, is_causal: bool, scale: float | None, softcap: float = 0.0) -> None:
    module = _find_innermost()
    for watcher in () if module is None else module.watchers:
        watcher.see(q, k, mask, is_causal, scale, softcap)


class _Unseen:
    """Hides what runs inside from the innermost module: it was shown already."""

    def __enter__(self) -> None:
        self._hidden: list[Entering] = []
        if torch.compiler.is_compiling():
            torch._dynamo.comptime.comptime(_trace_hides)
        elif _running.stack:
            self._hidden.append(_running.stack.pop())

    def __exit__(self, *error: object) -> None:
        if torch.compiler.is_compiling():
            torch._dynamo.comptime.comptime(_trace_leaves)
        elif self._hidden:
            _running.stack.extend(self._hidden)


def _softmax(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def show_and_call(input: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
        module = _find_innermost()
        if module and isinstance(input, torch.Tensor) and isinstance(dim, int) and dim in (-1, input.dim() - 1):
            for watcher in module.watchers:
                watcher.see_logits(input)
            if torch.compiler.is_compiling() and not args and set(kwargs) <= {"_stacklevel", "dtype"}:
                # The same: a graph would keep the function by its name, and find this one under it.
                return input.softmax(dim, dtype=kwargs.get("dtype"))
        return original(input, dim, *args, **kwargs)

    return show_and_call


def _scaled_dot_product_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def show_and_call(
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

    return show_and_call


def _get_interface(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def get_interface(self: Any, attn_implementation: Any, default: Any) -> Any:
        found = original(self, attn_implementation, default)
        if attn_implementation == "sdpa":  # which calls torch's function
            return found

        def show_and_call(
            module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any
        ) -> Any:
            scale = args[0] if args and attn_implementation == "eager" else kwargs.get("scaling")
            mask, is_causal = attention_mask, False
            if attn_implementation != "eager" and not _is_whole(mask):
                mask, is_causal = _make_mask_of_flash(module, query, key, mask, kwargs)
            _show(query, key, mask, is_causal, scale, kwargs.get("softcap") or 0.0)
            with _Unseen():
                return found(module, query, key, value, attention_mask, *args, **kwargs)

        return show_and_call

    return get_interface


def _is_whole(mask: Any) -> bool:
    """Return whether a mask says all: of four dimensions, or one of blocks."""
    return hasattr(mask, "mask_mod") or (isinstance(mask, torch.Tensor) and mask.dim() == 4)


def _make_mask_of_flash(module: Any, query: Any, key: Any, padding: Any, kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """Convert the arguments of flash kernels to a mask, and whether it is causal besides.

    padding: None, or ``[batch, keys]``, 0 where a key is none.
    """
    given, queries, keys = kwargs.get("is_causal"), query.shape[2], key.shape[2]
    is_causal = bool(getattr(module, "is_causal", True) if given is None else given) and queries > 1
    mask = padding[:, None, None, :].bool() if isinstance(padding, torch.Tensor) and padding.dim() == 2 else None
    window = kwargs.get("sliding_window")
    if window is not None:
        place = torch.arange(queries, device=query.device)[:, None] + (keys - queries)
        near = place - torch.arange(keys, device=query.device) < window
        mask = near if mask is None else mask & near
    return mask, is_causal


def _flex_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def show_and_call(
        query: Any,
        key: Any,
        value: Any,
        score_mod: Any = None,
        block_mask: Any = None,
        scale: float | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if score_mod is None:  # which logits it would make, nobody says
            _show(query, key, block_mask, False, scale)
        with _Unseen():
            return original(query, key, value, score_mod, block_mask, scale, *args, **kwargs)

    return show_and_call


class _Replaced:
    """Names that hold another function for now."""

    def __init__(self) -> None:
        self._names: list[tuple[Any, str, Any, Any]] = []  # where, name, what it was, what it is

    def replace(self, where: Any, name: str, new: Any) -> None:
        """where: a module, a class, or the globals of a file."""
        self._names.append((where, name, _get(where, name), new))
        _set(where, name, new)

    def put_back(self) -> None:
        for where, name, old, new in reversed(self._names):
            if _get(where, name) is new:  # else somebody has replaced it since, and calls ours
                _set(where, name, old)
        self._names = []


def _get(where: Any, name: str) -> Any:
    return where.get(name) if isinstance(where, dict) else getattr(where, name, None)


def _set(where: Any, name: str, value: Any) -> None:
    if isinstance(where, dict):
        where[name] = value
    else:
        setattr(where, name, value)


_changing = threading.RLock()  # garbage that is collected meanwhile may end another one
_users = 0
_replaced = _Replaced()
_FUNCTIONS: list[tuple[Any, str, Callable[..., Any], Callable[..., Any]]] = [  # where, name, original, what shows
    (where, name, getattr(where, name), make(getattr(where, name)))
    for where, name, make in (
        (functional, "scaled_dot_product_attention", _scaled_dot_product_attention),
        (functional, "softmax", _softmax),
        (torch, "softmax", _softmax),
        (flex, "flex_attention", _flex_attention),
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
            _replace_functions(_find_globals(modules))

    def remove(self) -> None:
        global _users
        with _changing:
            if self._is_on:
                self._is_on = False
                _users -= 1
                if _users == 0:
                    _replaced.put_back()

    def __del__(self) -> None:
        """Remove it with a monitor that nobody holds any more."""
        self.remove()


def _find_globals(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """The globals that their forwards look names up in, each once."""
    kinds = {kind for module in modules for kind in type(module).__mro__ if "forward" in vars(kind)}
    found = {}
    for kind in kinds:
        names = getattr(inspect.unwrap(vars(kind)["forward"]), "__globals__", None)
        if isinstance(names, dict):
            found[id(names)] = names
    return list(found.values())


def _replace_functions(files: list[dict[str, Any]]) -> None:
    for where, name, original, shown in _FUNCTIONS:
        if getattr(where, name) is original:
            _replaced.replace(where, name, shown)
        elif getattr(where, name) is not shown:
            _log.info("%s.%s was replaced by somebody else: it is not watched", where.__name__, name)
        for names in files:
            for own in [own for own, value in names.items() if value is original]:
                _replaced.replace(names, own, shown)
    interface: Any = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
    if hasattr(interface, "get_interface") and not hasattr(interface.get_interface, "__wrapped__"):
        _replaced.replace(interface, "get_interface", _get_interface(interface.get_interface))
