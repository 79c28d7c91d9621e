"""Times of a training step: hookstats' own by the host's clock, whole steps by a GPU's. Waits for nothing."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import NamedTuple

import torch
from torch import nn

from hookstats import _native
from hookstats.watch.flags import Flags

_FIRST, _APART, _TIMED_STEPS = 8, 8, 16  # the first steps of a kind are timed, then each eighth; of measured ones 16
_LAST_STEPS = 32  # skipped ones that are remembered, of those that were timed
_CALLS, _ROUNDS = 200, 5  # of a module that does nothing, with and without a hook


class Overhead(NamedTuple):
    """Microseconds of a step; NaN where nothing is known yet.

    Means over the same steps, so that what else runs on the machine, which may add ten times as much to a step, is in
    the parts as in the whole: their share stays.

    ``measured_host``, ``skipped_host``: what hookstats' hooks (and torch's calls of them) and `Monitor.step` take of
    the host, kernels included where they run there; of the first eight steps of a kind, then of each eighth (the first
    two steps of the run are not among them): of 16 measured ones, and of the last 32 that were skipped. What is inside
    a compiled graph is not in these.

    ``measured_step``, ``skipped_step``: the whole step, from one `Monitor.step` to the next, on the GPU's clock if
    there is one. Their difference is what kernels take of a GPU, and what a compiled graph does for hookstats, with the
    noise of the machine: no kernel is timed by itself, because events around it would delay what they measure.

    ``every``, ``rows``: each so-many-th step is measured now, and one of so many rows read, as `attach` was told, or as
    ``budget=`` has chosen. ``every`` is NaN where a callable decides, and both are until there is a choice.
    """

    measured_host: float
    skipped_host: float
    measured_step: float
    skipped_step: float
    every: float
    rows: float


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

    def measure_since(self, before: _Mark) -> float | None:
        """Return microseconds since another mark; None: the device has not come to it, or there are two streams."""
        if self.event is None or before.event is None:
            return 1e6 * (self.at - before.at)
        if self.stream != before.stream:
            return None
        return 1e3 * before.event.elapsed_time(self.event) if self.event.query() else None


class TimedStep(NamedTuple):
    """A whole step, from one `Monitor.step` to the next, and what hooks took of it, where that was timed."""

    before: _Mark
    after: _Mark
    times: _native.Times | None

    def read_us(self) -> float:
        """Waits for the device. Infinite where two streams do not tell."""
        if self.after.event is not None:
            self.after.event.synchronize()
        took = self.after.measure_since(self.before)
        return math.inf if took is None else took

    @property
    def host_us(self) -> float:
        return 0.0 if self.times is None else self.times.host_us


class Stopwatch:
    """Times the steps of a monitor."""

    def __init__(self, flags: Flags, device: torch.device) -> None:
        self._flags = flags
        self._device = device
        self._timed: list[_native.Times] = []
        self._ended: list[tuple[_Mark, _Mark]] = []  # of those timed, as far as they have ended
        self._turns = {True: 0, False: 0}  # measured steps, and skipped ones, without the first two steps
        self._closing: deque[float] = deque(maxlen=_LAST_STEPS)  # Monitor.step alone, of steps that were skipped
        self._skipped: deque[tuple[_Mark, _Mark]] = deque(maxlen=_LAST_STEPS)
        self._begun: _Mark | None = None  # of a step that is timed
        self._times: _native.Times | None = None  # of a measured step that is timed
        self._has_stepped = self._will_time = False
        self.last: TimedStep | None = None  # that has ended
        self._us_of_a_hook: float | None = None

    @property
    def is_timing(self) -> bool:
        """Tell whether the step that runs is timed."""
        return self._begun is not None

    @contextmanager
    def closing(self, measured: bool) -> Iterator[None]:
        """Wrap `Monitor.step`, where it ends a step of this kind that is timed."""
        begun, at, times = self._begun, time.perf_counter(), self._times
        assert begun is not None
        with self._flags.span():
            yield
        self.last = TimedStep(begun, self._mark(), times)
        if times is not None:
            self._ended.append((begun, self.last.after))
        elif not measured:
            self._skipped.append((begun, self.last.after))
            self._closing.append(1e6 * (time.perf_counter() - at))

    def begin(self, measured: bool, always: bool = False) -> None:
        """The step that begins now is measured, or is not. always: time it in any case."""
        self._will_time = self._has_stepped and (self._is_its_turn(measured) or always)
        times = _native.Times() if measured and self._will_time else None
        if times is not self._times:
            self._flags.enabled.times = self._times = times
        if times is not None:
            self._timed.append(times)

    def start(self) -> None:
        """Set the stopwatch for the step that has begun, if that is timed."""
        self._has_stepped = True
        self._begun = self._mark() if self._will_time else None

    def _is_its_turn(self, measured: bool) -> bool:
        """Choose steps that are spread over the run: in its first ones the machine may be busy."""
        turn = self._turns[measured]
        self._turns[measured] += 1
        if measured and len(self._timed) >= _TIMED_STEPS:
            return False
        return turn < _FIRST or turn % _APART == 0

    def _mark(self) -> _Mark:
        is_gpu = self._device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        return _Mark(self._device if is_gpu else None)

    def overhead(self, idle_hook: Callable[..., None], hooks: int) -> Overhead:
        """`idle_hook`: a forward hook that does what the `hooks` do in a step that is skipped."""
        if self._us_of_a_hook is None:
            self._us_of_a_hook = _us_of_a_hook(idle_hook)
        paused = self._us_of_a_hook
        timed = [times for times in self._timed if times is not self._times]
        calls = fmean([float(times.calls) for times in timed] or [float(hooks)])
        return Overhead(
            measured_host=_mean(times.host_us for times in timed) + calls * paused,
            skipped_host=_mean(self._closing) + calls * paused,
            measured_step=_mean(after.measure_since(before) for before, after in self._ended),
            skipped_step=_mean(after.measure_since(before) for before, after in self._skipped),
            every=math.nan,
            rows=math.nan,
        )


class _Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _us_of_a_hook(hook: Callable[..., None]) -> float:
    """Measure what it adds to a module's call: torch's own way of calling hooks takes most of it."""
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


def _mean(values: Iterable[float | None]) -> float:
    """Return the mean of those that are known; NaN where none is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else float("nan")
