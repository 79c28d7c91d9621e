"""The first tensor that holds NaN or an infinity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from hookstats.numbers.fields import Array
from hookstats.rules.finding import Finding
from hookstats.rules.step import Mask, Step
from hookstats.rules.words import number, tensor_of

_BACKWARD = ("grad_output", "grad_input", "param_grad")


@dataclass
class NonFinite:
    """The first tensor, in order of execution, that holds NaN, Inf or -Inf, in forward or in backward: critical.

    There is no threshold to set: one such value ends most trainings. Two things are in order, and are told apart. -Inf
    alone in an output or input that has it from its first step on is a mask, of attention or of a router. Gradients in
    a step that a GradScaler has skipped are how it finds its scale: a note, unless that happens in ``overflows``
    measured steps in a row (a scaler that begins at 65536 has come to 1 after 16 of them).
    """

    overflows: int = 16
    per_site: ClassVar[bool] = False
    _seen: Mask = field(default_factory=lambda: np.empty(0, bool), init=False, repr=False, compare=False)
    _masks: Mask = field(default_factory=lambda: np.empty(0, bool), init=False, repr=False, compare=False)
    _clean: int | None = field(default=None, init=False, repr=False, compare=False)  # the last step that was finite
    _skipped: int = field(default=0, init=False, repr=False, compare=False)  # by the scaler, in a row

    def __call__(self, step: Step) -> Iterator[Finding]:
        bad = self._counted(step)[step.order]
        self._skipped = self._skipped + 1 if step.overflowed else 0
        if bad.any():
            place = int(np.flatnonzero(bad)[0])
            yield self._of_tensor(step, place, bad[place])
        elif not np.isfinite(step.scalars.get("loss", 0.0)):
            sentence = (
                f"the loss is {step.scalars['loss']}, and every watched tensor is finite: it began behind the model, "
                f"in the loss itself. Look for a logarithm or a division there, and at the labels.{self._since()}"
            )
            yield step.finding("nonfinite", None, step.scalars["loss"], 0, "critical", sentence)
        else:
            self._clean = step.number

    def _of_tensor(self, step: Step, place: int, bad: float) -> Finding:
        """place: in the order of execution."""
        first = int(step.order[place])
        name, tensor = step.sites[first]
        kind = tensor.partition(".")[0]
        what = "NaN" if step.totals.nans[first] else "an infinity"
        text = f"{number(bad)} of {number(bad + step.totals.count[first])} values of {tensor_of(step.sites[first])}"
        if step.overflowed and kind in _BACKWARD and self._skipped < self.overflows:
            sentence = (
                f"{text} are {what}: the GradScaler has skipped this step and lowers its scale. Nothing is to be done."
            )
            return step.finding("nonfinite", first, bad, 0, "note", sentence)
        if kind in ("output", "input"):
            advice = "It began in forward"
            if place:
                advice += f", behind {tensor_of(step.sites[int(step.order[place - 1])])}, which is finite"
            advice += f": look at the weights and the arithmetic of {name or 'the model'}"
        elif kind in _BACKWARD:
            advice = (
                "It began in backward, all outputs are finite: look at what follows it in forward, up to the loss, "
                "for a square root or a division at 0"
            )
        else:
            advice = "It began in the optimizer, outputs and gradients are finite: look at its state and its settings"
        if step.overflowed:
            advice += f"; the GradScaler has now skipped {self._skipped} measured steps in a row"
        sentence = (
            f"{text} are {what}, the first in this step. {advice}.{self._since()} Go back to a checkpoint before it."
        )
        return step.finding("nonfinite", first, bad, 0, "critical", sentence)

    def _since(self) -> str:
        return "" if self._clean is None else f" In step {self._clean} everything was finite."

    def _counted(self, step: Step) -> Array:
        """``[n]``: values that are not finite, without those of masks."""
        new = len(step.sites) - len(self._seen)
        if new:
            self._seen, self._masks = (np.append(each, np.zeros(new, bool)) for each in (self._seen, self._masks))
        totals, begins = step.totals, (step.calls > 0) & ~self._seen
        if begins.any():
            is_forward = step.of("output") | step.of("input")
            self._masks |= begins & is_forward & (totals.neginfs > 0) & (totals.nans + totals.posinfs == 0)
            self._seen |= begins
        return np.where(self._masks, totals.nans + totals.posinfs, step.nonfinite)
