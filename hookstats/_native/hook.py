"""The hook in Python, for a torch that csrc/hook.cpp was not built for: over the same operators, in graphs, too.

It does what hook.cpp and slots.h do, whose comments say why; now.py says what it measures. It is slower by some
microseconds for each tensor.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from hookstats._native import now
from hookstats._native.now import Counted, Enabled, Rows, Times, name_thread, place_in_autograd
from hookstats._native.operators import Operators, SiteInPython, backward_is_running, has_no_data
from hookstats._warn import WarnOnce

# What hookstats/_native/__init__.py takes of the glue, or of this file.
__all__ = ["Counted", "Enabled", "Hook", "Times", "bind", "call_in_c", "has_no_data", "lay_slots"]
__all__ += ["load", "name_thread", "observe", "place_in_autograd", "set_part", "take_failures"]

_PYTHON = torch._C.DispatchKey.Python
_warn_once = WarnOnce()
_ops: Operators  # of `load`

_failures: dict[int, tuple[str, int]] = {}  # inside backward, by number: the first reason, and how often
_failing = threading.Lock()


def take_failures() -> dict[int, tuple[str, int]]:
    """Return the failures inside backward since the last call."""
    with _failing:
        found = dict(_failures)
        _failures.clear()
    return found


class _Observed:
    """The SiteStates that a hook measures into: of an output and of its gradient, either may be None."""

    def __init__(self, output: Any, gradient: Any, in_graph: Callable[..., Any], is_table: bool) -> None:
        self.output, self.gradient = output, gradient
        self.site = SiteInPython(_ops, gradient if output is None else output)  # that an output is to fit
        self.gradient_site = None if gradient is None else SiteInPython(_ops, gradient)
        self.channel_dim: int = (gradient if output is None else output).channel_dim
        self.knows_all = self.channel_dim < _ops.constants["DIMS_BY_NDIM"]
        self.enabled: Enabled = (gradient if output is None else output).enabled
        self.in_graph, self.is_table = in_graph, is_table
        self.is_sampled: bool = (gradient if output is None else output).is_sampled

    def knows(self, ndim: int) -> bool:
        """Return whether the channel dimension of such a tensor is known: csrc/ops.h."""
        return self.knows_all or ndim > 7 or bool(self.channel_dim >> 4 * ndim & 15)

    def measure(self, x: torch.Tensor, is_output: bool, rows: Rows | None) -> bool:
        """Folds it where there is a site for it; else it is only looked at, as the site is to fit."""
        only_look = (self.output if is_output else self.gradient) is None
        site = self.site if is_output or self.gradient_site is None else self.gradient_site
        if rows is not None:
            rows.prepare_use()
        sampling = self.enabled.sampling if self.is_sampled else (1, 0)
        concerned: bool = _ops.fold(x, site.number, *(rows or (None, None))[:2], only_look, *sampling)
        return concerned


_hooks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by number, from 1
_slot_at: dict[int, int] = {}  # on GPUs, by address


class Hook:
    """The extension's part of `hookstats.watch.hooks.SiteHook`: the sites that it measures into."""

    __slots__ = ("number", "observed", "parts_in_graphs", "slots")
    number: int
    observed: _Observed | None
    parts_in_graphs: dict[str, Hook]  # of a container, by path
    slots: list[torch.Tensor]  # on GPUs
    _numbers = itertools.count(1)

    def __new__(cls, *args: Any, **kwargs: Any) -> Hook:
        made = super().__new__(cls)
        made.number, made.observed, made.parts_in_graphs, made.slots = next(cls._numbers), None, {}, []
        with suppress(TypeError):  # of a class without room for a weak reference: its hooks are not found
            _hooks[made.number] = made
        return made


def _check_hook(hook: Any) -> Any:
    if not isinstance(hook, Hook):
        raise TypeError(f"hookstats: expected a hook, got {type(hook).__name__}")
    return hook


def bind(hook: Any, output: Any, gradient: Any, in_graph: Callable[..., Any], is_table: bool) -> None:
    """Make `observe` fold into these SiteStates from now on: csrc/hook.cpp."""
    nothing = output is None and gradient is None
    _check_hook(hook).observed = None if nothing else _Observed(output, gradient, in_graph, is_table)


def lay_slots(hook: Any, output: torch.Tensor, gradient: torch.Tensor) -> None:
    """Let a graph give these tensors, int64 [1], to the operator `observe` in the hook's place."""
    for number, slot in enumerate((output, gradient), 2 * _check_hook(hook).number):
        slot.fill_(number)
        if not slot.is_cpu:
            hook.slots.append(slot)  # so that nothing else comes to its address
            _slot_at[slot.data_ptr()] = number


def set_part(hook: Any, path: str, part: Any) -> None:
    """Give another hook what graphs find at a path of a hook's container."""
    _check_hook(hook).parts_in_graphs[path] = _check_hook(part)


def observe(x: Any, hook: Any) -> Any:
    """Folds the tensor x into the site of the output, unless it is a recomputation, and its gradient, when it comes,
    into the gradient's. Returns None, or why x was not measured; NotImplemented for a container or a wrapper.
    """
    observed: _Observed | None = hook.observed
    if observed is None:
        return None
    enabled = observed.enabled
    if not enabled.is_open_here() or not enabled.counts_now():
        return None
    if type(x) is torch.Tensor and _is_unwatched():
        return _observe(x, observed)
    if not isinstance(x, torch.Tensor) or torch._C._dispatch_keys(x).has(_PYTHON):
        return NotImplemented
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return _observe(x, observed)


def _is_unwatched() -> bool:
    """Return whether no mode is active: neither modes nor subclasses may see what is done here."""
    return not (torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


def _observe(x: torch.Tensor, observed: _Observed) -> str | None:
    try:
        if x.layout is not torch.strided or x.is_nested:
            return "expected a dense strided tensor"
        if has_no_data(x) or torch._C._is_tracing():
            return None
        if not observed.knows(x.dim()):
            return "the channel dimension of such a tensor is not known yet"
        times = observed.enabled.times
        if times is None:
            _measure(x, observed)
        else:
            with times.span(1):
                _measure(x, observed)
    except Exception as error:
        return str(error)
    return None


def _measure(x: torch.Tensor, observed: _Observed) -> None:
    counted, rows = observed.enabled.find_counted(), None
    if counted is not None:
        rows = counted.on(x.device, observed.is_sampled)
        if rows is not None and observed.is_table and x.shape[: rows.row_index.dim()] != rows.row_index.shape:
            rows = None
    if observed.output is not None and rows is None and not observed.is_sampled:
        if not backward_is_running():
            _ops.fold(x, observed.site.number)
    elif observed.output is None or not backward_is_running():
        concerned = observed.measure(x, True, rows)
        if rows is not None and counted is not None:
            counted.note(concerned)
    # A leaf's gradient is its owner's, and a hook on it would outlive the step.
    if observed.gradient is not None and x.requires_grad and x.grad_fn is not None:
        _register_fast(x, functools.partial(_observe_gradient, observed, rows))


def _register_fast(x: torch.Tensor, hook: Callable[..., Any]) -> None:
    """Register a hook as x.register_hook does, without a handle, which takes three times as long."""
    hooks: Any = x._backward_hooks
    if hooks is None:
        x._backward_hooks = hooks = OrderedDict()  # of which handles have weak references
        x.grad_fn._register_hook_dict(x)  # type: ignore[union-attr]
    hooks[hook] = hook


def _observe_gradient(observed: _Observed, rows: Rows | None, gradient: torch.Tensor | None) -> Any:
    """rows: those that counted in the forward."""
    if torch.compiler.is_compiling():  # compiled autograd traces it
        return observed.in_graph(gradient, rows=None if rows is None else rows[:2])
    try:
        if gradient is None or not observed.enabled.is_open_here() or has_no_data(gradient):
            return None
        is_plain = rows is None and type(gradient) is torch.Tensor and not observed.is_sampled
        if is_plain and _is_unwatched() and observed.enabled.times is None:
            _ops.fold(gradient, observed.gradient_site.number)  # type: ignore[union-attr]
            return None
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), observed.enabled.span():
            observed.measure(gradient, False, rows)
    except Exception as error:
        if observed.gradient.strict:
            raise
        with _failing:
            first, before = _failures.get(observed.gradient.site, (str(error), 0))
            _failures[observed.gradient.site] = first, before + 1
    return None


def _observe_in_graph(
    x: torch.Tensor,
    slot: torch.Tensor,
    path: str = "",
    note: str = "",
    row_index: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> None:
    """Measure a tensor of a compiled graph, which calls this: csrc/hook.cpp."""
    if has_no_data(x) or has_no_data(slot):
        return
    if slot.dtype != torch.int64 or slot.numel() != 1:
        raise TypeError(f"observe: slot: expected one int64, got {slot.dtype} {list(slot.shape)}")
    if slot.is_cpu:
        number = ctypes.c_int64.from_address(slot.data_ptr()).value
    else:
        number = _slot_at.get(slot.data_ptr(), 0)
        if not number:
            _warn_once(
                "slots",
                "not measured: a compiled graph copies its inputs on a GPU, and so does not tell which module it runs; "
                'backend="inductor" copies none',
            )
    hook, is_output = _hooks.get(number >> 1), number % 2 == 0
    is_new = hook is not None and bool(path) and path not in hook.parts_in_graphs
    owner = hook.parts_in_graphs[path] if hook is not None and path and not is_new else hook
    observed = None if owner is None else owner.observed
    if hook is None or observed is None or (is_output and backward_is_running()):
        return
    if not observed.enabled.is_open_here():
        return
    rows = None if row_index is None or kept is None else Rows(row_index, kept)
    if not is_new and not note and observed.knows(x.dim()):
        with suppress(Exception):  # it may fit a site that is made anew; else the same is met there
            observed.measure(x, is_output, rows)
            return
    refused = hook.binder.measure_by_slot(hook, x, is_output, path, note, None if rows is None else rows[:2])
    if refused is not None:
        raise RuntimeError(refused)


def load(ops: Operators) -> None:
    """Measure by these operators, and define those that graphs call."""
    global _ops
    _ops, run = ops, _observe_in_graph
    now.load(ops)
    ops.define("observe(Tensor x, Tensor(a!) slot) -> ()", run, batched=True)
    ops.define(
        "observe.rows(Tensor x, Tensor(a!) slot, Tensor rows, Tensor kept) -> ()",
        lambda x, slot, rows, kept: run(x, slot, "", "", rows, kept),
        batched=True,
    )
    schema = "observe.part(Tensor x, Tensor(a!) slot, str path, str note, Tensor? rows, Tensor? kept) -> ()"
    ops.define(schema, run, batched=True)


def call_in_c(kind: type[Hook]) -> None:
    """Call the hook through __call__."""
