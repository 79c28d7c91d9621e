"""explain(): which hooks are on a model, in the order in which they run, and which will not do what they seem to do.

What is said is read off the model; nothing is run.
"""

from __future__ import annotations

import contextlib
import dis
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from hookstats.modules.order import ModuleHook
from hookstats.modules.selection import clean_names, find_never_called
from hookstats.numbers.tables import html


class HookRow(NamedTuple):
    """A hook of a model, as a row."""

    name: str  # the module's or parameter's clean name; "(every module)" for a global hook
    kind: str  # "forward-pre", "forward", "full backward-pre", "full backward", "old backward", "gradient", ...
    hook: str  # what it is, and where it was written
    is_ours: bool
    traps: tuple[str, ...]


class Explanation:
    """Result of `explain`: the hooks as `rows`, and as a text when printed."""

    def __init__(self, rows: list[HookRow], modules: int) -> None:
        self.rows = rows
        self._modules = modules

    @property
    def traps(self) -> list[HookRow]:
        """The hooks of which there is something to beware."""
        return [row for row in self.rows if row.traps]

    def __repr__(self) -> str:
        return f"Explanation({len(self.rows)} hooks on {self._modules} modules, {len(self.traps)} to beware of)"

    def _repr_html_(self) -> str:
        """Return a table for notebooks: a row for each hook, 60 at most, and warnings below."""
        rows = [["module", "when", "hook, in the order in which they run"]]
        rows += [[row.name or "(model)", row.kind, row.hook] for row in self.rows]
        below = [f"{row.name or '(model)'}, {row.kind}, {row.hook}: {trap}" for row in self.traps for trap in row.traps]
        return html(repr(self), rows, 3, below)

    def __str__(self) -> str:
        if not self.rows:
            return f"no hooks on {self._modules} modules"
        names = [row.name or "(model)" for row in self.rows]
        width, kinds = max(map(len, ["module", *names])), max(len(row.kind) for row in self.rows)
        lines = [f"{'module':{width}}  {'when':{kinds}}  hook, in the order in which they run"]
        lines.append("-" * len(lines[0]))
        for name, row in zip(names, self.rows, strict=True):
            lines.append(f"{name:{width}}  {row.kind:{kinds}}  {row.hook}")
            lines += [f"{'':{width}}  {'':{kinds}}  ! {trap}" for trap in row.traps]
        return "\n".join(lines)


def explain(model: nn.Module) -> Explanation:
    """The hooks on a model's modules and parameters, ours and others', with what is known to go wrong.

    These are pointed out: the deprecated ``register_backward_hook``; full backward hooks beside a module that works in
    place; hooks whose code may return something, which takes the place of what they were given; hooks on modules that
    are never called. Not seen: hooks on tensors inside the forward pass, and those written in C++.

    Raises TypeError for what is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"explain: expected a torch.nn.Module, got {type(model).__name__}")
    clean = {id(module): name for name, module in clean_names(model).items()}
    silent = find_never_called(model)
    followers = _find_in_place_neighbours(model)
    rows = [
        _make_row("(every module)", kind, hook, []) for kind, hook in _list_hooks(torch.nn.modules.module, "_global_")
    ]
    modules = dict(model.named_modules())
    for path, module in modules.items():
        name = clean.get(id(module), f"{path} ({type(module).__name__})".lstrip())
        for kind, hook in _list_hooks(module, "_"):
            traps = [f"never runs: {silent[name]}"] if name in silent else []
            if kind == "old backward":
                traps.append(_say_old_backward(module))
            elif kind.startswith("full backward") and id(module) in followers:
                traps.append(followers[id(module)])
            rows.append(_make_row(name, kind, hook, traps))
        for key, parameter in module.named_parameters(recurse=False):
            for kind, hooks in (
                ("gradient", parameter._backward_hooks),
                ("gradient in .grad", getattr(parameter, "_post_accumulate_grad_hooks", None)),
            ):
                rows += [_make_row(f"{name}.{key}".lstrip("."), kind, hook, []) for hook in (hooks or {}).values()]
    return Explanation(rows, len(modules))


def _list_hooks(of: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Each hook's kind and the hook. of, prefix: a module and "_"; of those on all modules, torch's, "_global_"."""
    backward = "old backward" if getattr(of, f"{prefix}is_full_backward_hook") is False else "full backward"
    for kind, hooks in (
        ("forward-pre", "forward_pre_hooks"),
        ("forward", "forward_hooks"),
        ("full backward-pre", "backward_pre_hooks"),
        (backward, "backward_hooks"),
    ):
        for hook in getattr(of, f"{prefix}{hooks}").values():
            yield kind, hook


def _make_row(name: str, kind: str, hook: Any, traps: list[str]) -> HookRow:
    if isinstance(hook, ModuleHook):
        return HookRow(name, kind, f"hookstats.{hook.description}", True, tuple(traps))
    if isinstance(getattr(hook, "__self__", None), contextlib.nullcontext):  # see order.ModuleHook
        return HookRow(name, kind, "nothing: what a hook of hookstats is in a copy of its model", True, ())
    function, code = _find_code(hook)
    if code is not None and kind != "gradient in .grad" and _may_return(code):
        given = {"forward": "the output", "forward-pre": "the input"}.get(kind, "the gradient")
        traps = [*traps, f"may return something, which takes the place of {given}"]
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    called = getattr(function, "__qualname__", type(function).__qualname__)
    return HookRow(name, kind, f"{getattr(function, '__module__', None) or '?'}.{called}{where}", False, tuple(traps))


def _find_code(hook: Any) -> tuple[Any, Any]:
    """The function that is called in the end, and its code, if it is Python's."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    if not hasattr(hook, "__code__") and hasattr(type(hook).__call__, "__code__"):
        return hook, type(hook).__call__.__code__
    return hook, getattr(hook, "__code__", None)


def _may_return(code: Any) -> bool:
    """Return whether a function has a place where it returns anything but the constant None."""
    before = None
    for step in dis.get_instructions(code):
        if step.opname == "RETURN_CONST" and step.argval is not None:
            return True
        if step.opname == "RETURN_VALUE" and not (before and before.opname == "LOAD_CONST" and before.argval is None):
            return True
        before = step
    return False


def _say_old_backward(module: nn.Module) -> str:
    if next(module.children(), None) is not None:
        return "deprecated register_backward_hook: of all that is in this module, it sees the last operation only"
    return "deprecated register_backward_hook: its grad_input is that of the module's last operation, not the module's"


def _find_in_place_neighbours(model: nn.Module) -> dict[int, str]:
    """The modules, by id, on which a full backward hook raises, if the leaves run in the order of their names."""
    leaves = [(name, module) for name, module in model.named_modules() if next(module.children(), None) is None]
    places = {id(module): place for place, (_, module) in enumerate(leaves)}
    found: dict[int, str] = {}
    for module in model.modules():
        inside = [places[id(leaf)] for leaf in module.modules() if id(leaf) in places]
        for place, what in ((min(inside), "which comes first in it"), (max(inside) + 1, "which comes next")):
            if place < len(leaves) and getattr(leaves[place][1], "inplace", False) is True:
                itself = leaves[place][1] is module
                found[id(module)] = "a full backward hook makes a view of what it watches, so that this raises: " + (
                    "the module works in place" if itself else f"{leaves[place][0]!r}, {what}, works in place"
                )
    return found
