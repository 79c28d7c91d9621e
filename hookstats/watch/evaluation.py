"""Leaves evaluation out: only forwards in training mode are measured, where that is wanted."""

from __future__ import annotations

import itertools
import weakref

from torch import nn

from hookstats import _native
from hookstats.modules.selection import unwrapped
from hookstats.watch.memory import Flags

# By TrainingOnly.number, for graphs: the module whose `training` decides. A global that equal blocks share.
ROOTS: dict[int, weakref.ref[nn.Module]] = {}


def is_left_out(number: int) -> bool:
    """Whether a forward that runs now is evaluation. Can be traced."""
    root = ROOTS.get(number)
    return root is not None and not root().training  # type: ignore[union-attr]


class TrainingOnly:
    """Whether a monitor leaves evaluation out.

    The `training` of the model's root decides, of what is inside wrappers (trainers evaluate that, and leave a
    wrapper's flag as it was); a frozen submodule in eval mode is measured.
    """

    _numbers = itertools.count()

    def __init__(self, model: nn.Module, wanted: bool | None, flags: Flags) -> None:
        """wanted: None, as soon as the model has been seen in training mode, at attach or when a step begins."""
        self.number = next(self._numbers)
        self._root = weakref.ref(unwrapped(model))
        self._wanted = wanted
        self._flags = flags
        self._at_its_end: weakref.finalize[..., nn.Module] | None = None
        self._is_over = False
        self.begin_step()

    def begin_step(self) -> None:
        root = self._root()
        if root is None or self._at_its_end is not None or self._wanted is False or self._is_over:
            return
        if self._wanted or root.training:
            ROOTS[self.number] = self._root
            self._flags.enabled.decide_by(root)
            self._at_its_end = weakref.finalize(root, _forget, self.number, self._flags.enabled)

    def is_evaluating(self) -> bool:
        """Whether a forward would be left out now."""
        return is_left_out(self.number)

    def forget(self) -> None:
        """The monitor is detached."""
        self._is_over = True
        if self._at_its_end is not None:
            self._at_its_end()


def _forget(number: int, enabled: _native.Enabled) -> None:
    ROOTS.pop(number, None)
    enabled.decide_by(None)


def check_training_only(training_only: object) -> None:
    if training_only is not None and not isinstance(training_only, bool):
        raise TypeError(f"training_only: expected True, False or None, got {training_only!r}")
