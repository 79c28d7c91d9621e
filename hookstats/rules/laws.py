"""Laws: equations between what is measured anyway, which hold in every healthy step, whatever the loss and the data."""

from __future__ import annotations

import numpy as np

from hookstats.numbers.fields import Array, Counts
from hookstats.rules.arriving import sums_of_outputs
from hookstats.rules.finding import Finding
from hookstats.rules.formatting import number
from hookstats.rules.history import Streak, extended
from hookstats.rules.step import Mask, Step
from hookstats.rules.thresholds import rule

# Of the L1 norm of a bias's gradient, and of its output's: of a sum that has cancelled farther, what rounding to
# bfloat16, and what adding up in float32, has made of it may be anything.
_LEAST, _LEAST_OF_OUTPUT = 0.02, 1e-5


@rule
class BiasGradient:
    """A layer's gradients are a multiple of what its output's gradient says: a warning, or a note from the start on.

    The gradient of a bias (of a linear layer, a convolution, a norm) is the sum of the gradient of its module's output,
    by the chain rule. Over all channels both sums are known, and their ratio is 1, or what clipping has made of it in
    all layers alike: then it is their median. A layer is ill if its ratio is ``factor`` = 1.5 times that, or less than
    1 / 1.5 of it, and stays so to 3 % in ``consecutive_steps`` = 5 measured steps in a row. The law is arithmetic;
    the figures are ours.

    What else looks like it: a module that multiplies its output after it has added the bias, a hook on parameters that
    is meant to scale their gradients. Both hold from the first step on: then it is a note. What to do: look at what
    changes gradients after backward: hooks on parameters, reductions over a process group, a division that is
    missing or done twice.

    So that a healthy run is silent: a layer is judged where its sums have not cancelled, as they do between a residual
    stream and the norms behind it, and where the law holds to 1 % in another layer, or two thirds of at least three
    layers agree to 10 %. Factors that vary from step to step are those of other ranks' data, or of clipping each
    parameter by itself.
    """

    factor: float = 1.5
    consecutive_steps: int = 5

    def __post_init__(self) -> None:
        self._streak = Streak(self.consecutive_steps)
        self._ratios, self._agreed = np.empty(0), np.empty(0, bool)  # of each gradient, in the step before; ever
        self._sites, self._pairs = -1, np.empty((3, 0), np.int64)

    def __call__(self, step: Step) -> list[Finding] | None:
        biases, ratios = self._ratios_of(step)
        if not biases.size:
            return None
        n = len(step.sites)
        relative = np.full(n, np.nan)
        holds = bool((abs(ratios - 1) < 0.01).any())
        relative[biases] = ratios if holds else ratios / np.median(ratios)
        judged = np.isfinite(relative)
        with np.errstate(invalid="ignore"):
            is_off = judged & ~((relative < self.factor) & (relative > 1 / self.factor))
            is_steady = abs(relative / extended(self._ratios, n, np.nan) - 1) < 0.03
            agree = judged & (abs(relative - 1) < 0.1)
        self._ratios = np.where(judged, relative, extended(self._ratios, n, np.nan))
        if not holds and (3 * agree.sum() < 2 * judged.sum() or judged.sum() < 3):
            return []
        ill = self._streak.push(step.number, is_off & (is_steady | (self._lengths(n) == 0)), judged)
        self._agreed = extended(self._agreed, n, False) | agree
        return [self._finding(step, site, float(relative[site]), int(agree.sum())) for site in step.in_order(ill)]

    def _lengths(self, n: int) -> Counts:
        return extended(self._streak.lengths, n, 0)

    def _ratios_of(self, step: Step) -> tuple[Counts, Array]:
        """The ids of gradients of biases that have not cancelled, and how many times its output's each of them is."""
        if self._sites < len(step.sites):
            self._sites, self._pairs = len(step.sites), sums_of_outputs(step)
        gradients, outputs, is_weight = self._pairs
        sums, sizes = step.totals.mean * step.totals.count, step.totals.l1_norm
        now, fresh = sums[gradients], sums[outputs]
        with np.errstate(invalid="ignore"):
            known: Mask = (is_weight == 0) & (abs(now) > _LEAST * sizes[gradients])
            known &= abs(fresh) > _LEAST_OF_OUTPUT * sizes[outputs]
        known &= np.isfinite(now) & np.isfinite(fresh) & (step.nonfinite[gradients] + step.nonfinite[outputs] == 0)
        return gradients[known], now[known] / fresh[known]

    def _finding(self, step: Step, site: int, factor: float, agree: int) -> Finding:
        name, since = step.sites[site].name, int(self._streak.since[site])
        size = number(factor) if abs(factor) > 0.95 else f"1/{number(1 / factor)}"
        sentence = (
            f"the gradient of {name} is {size} times the sum of its output's gradient, step after step since step "
            f"{since}. By the chain rule it is that sum, and {agree} other layers keep to it. "
        )
        if self._agreed[site]:
            sentence += (
                "Look at what changes gradients after backward: a hook on these parameters, a reduction over the wrong "
                "process group, a division that is missing or done twice."
            )
        else:
            sentence += (
                "It has been so from the start: that is right where the module multiplies its output, or where a hook "
                "is to scale these gradients; else look at reductions over process groups and at missing divisions."
            )
        severity = "warning" if self._agreed[site] else "note"
        return step.finding("bias-gradient", site, factor, self.factor, severity, sentence, since=since)
