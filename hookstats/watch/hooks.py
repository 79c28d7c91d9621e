"""Hooks that run with a module, from its inputs and outputs to the extension."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from hookstats import _native
from hookstats.modules.channels import ChannelAxis, find_natural_channels
from hookstats.modules.containers import REST, walk
from hookstats.modules.order import ModuleHook
from hookstats.modules.sharding import Sharding
from hookstats.numbers.fields import Site
from hookstats.watch.graphs import is_measured, mark_static_address, observe, observe_gradient, observe_in_graph
from hookstats.watch.guards import Rows
from hookstats.watch.memory import Entry, SiteState, StatePlace

Kinds: TypeAlias = tuple[str | None, str | None]  # of a hook's sites: the tensor's, its gradient's


class SiteSpec:
    """Facts about a hook's tensor: for `SiteBinder` and `Fitting` alone, never read on the fast way."""

    def __init__(
        self,
        name: str,
        path: str,
        channels: ChannelAxis,
        keep_channels: bool,
        kinds: Kinds,
        module: torch.nn.Module | None = None,
        group_size: int | None = None,
    ) -> None:
        """group_size: how many channels belong together, such as those of a head."""
        self.name = name
        self.path = path
        self.channels = channels
        self.keep_channels = keep_channels
        self.kinds = kinds
        self.group_size = group_size
        self.module = None if module is None else weakref.ref(module)
        self.entries: dict[str, Entry] = {}  # by tensor kind
        self.dims: dict[int, int] = {}  # of its channels, by the number of a tensor's dimensions, where found
        # Of plain tensors that are a rank's part of a whole: a method that tells how they lie, by their channels here.
        self.placed: Callable[[], Callable[[int], Sharding | None] | None] = lambda: None

    @property
    def place(self) -> StatePlace:
        """Return the place where its states lie now."""
        return next(iter(self.entries.values())).place

    @property
    def channel_dim(self) -> int:
        """Return it as the extension has it: csrc/ops.h."""
        if self.channels.dim is not None and self.dims:
            return self.channels.dim
        found = self.dims if self.channels.dim is None else {}
        return _native.DIMS_BY_NDIM + sum((dim + 1) << 4 * ndim for ndim, dim in found.items() if ndim < 8)

    @property
    def shown_dim(self) -> int | None:
        """Return what people are shown: the latest that was found; -1 if it is the last, else counted from the front.

        What was not looked at, because its width and place are those of its module's type, has the dimensions of a
        batch: 1 of a convolution, whose channels are the third from the end. A dimension that the caller has given
        stays as it was given until it is looked at.
        """
        if self.dims:
            ndim, dim = next(reversed(self.dims.items()))
            return None if ndim == 0 else -1 if dim == ndim - 1 else dim
        module = None if self.module is None else self.module()
        if module is not None and self.channels.dim is not None and self.channels.dim < -1:
            natural = find_natural_channels(module)
            if natural.dim == self.channels.dim:
                return 1
        return self.channels.dim

    @property
    def sites(self) -> dict[str, Site]:
        """Return the sites by tensor kind."""
        return {kind: Site(self.name, kind + self.path) for kind in self.kinds if kind}


class SiteHook(ModuleHook, _native.Hook):
    """Measures a module's output and, when it comes, the gradient of that output; as a forward hook.

    Under torch.compile the tracer follows the same hook, to `observe_in_graph`. What it reads is guarded, before each
    run of the graph, so it has little to read: the monitor's name and the slots. They are plain attributes: any look-up
    by site would give every one of many equal modules a graph of its own.
    """

    __slots__ = (
        "__weakref__",
        "binder",
        "gradient",
        "gradient_slot",
        "is_table",
        "monitor",
        "output",
        "parts",
        "slot",
        "spec",
    )
    is_late = False  # whether nobody knows of its site until a tensor of it is met
    is_sampled = True  # whether some of its tensors' rows are read alone, where the monitor does that

    def __init__(self, binder: Any, spec: SiteSpec) -> None:
        """binder: the SiteBinder that makes this hook."""
        self.binder = binder
        self.spec = spec
        self.monitor: str = binder.monitor
        self.is_table = spec.module is not None and isinstance(spec.module(), torch.nn.Embedding)
        self.slot: torch.Tensor | None = None  # None: it has no site
        self.gradient_slot: torch.Tensor | None = None  # None: none of a gradient
        self.bind(None, None)
        self.parts: dict[str, SiteHook] = {}  # of a container, by path

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        """Serve the compiler and subclasses. Else the extension does the same, without entering Python."""
        if torch.compiler.is_compiling():
            return observe_in_graph(output, self)
        problem = _native.observe(output, self)
        if problem is not None:
            self.binder.rebind(self, output, problem)

    def bind_sites(self) -> None:
        """Make it measure into the states that its sites have now."""
        sites = self.spec.entries
        self.bind(*(sites[kind].state if kind and not sites[kind].given_up else None for kind in self.spec.kinds))

    def bind(self, output: SiteState | None, gradient: SiteState | None) -> None:
        """Make it measure into these from now on."""
        self.output, self.gradient = output, gradient
        state = output or gradient
        if state is not None:
            self._lay_slots(state.moments.device)
        slot = self.gradient_slot
        in_graph = None if slot is None else functools.partial(observe_gradient, slot)
        _native.bind(self, output, gradient, in_graph, self.is_table)

    def _lay_slots(self, device: torch.device) -> None:
        """Lay them where its tensors are: graphs whose inputs are on a CPU, too, are no CUDA graphs."""
        if self.slot is not None and self.slot.device == device:
            return
        slots = self.binder.store.slots(device)
        _native.lay_slots(self, *slots)
        for slot in slots:
            mark_static_address(slot)
        self.slot, self.gradient_slot = slots if self.spec.kinds[1] else (slots[0], None)

    def watches_gradient(self, path: str) -> bool:
        """Tell whether the gradient of a tensor at this path of a container can be watched. Can be traced."""
        return True


_native.call_in_c(SiteHook)


class FedHook(SiteHook):
    """Takes numbers that were computed from what runs, such as those of attention logits. It hangs on no module."""

    __slots__ = ()
    is_late = True
    is_sampled = False

    def feed(self, numbers: torch.Tensor, rows: Rows | None) -> None:
        """Folds a plain tensor into the site. Can be traced. rows: those that count; None: all."""
        if self.slot is not None:  # else there was no memory for its site
            observe(numbers, self.slot, "", rows)


class FedGradientHook(FedHook):
    """Takes numbers that are computed inside a backward: where it recomputes a forward, outputs do not count."""

    __slots__ = ()

    def feed(self, numbers: torch.Tensor, rows: Rows | None) -> None:
        if self.gradient_slot is not None:
            observe(numbers, self.gradient_slot, "", rows)


class InputHook(SiteHook):
    """Measures a module's inputs before it runs, as a forward pre-hook with kwargs.

    One positional tensor, and no tensor by name, is the site itself; else the inputs are the parts of a container, by
    number and by name. A gradient is the module's own share: the module is given an alias of each argument that is a
    tensor (not a parameter, nor in a container), and the gradient of the alias is watched.
    """

    __slots__ = ()

    def __call__(self, module: Any, args: Any, kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():
            return self._observe_inputs(module, args, kwargs) if is_measured(self) else None
        if not self.binder.measures_now() or torch._C._is_tracing():
            return None
        try:
            with self.binder.span_of_a_hook():
                return self._observe_inputs(module, args, kwargs)
        except Exception as error:
            self.binder.leave_out(self.spec.entries.values(), error)

    def _observe_inputs(self, module: Any, args: Any, kwargs: Any) -> Any:
        changed = self.spec.kinds[1] is not None
        if changed:  # without gradients, too: an alias then has none, where the argument may get one from elsewhere
            args, kwargs = _aliases(args, kwargs)
        given = args[0] if _is_one(args, kwargs) else {**{str(i): arg for i, arg in enumerate(args)}, **kwargs}
        super().__call__(module, args, given)
        return (args, kwargs) if changed else None

    def watches_gradient(self, path: str) -> bool:
        """Only inputs that are tensors themselves are passed on as aliases, whose gradients can be watched."""
        return not path or (path.count(".") == 1 and path != REST)


class ModelInputHook(InputHook):
    """Measures what the model is given, as far as it is floating: indices are nothing to measure, and no complaint."""

    __slots__ = ()
    is_late = True
    is_sampled = False

    def _observe_inputs(self, module: Any, args: Any, kwargs: Any) -> Any:
        if _is_one(args, kwargs) and not args[0].is_floating_point():
            return None
        return super()._observe_inputs(module, args, kwargs)


def _aliases(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments, with an alias in the place of each tensor; in all places of one tensor the same one."""
    given = [*args, *kwargs.values()]
    new: list[Any] = []
    for i, value in enumerate(given):
        before = next((j for j in range(i) if given[j] is value), None)
        if before is not None:
            new.append(new[before])
        elif isinstance(value, torch.Tensor) and value.requires_grad and not isinstance(value, torch.nn.Parameter):
            new.append(value.view_as(value))
        else:
            new.append(value)
    return tuple(new[: len(args)]), dict(zip(kwargs, new[len(args) :], strict=True))


def _is_one(args: Any, kwargs: Any) -> bool:
    """Tell whether one positional tensor is given, and none by name."""
    return len(args) == 1 and isinstance(args[0], torch.Tensor) and not any(True for _ in walk(kwargs))
