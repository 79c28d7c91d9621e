"""What happens when a module runs: the hooks, from its inputs and outputs to the extension.

And what happens to a tensor that the fast way cannot take.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch

from hookstats import _native
from hookstats.fields import Site
from hookstats.masks import Masks, rows_on
from hookstats.select import Channels, channel_dim_of, walk
from hookstats.stages import ModuleHook
from hookstats.state import Entry, Rows, SiteState, Store, accumulate, local_part
from hookstats.telling import WarnOnce, warn

_HOST = torch.device("cpu")
_observe = _native.observe  # a global of its own: one look-up less in every hook


Kinds: TypeAlias = tuple[str | None, str | None]  # of a hook's sites: the tensor's, its gradient's


class Hook(ModuleHook, _native.Hook):
    """Measures a module's output and, when it comes, the gradient of that output; as a forward hook.

    Under torch.compile the tracer follows the same hook, with `_observe_in_graph` in the place of the C function. The
    states are plain attributes: any look-up by site would give every one of many equal modules a graph of its own.
    """

    __slots__ = ("__weakref__", "gradient", "output", "parts", "watched", "watcher")

    def __init__(self, watcher: Watcher, watched: Watched) -> None:
        self.watcher = watcher
        self.watched = watched
        self.give(None, None)
        self.parts: dict[str, Hook] = {}  # of a container, by path

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        problem = _observe(output, self)
        if problem is not None:
            self.watcher.mend(self, output, problem)

    def give(self, output: SiteState | None, gradient: SiteState | None) -> None:
        """From now on it measures into these."""
        for state in (output, gradient):
            for tensor in (state.moments, state.counters, state.histogram, state.active) if state else ():
                if tensor is not None:
                    torch._dynamo.mark_static_address(tensor)  # else mode="reduce-overhead" gives up, as they change
        self.output = output  # for the tracer
        self.gradient = gradient
        _native.give(self, output, gradient, functools.partial(_observe_gradient_in_graph, gradient))


class InputHook(Hook):
    """Measures a module's inputs before it runs, as a forward pre-hook with kwargs.

    One positional tensor, and no tensor by name, is the site itself; else the inputs are the parts of a container, by
    number and by name. A gradient is the module's own share: the module is given an alias of each argument that is a
    tensor (not a parameter, nor in a container), and the gradient of the alias is watched.
    """

    __slots__ = ()

    def __call__(self, module: Any, args: Any, kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():
            return None if _is_exporting() else self._observe_inputs(module, args, kwargs)
        if not self.watcher.is_open() or torch._C._is_tracing():
            return None
        try:
            with self.watcher.span_of_a_hook():
                return self._observe_inputs(module, args, kwargs)
        except Exception as error:
            self.watcher.give_up(self, f"{type(error).__name__}: {error}")

    def _observe_inputs(self, module: Any, args: Any, kwargs: Any) -> Any:
        changed = self.watched.kinds[1] is not None and torch.is_grad_enabled()
        if changed:
            args, kwargs = _aliases(args, kwargs)
        single = len(args) == 1 and isinstance(args[0], torch.Tensor) and not _holds_tensors(kwargs)
        super().__call__(module, args, args[0] if single else _by_name(args, kwargs))
        return (args, kwargs) if changed else None


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


def _holds_tensors(kwargs: Any) -> bool:
    return any(True for _ in walk(kwargs))


def _by_name(args: Any, kwargs: Any) -> dict[str, Any]:
    return {**{str(number): value for number, value in enumerate(args)}, **kwargs}


def _observe_in_graph(output: object, hook: Hook) -> None:
    """What `_native.observe` does, in operators; also for what is in a container, where an eager forward showed it."""
    if _is_exporting():
        return
    for path, tensor in walk(output):
        part = hook.parts.get(path) if path else hook
        if part is not None:
            _observe_tensor_in_graph(
                tensor, part.output, part.gradient, rows_on(tensor.device, hook.watcher.masks.number)
            )


def _observe_tensor_in_graph(
    x: torch.Tensor, output: SiteState | None, gradient: SiteState | None, rows: Rows | None
) -> None:
    if output is not None and _fits(x, output):
        accumulate(x, output, skip_recomputation=True, rows=rows)
    if gradient is not None and x.requires_grad and not x.is_leaf and _fits(x, gradient):
        # A closure: of a partial, all that the state holds would be guarded, and every site have a graph of its own.
        x.register_hook(lambda g: _observe_gradient_in_graph(gradient, g, rows))
        torch._dynamo.comptime.comptime(_inputs_first)


def _observe_gradient_in_graph(
    state: SiteState | None, gradient: torch.Tensor | None, rows: Rows | None = None
) -> torch.Tensor | None:
    """Returns the gradient: inside of a graph, compiled autograd takes None for what is to replace it."""
    if state is not None and gradient is not None and _fits(gradient, state):  # None: of a graph's unused output
        accumulate(gradient, state, rows=rows)
    return gradient


def _is_exporting() -> bool:
    """torch.compiler.is_exporting(), which graphs of torch 2.11 take for true, whatever is traced."""
    return torch.compiler._is_exporting_flag


@functools.cache
def _teach_the_compiler() -> None:
    """Imports the compiler, the first time."""
    torch.compiler.substitute_in_graph(_observe, skip_signature_check=True)(_observe_in_graph)


def _inputs_first(context: Any) -> None:
    """Runs while `_observe_tensor_in_graph` is traced: puts the inputs of the graph back in front, in their order.

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


# By site, of all monitors: the extension does not know whose site it is.
_failures: dict[int, str] = {}


class Watched:
    """What is known of a hook's tensor: for `Watcher` alone, never read on the fast way.

    ``bound``: its width is settled. ``moved``: the width was another one than expected, once.
    """

    def __init__(self, name: str, path: str, channels: Channels, keep_channels: bool, kinds: Kinds) -> None:
        self.name = name
        self.path = path
        self.channels = channels
        self.keep_channels = keep_channels
        self.kinds = kinds
        self.bound = not keep_channels or channels.width is not None
        self.moved = False
        self.entries: dict[str, Entry] = {}  # by tensor kind

    @property
    def channel_dim(self) -> int:
        """For the extension."""
        if not self.bound:
            return _native.UNKNOWN_DIM
        return _native.DIM_BY_RULE if self.channels.dim is None else self.channels.dim

    @property
    def sites(self) -> dict[str, Site]:
        """By tensor kind."""
        return {kind: Site(self.name, kind + self.path) for kind in self.kinds if kind}


class Watcher:
    """Makes the hooks, and mends them when a tensor is not what its site was made for."""

    def __init__(self, store: Store) -> None:
        self.warn_once = WarnOnce()
        self.masks = Masks(store, self.warn_once)
        self._binding = threading.RLock()
        self.skipped: dict[Site, str] = {}
        self._seen: list[tuple[Hook, Any]] | None = None  # while a forward on fake tensors runs
        self._learns = False  # after it
        self.example_bytes = 0  # that it would have read, gradients included
        self._store = store
        self._hooks: WeakValueDictionary[int, Hook] = WeakValueDictionary()  # by Entry.index; the model owns them
        _teach_the_compiler()

    @staticmethod
    def has_data(tensor: torch.Tensor) -> bool:
        """Whether there is something to measure, in the tensor or in what it wraps."""
        return not _is_a_mere_shape(tensor)

    def hooks(self) -> int:
        """How many there are."""
        return len({id(hook) for hook in self._hooks.values()})

    def idle_hook(self) -> Hook:
        """One that does what hooks do in a step that is not measured."""
        return Hook(self, Watched("", "", Channels(None, None), False, (None, None)))

    def span_of_a_hook(self) -> contextlib.AbstractContextManager[None]:
        """Around what a hook does in Python."""
        return self._store.flags.span(_HOST, calls=1)

    def is_open(self) -> bool:
        return self._store.flags.value

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Inside, a forward on fake tensors shows the hooks every width, and what is in containers."""
        before, self._store.flags.value = self._store.flags.value, True
        seen = self._seen = []
        try:
            yield
        finally:
            self._seen, self._store.flags.value = None, before
        self._learns = True
        for hook, value in seen:  # only now: in there, states would be fake, too
            self.take_apart(hook, value)
        self._learns = False

    def hook(self, watched: Watched, device: torch.device, make: type[Hook] = Hook) -> Hook:
        """A hook for a tensor, with its sites' states on this device."""
        hook = make(self, watched)
        keep_channels = watched.keep_channels
        width = watched.channels.width if keep_channels and watched.channels.width else 1
        for kind, site in watched.sites.items():
            entry = self._store.add(site, device, width, watched.channel_dim, keep_channels and watched.bound)
            watched.entries[kind] = entry
            self._hooks[entry.index] = hook
        self._give_states(hook)
        self.masks.refresh()  # the device may be a new one
        return hook

    def _give_states(self, hook: Hook) -> None:
        entries = hook.watched.entries
        hook.give(*(entries[kind].state if kind else None for kind in hook.watched.kinds))

    def take_apart(self, hook: Hook, output: Any) -> None:
        """Measures the tensors in a container, each at its own site; and a wrapped tensor, at the module's."""
        try:
            for path, tensor in walk(output):
                if not path:
                    self._measure(hook, tensor)
                elif tensor.is_floating_point() and (self._learns or not _is_a_mere_shape(tensor)):
                    self._measure(hook.parts.get(path) or self._part(hook, path, tensor), tensor)
        except Exception as error:
            self.give_up(hook, f"{type(error).__name__}: {error}")

    def _part(self, hook: Hook, path: str, tensor: torch.Tensor) -> Hook:
        whole = hook.watched
        for entry in whole.entries.values():
            entry.hidden_if_silent = True
        kinds = whole.kinds if _has_gradient_site(hook, path) else (whole.kinds[0], None)
        watched = Watched(whole.name, path, Channels(whole.channels.dim, None), whole.keep_channels, kinds)
        if self._store.fits(tensor.device, 1, len(watched.sites)):
            part = self.hook(watched, tensor.device)
        else:
            part = Hook(self, watched)
            self._skip(list(watched.sites.values()), "memory_budget is used up")
        hook.parts[path] = part
        return part

    def _measure(self, hook: Hook, tensor: torch.Tensor) -> None:
        if hook.output is None and hook.gradient is None:
            return
        if _is_a_mere_shape(tensor):
            if self._learns and tensor.numel() > 0:
                self.example_bytes += tensor.nbytes * len(hook.watched.sites)
                self._bind(hook, tensor)
            return
        if _is_wrapper(tensor):
            return self._measure_wrapped(hook, tensor)
        problem = _observe(tensor, hook)
        if problem is not None:
            self._mend(hook, tensor, problem)

    def _measure_wrapped(self, hook: Hook, tensor: torch.Tensor) -> None:
        """By operators: a wrapper knows how to hand its data to one, or waits for them first."""
        part = _part_here(tensor)
        if part.numel() == 0:
            return
        self._bind(hook, part)
        rows = rows_on(part.device, self.masks.number)
        if hook.output is not None:
            accumulate(part, hook.output, skip_recomputation=True, rows=rows)
        if hook.gradient is not None and tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(functools.partial(self._measure_wrapped_gradient, hook.gradient, rows))

    def _measure_wrapped_gradient(self, state: SiteState, rows: Rows | None, gradient: torch.Tensor) -> None:
        """Inside backward: what goes wrong is told when the step is closed."""
        if not self.is_open():
            return
        try:
            accumulate(_part_here(gradient), state, rows=rows)
        except Exception as error:
            if state.strict:
                raise
            _failures.setdefault(state.site, f"{type(error).__name__}: {error}")

    def mend(self, hook: Hook, value: Any, problem: Any) -> None:
        """The extension did not measure what it was given: a container, or a tensor whose state does not fit it."""
        if self._seen is not None:
            self._seen.append((hook, value))
            return
        with self.span_of_a_hook():
            if problem is NotImplemented:
                self.take_apart(hook, value)
            else:
                self._mend(hook, value, problem)

    def _mend(self, hook: Hook, tensor: torch.Tensor, problem: str | None) -> None:
        """Puts a state in place that fits the tensor, or gives the site up."""
        try:
            if tensor.numel() == 0:  # nothing to measure, and its width says nothing
                return
            self._bind(hook, tensor)
            problem = _observe(tensor, hook)  # if it was right already, another thread has just done it
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            self.give_up(hook, problem)

    def _bind(self, hook: Hook, tensor: torch.Tensor) -> None:
        """Moves the hook's states to the device and width of a tensor, one thread after the other."""
        with self._binding:
            self._bind_alone(hook, tensor)

    def _bind_alone(self, hook: Hook, tensor: torch.Tensor) -> None:
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
            return
        watched.bound = True
        for entry in watched.entries.values():
            entry.keep_channels = watched.keep_channels
            self._store.place(entry, tensor.device, width, watched.channel_dim)
        self._give_states(hook)
        if tensor.device != place.device:
            self.masks.refresh()

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
        self.warn_once(
            "budget",
            f"per-channel state of {watched.name!r} and later sites would not fit into memory_budget="
            f"{self._store.memory_budget} bytes: they keep totals only",
        )
        return 1

    def give_up(self, hook: Hook, problem: str) -> None:
        """A site that cannot be measured: from now on nothing is done for it, unless it is to raise."""
        if self._store.strict:
            raise RuntimeError(f"hookstats: {hook.watched.name!r} cannot be measured: {problem}")
        hook.give(None, None)
        self.skip_entries(list(hook.watched.entries.values()), problem)

    def skip_entries(self, entries: list[Entry], problem: str) -> None:
        """Gives sites up, with a warning."""
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
        for index in [index for index in list(_failures) if index in self._hooks]:
            problem = _failures.pop(index)
            hook = self._hooks[index]
            hook.give(hook.output, None)
            self.skip_entries([entry for entry in hook.watched.entries.values() if entry.index == index], problem)


def _has_gradient_site(hook: Hook, path: str) -> bool:
    """Of inputs, only those that are tensors themselves are passed on as aliases whose gradients can be watched."""
    return not isinstance(hook, InputHook) or path.count(".") == 1


def _is_a_mere_shape(tensor: torch.Tensor) -> bool:
    """Fake and meta tensors, and those inside functorch: there is no one piece of data to read."""
    return type(tensor).__name__ == "FakeTensor" or (not _is_wrapper(tensor) and _native.has_no_data(tensor))


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether it holds its data in other tensors."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _part_here(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a wrapper's values. TypeError where that is not a part of them."""
    for placement in getattr(tensor, "placements", ()):
        if placement.is_partial():
            raise TypeError(
                f"expected a DTensor that is whole or sharded, got {placement}: its values are yet to be reduced"
            )
    return local_part(tensor)
