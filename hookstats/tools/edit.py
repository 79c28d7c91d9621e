"""edit(): changes what flows through a model: gradients clipped or scaled, activations masked, any tensor replaced.

    with hookstats.edit(model, "layers.*.mlp", lambda g: g.clamp(-1, 1), "grad_output") as clip:
        train(model)
    print(clip.changed)

Which tensor of a module an edit changes is named as everywhere in hookstats: "output" and "input" are what leaves and
what enters a module, "grad_output" and "grad_input" the gradients of those two. Every floating tensor in tuples, lists,
dicts and dataclasses is changed; "output.0" or "grad_output.logits" is one of them, "input.0" the first positional
argument, "input.mask" the keyword argument. Modules may be made of others, and the model may be compiled.

- Edits of one tensor act in the order in which they were made. An edit of "grad_output" acts on the gradient of the
  tensor that it meets: if an edit of "output" was made before it, that of the changed output. An edit of "grad_input"
  acts where the gradient leaves the module, whatever was done to the "input".
- `hookstats.attach` shows an edited tensor, and its gradient, before the edit; with ``after=True`` after it. Which of
  them came first makes no difference. (In graphs that torch before 2.13 compiled, the gradient of one tensor meets
  edits and statistics in the reverse order.)
- A module whose input or "grad_input" is edited works on a tensor of its own: if it works in place, its caller's tensor
  stays as it was.
- A copy of the model (``deepcopy``, ``pickle``) is without edits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

from hookstats import _native
from hookstats.modules import order
from hookstats.modules.containers import rebuild, walk
from hookstats.modules.selection import Modules, find_modules_at
from hookstats.numbers.selection import Globs

_GRADIENTS = ("grad_output", "grad_input")
_TENSORS = ("output", "input", *_GRADIENTS)
Choice: TypeAlias = Globs | Callable[[str, nn.Module], bool]
Change: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def edit(
    model: nn.Module,
    modules: Choice,
    fn: Change,
    tensor: str = "output",
    *,
    exclude: Modules = None,
    after: bool = False,
) -> Edit:
    """Makes of a tensor what `fn` makes of it, whenever it flows through the model.

    Args:
        model: any module, compiled ones included.
        modules: globs over module names (``"layers.*.mlp"``; ``*`` crosses dots), or a callable
            ``(name, module) -> bool``. A container that matches is edited, and each of its children that matches, too.
        fn: a callable ``Tensor -> Tensor`` of the same shape and dtype, that does not change its argument in place. Its
            gradient is autograd's. Under torch.compile it is traced into the graph.
        tensor: ``"output"``, ``"input"``, ``"grad_output"`` or ``"grad_input"``, or one tensor in it
            (``"grad_output.0"``).
        exclude: globs or a callable, too; what they choose is left out, with all that is inside it.
        after: whether `hookstats.attach` shows the tensor after the edit.

    Raises:
        TypeError, ValueError: for arguments that are not as above; a glob that matches nothing, or only modules that
            are never called. In the forward pass, TypeError where there is no floating tensor to edit; TypeError or
            ValueError for what `fn` returned.
    """
    if not callable(fn):
        raise TypeError(f"edit: fn: expected a callable Tensor -> Tensor, got {fn!r}")
    return Edit(fn, model, modules, exclude, tensor, after)


class Edit:
    """A handle of an edit. As a context manager, it is removed at the end."""

    def __init__(
        self, change: Change, model: nn.Module, modules: Choice, exclude: Modules, tensor: str, after: bool
    ) -> None:
        kind = tensor.partition(".")[0] if isinstance(tensor, str) else ""
        if kind not in _TENSORS:
            raise ValueError(f"edit: tensor: expected {', '.join(_TENSORS)} or one in it ('output.0'), got {tensor!r}")
        if not isinstance(after, bool):
            raise TypeError(f"edit: after: expected True or False, got {after!r}")
        self.description = f"edit(fn={getattr(change, '__qualname__', type(change).__name__)})"
        self.change = change
        self.removed = False
        self._hooks: dict[str, EditHook] = {}
        self._handles: list[order.Hanging] = []
        # Where inputs are handed on from hook to hook, their gradients pass the hooks in the reverse order.
        reverse = kind == "grad_input"
        on_inputs = kind.endswith("input")
        try:
            for name, module in find_modules_at(model, modules, exclude).items():
                hook = (InputEdit if on_inputs else OutputEdit)(self, name, tensor, _find_device(module, model))
                hook.stage = order.BEFORE_STATISTICS if after != reverse else order.AFTER_STATISTICS
                self._hooks[name] = hook
                self._handles.append(
                    order.register(module, hook, on_inputs=on_inputs, with_kwargs=True, newest_first=reverse)
                )
        except Exception:
            self.remove()
            raise
        order.make_room_for_graphs()

    @property
    def changed(self) -> int:
        """Return how many elements were changed so far, that is, are not equal to what they were. Waits for the device.

        A recomputed forward (activation checkpointing) counts once. Not counted, though edited, is what has no data of
        its own: DTensors, fake tensors, tensors inside ``torch.func``.
        """
        return sum(int(counter) for hook in self._hooks.values() for counter in hook.counters)

    def remove(self) -> None:
        """Takes the edit off the model. Gradients that are still to come are not changed any more (in eager mode)."""
        if self.removed:
            return
        self.removed = True
        for handle in self._handles:
            handle.remove()
        order.make_room_for_graphs()

    def __enter__(self) -> Edit:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        where = ", ".join(name or "(model)" for name in self._hooks)
        return f"<{self.description} on {where}{': removed' if self.removed else ''}>"


class EditHook(order.ModuleHook):
    """An edit on one module. What a graph needs is in plain attributes, so that equal modules share one."""

    def __init__(self, edit: Edit, name: str, tensor: str, device: torch.device) -> None:
        self.edit = edit
        self.description = f"{edit.description} of {tensor}"
        self.name = name
        self.tensor = tensor
        kind, _, path = tensor.partition(".")
        self.path = f".{path}" if path else ""
        self.of_gradient = kind in _GRADIENTS
        self.counters = [_make_counter(device)]  # one on each device where tensors were seen, the present one last

    def apply_edit(self, value: Any, inputs: Any) -> Any:
        """`value`, with the tensors in question changed, or with hooks for their gradients; `inputs` are not ours."""
        done: list[tuple[torch.Tensor, torch.Tensor]] = []

        def change(path: str, old: torch.Tensor) -> torch.Tensor:
            inside = not self.path or path == self.path or path.startswith(f"{self.path}.")
            if not inside or not old.is_floating_point():
                return old
            for before, after in done:  # the same tensor in two places is one tensor
                if before is old:
                    return after
            new = self._edit_gradient(old, inputs) if self.of_gradient else self._apply_change(old)
            done.append((old, new))
            return new

        new = rebuild(value, change)
        if not done:
            found = [f"{self.tensor.partition('.')[0]}{path} {tensor.dtype}" for path, tensor in walk(value)]
            raise TypeError(
                f"{self.edit.description}: expected a floating tensor as {self.tensor} of {self.name or '(model)'}, "
                f"got {', '.join(found) or type(value).__name__}"
            )
        return new

    def _edit_gradient(self, tensor: torch.Tensor, inputs: Any) -> torch.Tensor:
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        if tensor.is_leaf or any(tensor is other for _, other in walk(inputs)):
            tensor = tensor.clone()  # others use it, too: its gradient is not this module's alone

        def edit_gradient(gradient: torch.Tensor | None) -> torch.Tensor | None:
            if gradient is None or self.edit.removed:  # in a graph: of an output that nobody used
                return None
            return self._apply_change(gradient)

        tensor.register_hook(edit_gradient)
        return tensor

    def _apply_change(self, old: torch.Tensor) -> torch.Tensor:
        new = self.edit.change(old)
        if not isinstance(new, torch.Tensor):
            raise TypeError(f"{self.edit.description}: expected fn to return a tensor, got {type(new).__name__}")
        if new.shape != old.shape or new.dtype != old.dtype:
            raise ValueError(
                f"{self.edit.description}: expected fn to return {old.dtype} {list(old.shape)} for {self.tensor} of "
                f"{self.name or '(model)'}, got {new.dtype} {list(new.shape)}"
            )
        with torch.no_grad():
            self._count(old, new)
        return new

    def _count(self, old: torch.Tensor, new: torch.Tensor) -> None:
        in_graph = torch.compiler.is_compiling()
        if not in_graph and (_native.has_no_data(old) or (_native.backward_is_running() and not self.of_gradient)):
            return
        if self.counters[-1].device != old.device:
            if in_graph:
                raise RuntimeError(
                    f"{self.edit.description}: expected tensors on {self.counters[-1].device}, where the model was "
                    f"when the edit was made, got one on {old.device}: make edits after model.to()"
                )
            at = next((i for i, counter in enumerate(self.counters) if counter.device == old.device), None)
            self.counters.append(_make_counter(old.device) if at is None else self.counters.pop(at))
        amount = ((new != old) & ~(new.isnan() & old.isnan())).sum()
        if in_graph:
            _native.add(self.counters[-1], amount, not self.of_gradient)
        else:
            self.counters[-1].add_(amount)


class OutputEdit(EditHook):
    """A forward hook."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return self.apply_edit(output, (args, kwargs))


class InputEdit(EditHook):
    """A forward-pre hook."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = {str(place): arg for place, arg in enumerate(args)} | kwargs
        new = self.apply_edit(given, given)
        return tuple(new[str(place)] for place in range(len(args))), {name: new[name] for name in kwargs}


def _make_counter(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.zeros((), dtype=torch.int64, device=device)


def _find_device(*modules: nn.Module) -> torch.device:
    tensors = (t for module in modules for t in (*module.parameters(), *module.buffers()))
    return next((t.device for t in tensors if t.device.type != "meta"), torch.device("cpu"))
