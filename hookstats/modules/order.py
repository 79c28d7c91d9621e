"""The place of our hooks among a module's hooks, whoever came first. Knows torch alone.

Hooks of one stage run in the order in which they came, and every hook of an earlier stage runs before them. Hooks of
others keep their order.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

_log = logging.getLogger("hookstats")

# What a forward hook of one stage changes is what those of the later stages see.
BEFORE_STATISTICS, STATISTICS, AFTER_STATISTICS = range(3)


class ModuleHook:
    """A hook of ours, for statistics if nothing else is said. It stays behind when its model is copied or pickled."""

    __slots__ = ()
    stage: int = STATISTICS
    description: str = "attach"

    def __reduce__(self) -> Any:
        """Copied and pickled as a function that takes anything and returns None.

        Not one of ours: such a model must load where hookstats is not installed.
        """
        return getattr, (contextlib.nullcontext(), "__exit__")


def register(
    module: nn.Module,
    hook: ModuleHook,
    *,
    on_inputs: bool = False,
    with_kwargs: bool = False,
    newest_first: bool = False,
) -> Hanging:
    """Hangs a hook on a module, behind those of its stage and before those of later ones.

    Args:
        on_inputs: a forward-pre hook instead of a forward hook.
        with_kwargs: the hook is given the module's keyword arguments after the positional ones.
        newest_first: before those of its stage.
    """
    _guards.add_hook(hook)
    hooks: Any = module._forward_pre_hooks if on_inputs else module._forward_hooks
    behind = [key for key, other in hooks.items() if _comes_after(other, hook.stage, newest_first)]
    hang: Any = module.register_forward_pre_hook if on_inputs else module.register_forward_hook
    handle: RemovableHandle = hang(hook, with_kwargs=with_kwargs)
    if behind:
        keys = list(hooks)
        for key in keys[keys.index(behind[0]) : -1]:
            hooks[key] = hooks.pop(key)  # move_to_end would be lost on torch.compile, which reads the dict beneath
    return Hanging(hook, handle)


class Hanging:
    """A hook on a module, until it is removed."""

    def __init__(self, hook: ModuleHook, handle: RemovableHandle) -> None:
        self._hook = weakref.ref(hook)  # models own them
        self._handle = handle

    def remove(self) -> None:
        self._handle.remove()
        _guards.takes_off(self._hook())


def _comes_after(other: object, stage: int, newest_first: bool) -> bool:
    return isinstance(other, ModuleHook) and (other.stage > stage or (newest_first and other.stage == stage))


def on_compiler_import(act: Callable[[], None]) -> None:
    """Call this at once if torch._dynamo is imported, else as soon as anybody imports it.

    The import takes a second or two, which a program that compiles nothing should not pay. torch.compile is told what
    it has to know of hooks before it can compile anything.
    """
    if "torch._dynamo" in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _CompilerWatch(act))


class _CompilerWatch(MetaPathFinder):
    """Finds nothing itself: has something done after the one who finds torch._dynamo has imported it."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch._dynamo":
            return None
        with contextlib.suppress(ValueError):  # another thread may have begun the same import
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_act(module: Any) -> None:
            execute(module)
            try:
                self._act()
            except Exception:  # which would be one of the program's import
                _log.warning("graphs may be compiled without hookstats' hooks", exc_info=True)

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


class _Guards:
    """Makes graphs look at hooks while any of ours hangs: one is used for modules without hooks only if they have none.

    By default torch.compile leaves these guards out, and uses the graph of a model without hooks for another one of the
    same class that has some: a second model, an EMA copy, one of many equal blocks. What was compiled so is forgotten.
    What is compiled from then on notices by itself which hooks come and go, and need not be. If nothing is, torch's
    default comes back with the last hook that is removed.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may take hooks off meanwhile
        self._hooks: WeakSet[ModuleHook] = WeakSet()  # a model that is no more has none
        self._changed = False
        self._waits = False  # for the compiler, which nobody has imported

    def add_hook(self, hook: ModuleHook) -> None:
        with self._lock:
            self._hooks.add(hook)
            if self._waits:
                return
            self._waits = True
        on_compiler_import(self._change)

    def _change(self) -> None:
        from torch._dynamo import config

        with self._lock:
            self._waits = False
            if not self._hooks or not config.skip_nnmodule_hook_guards:
                return
            config.skip_nnmodule_hook_guards, self._changed = False, True
        if has_compiled():  # without the lock: this may wait for whoever compiles
            torch.compiler.reset()
            _log.info("something was compiled before: torch.compiler.reset() was called, so that hooks are seen")

    def takes_off(self, hook: ModuleHook | None) -> None:
        """Remove a hook; None: it was gone already."""
        with self._lock:
            if hook is not None:
                self._hooks.discard(hook)
            if not self._hooks and self._changed and not has_compiled():
                from torch._dynamo import config

                config.skip_nnmodule_hook_guards, self._changed = True, False


_guards = _Guards()


def make_room_for_graphs() -> None:
    """Make room in the compiler's caches when hooks have come or gone: new graphs come on top of those that are there.

    A frame that needs more graphs than the recompile limit (8 by default) runs eagerly for good, and raises if it is to
    be one full graph. A monitor of blocks that are compiled apart needs five, so where more than a quarter of the limit
    is used up, that frame's are forgotten: all of them, as nobody knows which are still used.
    """
    if not has_compiled():
        return
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
    from torch._dynamo import config, convert_frame

    with convert_frame.compile_lock:
        for reference in convert_frame.input_codes.seen:
            code = reference()
            if code and len(_debug_get_cache_entry_list(code)) > config.recompile_limit // 4:
                reset_code(code)


def has_compiled() -> bool:
    """Return whether torch.compile has compiled anything in this process."""
    module = sys.modules.get("torch._dynamo.convert_frame")
    return module is not None and module.FRAME_COUNTER > 0
