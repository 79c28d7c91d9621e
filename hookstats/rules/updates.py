"""Updates against the weights that they change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from hookstats.numbers.fields import Counts
from hookstats.rules.finding import Finding
from hookstats.rules.history import Streak
from hookstats.rules.step import Mask, Step
from hookstats.rules.words import number


@dataclass
class UpdateRatio:
    """An optimizer's step changes a parameter too much: mean |update| over mean |parameter| (warning).

    About 1e-3 is usual, far above 1e-2 is bad (bo-ke/llm-internal-medicine, docs/optim_update.md): ill is ``ratio`` =
    0.1, in ``row`` = 20 measured steps in a row. It needs ``attach(tensors=(..., "param", "param_update"))``.

    The rounding of low precision. Where an optimizer keeps float32 master weights of bfloat16 parameters, an update is
    seen as 0 or a whole unit in the last place: its rms is far too large, 3.5 times at a learning rate of 1e-5.
    Subtracting ulp^2 / 12 for each value does not mend that, because a value that has changed has changed by a whole
    unit. Its mean absolute value is right without knowing any dtype: a change of a 30th of a unit is seen in one value
    of 30. It is assumed that the masters lie evenly between the steps of the parameter's dtype. Parameters without
    masters change as they are seen to.

    So that a healthy run is silent: parameters that began at exactly 0 (biases, LoRA, the last layer of a block) have no
    size but that of their updates, and are not judged until they have ``settled`` = 200 measured steps behind them;
    nor are parameters of fewer than ``values`` = 64 numbers, which pass through 0 together.
    """

    ratio: float = 0.1
    row: int = 20
    settled: int = 200
    values: int = 64
    _streak: Streak = field(default_factory=Streak, init=False, repr=False, compare=False)
    _ages: Streak = field(default_factory=Streak, init=False, repr=False, compare=False)
    _from_zero: Mask = field(default_factory=lambda: np.empty(0, bool), init=False, repr=False, compare=False)

    def __call__(self, step: Step) -> Iterator[Finding] | None:
        weights = step.partner("param_update", "param")
        measured = (weights >= 0) & (step.totals.count >= self.values)
        return self._of(step, weights, measured) if measured.any() else None

    def _of(self, step: Step, weights: Counts, measured: Mask) -> Iterator[Finding]:
        means = step.totals.abs_mean
        sizes = np.where(measured, means[weights], np.nan)
        ages = self._ages.longer(measured, measured)
        new = len(step.sites) - len(self._from_zero)
        self._from_zero = np.append(self._from_zero, np.zeros(new, bool))
        self._from_zero |= (ages == 1) & (sizes == 0)
        with np.errstate(invalid="ignore", divide="ignore"):
            ratios = np.where(measured & (sizes > 0), means / sizes, 0.0)
        too_large = (ratios > self.ratio) & (~self._from_zero | (ages > self.settled))
        ill = (self._streak.longer(too_large, measured) >= self.row) & too_large
        for site in np.flatnonzero(ill).tolist():
            sentence = (
                f"each step changes {step.sites[site].name} by {number(ratios[site])} of its size, for {self.row} "
                "measured steps; about 0.001 is usual. Lower its learning rate, or warm it up longer."
            )
            yield step.finding("update-ratio", site, ratios[site], self.ratio, "warning", sentence)
