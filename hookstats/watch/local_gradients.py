"""A rank's own gradients: of each backward, as they are added to a parameter's `grad`, before ranks reduce them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hookstats.modules.sharding import is_dtensor
from hookstats.numbers.fields import Site
from hookstats.watch.batches import Batches, Parameter, find_part
from hookstats.watch.binding import SiteBinder
from hookstats.watch.memory import StateStore

LOCAL_GRADIENT = "param_grad_local"


class LocalGradients:
    """Hooks before the nodes of autograd that accumulate gradients: what `torch.autograd.grad` takes passes none."""

    def __init__(
        self,
        model: nn.Module,
        store: StateStore,
        binder: SiteBinder,
        batches: Batches,
        timed: weakref.WeakMethod[Callable[..., Any]],
    ) -> None:
        """timed: calls what measures, as a part of what hookstats takes of a step; what it raises ends no backward."""
        self._model = weakref.ref(model)
        self._store = store
        self._binder = binder
        self._batches = batches
        self._timed = timed
        self._watched: dict[Parameter, tuple[int, Any, Any]] = {}  # the tensor's id, its node, the hook's handle

    def watch(self, each: Parameter) -> None:
        """Or leaves it out, with the reason."""
        model = self._model()
        modules = () if model is None else model.modules()
        if is_dtensor(each.get()) and any(hasattr(module, "set_requires_gradient_sync") for module in modules):
            problem = "FSDP2 reduces a gradient before anybody can see it: torch has no public hook at that point"
            each.entries[LOCAL_GRADIENT].given_up = True
            return self._binder.skipping.give_up([Site(each.name, LOCAL_GRADIENT)], problem, reason=problem)
        self._watched[each] = (0, None, None)
        self._register_hook(each)

    def look_again(self) -> None:
        """Parameters may have been replaced."""
        for each, (known, _, _) in self._watched.items():
            if id(each.get()) != known:
                self._register_hook(each)

    def remove(self) -> None:
        for _, _, handle in self._watched.values():
            if handle is not None:
                handle.remove()
        self._watched.clear()

    def _register_hook(self, each: Parameter) -> None:
        _, _, handle = self._watched[each]
        if handle is not None:
            handle.remove()
        tensor, this = each.get(), weakref.ref(self)
        if tensor is None or not tensor.requires_grad or nn.parameter.is_lazy(tensor):
            self._watched[each] = (0, None, None)
            return

        def measure(gradients: tuple[torch.Tensor, ...]) -> None:
            local = this()
            timed = None if local is None else local._timed()
            if (
                local is not None
                and timed is not None
                and local._store.flags.is_open()
                and each.measures(LOCAL_GRADIENT)
            ):
                timed(local._measure, each, gradients[0])

        with torch.enable_grad():
            function = tensor.view_as(tensor).grad_fn
        node = None if function is None else function.next_functions[0][0]
        # The node lives as long as somebody holds it; the hook is one of its own.
        handle = None if node is None else node.register_prehook(measure)
        self._watched[each] = (id(tensor), node, handle)

    def _measure(self, each: Parameter, gradient: torch.Tensor) -> None:
        try:
            held = find_part(self._binder, each, LOCAL_GRADIENT, gradient)
        except Exception as error:
            if self._store.strict:
                raise
            return self._binder.leave_out([each.entries[LOCAL_GRADIENT]], error)
        self._batches.accumulate([(each, LOCAL_GRADIENT)], [held])
