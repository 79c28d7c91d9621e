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
    0.1 in ``row`` = 10 measured steps in a row, or once more than ``whole`` = 1, all that the parameter was. It needs
    ``attach(tensors=(..., "param", "param_update"))``.

    The rounding of low precision. Where an optimizer keeps float32 master weights of bfloat16 parameters, an update is
    seen as 0 or as a whole unit in the last place: its rms is then too large, 2.8 times at a learning rate of 1e-5 and
    weights of 0.02, 5 times at 3e-6. Subtracting ulp^2 / 12 for each value that changed leaves 2.7 and 4.8 times,
    because such a value has changed by a whole unit. The mean absolute value is right without knowing any dtype: an
    update of a 30th of a unit is seen in one value of 30. It is assumed that the masters lie evenly between the steps
    of the parameter's dtype. A parameter without masters is judged by how it did change, less than it was meant to.

    So that a healthy run is silent: parameters that began with one value throughout (LoRA with 0, a layer scale with
    1e-6) have no size but that of their updates, and neither have biases, which may pass through 0 (those of keys in
    attention change nothing, and only tremble): both are not judged; nor are parameters of fewer than ``values`` = 64
    numbers.
    """

    ratio: float = 0.1
    row: int = 10
    whole: float = 1.0
    values: int = 64
    _streak: Streak = field(default_factory=Streak, init=False, repr=False, compare=False)
    _seen: Mask = field(default_factory=lambda: np.empty(0, bool), init=False, repr=False, compare=False)
    _unsized: Mask = field(default_factory=lambda: np.empty(0, bool), init=False, repr=False, compare=False)

    def __call__(self, step: Step) -> Iterator[Finding] | None:
        weights = step.partner("param_update", "param")
        measured = (weights >= 0) & (step.totals.count >= self.values)
        return self._of(step, weights, measured) if measured.any() else None

    def _of(self, step: Step, weights: Counts, measured: Mask) -> Iterator[Finding]:
        means = step.totals.abs_mean
        sizes = np.where(measured, means[weights], np.nan)
        new = step.sites[len(self._seen) :]
        self._seen = np.append(self._seen, np.zeros(len(new), bool))
        self._unsized = np.append(self._unsized, np.array([name.endswith("bias") for name, _ in new], bool))
        begins = measured & ~self._seen
        self._unsized |= begins & (step.totals.min == step.totals.max)[weights]
        self._seen |= begins
        with np.errstate(invalid="ignore", divide="ignore"):
            ratios = np.where(measured & (sizes > 0), means / sizes, 0.0)
        too_large = (ratios > self.ratio) & ~self._unsized
        is_long = self._streak.longer(too_large, measured) >= self.row
        ill = too_large & (is_long | (ratios > self.whole))
        for site in step.in_order(ill):
            whole = ratios[site] > self.whole
            since = "so that nothing is left of what it was" if whole else f"for {self.row} measured steps"
            sentence = (
                f"a step changes {step.sites[site].name} by {number(ratios[site])} of its size, {since}; about 0.001 "
                "is usual. Lower its learning rate, or warm it up longer."
            )
            threshold = self.whole if whole else self.ratio
            yield step.finding("update-ratio", site, ratios[site], threshold, "warning", sentence)
