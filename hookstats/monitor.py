"""attach() and Monitor: which steps are measured, and when their numbers arrive."""

from __future__ import annotations

import logging
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeAlias

import torch
from torch import nn

from hookstats import _native, stages
from hookstats.drain import Drain, Pending, Scalars
from hookstats.fields import ExponentBins, Site
from hookstats.hooks import Watcher, warn
from hookstats.select import (
    Modules,
    as_globs,
    channels_of,
    matches,
    select_modules,
    wanted_channel_dims,
)
from hookstats.snapshot import SiteStats, Snapshot
from hookstats.state import Store

TENSORS = ("output", "grad_output")
Sink: TypeAlias = Callable[[Snapshot], object]

_log = logging.getLogger("hookstats")


class Monitor:
    """What `attach` returns: closes steps, hands out their numbers. As a context manager, it detaches at the end."""

    def __init__(
        self,
        watcher: Watcher,
        store: Store,
        handles: list[Any],
        due: Callable[[int], bool],
        sinks: tuple[Sink, ...],
    ) -> None:
        self._watcher = watcher
        self._store = store
        self._drain = Drain(store)
        self._handles = handles
        self._due = due
        self._sinks = sinks
        self._pending: deque[Pending] = deque()  # on their way
        self._finished: deque[Snapshot] = deque()  # arrived, not yet returned by step()
        self._last: Snapshot | None = None
        self._step = 0
        self._measured = True  # the open step
        self._pauses = 0
        self._warned: list[object] = []
        self._set_flags()

    @property
    def sites(self) -> list[Site]:
        """The watched sites, those in containers as soon as they have been seen; not those in `skipped`."""
        return [entry.site for entry in self._store.entries if not entry.hidden_if_silent]

    @property
    def skipped(self) -> dict[Site, str]:
        """The sites that are no longer measured, each with the reason."""
        self._watcher.collect_failures()
        return dict(self._watcher.skipped)

    @property
    def state_bytes(self) -> int:
        """Device memory that holds statistics, over all devices."""
        return self._store.bytes

    def step(self, step: int | None = None, **scalars: Any) -> Snapshot | None:
        """Closes a training step; to be called after ``optimizer.step()``. Waits for nothing.

        ``step``: the number of the step that ends here, where the trainer has its own. ``scalars``: numbers or
        one-element tensors (``loss=loss``) that travel with a measured step; TypeError or ValueError for others.
        Returns a Snapshot that has arrived, of this or an earlier measured step, each once and in order; None while
        there is none.
        """
        if step is not None and not hasattr(step, "__index__"):
            raise TypeError(
                f"step: expected an int, the number of the step, got {step!r}; scalars go by name: loss=loss"
            )
        number = self._step if step is None else operator.index(step)
        checked = Scalars(scalars)
        self._watcher.collect_failures()
        if self._measured and self._handles:
            self._close(number, checked)
        self._step = number + 1
        self._measured = self._is_due()
        self._set_flags()
        while self._pending and self._pending[0].ready():
            self._deliver(self._pending.popleft().finish())
        return self._finished.popleft() if self._finished else None

    def _close(self, number: int, scalars: Scalars) -> None:
        try:
            self._pending.append(self._drain.begin(number, scalars))
        except Exception as error:  # no memory for the copy, say
            if self._strict:
                raise
            self._store.clear()
            self._warn_once("close", f"step {number} was measured, but could not be copied: {error!r}")

    def _is_due(self) -> bool:
        try:
            return bool(self._due(self._step))
        except Exception as error:
            if self._strict:
                raise
            self._warn_once("every", f"every={self._due!r} failed, the step is not measured: {error!r}")
            return False

    def snapshot(self) -> Snapshot:
        """What is in the open step; if nothing is, the last measured step. Waits for the device."""
        self._watcher.collect_failures()
        now = self._drain.begin(self._step, Scalars({}), clear=False).finish()
        if now.order:
            return now
        while self._pending:
            self._deliver(self._pending.popleft().finish())
        return self._last or now

    def _deliver(self, snapshot: Snapshot) -> None:
        self._last = snapshot
        self._finished.append(snapshot)
        for sink in self._sinks:
            try:
                sink(snapshot)
            except Exception as error:
                if self._strict:
                    raise
                self._warn_once(sink, f"the sink {sink!r} failed: {error!r}")

    def _warn_once(self, what: object, text: str) -> None:
        if what not in self._warned:
            self._warned.append(what)
            warn(text)

    @property
    def _strict(self) -> bool:
        return self._store.strict

    def _set_flags(self) -> None:
        self._store.flags.value = bool(self._measured and self._handles and not self._pauses)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is measured inside: for evaluation between steps."""
        self._pauses += 1
        self._set_flags()
        try:
            yield
        finally:
            self._pauses -= 1
            self._set_flags()

    def reset(self) -> None:
        """Forgets what the open step has so far: after warm-up, say."""
        self._store.clear()

    def detach(self) -> None:
        """Takes every hook off the model. What the open step has so far becomes a last snapshot, if it is anything."""
        for handle in self._handles:
            handle.remove()
        was_attached, self._handles = bool(self._handles), []
        self._set_flags()
        while self._pending:
            self._deliver(self._pending.popleft().finish())
        if was_attached and self._measured:
            last = self._drain.begin(self._step, Scalars({})).finish()
            if last.order:
                self._deliver(last)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def __repr__(self) -> str:
        state = f"step {self._step}" if self._handles else "detached"
        return f"Monitor({len(self.sites)} sites, {self.state_bytes / 2**20:.1f} MB, {state})"


def attach(
    model: nn.Module,
    modules: Modules = None,
    *,
    tensors: Iterable[str] = TENSORS,
    channels: bool | str | Iterable[str] = True,
    channel_dim: int | Mapping[str, int] | None = None,
    histogram: ExponentBins | None = ExponentBins(),
    every: int | Callable[[int], bool] = 10,
    sinks: Sink | Iterable[Sink] = (),
    memory_budget: int = 256 << 20,
    strict: bool = False,
) -> Monitor:
    """Watches a model: statistics of its modules' outputs and of the gradients of those outputs.

    Args:
        model: any module, compiled ones included; attach before or after ``torch.compile``. What is in a tuple or dict
            output is learned from an eager forward. Not for compiled autograd, nor ``torch.export`` (detach before).
        modules: globs over module names (``"layers.*.mlp"``), or a callable ``(name, module) -> bool``. None: the leaf
            modules that do something, and the direct children of every ModuleList.
        tensors: of ``"output"``, ``"grad_output"``.
        channels: whether statistics are kept per channel: True, False, or globs.
        channel_dim: an int, or ``{glob: int}``. None: by the module's type (Linear, Embedding, LayerNorm: last;
            convolutions, BatchNorm, pooling: the one before the spatial ones), else 1 for 4-D and 5-D tensors, else
            the last.
        histogram: ``ExponentBins()``, ``ExponentBins(per_channel=True)``, or None.
        every: every how many steps one is measured, or a callable ``step -> bool``. Step 0 always is.
        sinks: a callable or several, called with each Snapshot when it arrives.
        memory_budget: bytes of state per device. Where channels would need more, all sites keep totals only.
        strict: what cannot be measured raises; otherwise the site is skipped, with one warning and its reason in
            ``Monitor.skipped``, and training goes on.

    Raises:
        TypeError, ValueError: for arguments that are not as above: an unknown tensor kind, a glob that matches nothing,
            a channel_dim that the module cannot have; for a DataParallel model.
        RuntimeError: for a model on a GPU where hookstats was built without CUDA.
    """
    _refuse(model)
    kinds = _checked_tensors(tensors)
    due = _checked_every(every)
    callables = _checked_sinks(sinks)
    _check_histogram(histogram)
    if not isinstance(memory_budget, int) or memory_budget < 0:
        raise ValueError(f"memory_budget: expected a number of bytes, got {memory_budget!r}")
    if not isinstance(strict, bool):
        raise TypeError(f"strict: expected True or False, got {strict!r}")
    chosen = select_modules(model, modules)
    dims = wanted_channel_dims(channel_dim, chosen)
    found = {name: channels_of(name, module, dims.get(name)) for name, module in chosen.items()}
    keep = _channel_names(channels, chosen)
    default = _device_of(model) or torch.device("cpu")
    devices = {name: _device_of(module) or default for name, module in chosen.items()}

    def sizes() -> dict[torch.device, int]:
        total = dict.fromkeys(devices.values(), 0)
        for name, device in devices.items():
            width = (found[name].width or 1) if name in keep else 1
            total[device] += len(kinds) * store.site_bytes(width)
        return total

    store = Store(histogram, memory_budget, strict)
    wanted = max(sizes().values())
    if wanted > memory_budget:
        keep = set()
    for device, size in sizes().items():
        store.reserve(device, size // 8)
    watcher = Watcher(store, kinds)
    handles: list[Any] = []
    try:
        for name, module in chosen.items():
            hook = watcher.hook(name, "", found[name], name in keep, devices[name])
            handles.append(stages.register(module, hook))
    except Exception:
        for handle in handles:
            handle.remove()
        raise
    monitor = Monitor(watcher, store, handles, due, callables)
    late = sum(1 for name in keep if found[name].width is None)
    _log.info(
        "attached to %d sites of %d modules, state %.1f MB%s",
        len(monitor.sites),
        len(chosen),
        store.bytes / 2**20,
        f"; {late} modules show their width at their first eager forward, compiled before that they keep totals only"
        if late
        else "",
    )
    if wanted > memory_budget:
        _log.warning(
            "per-channel state would take %.1f MB of memory_budget=%.1f MB on a device: all sites keep totals only. "
            "Choose fewer modules=, channels=[globs] or histogram=ExponentBins(), or raise memory_budget.",
            wanted / 2**20,
            memory_budget / 2**20,
        )
    if stages.forget_compiled():
        _log.info("something was compiled before: torch.compiler.reset() was called, so that hooks are compiled in")
    return monitor


def measure(
    tensor: torch.Tensor, channel_dim: int | None = -1, histogram: ExponentBins | None = ExponentBins()
) -> SiteStats:
    """The statistics of one tensor, now.

    Args:
        tensor: float32, float16, bfloat16, float64, float8_e4m3fn or float8_e5m2, any strides, on a CPU or (with a CUDA
            build) a GPU.
        channel_dim: the dimension whose entries are kept apart; None: none is. Not read for a 0-dim tensor.
        histogram: as in `attach`.

    Raises:
        TypeError: for another dtype, or what is not a dense tensor. IndexError: for a channel_dim out of range.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"measure: expected a torch.Tensor, got {type(tensor).__name__}")
    _refuse_device(tensor.device)
    _check_histogram(histogram)
    if tensor.layout != torch.strided or tensor.is_nested or _native.has_no_data(tensor):
        raise TypeError(f"measure: expected a dense strided tensor with data, got {tensor.layout} on {tensor.device}")
    if channel_dim is None or tensor.dim() == 0:
        width = 1
    elif not -tensor.dim() <= operator.index(channel_dim) < tensor.dim():
        raise IndexError(f"measure: expected channel_dim from {-tensor.dim()} to {tensor.dim() - 1}, got {channel_dim}")
    else:
        width = max(tensor.shape[channel_dim], 1)
    store = Store(histogram, 0, strict=True)
    site = Site("", "tensor")
    keep_channels = channel_dim is not None and tensor.dim() > 0
    state = store.add(site, tensor.device, width, channel_dim or 0, keep_channels).state
    store.flags.value = True
    _native.accumulate(
        tensor.detach(), state.moments, state.counters, state.histogram, state.active, state.channel_dim, False
    )
    return Drain(store).begin(0, Scalars({}), clear=False).finish()[site]


def _device_of(module: nn.Module) -> torch.device | None:
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type in ("cpu", "cuda"):
            return tensor.device
    return None


def _refuse_device(device: torch.device) -> None:
    if device.type == "cuda" and not _native.HAS_CUDA:
        raise RuntimeError(
            f"expected a CPU tensor or model, got one on {device}: this hookstats was built without nvcc and has no "
            "CUDA kernels. Install the CUDA toolkit and rebuild: "
            "pip install --no-build-isolation --force-reinstall --no-deps ."
        )


def _refuse(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"attach: expected a torch.nn.Module, got {type(model).__name__}")
    for module in model.modules():
        if isinstance(module, nn.DataParallel):
            raise TypeError(
                "attach: expected a model without DataParallel, whose replicas would share hooks across devices; use "
                "DistributedDataParallel"
            )
    for tensor in (*model.parameters(), *model.buffers()):
        _refuse_device(tensor.device)


def _checked_tensors(tensors: Iterable[str]) -> tuple[str, ...]:
    if not isinstance(tensors, Iterable):
        raise TypeError(f"tensors: expected some of {', '.join(TENSORS)}; got {tensors!r}")
    kinds = (tensors,) if isinstance(tensors, str) else tuple(tensors)
    for kind in kinds:
        if kind not in TENSORS:
            raise ValueError(f"tensors: expected some of {', '.join(TENSORS)}; got {kind!r}")
    if not kinds:
        raise ValueError(f"tensors: expected some of {', '.join(TENSORS)}; got none")
    return tuple(kind for kind in TENSORS if kind in kinds)


def _checked_every(every: int | Callable[[int], bool]) -> Callable[[int], bool]:
    if callable(every):
        return every
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"every: expected an int from 1, or a callable step -> bool; got {every!r}")
    return lambda step: step % every == 0


def _checked_sinks(sinks: Sink | Iterable[Sink]) -> tuple[Sink, ...]:
    listed: tuple[Any, ...] = tuple(sinks) if isinstance(sinks, Iterable) else (sinks,)
    for sink in listed:
        if not callable(sink):
            raise TypeError(f"sinks: expected callables Snapshot -> None, got {sink!r}")
    return listed


def _channel_names(channels: bool | str | Iterable[str], chosen: Mapping[str, nn.Module]) -> set[str]:
    if isinstance(channels, bool):
        return set(chosen) if channels else set()
    globs = as_globs("channels", channels, chosen)
    return {name for name in chosen if matches(name, globs)}


def _check_histogram(histogram: object) -> None:
    if histogram is not None and not isinstance(histogram, ExponentBins):
        raise TypeError(f"histogram: expected ExponentBins(...) or None, got {histogram!r}")
