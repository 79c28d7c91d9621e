"""What happens when a module runs: the forward hook, from its output to the extension.

And what happens to a tensor that the fast way cannot take.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any
from weakref import WeakValueDictionary

import torch

from hookstats import _native
from hookstats.fields import Site
from hookstats.select import Channels, channel_dim_of, walk
from hookstats.stages import ModuleHook
from hookstats.state import Entry, SiteState, Store

_log = logging.getLogger("hookstats")


def warn(text: str) -> None:
    """A warning, also where warnings are made errors: a training run must not die of what it is told."""
    try:
        warnings.warn(f"hookstats: {text}", stacklevel=3)
    except UserWarning:
        _log.warning(text)


class OutputHook(ModuleHook):
    """Measures a module's output and, when it comes, the gradient of that output.

    Under torch.compile the tracer follows the same hook and meets operators instead of the C function. The states are
    plain attributes: any look-up by site would give every one of many equal modules a graph of its own.
    """

    __slots__ = ("__weakref__", "gradient", "output", "parts", "watched", "watcher")

    def __init__(self, watcher: Watcher, watched: Watched) -> None:
        self.watcher = watcher
        self.watched = watched
        self.output: SiteState | None = None
        self.gradient: SiteState | None = None
        self.parts: dict[str, OutputHook] = {}  # of a container, by path

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            self._trace(output)
        elif type(output) is torch.Tensor:
            problem = _native.observe(output, self.output, self.gradient)
            if problem is not None:
                self.watcher.mend(self, output, problem)
        elif output is not None:
            self.watcher.take_apart(self, output)

    def _trace(self, output: Any) -> None:
        for path, tensor in walk(output):
            hook = self.parts.get(path) if path else self
            if hook is not None:
                _observe_in_graph(tensor, hook.output, hook.gradient)


def _observe_in_graph(x: torch.Tensor, output: SiteState | None, gradient: SiteState | None) -> None:
    """What `_native.observe` does, in operators."""
    if output is not None and _fits(x, output):
        _accumulate(x, output, True)
    if gradient is not None and x.requires_grad and not x.is_leaf and _fits(x, gradient):

        def accumulate_gradient(g: torch.Tensor | None) -> None:
            if g is not None:  # a graph's output that nobody used
                _accumulate(g, gradient, False)

        x.register_hook(accumulate_gradient)
        torch._dynamo.comptime.comptime(_inputs_first)


def _inputs_first(context: Any) -> None:
    """Runs while `_observe_in_graph` is traced: puts the inputs of the graph back in front, in their order.

    For torch 2.11 and 2.12. They move all that a hook refers to (state and sizes, which are inputs) to the tensor that
    the hook is registered on, and so behind earlier nodes that use it. Where nothing was moved, nothing is done.
    """
    tracer = context.get_local("x").as_proxy().tracer
    nodes = list(tracer.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    if inputs != nodes[: len(inputs)]:
        for proxy in reversed(tracer.input_name_to_proxy.values()):
            next(iter(tracer.graph.nodes)).prepend(proxy.node)


def _fits(x: torch.Tensor, state: SiteState) -> bool:
    """Whether a traced tensor can be measured. What cannot is left out: nothing can be mended inside a graph."""
    channels = state.moments.shape[1]
    dim = state.channel_dim
    if x.dtype not in _native.DTYPES or x.device != state.moments.device:
        return False
    if dim in (_native.DIM_BY_RULE, _native.UNKNOWN_DIM):
        dim = channel_dim_of(x, None)
    return channels == 1 or (-x.dim() <= dim < x.dim() and x.shape[dim] == channels)


def _accumulate(x: torch.Tensor, state: SiteState, skip_recomputation: bool) -> None:
    _native.accumulate(
        x, state.moments, state.counters, state.histogram, state.active, state.channel_dim, skip_recomputation
    )


# By site, of all monitors: the extension does not know whose site it is.
_failures: dict[int, str] = {}


class Watched:
    """What is known of a hook's tensor: for `Watcher` alone, never read on the fast way.

    ``bound``: its width is settled. ``moved``: the width was another one than expected, once.
    """

    def __init__(self, name: str, path: str, channels: Channels, keep_channels: bool) -> None:
        self.name = name
        self.path = path
        self.channels = channels
        self.keep_channels = keep_channels
        self.bound = not keep_channels or channels.width is not None
        self.moved = False
        self.entries: dict[str, Entry] = {}  # by tensor kind

    @property
    def channel_dim(self) -> int:
        """For the extension."""
        if not self.bound:
            return _native.UNKNOWN_DIM
        return _native.DIM_BY_RULE if self.channels.dim is None else self.channels.dim


class Watcher:
    """Makes the hooks, and mends them when a tensor is not what its site was made for."""

    def __init__(self, store: Store, tensors: tuple[str, ...]) -> None:
        self.skipped: dict[Site, str] = {}
        self._store = store
        self._tensors = tensors
        self._hooks: WeakValueDictionary[int, OutputHook] = WeakValueDictionary()  # by Entry.index; the model owns them
        self._warned_of_budget = False

    def hook(self, name: str, path: str, channels: Channels, keep_channels: bool, device: torch.device) -> OutputHook:
        """A hook for the output of the module `name`, or for the tensor at `path` in it."""
        watched = Watched(name, path, channels, keep_channels)
        hook = OutputHook(self, watched)
        width = channels.width if keep_channels and channels.width else 1
        for tensor in self._tensors:
            site = Site(name, tensor + path)
            entry = self._store.add(site, device, width, watched.channel_dim, keep_channels and watched.bound)
            watched.entries[tensor] = entry
            self._hooks[entry.index] = hook
        self._give_states(hook)
        return hook

    def _give_states(self, hook: OutputHook) -> None:
        entries = hook.watched.entries
        hook.output = entries["output"].state if "output" in entries else None
        hook.gradient = entries["grad_output"].state if "grad_output" in entries else None

    def take_apart(self, hook: OutputHook, output: Any) -> None:
        """Measures the tensors in a container, each at its own site; and a tensor of another class, at the module's."""
        if (hook.output is None and hook.gradient is None) or not self._store.flags.value:
            return
        try:
            for path, tensor in walk(output):
                if not path:
                    self._measure(hook, tensor)
                elif tensor.is_floating_point() and not _is_a_mere_shape(tensor):
                    self._measure(hook.parts.get(path) or self._part(hook, path, tensor), tensor)
        except Exception as error:
            if self._store.strict:
                raise
            self._give_up(hook, f"{type(error).__name__}: {error}")

    def _part(self, hook: OutputHook, path: str, tensor: torch.Tensor) -> OutputHook:
        whole = hook.watched
        for entry in whole.entries.values():
            entry.hidden_if_silent = True
        channels = Channels(whole.channels.dim, None)
        if self._store.fits(tensor.device, 1, len(self._tensors)):
            part = self.hook(whole.name, path, channels, whole.keep_channels, tensor.device)
        else:
            part = OutputHook(self, Watched(whole.name, path, channels, False))
            self._skip([Site(whole.name, tensor + path) for tensor in self._tensors], "memory_budget is used up")
        hook.parts[path] = part
        return part

    def _measure(self, hook: OutputHook, tensor: torch.Tensor) -> None:
        if (hook.output is None and hook.gradient is None) or _is_a_mere_shape(tensor):
            return
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # a wrapper: it holds no data itself
            return self._give_up(hook, f"expected a plain torch.Tensor, got {type(tensor).__name__}")
        problem = _native.observe(tensor, hook.output, hook.gradient)
        if problem is not None:
            self.mend(hook, tensor, problem)

    def mend(self, hook: OutputHook, tensor: torch.Tensor, problem: str | None) -> None:
        """`tensor` could not be measured: puts a state in place that fits it, or gives the site up."""
        try:
            if tensor.numel() == 0:  # nothing to measure, and its width says nothing
                return
            if self._bind(hook, tensor):
                problem = _native.observe(tensor, hook.output, hook.gradient)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            self._give_up(hook, problem)

    def _bind(self, hook: OutputHook, tensor: torch.Tensor) -> bool:
        """Moves the hook's states to the device and width of a tensor; False if they were right already."""
        watched = hook.watched
        if tensor.dtype not in _native.DTYPES:
            raise TypeError(f"expected a tensor of one of {', '.join(map(str, _native.DTYPES))}, got {tensor.dtype}")
        if tensor.layout != torch.strided:
            raise TypeError(f"expected a dense strided tensor, got layout {tensor.layout}")
        place = next(iter(watched.entries.values())).places[-1]
        width = self._width(watched, tensor)
        if watched.bound and width != place.channels:
            if watched.moved:
                width = self._fold(watched, place.channels, width)
            watched.moved = True
        if not self._store.fits(tensor.device, width, len(watched.entries)):
            width = self._fall_to_totals(watched)
        if watched.bound and (tensor.device, width) == (place.device, place.channels):
            return False
        watched.bound = True
        for entry in watched.entries.values():
            entry.keep_channels = watched.keep_channels
            self._store.place(entry, tensor.device, width, watched.channel_dim)
        self._give_states(hook)
        return True

    @staticmethod
    def _width(watched: Watched, tensor: torch.Tensor) -> int:
        if not watched.keep_channels or tensor.dim() == 0:
            return 1
        dim = channel_dim_of(tensor, watched.channels.dim)
        if not -tensor.dim() <= dim < tensor.dim():
            raise IndexError(f"channel_dim={dim} is out of range for an output of shape {tuple(tensor.shape)}")
        return tensor.shape[dim]

    @staticmethod
    def _fold(watched: Watched, before: int, now: int) -> int:
        watched.keep_channels = False
        warn(f"{watched.name!r} had {before} channels and now has {now}: its channels are folded into one")
        return 1

    def _fall_to_totals(self, watched: Watched) -> int:
        watched.keep_channels = False
        if not self._warned_of_budget:
            self._warned_of_budget = True
            warn(
                f"per-channel state of {watched.name!r} and later sites would not fit into memory_budget="
                f"{self._store.memory_budget} bytes: they keep totals only"
            )
        return 1

    def _give_up(self, hook: OutputHook, problem: str) -> None:
        if self._store.strict:
            raise RuntimeError(f"hookstats: {hook.watched.name!r} cannot be measured: {problem}")
        hook.output = hook.gradient = None
        self._skip_entries(list(hook.watched.entries.values()), problem)

    def _skip_entries(self, entries: list[Entry], problem: str) -> None:
        for entry in entries:
            entry.hidden_if_silent = True
        self._skip([entry.site for entry in entries], problem)

    def _skip(self, sites: list[Site], problem: str) -> None:
        problem = problem.removeprefix("hookstats: ")
        self.skipped.update(dict.fromkeys(sites, problem))
        warn(f"not measured: {' and '.join(map(str, sites))}: {problem}")

    def collect_failures(self) -> None:
        """Gives up the gradients whose kernels failed inside backward, where nothing could be said."""
        _failures.update(_native.take_failures())
        for index in [index for index in _failures if index in self._hooks]:
            problem = _failures.pop(index)
            hook = self._hooks[index]
            hook.gradient = None
            self._skip_entries([entry for entry in hook.watched.entries.values() if entry.index == index], problem)


def _is_a_mere_shape(tensor: torch.Tensor) -> bool:
    """Fake and meta tensors, and those inside functorch: there is no one piece of data to read."""
    return type(tensor).__name__ == "FakeTensor" or (
        type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and _native.has_no_data(tensor)
    )
