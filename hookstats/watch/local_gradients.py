"""A rank's own gradients: of each backward, as they are added to a parameter's `grad`, before ranks reduce them.

"reduction" reads 64 elements of these, and the same of the gradient that an optimizer takes: sites "reduction.local"
and "reduction.reduced", whose channels they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from hookstats.modules.sharding import is_dtensor
from hookstats.numbers.fields import Site
from hookstats.watch.batches import Batches, Parameter, find_part
from hookstats.watch.binding import SiteBinder
from hookstats.watch.flags import is_capturing
from hookstats.watch.memory import StateStore

LOCAL_GRADIENT = "param_grad_local"
SAMPLES = "reduction"
_LOCAL, _REDUCED = f"{SAMPLES}.local", f"{SAMPLES}.reduced"
_ELEMENTS = 64


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
        self._places: dict[Parameter, tuple[int, torch.Tensor]] = {}  # how many elements, and which are sampled
        self._sampled = set[Parameter]()  # of which the reduced gradient was, in this step

    def watch(self, each: Parameter, has_samples: bool) -> None:
        """Watch what its backwards bring, or leave it out, with the reason. has_samples: of elements, too."""
        model = self._model()
        modules = () if model is None else model.modules()
        if is_dtensor(each.get()) and any(hasattr(module, "set_requires_gradient_sync") for module in modules):
            problem = "FSDP2 reduces a gradient before anybody can see it: torch has no public hook at that point"
            kind = LOCAL_GRADIENT if LOCAL_GRADIENT in each.entries else SAMPLES
            if kind == LOCAL_GRADIENT:
                each.entries[kind].given_up = True
            return self._binder.skipping.give_up([Site(each.name, kind)], problem, reason=problem)
        if has_samples and not is_dtensor(each.get()):
            self._add_samples(each)
        self._watched[each] = (0, None, None)
        self._register_hook(each)

    def _add_samples(self, each: Parameter) -> None:
        tensor = each.get()
        if tensor is None or nn.parameter.is_lazy(tensor) or tensor.is_meta or not tensor.numel():
            return
        count = min(tensor.numel(), _ELEMENTS)
        if not self._store.make_room(tensor.device, count, 2, has_bins=False):
            return self._binder.skipping.give_up(
                [Site(each.name, kind) for kind in (_LOCAL, _REDUCED)], self._store.explain_no_room(count, 2, False)
            )
        places = torch.arange(count) * (tensor.numel() - 1) // max(count - 1, 1)
        self._places[each] = tensor.numel(), places.to(tensor.device)
        for kind in (_LOCAL, _REDUCED):
            entry = self._store.add(Site(each.name, kind), tensor.device, count, 1, count > 1, has_bins=False)
            entry.channel_dim = -1
            each.entries[kind] = entry

    def sample_reduced(self, parameters: Iterable[Parameter], scale: torch.Tensor | None = None) -> None:
        """Sample gradients that an optimizer is about to take, once a step. scale: by which it divides them."""
        if is_capturing() or not self._places:
            return
        found: dict[Parameter, torch.Tensor | None] = {}
        for each in parameters:
            tensor = each.get() if each.measures(_REDUCED) and each not in self._sampled else None
            sample = None if tensor is None else self._try_sample(each, _REDUCED, tensor.grad)
            if sample is not None:
                found[each] = sample if scale is None else sample / scale.to(sample.device)
        self._sampled |= found.keys()
        self._batches.accumulate([(each, _REDUCED) for each in found], list(found.values()))

    def _try_sample(self, each: Parameter, kind: str, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return sampled elements; None: there is no gradient, or it is left out."""
        try:
            return None if gradient is None else self._sample(each, gradient)
        except Exception as error:
            if self._store.strict:
                raise
            self._binder.leave_out([each.entries[kind]], error)
            return None

    def _sample(self, each: Parameter, gradient: torch.Tensor) -> torch.Tensor:
        count, places = self._places[each]
        if gradient.numel() != count:
            raise ValueError(f"expected a gradient of {count} elements, as before, got one of {gradient.numel()}")
        return torch.take(gradient.detach(), places)[None]

    def look_again(self) -> None:
        """Parameters may have been replaced, and a step has begun."""
        self._sampled.clear()
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
                and any(map(each.measures, (LOCAL_GRADIENT, _LOCAL)))
            ):
                timed(local._measure, each, gradients[0])

        with torch.enable_grad():
            function = tensor.view_as(tensor).grad_fn
        node = None if function is None else function.next_functions[0][0]
        # The node lives as long as somebody holds it; the hook is one of its own.
        handle = None if node is None else node.register_prehook(measure)
        self._watched[each] = (id(tensor), node, handle)

    def _measure(self, each: Parameter, gradient: torch.Tensor) -> None:
        if each.measures(_LOCAL):
            self._batches.accumulate([(each, _LOCAL)], [self._try_sample(each, _LOCAL, gradient)])
        if not each.measures(LOCAL_GRADIENT):
            return
        try:
            held = find_part(self._binder, each, LOCAL_GRADIENT, gradient)
        except Exception as error:
            if self._store.strict:
                raise
            return self._binder.leave_out([each.entries[LOCAL_GRADIENT]], error)
        self._batches.accumulate([(each, LOCAL_GRADIENT)], [held])
