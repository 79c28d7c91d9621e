"""What hookstats itself takes of a training step. Found on a few steps, with events on a GPU; waits for nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from hookstats import _native
from hookstats.watch.memory import Flags

_TIMED_STEPS = 3  # measured ones, behind the first two steps, whose every hook is timed
_LAST_STEPS = 32  # whole steps of either kind that are remembered
_CALLS, _ROUNDS = 200, 5  # of a module that does nothing, with and without a hook


class Overhead(NamedTuple):
    """Microseconds of a step; NaN where nothing is known yet.

    ``measured_host``, ``skipped_host``: what hookstats' hooks (and torch's calls of them) and `Monitor.step` take of
    the host, kernels included where they run there; of three measured steps, the first two not among them, and of the
    last 32 that were skipped. ``measured_device``: of a GPU (0 without one), from the first to the last kernel of each
    hook and of closing the step; a step that is skipped launches none. Medians. What is inside a compiled graph is not
    in these.

    ``measured_step``, ``skipped_step``: the whole step, from one `Monitor.step` to the next, on the GPU's clock if
    there is one; the medians of the last 32 of either kind, without the first step. Their difference also has what a
    compiled graph does for hookstats, and the noise of the machine.
    """

    measured_host: float
    measured_device: float
    skipped_host: float
    measured_step: float
    skipped_step: float


class _Mark:
    """A moment of a device; without a GPU, of the host."""

    def __init__(self, device: torch.device | None) -> None:
        self.event: torch.cuda.Event | None = None
        self.stream: torch.cuda.Stream | None = None
        self.at = time.perf_counter()
        if device is not None:
            self.stream = torch.cuda.current_stream(device)
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(self.stream)

    def us_since(self, before: _Mark) -> float | None:
        """None while the device has not come to it; and between two streams, of which none waits for the other."""
        if self.event is None or before.event is None:
            return 1e6 * (self.at - before.at)
        if self.stream != before.stream:
            return None
        return 1e3 * before.event.elapsed_time(self.event) if self.event.query() else None


class Stopwatch:
    """Times the steps of a monitor."""

    def __init__(self, flags: Flags, device: torch.device) -> None:
        self._flags = flags
        self._device = device
        self._timed: list[_native.Times] = []
        self._closing: deque[float] = deque(maxlen=_LAST_STEPS)  # Monitor.step alone, of steps that were skipped
        self._steps: deque[tuple[bool, _Mark, _Mark]] = deque(maxlen=2 * _LAST_STEPS)
        self._begun: _Mark | None = None
        self._us_of_a_hook: float | None = None

    @contextmanager
    def closing(self, measured: bool) -> Iterator[None]:
        """Around `Monitor.step`, which ends a step of this kind and sets the stopwatch for the next one."""
        begun, at = self._begun, time.perf_counter()
        with self._flags.span(self._device):
            yield
        self._begun = self._mark()
        if begun is not None:
            self._steps.append((measured, begun, self._begun))
            if not measured:
                self._closing.append(1e6 * (time.perf_counter() - at))

    def begin(self, measured: bool) -> None:
        """The step that begins now is measured, or is not."""
        for times in self._timed:
            times.device_us  # noqa: B018  (gives the events back that have come)
        timed = measured and self._begun is not None and len(self._timed) < _TIMED_STEPS
        self._flags.enabled.times = _native.Times() if timed else None
        if self._flags.enabled.times is not None:
            self._timed.append(self._flags.enabled.times)

    def _mark(self) -> _Mark:
        is_gpu = self._device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        return _Mark(self._device if is_gpu else None)

    def overhead(self, idle_hook: Callable[..., None], hooks: int) -> Overhead:
        """`idle_hook`: a forward hook that does what the `hooks` do in a step that is skipped."""
        if self._us_of_a_hook is None:
            self._us_of_a_hook = _us_of_a_hook(idle_hook)
        paused = self._us_of_a_hook
        timed = [times for times in self._timed if times is not self._flags.enabled.times]
        calls = _median([float(times.calls) for times in timed] or [float(hooks)])
        steps: dict[bool, list[float]] = {True: [], False: []}
        for measured, before, after in self._steps:
            us = after.us_since(before)
            if us is not None:
                steps[measured].append(us)
        return Overhead(
            measured_host=_median([times.host_us for times in timed]) + calls * paused,
            measured_device=_median([us for us in (times.device_us for times in timed) if us is not None]),
            skipped_host=_median(list(self._closing)) + calls * paused,
            measured_step=_median(steps[True]),
            skipped_step=_median(steps[False]),
        )


class _Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _us_of_a_hook(hook: Callable[..., None]) -> float:
    """What it adds to a module's call: torch's own way of calling hooks takes most of it."""
    x, bare, hooked = torch.empty(0), _Nothing(), _Nothing()
    hooked.register_forward_hook(hook)
    shortest = dict.fromkeys((bare, hooked), float("inf"))
    for _ in range(_ROUNDS):
        for module in shortest:
            begun = time.perf_counter()
            for _ in range(_CALLS):
                module(x)
            shortest[module] = min(shortest[module], 1e6 * (time.perf_counter() - begun) / _CALLS)
    return max(shortest[hooked] - shortest[bare], 0.0)


def _median(values: list[float]) -> float:
    return median(values) if values else float("nan")
