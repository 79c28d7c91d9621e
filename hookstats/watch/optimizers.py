"""The steps of all optimizers of the process, told to the parameters that are watched."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hookstats.watch.parameters import Parameters

# Those that are watched, in the order in which they came, and some that nobody holds any more. Replaced, never changed:
# threads may be stepping.
_watched: tuple[weakref.ref[Parameters], ...] = ()
_registered = False
_changing = threading.RLock()  # garbage that is collected meanwhile may detach a monitor


class _Watch:
    """`Parameters` that are measured at every optimizer step, until it is removed."""

    def __init__(self, held: weakref.ref[Parameters]) -> None:
        self._held = held

    def remove(self) -> None:
        global _watched
        with _changing:
            _watched = tuple(each for each in _watched if each is not self._held)


def watch_optimizers(parameters: Parameters) -> Any:
    """Measures at every optimizer step, until the returned handle is removed or nobody holds `parameters`.

    The hooks are registered once in a process, and never taken off: torch walks over them in every step, also of
    another thread, which would raise for the change.
    """
    global _watched, _registered
    held = weakref.ref(parameters)
    with _changing:
        if not _registered:
            _registered = True
            register_optimizer_step_pre_hook(_before_step)
            register_optimizer_step_post_hook(_after_step)
        _watched = (*(each for each in _watched if each() is not None), held)
    return _Watch(held)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.compiler.is_compiling():
        return None
    changed = None
    for held in _watched:
        found = held()
        if found is not None:
            changed = found.before_optimizer_step(optimizer, *(changed or (args, kwargs))) or changed
    return changed


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for held in _watched:
        found = held()
        if found is not None:
            found.after_optimizer_step(optimizer)
