"""Makes the sites of hooks, and makes them anew when a tensor is not what its site was made for."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch

from hookstats import _native
from hookstats._warn import WarnOnce, warn
from hookstats.modules.channels import Channels, channel_dim_of
from hookstats.modules.containers import REST, walk
from hookstats.numbers.fields import Site
from hookstats.watch.evaluation import TrainingOnly
from hookstats.watch.graphs import teach_the_compiler
from hookstats.watch.hooks import Hook, InputHook, SiteSpec
from hookstats.watch.ignoring import Ignoring, rows_on
from hookstats.watch.memory import Entry, Rows, SiteState, Store, accumulate
from hookstats.watch.wrappers import is_a_mere_shape, is_wrapper, part_here

_HOST = torch.device("cpu")
MOST_PARTS = 128  # of one module's container; 64 layers' keys and values are as many


# By site, of all monitors: the extension does not know whose site it is.
_failures: dict[int, str] = {}


class SiteBinder:
    """Makes the hooks, and mends them when a tensor is not what its site was made for."""

    def __init__(self, store: Store, training: TrainingOnly) -> None:
        self.warn_once = WarnOnce()
        self.training = training
        self.ignoring = Ignoring(store, self.warn_once)
        self.skipped: dict[Site, str] = {}
        self._seen: list[tuple[Hook, Any]] | None = None  # while a forward on fake tensors runs
        self._learns = False  # after it
        self.example_bytes = 0  # that it would have read, gradients included
        self._store = store
        self._hooks: WeakValueDictionary[int, Hook] = WeakValueDictionary()  # by Entry.index; the model owns them
        teach_the_compiler()

    @staticmethod
    def has_data(tensor: torch.Tensor) -> bool:
        """Whether there is something to measure, in the tensor or in what it wraps."""
        return not is_a_mere_shape(tensor)

    def hooks(self) -> int:
        """How many there are."""
        return len({id(hook) for hook in self._hooks.values()})

    def idle_hook(self) -> Hook:
        """One that does what hooks do in a step that is not measured."""
        return Hook(self, SiteSpec("", "", Channels(None, None), False, (None, None)))

    def span_of_a_hook(self) -> contextlib.AbstractContextManager[None]:
        """Around what a hook does in Python."""
        return self._store.flags.span(_HOST, calls=1)

    def is_open(self) -> bool:
        return self._store.flags.value

    def measures_now(self) -> bool:
        """Whether a forward that runs now is measured."""
        return self._store.flags.enabled.measures_now()

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

    def hook(self, spec: SiteSpec, device: torch.device, make: type[Hook] = Hook) -> Hook:
        """A hook for a tensor, with its sites' states on this device."""
        hook = make(self, spec)
        keep_channels = spec.keep_channels
        width = spec.channels.width if keep_channels and spec.channels.width else 1
        with self._store.lock:
            for kind, site in spec.sites.items():
                entry = self._store.add(site, device, width, spec.channel_dim, keep_channels and spec.bound)
                spec.entries[kind] = entry
                self._hooks[entry.index] = hook
            self._give_states(hook)
            self.ignoring.refresh()  # the device may be a new one
        return hook

    def _give_states(self, hook: Hook) -> None:
        entries = hook.spec.entries
        hook.bind(*(entries[kind].state if kind else None for kind in hook.spec.kinds))

    def take_apart(self, hook: Hook, output: Any) -> None:
        """Measures the tensors in a container, each at its own site; and a wrapped tensor, at the module's."""
        try:
            for path, tensor in walk(output):
                if not path:
                    self._measure(hook, tensor)
                elif tensor.is_floating_point() and (self._learns or not is_a_mere_shape(tensor)):
                    self._measure(hook.parts.get(path) or self._part_once(hook, path, tensor), tensor)
        except Exception as error:
            self.give_up(hook, f"{type(error).__name__}: {error}")

    def _part_once(self, hook: Hook, path: str, tensor: torch.Tensor) -> Hook:
        """Made by the first of the threads that meet it. All that come when there are many share one."""
        with self._store.lock:
            if path not in hook.parts and len(hook.parts) >= MOST_PARTS:
                path = REST
            return hook.parts.get(path) or self._part(hook, path, tensor)

    def _part(self, hook: Hook, path: str, tensor: torch.Tensor) -> Hook:
        whole = hook.spec
        for entry in whole.entries.values():
            entry.hidden_if_silent = True
        kinds = whole.kinds if _has_gradient_site(hook, path) else (whole.kinds[0], None)
        keep_channels = whole.keep_channels and path != REST
        spec = SiteSpec(whole.name, path, Channels(whole.channels.dim, None), keep_channels, kinds)
        if path == REST:
            some, *_ = spec.sites.values()
            warn(f"{whole.name!r} has had {MOST_PARTS} tensors of other names: all later ones share the site {some}")
        part = hook.parts[path] = self.late_hook(spec, tensor.device)
        return part

    def late_hook(self, spec: SiteSpec, device: torch.device) -> Hook:
        """A hook for what is seen only now; where its state would not fit into memory_budget, one that does nothing."""
        if self._store.make_room(device, 1, len(spec.sites)):
            return self.hook(spec, device)
        problem = self._store.no_room(1, len(spec.sites))
        if self._store.strict:
            raise RuntimeError(f"hookstats: {spec.name!r} cannot be measured: {problem}")
        self._skip(list(spec.sites.values()), problem)
        return Hook(self, spec)

    def _measure(self, hook: Hook, tensor: torch.Tensor) -> None:
        if hook.output is None and hook.gradient is None:
            return
        if is_a_mere_shape(tensor):
            if self._learns and tensor.numel() > 0:
                self.example_bytes += tensor.nbytes * len(hook.spec.sites)
                self._bind(hook, tensor)
            return
        if is_wrapper(tensor):
            return self._measure_wrapped(hook, tensor)
        problem = _native.observe(tensor, hook)
        if problem is not None:
            self._rebind(hook, tensor, problem)

    def _measure_wrapped(self, hook: Hook, tensor: torch.Tensor) -> None:
        """By operators: a wrapper knows how to hand its data to one, or waits for them first."""
        part = part_here(tensor)
        if part.numel() == 0:
            return
        with self._store.lock:  # no other thread moves the site in between
            self._bind(hook, part)
            output, gradient = hook.output, hook.gradient
        rows = rows_on(part.device, self.ignoring.number)
        if output is not None:
            accumulate(part, output, skip_recomputation=True, rows=rows)
        if gradient is not None and tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(functools.partial(self._measure_wrapped_gradient, gradient, rows))

    def _measure_wrapped_gradient(self, state: SiteState, rows: Rows | None, gradient: torch.Tensor) -> None:
        """Inside backward: what goes wrong is told when the step is closed."""
        if not self.is_open():
            return
        try:
            accumulate(part_here(gradient), state, rows=rows)
        except Exception as error:
            if state.strict:
                raise
            _failures.setdefault(state.site, f"{type(error).__name__}: {error}")

    def rebind(self, hook: Hook, value: Any, problem: Any) -> None:
        """The extension did not measure what it was given: a container, or a tensor whose state does not fit it."""
        if self._seen is not None:
            self._seen.append((hook, value))
            return
        with self.span_of_a_hook():
            if problem is NotImplemented:
                self.take_apart(hook, value)
            else:
                self._rebind(hook, value, problem)

    def _rebind(self, hook: Hook, tensor: torch.Tensor, problem: str | None) -> None:
        """Puts a state in place that fits the tensor, or gives the site up."""
        try:
            if tensor.numel() == 0:  # nothing to measure, and its width says nothing
                return
            with self._store.lock:  # no other thread moves the site in between
                self._bind(hook, tensor)
                problem = _native.observe(tensor, hook)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            self.give_up(hook, problem)

    def _bind(self, hook: Hook, tensor: torch.Tensor) -> None:
        """Moves the hook's states to the device and width of a tensor, one thread after the other."""
        with self._store.lock:
            self._bind_alone(hook, tensor)

    def _bind_alone(self, hook: Hook, tensor: torch.Tensor) -> None:
        spec = hook.spec
        if tensor.dtype not in _native.DTYPES:
            raise TypeError(f"expected a tensor of one of {', '.join(map(str, _native.DTYPES))}, got {tensor.dtype}")
        if tensor.layout != torch.strided:
            raise TypeError(f"expected a dense strided tensor, got layout {tensor.layout}")
        place = next(iter(spec.entries.values())).places[-1]
        width = self._width(spec, tensor)
        if spec.bound and width != place.channels:
            if spec.moved:
                width = self._fold(spec, place.channels, width)
            spec.moved = True
        if spec.bound and (tensor.device, width) == (place.device, place.channels):
            return
        new = sum(entry.place_at(tensor.device, width) is None for entry in spec.entries.values())
        if spec.keep_channels and not self._store.make_room(tensor.device, width, new):
            width = self._fall_to_totals(spec)
        spec.bound = True
        for entry in spec.entries.values():
            entry.keep_channels = spec.keep_channels
            self._store.place(entry, tensor.device, width, spec.channel_dim)
        self._give_states(hook)
        if tensor.device != place.device:
            self.ignoring.refresh()

    @staticmethod
    def _width(spec: SiteSpec, tensor: torch.Tensor) -> int:
        if not spec.keep_channels or tensor.dim() == 0:
            return 1
        dim = channel_dim_of(tensor, spec.channels.dim)
        if not -tensor.dim() <= dim < tensor.dim():
            raise IndexError(f"channel_dim={dim} is out of range for an output of shape {tuple(tensor.shape)}")
        return tensor.shape[dim]

    @staticmethod
    def _fold(spec: SiteSpec, before: int, now: int) -> int:
        spec.keep_channels = False
        warn(f"{spec.name!r} had {before} channels and now has {now}: its channels are folded into one")
        return 1

    def _fall_to_totals(self, spec: SiteSpec) -> int:
        spec.keep_channels = False
        self.warn_once(
            "budget",
            f"per-channel state of {spec.name!r} and later sites would not fit into memory_budget="
            f"{self._store.memory_budget} bytes: they keep totals only",
        )
        return 1

    def give_up(self, hook: Hook, problem: str) -> None:
        """A site that cannot be measured: from now on nothing is done for it, unless it is to raise."""
        if self._store.strict:
            raise RuntimeError(f"hookstats: {hook.spec.name!r} cannot be measured: {problem}")
        hook.bind(None, None)
        self.skip_entries(list(hook.spec.entries.values()), problem)

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
            hook.bind(hook.output, None)
            self.skip_entries([entry for entry in hook.spec.entries.values() if entry.index == index], problem)


def _has_gradient_site(hook: Hook, path: str) -> bool:
    """Of inputs, only those that are tensors themselves are passed on as aliases whose gradients can be watched."""
    return not isinstance(hook, InputHook) or (path.count(".") == 1 and path != REST)
