"""Makes the sites of hooks, and makes them anew when a tensor is not what its site was made for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from hookstats import _native
from hookstats._warn import WarnOnce, warn
from hookstats.modules.channels import ChannelAxis
from hookstats.modules.containers import REST, walk
from hookstats.watch.fitting import Fitting
from hookstats.watch.flags import TrainingOnly, is_capturing
from hookstats.watch.graphs import observe_tensor, read_sharding_note, teach_the_compiler
from hookstats.watch.guards import Rows
from hookstats.watch.hooks import InputHook, SiteHook, SiteSpec
from hookstats.watch.ignoring import Ignoring
from hookstats.watch.memory import Entry, StateStore, accumulate
from hookstats.watch.skipping import InsideCapture, Problem, Skipping, say_reason
from hookstats.watch.wrappers import channel_dim_of_site, is_a_mere_shape, is_wrapper, note_sharding_of

_Hook = TypeVar("_Hook", bound=SiteHook)
HOOKS: WeakValueDictionary[int, SiteHook] = WeakValueDictionary()  # by Entry.index, of all monitors; models own them
MOST_PARTS = 128  # of one module's container; 64 layers' keys and values are as many


class SiteBinder:
    """Makes the hooks, and fits them anew when a tensor is not what its site was made for."""

    def __init__(self, store: StateStore, training: TrainingOnly) -> None:
        self.warn_once = WarnOnce()
        self.training = training
        self.ignoring = Ignoring(store, self.warn_once)
        self.skipping = Skipping(store.strict)
        self.store = store
        self.monitor = store.flags.monitor  # its name, for graphs
        self._fitting = Fitting(store, self.ignoring, self.warn_once)
        self._failed: dict[int, tuple[str, int]] = {}  # inside backward, by Entry.index: first reason, how often
        self._failing = threading.Lock()
        teach_the_compiler(*_ENTRANCES)

    def hooks(self) -> int:
        """Return how many hooks there are."""
        return len({id(hook) for hook in list(HOOKS.values()) if hook.binder is self})

    def idle_hook(self) -> SiteHook:
        """Return a hook that does what hooks do in a step that is not measured."""
        return SiteHook(self, SiteSpec("", "", ChannelAxis(None, None), False, (None, None)))

    def span_of_a_hook(self) -> contextlib.AbstractContextManager[None]:
        """Time what a hook does in Python."""
        return self.store.flags.span(calls=1)

    def measures_now(self) -> bool:
        """Return whether a forward that runs now is measured."""
        return self.store.flags.is_open() and self.store.flags.enabled.counts_now()

    def hook(self, spec: SiteSpec, device: torch.device, make: type[_Hook]) -> _Hook:
        """A hook for a tensor, with its sites' states on this device."""
        hook = make(self, spec)
        width = spec.channels.width if spec.keep_channels and spec.channels.width else 1
        with self.store.lock:
            for kind, site in spec.sites.items():
                keeps = spec.keep_channels and spec.channels.width is not None
                entry = self.store.add(site, device, width, spec.channel_dim, keeps)
                spec.entries[kind] = entry
                HOOKS[entry.index] = hook
                entry.channel_dim, entry.group_size = spec.shown_dim, spec.group_size
                entry.is_container = make.is_late  # until something of the site itself is met
            hook.bind_sites()
            self.ignoring.refresh()  # the device may be a new one
        return hook

    def _observe_container(self, hook: SiteHook, output: Any) -> None:
        """Measures the tensors in a container, each at its own site; and a wrapped tensor, at the module's."""
        try:
            for path, tensor in walk(output):
                if not path:
                    self._measure(hook, tensor)
                elif tensor.is_floating_point() and not is_a_mere_shape(tensor):
                    if path in hook.parts or not is_capturing():
                        self._measure(hook.parts.get(path) or self._part_once(hook, path, tensor.device), tensor)
                    else:
                        self.leave_out(hook.spec.entries.values(), InsideCapture())
        except Exception as error:
            self.leave_out(hook.spec.entries.values(), error)

    def _part_once(self, hook: SiteHook, path: str, device: torch.device) -> SiteHook:
        """Made by the first of the threads that meet it. All that come when there are many share one."""
        with self.store.lock:
            if path not in hook.parts and len(hook.parts) >= MOST_PARTS:
                path = REST
            return hook.parts.get(path) or self._part(hook, path, device)

    def _part(self, hook: SiteHook, path: str, device: torch.device) -> SiteHook:
        whole = hook.spec
        for entry in whole.entries.values():
            entry.is_container = True
        kinds = whole.kinds if hook.watches_gradient(path) else (whole.kinds[0], None)
        keep_channels = whole.keep_channels and path != REST
        module = None if whole.module is None else whole.module()
        spec = SiteSpec(whole.name, path, ChannelAxis(whole.channels.dim, None), keep_channels, kinds, module)
        if path == REST:
            some, *_ = spec.sites.values()
            warn(f"{whole.name!r} has had {MOST_PARTS} tensors of other names: all later ones share the site {some}")
        part = hook.parts[path] = self.late_hook(spec, device, SiteHook)
        _native.set_part(hook, path, part)
        return part

    def late_hook(self, spec: SiteSpec, device: torch.device, make: type[_Hook]) -> _Hook:
        """A hook for what is seen only now; where its state would not fit into memory_budget, one that does nothing."""
        if self.store.make_room(device, 1, len(spec.sites)):
            return self.hook(spec, device, make)
        self.skipping.give_up(spec.sites.values(), self.store.explain_no_room(1, len(spec.sites)))
        return make(self, spec)

    def _measure(self, hook: SiteHook, tensor: torch.Tensor) -> None:
        if (hook.output is None and hook.gradient is None) or is_a_mere_shape(tensor):
            return
        if is_wrapper(tensor):
            return observe_tensor(tensor, hook)  # it knows how to hand its data to an operator, or waits for them first
        problem = _native.observe(tensor, hook)
        if problem is not None:
            self._rebind(hook, tensor, problem)

    def measure_by_slot(
        self, hook: SiteHook, tensor: torch.Tensor, is_output: bool, path: str, note: str, rows: Rows | None
    ) -> str | None:
        """Measures what an operator of a graph was given and does not fit the site of its slot, once that is fitted.

        path: in the hook's container. note: as `graphs.read_sharding_note` has it. Returns what is to be raised, under
        strict.
        """
        own, other = hook.spec.kinds if is_output else reversed(hook.spec.kinds)
        kind = own or other or ""  # other: the site of the gradient alone, which is to fit the output
        entry = hook.spec.entries.get(kind)
        try:
            if path:
                if path not in hook.parts and is_capturing():
                    raise InsideCapture
                hook = self._part_once(hook, path, tensor.device)
                entry = hook.spec.entries.get(kind)
            is_empty = tensor.numel() == 0  # but other ranks may have some of it
            if entry is None or entry.given_up or (is_empty and not note):
                return None
            with self.store.lock:  # no other thread moves the site in between
                if not is_empty:
                    self._fitting.fit(hook, tensor)
                dim = channel_dim_of_site(hook.spec, tensor.dim())
                if note and own:
                    note_sharding_of(entry, read_sharding_note(note, dim), self.store.clears)
                elif placed := hook.spec.placed():
                    note_sharding_of(entry, placed(tensor.shape[dim]), self.store.clears)
                state = hook.output if is_output else hook.gradient
            if state is not None and not is_empty:
                accumulate(tensor, state, rows=rows)
        except Exception as error:
            if entry is None:
                return None
            if self.store.strict:
                return f"hookstats: {entry.site} cannot be measured: {say_reason(error)}"
            has_gradient = note or tensor.is_floating_point() or tensor.is_complex()  # an operator of its own sees that
            entries = [entry] if has_gradient else hook.spec.entries.values()
            if is_output and (own or not has_gradient):
                self.leave_out(entries, error)
            elif not is_output:
                self._add_failure(entry.index, error)
        return None

    def rebind(self, hook: SiteHook, value: Any, problem: Any) -> None:
        """The extension did not measure what it was given: a container, or a tensor whose state does not fit it."""
        with self.span_of_a_hook():
            if problem is NotImplemented:
                self._observe_container(hook, value)
            else:
                self._rebind(hook, value, problem)

    def _rebind(self, hook: SiteHook, tensor: torch.Tensor, problem: Problem | None) -> None:
        """Puts a state in place that fits the tensor, or leaves the tensor out."""
        if tensor.is_nested:  # has no shape to ask for
            return self.leave_out(hook.spec.entries.values(), f"{problem}, got a nested one")
        try:
            if tensor.numel() == 0:  # nothing to measure, and its width says nothing
                return
            with self.store.lock:  # no other thread moves the site in between
                self._fitting.fit(hook, tensor)
                problem = _native.observe(tensor, hook)
        except Exception as error:
            problem = error
        if problem is not None:
            self.leave_out(hook.spec.entries.values(), problem)

    def leave_out(self, entries: Iterable[Entry], problem: Problem, times: int = 1, reason: str | None = None) -> None:
        """Tensors of these sites cannot be measured; training goes on, unless it is to raise. reason: as `Skipping`."""
        for entry in (entries := list(entries)):
            entry.left_out = True
        self.skipping.leave_out([entry.site for entry in entries], problem, times, reason)

    def give_up(self, entries: Iterable[Entry], problem: Problem) -> None:
        """Give up sites that can never be measured."""
        entries = list(entries)
        self.skipping.give_up([entry.site for entry in entries], problem)
        for entry in entries:
            entry.given_up = True
            hook = HOOKS.get(entry.index)
            if hook is not None:
                hook.bind_sites()

    def collect_failures(self) -> None:
        """Counts the gradients whose kernels failed inside backward, where nothing could be said."""
        for index, (problem, times) in _native.take_failures().items():  # of all monitors
            hook = HOOKS.get(index)
            if hook is not None:
                hook.binder._add_failure(index, problem, times)
        with self._failing:
            failed, self._failed = self._failed, {}
        for index, (problem, times) in failed.items():
            hook = HOOKS.get(index)
            if hook is not None:
                self.leave_out([each for each in hook.spec.entries.values() if each.index == index], problem, times)

    def _add_failure(self, index: int, problem: Problem, times: int = 1) -> None:
        with self._failing:
            first, before = self._failed.get(index, (say_reason(problem), 0))
            self._failed[index] = first, before + times


_ENTRANCES = (SiteBinder.rebind, SiteHook.__call__, InputHook.__call__)  # by which hooks enter Python
