"""From a module's output to its kernels: csrc/hook.cpp, in Python."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from hookstats.portable.devices import Devices
from hookstats.portable.measuring import Enabled
from hookstats.portable.sites import Rows, Site, backward_is_running, channel_dim_for, has_no_data, keys_of

_PYTHON = torch._C.DispatchKey.Python
_OF_A_SITE = ("moments", "counters", "histogram", "active", "channel_dim", "low", "high", "block")
_failures: dict[int, tuple[str, int]] = {}  # inside backward, by number: the first reason, and how often
_failing = threading.Lock()


def take_failures() -> dict[int, tuple[str, int]]:
    """What went wrong inside backward since it was asked last."""
    with _failing:
        found = dict(_failures)
        _failures.clear()
    return found


class Half(NamedTuple):
    """The site of an output, or of its gradient, made for a `hookstats.watch.memory.SiteState`."""

    site: Site
    state: Any


def _half(devices: Devices, state: Any) -> Half:
    given = (getattr(state, name) for name in _OF_A_SITE)
    return Half(Site(devices, *given), state)


class Hook:
    """What `hookstats.watch.hooks.Hook` has of the extension: the sites that it measures into."""

    __slots__ = ("halves",)
    halves: tuple[Half | None, Half | None, Enabled, bool] | None

    def __new__(cls, *args: Any, **kwargs: Any) -> Hook:
        made = super().__new__(cls)
        made.halves = None
        return made


def bind(
    devices: Devices, hook: Hook, output: Any, gradient: Any, in_graph: Callable[..., Any], is_table: bool
) -> None:
    """From now on `observe` folds into these SiteStates; either may be None. is_table: see csrc/hook.cpp."""
    if not isinstance(hook, Hook):
        raise TypeError(f"hookstats: expected a hook, got {type(hook).__name__}")
    first = gradient if output is None else output
    if first is None:
        hook.halves = None
    else:
        halves = (None if state is None else _half(devices, state) for state in (output, gradient))
        hook.halves = (*halves, first.enabled, is_table)


def observe(x: object, hook: Any) -> Any:
    """Folds the tensor x into the site of the output, unless it is a recomputation, and its gradient, when it comes,
    into the gradient's. Returns None, or why x was not measured; NotImplemented for a container or a wrapper.
    """
    halves = hook.halves
    if halves is None:
        return None
    output, gradient, enabled, is_table = halves
    if not (enabled.is_open.value or enabled.is_open_here()) or not enabled.counts_now():
        return None
    if not isinstance(x, torch.Tensor) or keys_of(x).has(_PYTHON):
        return NotImplemented
    with torch._C.DisableTorchFunction():  # subclasses and modes are not to see what is asked here
        if x.layout is not torch.strided or x.is_nested:
            return "expected a dense strided tensor"
        if x.is_meta or not torch._C._has_storage(x) or torch._C._is_tracing():
            return None
        if channel_dim_for((output or gradient).site.channel_dim, x.dim()) is None:
            return "the channel dimension of such a tensor is not known yet"
        times = enabled.times
        with nullcontext() if times is None else times.span(1):
            try:
                return _observe(x, output, gradient, enabled, is_table)
            except Exception as error:
                return str(error)


def _observe(x: torch.Tensor, output: Half | None, gradient: Half | None, enabled: Enabled, is_table: bool) -> None:
    counted, concerned = enabled.counted_here(), None
    rows = None if counted is None else counted.on(x.device)
    if rows is not None and is_table and x.shape[: rows.row_index.dim()] != rows.row_index.shape:
        rows = None
    if output is None:
        assert gradient is not None
        concerned = gradient.site.described(x, rows).by_rows  # raises what accumulate would
    elif not backward_is_running():
        concerned = output.site.accumulate(x, rows)
    if rows is not None and counted is not None and concerned is not None:
        counted.note(concerned)
    # A leaf's gradient is its owner's, and a hook on it would outlive the step.
    if gradient is not None and x.requires_grad and x.grad_fn is not None:
        x.register_hook(functools.partial(_accumulate_gradient, gradient, rows))


def _accumulate_gradient(half: Half, rows: Rows | None, gradient: torch.Tensor | None) -> None:
    """rows: those that counted in the forward."""
    if torch.compiler.is_compiling():  # compiled autograd traces it, where nothing can be measured
        return
    if gradient is None or not half.state.enabled.is_open_here() or has_no_data(gradient):
        return
    times = half.state.enabled.times
    try:
        with torch._C.DisableTorchFunction(), nullcontext() if times is None else times.span():
            half.site.accumulate(gradient, rows)
    except Exception as error:
        if half.state.strict:
            raise
        with _failing:
            first, before = _failures.get(half.state.site, (str(error), 0))
            _failures[half.state.site] = first, before + 1


def call_in_c(kind: type[Hook]) -> None:
    """Calls go through __call__ here."""
