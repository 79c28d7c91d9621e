"""What an optimizer keeps, against what it divides by."""

from __future__ import annotations

import math

import numpy as np

from hookstats.numbers.fields import Site
from hookstats.rules.finding import Finding
from hookstats.rules.formatting import number
from hookstats.rules.history import Streak
from hookstats.rules.step import Mask, Step, is_bias
from hookstats.rules.thresholds import rule


@rule
class SecondMoment:
    """Adam divides by its epsilon instead of its second moment, in most values of a parameter (warning).

    An update is m / (sqrt(v) + eps). Where sqrt(v) is below ``eps`` = 1e-8 it is no longer of the size of the learning
    rate, but smaller, the smaller the gradients are: Wortsman et al. 2023, arXiv 2309.14322, found layers of large
    models that stop learning in this way. A parameter is ill if more than ``share`` = 0.5 of the values that are not 0
    are below. The rule judges "optimizer.exp_avg_sq", which ``tensors=(..., "optimizer")`` measures.

    What else looks like it: gradients that are small because the loss was divided by something. What to do: a smaller
    epsilon (1e-15 costs nothing in float32), or a loss that is not divided; where weights or gradients shrink for
    another reason, look there first.

    So that a healthy run is silent: in ``consecutive_steps`` = 20 verdicts in a row, because moments begin at 0; at
    least ``values`` = 64 are not 0; and values that are 0 do not count: they are of rows of an embedding that no token
    has met. A bias whose gradient is below ``cancelled`` = 1e-4 of that of its weight is not judged: that of a key's
    bias in attention is 0 but for rounding.
    """

    eps: float = 1e-8
    share: float = 0.5
    values: int = 64
    consecutive_steps: int = 20
    cancelled: float = 1e-4

    def __post_init__(self) -> None:
        self._streak = Streak(self.consecutive_steps)

    def __call__(self, step: Step) -> list[Finding] | None:
        judged = step.is_kind("optimizer.exp_avg_sq") & (step.calls > 0)
        nonzero = step.totals.count - step.totals.zeros
        judged &= (nonzero >= self.values) & (step.nonfinite == 0)
        judged[self._cancelled(step, judged)] = False
        # Where even the mean is so small, most values may be; it spares the others.
        likely = judged & (step.totals.mean < 1e4 * self.eps**2)
        if not judged.any():
            return None
        below = np.zeros(len(step.sites))
        ids, counts = step.exponents(likely)
        last = 126 + math.floor(math.log2(self.eps**2))  # of the bins whose values are all below
        small = counts[:, : last + 1].sum(1) - step.totals.zeros[ids]
        below[ids] = small / nonzero[ids]
        ill = self._streak.push(step.number, below > self.share, judged)
        return [self._finding(step, site, float(below[site])) for site in step.in_order(ill)]

    def _cancelled(self, step: Step, judged: Mask) -> list[int]:
        """The ids of second moments of biases that are far smaller than those of their weights."""
        ids = {step.sites[i]: i for i in np.flatnonzero(judged).tolist()}
        means, found = step.totals.mean, []
        for (name, tensor), i in ids.items():
            weight = ids.get(Site(name.removesuffix("bias") + "weight", tensor)) if is_bias(name) else None
            if weight is not None and means[i] < self.cancelled**2 * means[weight]:
                found.append(i)
        return found

    def _finding(self, step: Step, site: int, below: float) -> Finding:
        sentence = (
            f"the square root of Adam's second moment of {step.sites[site].name} is below {number(self.eps)} in "
            f"{number(100 * below)} % of its values: epsilon decides how far a step goes, and it learns more slowly "
            "than its learning rate says. Lower epsilon, or see why its gradients are so small."
        )
        since = self._streak.since[site]
        return step.finding("second-moment", site, below, self.share, "warning", sentence, since=since)
