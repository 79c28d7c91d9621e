"""Attention functions, replaced while somebody watches attention: they compute what they did, and show their q and k.

Whose attention it is, the call stack says: that of the innermost module whose forward runs and has an `AttentionMark`.
While a graph is traced, it is the tracer's stack of what it traces.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import flex_attention as flex

from hookstats.modules import order
from hookstats.watch import guards
from hookstats.watch.flags import is_capturing

_log = logging.getLogger("hookstats")


class AttentionMark(order.ModuleHook):
    """A mark on an attention: graphs of equal blocks reach those who watch it as they reach hooks, by the module."""

    def __init__(self) -> None:
        self.watchers: tuple[Any, ...] = ()  # `hookstats.language.attention.Attention`
        self.handle: Any = None

    def __call__(self, module: Any, args: Any) -> None:
        """Do nothing."""


def mark_of(module: Any) -> AttentionMark | None:
    """Return the mark of a module. Can be traced."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, AttentionMark):
            return hook
    return None


def _find_owner(frame: Any, outer: str, read_module: Callable[[Any], Any]) -> Any:
    """Return the innermost marked module. None: there is none, or it was shown already by a function of this file."""
    is_outside, here = False, _find_owner.__code__.co_filename
    while frame is not None:
        if frame.f_code.co_filename != here:
            is_outside, module = True, read_module(frame)
            if module is not None:
                return module
        elif is_outside:
            return None
        frame = getattr(frame, outer, None)
    return None


def _read_module(frame: Any) -> Any:
    module = frame.f_locals.get("self") if frame.f_code.co_name == "_call_impl" else None
    return module if isinstance(module, nn.Module) and mark_of(module) else None


def _find_running() -> AttentionMark | None:
    """The mark of that module where no graph is traced. While nothing is measured nobody looks: a stack may be deep."""
    if not guards.now.is_open() and not is_capturing():
        return None
    try:
        owner = _find_owner(sys._getframe(), "f_back", _read_module)
        return None if owner is None else mark_of(owner)
    except Exception as error:  # another thread may change the hooks of a module meanwhile
        _log.info("whose attention runs is not seen: %r", error)
        return None


def _read_traced_module(tracer: Any) -> Any:
    """The same of a tracer, as its variable: a hook or a forward may be all that is traced of a module."""
    from torch._dynamo.variables.misc import CellVariable  # which nobody needs who compiles nothing

    found = tracer.symbolic_locals.get("self")
    found = None if found is None else found.realize()
    if isinstance(found, CellVariable):
        found = tracer.output.side_effects.load_cell(found).realize()
    module = getattr(found, "value", None)
    return found if isinstance(module, nn.Module) and mark_of(module) else None


def _trace_finds(context: Any) -> None:
    """Runs while `_find_innermost` is traced, and gives it its local variable."""
    try:
        tracer = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
        owner = _find_owner(tracer, "parent", _read_traced_module)
        if owner is not None:
            tracer.symbolic_locals["owner"] = owner
    except Exception as error:
        _log.info("the attention of a graph is not seen: %r", error)


def _find_innermost() -> AttentionMark | None:
    """The mark of the attention whose forward runs; in graphs, of those that measure. Can be traced."""
    if not torch.compiler.is_compiling():
        return _find_running()
    owner = None
    if guards.now.measured:
        torch._dynamo.comptime.comptime(_trace_finds)
    return None if owner is None else mark_of(owner)


def _show(q: Any, k: Any, mask: Any, is_causal: bool, scale: float | None, softcap: float = 0.0) -> None:
    mark = _find_innermost()
    for watcher in () if mark is None else mark.watchers:
        watcher.see(q, k, mask, is_causal, scale, softcap)


def _softmax(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def show_and_call(input: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
        mark = _find_innermost()
        if mark and isinstance(input, torch.Tensor) and isinstance(dim, int) and dim in (-1, input.dim() - 1):
            for watcher in mark.watchers:
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
        return (dispatch or original)(
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
        return original(query, key, value, score_mod, block_mask, scale, *args, **kwargs)

    return show_and_call


_changing = threading.RLock()  # garbage that is collected meanwhile may end another one
_showing: WeakSet[Interception] = WeakSet()
_FUNCTIONS = [
    (where, name, getattr(where, name), make(getattr(where, name)))
    for where, name, make in (
        (functional, "scaled_dot_product_attention", _scaled_dot_product_attention),
        (functional, "softmax", _softmax),
        (torch, "softmax", _softmax),
        (flex, "flex_attention", _flex_attention),
    )
]
_files: dict[int, dict[str, Any]] = {}  # globals in which functions are replaced, by id


class Interception:
    """Shows attention until it is removed; the last one puts everything back, in whatever order they end."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """modules: those that are watched. Where the file of one's class took a function by name (``from
        torch.nn.functional import scaled_dot_product_attention``), it is replaced there, too.
        """
        kinds = {kind for module in modules for kind in type(module).__mro__ if "forward" in vars(kind)}
        files = [getattr(inspect.unwrap(vars(kind)["forward"]), "__globals__", None) for kind in kinds]
        with _changing:
            _showing.add(self)
            for names in (*map(vars, (functional, torch, flex)), *files):
                if isinstance(names, dict):
                    _files[id(names)] = names
            _exchange(is_shown=True)
        for where, name, _, shown in _FUNCTIONS:
            if getattr(where, name) is not shown:
                _log.info("%s.%s was replaced by somebody else: it is not watched", where.__name__, name)

    def remove(self) -> None:
        with _changing:
            _showing.discard(self)
            if not list(_showing):  # not those that are on their way out
                _exchange(is_shown=False)
                _files.clear()

    __del__ = remove  # with a monitor that nobody holds any more


def _exchange(is_shown: bool) -> None:
    """Put what shows in the place of functions, or these back; what somebody else has put there stays."""
    for names in _files.values():
        for name, value in list(names.items()):
            for *_, original, shown in _FUNCTIONS:
                if value is (original if is_shown else shown):
                    names[name] = shown if is_shown else original
    interface: Any = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
    get: Any = getattr(interface, "get_interface", None)
    code: Any = getattr(get, "__code__", None)
    if code is not None and is_shown != (code.co_filename == _exchange.__code__.co_filename):
        interface.get_interface = _get_interface(get) if is_shown else get.__wrapped__
