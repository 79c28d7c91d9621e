"""A monitor's flags on the host and on each device, which say whether what runs now is measured; evaluation is not.

A pause, a step that is not measured, evaluation: hooks ask the host's flag, kernels and compiled graphs the device's.
"""

from __future__ import annotations

import itertools
import weakref
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from hookstats import _native
from hookstats.modules.selection import unwrap
from hookstats.watch import guards


def is_capturing() -> bool:
    """Tell whether what this thread launches becomes part of a CUDA graph: then nothing may be waited for, or made."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Monitors:
    """Each attached monitor's part of `hookstats.watch.guards.now`, as an attribute of its name.

    Graphs take it from here, not from their hooks: what is found on the same way is looked at once before a graph runs,
    not once for each hook.
    """


MONITORS = Monitors()


class Flags:
    """Flags that say whether anything is to be measured now: one int32 on the host, one on each device."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self._value = False
        self.monitor = f"monitor_{next(self._numbers)}"  # the name among MONITORS
        with torch.inference_mode(False):
            self.host = torch.zeros(1, dtype=torch.int32, device="cpu")
        self.enabled = _native.Enabled(self.host)
        self._devices = {self.host.device: self.host}

    def on(self, device: torch.device) -> torch.Tensor:
        if device not in self._devices:
            with torch.inference_mode(False):
                flag = self.host.to(device)
            self._devices[device] = self._devices.get(flag.device, flag)  # device: perhaps another name, as cpu:0
        return self._devices[device]

    def span(self, calls: int = 0) -> AbstractContextManager[None]:
        """Time what hookstats does in Python: `calls` of hooks, or something else."""
        times = self.enabled.times
        return nullcontext() if times is None else times.span(calls)

    def is_open(self) -> bool:
        """Tell whether what runs now is measured. What a CUDA graph captures is: a replay asks the device's flag."""
        return self._value or (not self.enabled.is_paused and is_capturing())

    @property
    def value(self) -> bool:
        return self._value

    @value.setter
    def value(self, value: bool) -> None:
        if value != self._value:
            self._value = value
            _native.set_flags(list(self._devices.values()), int(value))


class TrainingOnly:
    """Decides whether a monitor leaves evaluation out.

    The `training` of the model's root decides, of what is inside wrappers (trainers evaluate that, and leave a
    wrapper's flag as it was); a frozen submodule in eval mode is measured.
    """

    def __init__(self, model: nn.Module, wanted: bool | None, flags: Flags) -> None:
        """wanted: None, as soon as the model has been seen in training mode, at attach or when a step begins."""
        root = unwrap(model)
        self._root = weakref.ref(root)
        self._wanted = wanted
        self._is_decided = wanted is False
        self._enabled = flags.enabled
        part = guards.now.add(self._enabled)
        setattr(MONITORS, flags.monitor, part)
        self._at_its_end = weakref.finalize(root, _forget, part, self._enabled, flags.monitor)
        self.begin_step()

    def begin_step(self) -> None:
        if self._is_decided:
            return
        root = self._root()
        if root is None or not self._at_its_end.alive:
            return
        if self._wanted or root.training:
            self._is_decided = True
            self._enabled.decide_by(root)

    def is_evaluating(self) -> bool:
        """Tell whether a forward would be left out now."""
        return self._enabled.leaves_out

    def forget(self) -> None:
        """The monitor is detached."""
        self._at_its_end()


def _forget(part: guards.Part, enabled: _native.Enabled, monitor: str) -> None:
    part.remove()
    delattr(MONITORS, monitor)
    enabled.decide_by(None)
