"""Makes the sites of hooks, and makes them anew when a tensor is not what its site was made for."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch

from hookstats import _native
from hookstats._warn import WarnOnce, warn
from hookstats.modules.channels import Channels, channel_dim_of
from hookstats.modules.containers import REST, walk
from hookstats.numbers.fields import Site, Skipped
from hookstats.numbers.snapshot import Snapshot
from hookstats.watch.evaluation import TrainingOnly
from hookstats.watch.graphs import teach_the_compiler
from hookstats.watch.hooks import Hook, InputHook, SiteSpec
from hookstats.watch.ignoring import Ignoring, rows_on
from hookstats.watch.memory import Entry, Rows, SiteState, Store, accumulate
from hookstats.watch.skipping import Skipping
from hookstats.watch.wrappers import is_a_mere_shape, is_wrapper, part_here

_HOST = torch.device("cpu")
MOST_PARTS = 128  # of one module's container; 64 layers' keys and values are as many


# By Entry.index, of all monitors (the extension does not know whose site it is): the first reason, and how often.
_failures: dict[int, tuple[str, int]] = {}


class SiteBinder:
    """Makes the hooks, and mends them when a tensor is not what its site was made for."""

    def __init__(self, store: Store, training: TrainingOnly) -> None:
        self.warn_once = WarnOnce()
        self.training = training
        self.ignoring = Ignoring(store, self.warn_once)
        self.skipping = Skipping(store.strict)
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
        hook.bind(*(entries[kind].state if kind and not entries[kind].given_up else None for kind in hook.spec.kinds))

    def take_apart(self, hook: Hook, output: Any) -> None:
        """Measures the tensors in a container, each at its own site; and a wrapped tensor, at the module's."""
        try:
            for path, tensor in walk(output):
                if not path:
                    self._measure(hook, tensor)
                elif tensor.is_floating_point() and (self._learns or not is_a_mere_shape(tensor)):
                    part = hook.parts.get(path) or self._part_once(hook, path, tensor)
                    self._measure(part, tensor)
        except Exception as error:
            self.leave_out(hook.spec.entries.values(), f"{type(error).__name__}: {error}")

    def _part_once(self, hook: Hook, path: str, tensor: torch.Tensor) -> Hook:
        """Made by the first of the threads that meet it. All that come when there are many share one."""
        with self._store.lock:
            if path not in hook.parts and len(hook.parts) >= MOST_PARTS:
                path = REST
            return hook.parts.get(path) or self._part(hook, path, tensor)

    def _part(self, hook: Hook, path: str, tensor: torch.Tensor) -> Hook:
        whole = hook.spec
        for entry in whole.entries.values():
            entry.is_container = True
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
        self.skipping.give_up(spec.sites.values(), self._store.no_room(1, len(spec.sites)))
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
            try:
                return self._measure_wrapped(hook, tensor)
            except Exception as error:
                return self.leave_out(hook.spec.entries.values(), f"{type(error).__name__}: {error}")
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
            _add_failure(state.site, f"{type(error).__name__}: {error}")

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
        """Puts a state in place that fits the tensor, or leaves the tensor out."""
        if tensor.is_nested:  # has no shape to ask for
            return self.leave_out(hook.spec.entries.values(), f"{problem}, got a nested one")
        try:
            if tensor.numel() == 0:  # nothing to measure, and its width says nothing
                return
            with self._store.lock:  # no other thread moves the site in between
                self._bind(hook, tensor)
                problem = _native.observe(tensor, hook)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            self.leave_out(hook.spec.entries.values(), problem)

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

    def leave_out(self, entries: Iterable[Entry], problem: str, times: int = 1) -> None:
        """Tensors of these sites cannot be measured; training goes on, unless it is to raise."""
        for entry in (entries := list(entries)):
            entry.left_out = True
        self.skipping.leave_out([entry.site for entry in entries], problem, times)

    def give_up(self, entries: Iterable[Entry], problem: str) -> None:
        """What can never be measured."""
        entries = list(entries)
        self.skipping.give_up([entry.site for entry in entries], problem)
        self._no_more(entries)

    def judge(self, left_out: dict[Site, Skipped], snapshot: Snapshot) -> None:
        """The numbers of a step have come: gives up the sites of which nothing could be measured for some steps."""
        hopeless = set(self.skipping.judge(left_out, snapshot))
        if hopeless:
            self._no_more([entry for entry in self._store.entries if entry.site in hopeless])

    def _no_more(self, entries: list[Entry]) -> None:
        for entry in entries:
            entry.given_up = True
            hook = self._hooks.get(entry.index)
            if hook is not None:
                self._give_states(hook)

    def collect_failures(self) -> None:
        """Counts the gradients whose kernels failed inside backward, where nothing could be said."""
        for index, (problem, times) in _native.take_failures().items():
            _add_failure(index, problem, times)
        for index in [index for index in list(_failures) if index in self._hooks]:
            problem, times = _failures.pop(index)
            entries = self._hooks[index].spec.entries.values()
            self.leave_out([entry for entry in entries if entry.index == index], problem, times)


def _add_failure(index: int, problem: str, times: int = 1) -> None:
    problem, before = _failures.get(index, (problem, 0))
    _failures[index] = problem, before + times


def _has_gradient_site(hook: Hook, path: str) -> bool:
    """Of inputs, only those that are tensors themselves are passed on as aliases whose gradients can be watched."""
    return not isinstance(hook, InputHook) or (path.count(".") == 1 and path != REST)
