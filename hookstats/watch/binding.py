"""Makes the sites of hooks, and makes them anew when a tensor is not what its site was made for."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch

from hookstats import _native
from hookstats._warn import WarnOnce, warn
from hookstats.modules.channels import ChannelAxis
from hookstats.modules.containers import REST, walk
from hookstats.modules.evidence import UNKNOWN, Ran, Seen, channel_dim_by_evidence, seen_of, widths_of
from hookstats.modules.order import recomputing
from hookstats.modules.sharding import Sharding, unreduced
from hookstats.numbers.fields import Site, Skipped
from hookstats.numbers.snapshot import Snapshot
from hookstats.watch.evaluation import TrainingOnly
from hookstats.watch.graphs import HOOKS, teach_the_compiler, traced
from hookstats.watch.hooks import Hook, InputHook, SiteSpec
from hookstats.watch.ignoring import Ignoring, rows_on
from hookstats.watch.memory import Entry, Rows, SiteState, Store, accumulate, is_capturing
from hookstats.watch.skipping import Captured, Skipping
from hookstats.watch.wrappers import is_a_mere_shape, is_wrapper, note_sharding, note_sharding_of, part_here

_HOST = torch.device("cpu")
MOST_PARTS = 128  # of one module's container; 64 layers' keys and values are as many


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
        self._ran = Ran()
        self._alike: dict[Any, WeakSet[Hook]] = {}  # by SiteSpec.alike
        self._hooks: WeakValueDictionary[int, Hook] = WeakValueDictionary()  # by Entry.index; the model owns them
        self._failed: dict[int, tuple[str, int]] = {}  # inside backward, by Entry.index: first reason, how often
        self._failing = threading.Lock()
        teach_the_compiler(*_ENTRANCES)

    @staticmethod
    def has_data(tensor: torch.Tensor) -> bool:
        """Whether there is something to measure, in the tensor or in what it wraps."""
        return not is_a_mere_shape(tensor)

    def hooks(self) -> int:
        """How many there are."""
        return len({id(hook) for hook in self._hooks.values()})

    @property
    def monitor(self) -> str:
        """The name of the monitor, for graphs."""
        return self._store.flags.monitor

    def idle_hook(self) -> Hook:
        """One that does what hooks do in a step that is not measured."""
        return Hook(self, SiteSpec("", "", ChannelAxis(None, None), False, (None, None)))

    def span_of_a_hook(self) -> contextlib.AbstractContextManager[None]:
        """Around what a hook does in Python."""
        return self._store.flags.span(_HOST, calls=1)

    def measures_now(self) -> bool:
        """Whether a forward that runs now is measured."""
        return self._store.flags.is_open() and self._store.flags.enabled.counts_now()

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
        width = spec.channels.width if spec.keep_channels and spec.channels.width else 1
        with self._store.lock:
            for kind, site in spec.sites.items():
                entry = self._store.add(site, device, width, spec.channel_dim, spec.keep_channels and spec.bound)
                spec.entries[kind] = entry
                self._hooks[entry.index] = HOOKS[entry.index] = hook
                entry.channel_dim = spec.shown_dim
            self._alike.setdefault((make, spec.alike), WeakSet()).add(hook)
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
                    if path in hook.parts or not is_capturing():
                        self._measure(hook.parts.get(path) or self._part_once(hook, path, tensor.device), tensor)
                    else:
                        self.leave_out(hook.spec.entries.values(), str(Captured()))
        except Exception as error:
            self.leave_out(hook.spec.entries.values(), f"{type(error).__name__}: {error}")

    def _part_once(self, hook: Hook, path: str, device: torch.device) -> Hook:
        """Made by the first of the threads that meet it. All that come when there are many share one."""
        with self._store.lock:
            if path not in hook.parts and len(hook.parts) >= MOST_PARTS:
                path = REST
            return hook.parts.get(path) or self._part(hook, path, device)

    def _part(self, hook: Hook, path: str, device: torch.device) -> Hook:
        whole = hook.spec
        for entry in whole.entries.values():
            entry.is_container = True
        kinds = whole.kinds if _has_gradient_site(hook, path) else (whole.kinds[0], None)
        keep_channels = whole.keep_channels and path != REST
        module = None if whole.module is None else whole.module()
        spec = SiteSpec(whole.name, path, ChannelAxis(whole.channels.dim, None), keep_channels, kinds, module)
        if path == REST:
            some, *_ = spec.sites.values()
            warn(f"{whole.name!r} has had {MOST_PARTS} tensors of other names: all later ones share the site {some}")
        part = hook.parts[path] = self.late_hook(spec, device)
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
        if part.numel() == 0:  # but other ranks may have some of it
            return note_sharding(hook.spec, hook.spec.kinds, tensor, self._store.clears)
        with self._store.lock:  # no other thread moves the site in between
            self._bind(hook, part)
            output, gradient = hook.output, hook.gradient
            note_sharding(hook.spec, hook.spec.kinds[:1], tensor, self._store.clears)
        rows = rows_on(part.device, self.monitor)
        if output is not None:
            accumulate(part, output, skip_recomputation=True, rows=rows)
        if gradient is not None and tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(functools.partial(self._measure_gradient, hook.spec, gradient, rows))

    def _measure_gradient(self, spec: SiteSpec, state: SiteState, rows: Rows | None, gradient: torch.Tensor) -> None:
        """Inside backward: what goes wrong is told when the step is closed."""
        if not self._store.flags.is_open():
            return
        try:
            part = part_here(gradient)
            note_sharding(spec, spec.kinds[1:], gradient, self._store.clears)
            accumulate(part, state, rows=rows)
        except Exception as error:
            if state.strict:
                raise
            self._add_failure(state.site, f"{type(error).__name__}: {error}")

    def note_in_graph(self, hook: Hook, index: int, found: Sharding | str, is_output: bool) -> None:
        """A graph has measured a wrapper: where it lies; or has not: why. index: Entry.index."""
        if not self._store.flags.is_open() or (is_output and recomputing()):
            return
        for entry in hook.spec.entries.values():
            if entry.index != index:
                continue
            try:
                if isinstance(found, str):
                    raise TypeError(found.removeprefix("TypeError: "))
                note_sharding_of(entry, found, self._store.clears)
            except TypeError as error:
                problem = f"TypeError: {error}"
                if is_output or self._store.strict:
                    self.leave_out([entry], problem)
                else:
                    self._add_failure(index, problem)

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
        except Captured as error:
            problem = str(error)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            self.leave_out(hook.spec.entries.values(), problem)

    def _bind(self, hook: Hook, tensor: torch.Tensor) -> None:
        """Moves the hook's states to the device and width of a tensor, one thread after the other."""
        if tensor.dtype not in _native.DTYPES:
            raise TypeError(f"expected a tensor of one of {', '.join(map(str, _native.DTYPES))}, got {tensor.dtype}")
        if tensor.layout != torch.strided:
            raise TypeError(f"expected a dense strided tensor, got layout {tensor.layout}")
        with self._store.lock:
            self._bind_seen(hook, seen_of(tensor), tensor.device)

    def _bind_seen(self, hook: Hook, seen: Seen, device: torch.device) -> bool:
        """Whether anything has changed."""
        spec = hook.spec
        place = next(iter(spec.entries.values())).places[-1]
        dim = self._channel_dim(spec, seen, place.channels)
        width = (seen.sizes[dim] if seen.sizes else 1) if spec.keep_channels else None
        if width == UNKNOWN:
            width = None
        if is_capturing() and any(entry.place_at(device, width or 1) is None for entry in spec.entries.values()):
            raise Captured
        if width is not None and spec.bound and not spec.guessed and width != place.channels:
            if spec.moved:
                self._fold(spec, place.channels, width)
                width = None
            spec.moved = True
        spec.met, spec.guessed = True, False
        self._ran.note(seen.sizes, dim)
        return self._settle(hook, len(seen.sizes), dim, width, device)

    def _settle(self, hook: Hook, ndim: int, dim: int, width: int | None, device: torch.device) -> bool:
        """Gives the hook states of this width; None: totals alone. Whether they are others than before."""
        spec = hook.spec
        place = next(iter(spec.entries.values())).places[-1]
        stays = spec.bound and (device, width or 1) == (place.device, place.channels)
        new = sum(entry.place_at(device, width or 1) is None for entry in spec.entries.values())
        if not stays and width is not None and not self._store.make_room(device, width, new):
            self._fall_to_totals(spec)
            width = None
            stays = spec.bound and (device, 1) == (place.device, place.channels)
        before = spec.channel_dim
        spec.settle(ndim, dim)
        if stays and spec.channel_dim == before:
            return False
        spec.bound = True
        for entry in spec.entries.values():
            entry.keep_channels, entry.channel_dim = width is not None, spec.shown_dim
            if stays:
                entry.state = entry.state._replace(channel_dim=spec.channel_dim)
            else:
                self._store.place(entry, device, width or 1, spec.channel_dim)
        self._give_states(hook)
        if device != place.device:
            self.ignoring.refresh()
        return True

    def _channel_dim(self, spec: SiteSpec, seen: Seen, width: int) -> int:
        """Counted from 0."""
        ndim = len(seen.sizes)
        if ndim == 0:
            return 0
        known = spec.channels.dim
        if known is not None:
            if not -ndim <= known < ndim:
                raise IndexError(f"channel_dim={known} is out of range for an output of shape {seen.sizes}")
            return known % ndim
        found = None if spec.guessed else spec.dim_for(ndim)
        if found is not None and (not spec.keep_channels or seen.sizes[found] == width):
            return found
        return channel_dim_by_evidence(seen, widths_of(None if spec.module is None else spec.module()), self._ran)

    def bind_traced(self, hook: Hook, path: str, tensor: torch.Tensor) -> bool:
        """While a graph is traced, before any state is read: makes the states that a fake tensor needs.

        And, as a guess, those of the modules like this one: each of many equal blocks would else be compiled anew.
        Returns whether what an earlier part of the graph may have read has changed.
        """
        if tensor.dtype not in _native.DTYPES or (hook.output is None and hook.gradient is None):
            return False
        with self._store.lock:
            part = self._part_of(hook, path, tensor.device)
            if part is None:
                return False
            if unreduced(tensor) is not None:
                return False  # the graph tells
            seen, spec = traced(part_here(tensor)), part.spec
            if seen is None or 0 in seen.sizes:
                self._settle_by_type(part, tensor.dim())
                return False
            was_met, was_guessed = spec.met, spec.guessed
            changed = self._bind_seen(part, seen, tensor.device)
            if changed or not (was_met or was_guessed):
                for other in list(self._alike.get((type(hook), hook.spec.alike), ())):
                    if other is not hook:
                        self._guess(other, part, seen, is_later=_index_of(other) > _index_of(hook))
            return changed and was_met

    def _part_of(self, hook: Hook, path: str, device: torch.device) -> Hook | None:
        """The hook of what lies at a path of a hook's container; None: it was given up."""
        part = self._part_once(hook, path, device) if path else hook
        return None if part.output is None and part.gradient is None else part

    def _settle_by_type(self, part: Hook, ndim: int) -> None:
        """For what cannot be looked at, such as a nested tensor."""
        spec = part.spec
        place = next(iter(spec.entries.values())).places[-1]
        if spec.channels.dim is not None and spec.bound and not spec.met:
            self._settle(part, ndim, spec.channels.dim, place.channels if spec.keep_channels else None, place.device)

    def _guess(self, hook: Hook, met: Hook, seen: Seen, is_later: bool) -> None:
        """Gives what one hook met to another at the same path of a module like it."""
        place = next(iter(hook.spec.entries.values())).places[-1]
        part = self._part_of(hook, met.spec.path, place.device)
        dim = met.spec.dim_for(len(seen.sizes))
        if part is None or dim is None or part.spec.met or (part.spec.guessed and not is_later):
            return  # it knows better, or a graph may have run with an earlier guess
        spec = part.spec
        spec.guessed = True
        width = spec.channels.width or (seen.sizes[dim] if seen.sizes else 1)
        keeps = spec.keep_channels and met.spec.keep_channels
        self._settle(part, len(seen.sizes), dim, width if keeps else None, place.device)

    @staticmethod
    def _fold(spec: SiteSpec, before: int, now: int) -> None:
        spec.keep_channels = False
        warn(f"{next(iter(spec.sites.values()))} had {before} channels and now has {now}: they are folded into one")

    def _fall_to_totals(self, spec: SiteSpec) -> None:
        spec.keep_channels = False
        self.warn_once(
            "budget",
            f"per-channel state of {spec.name!r} and later sites would not fit into memory_budget="
            f"{self._store.memory_budget} bytes: they keep totals only",
        )

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
        for index, (problem, times) in _native.take_failures().items():  # of all monitors
            hook = HOOKS.get(index)
            if hook is not None:
                hook.binder._add_failure(index, problem, times)
        with self._failing:
            failed, self._failed = self._failed, {}
        for index, (problem, times) in failed.items():
            hook = self._hooks.get(index)
            if hook is not None:
                self.leave_out([each for each in hook.spec.entries.values() if each.index == index], problem, times)

    def _add_failure(self, index: int, problem: str, times: int = 1) -> None:
        with self._failing:
            first, before = self._failed.get(index, (problem, 0))
            self._failed[index] = first, before + times


_ENTRANCES = (SiteBinder.rebind, InputHook.__call__)  # by which hooks enter Python


def _index_of(hook: Hook) -> int:
    """In the order in which modules stand in the model."""
    return next(iter(hook.spec.entries.values())).index


def _has_gradient_site(hook: Hook, path: str) -> bool:
    """Only inputs that are tensors themselves are passed on as aliases, whose gradients can be watched."""
    return not isinstance(hook, InputHook) or (path.count(".") == 1 and path != REST)
