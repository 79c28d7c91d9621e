"""Leaves evaluation out: only forwards in training mode are measured, where that is wanted."""

from __future__ import annotations

import weakref

from torch import nn

from hookstats import _native
from hookstats.modules.selection import unwrapped
from hookstats.watch.memory import MONITORS, Flags


class TrainingOnly:
    """Whether a monitor leaves evaluation out.

    The `training` of the model's root decides, of what is inside wrappers (trainers evaluate that, and leave a
    wrapper's flag as it was); a frozen submodule in eval mode is measured.
    """

    def __init__(self, model: nn.Module, wanted: bool | None, flags: Flags, compiled_programs: int) -> None:
        """wanted: None, as soon as the model has been seen in training mode, at attach or when a step begins.

        compiled_programs: as in attach.
        """
        root = unwrapped(model)
        self._root = weakref.ref(root)
        self._wanted = wanted
        self._enabled = flags.enabled
        part = flags.in_graphs.part = _native.now.add(self._enabled, compiled_programs == 1)
        setattr(MONITORS, flags.monitor, flags.in_graphs)
        self._at_its_end = weakref.finalize(root, _forget, part, self._enabled, flags.monitor)
        self.begin_step()

    def begin_step(self) -> None:
        root = self._root()
        if root is None or self._wanted is False or not self._at_its_end.alive:
            return
        if self._wanted or root.training:
            self._wanted = True
            self._enabled.decide_by(root)

    def is_evaluating(self) -> bool:
        """Whether a forward would be left out now."""
        return self._enabled.leaves_out

    def forget(self) -> None:
        """The monitor is detached."""
        self._at_its_end()


def _forget(part: _native.Part, enabled: _native.Enabled, monitor: str) -> None:
    part.remove()
    delattr(MONITORS, monitor)
    enabled.decide_by(None)


def check_training_only(training_only: object) -> None:
    if training_only is not None and not isinstance(training_only, bool):
        raise TypeError(f"training_only: expected True, False or None, got {training_only!r}")
