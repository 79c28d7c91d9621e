"""The second moment of Adam against its epsilon."""

from __future__ import annotations

import math

import numpy as np

from hookstats.rules.engine import Ill, rule
from hookstats.rules.formatting import number
from hookstats.rules.step import Step

_KIND = "optimizer.exp_avg_sq"


@rule(of=_KIND, depth=3)
def second_moment(
    step: Step,
    eps: float = 1e-8,
    share: float = 0.5,
    values: int = 64,
    consecutive_steps: int = 20,
    cancelled: float = 1e-4,
) -> Ill | None:
    """Adam divides by its epsilon instead of its second moment in most values of a parameter (warning).

    An update is m / (sqrt(v) + eps). Where sqrt(v) is below ``eps`` = 1e-8 it is no longer of the size of the learning
    rate, but smaller, the smaller the gradients are: Wortsman et al. 2023, arXiv 2309.14322, found layers of large
    models that stop learning in this way. A parameter is ill if more than ``share`` = 0.5 of the values that are not 0
    are below. The rule judges "optimizer.exp_avg_sq", which ``tensors=(..., "optimizer")`` measures.

    What else looks like it: gradients that are small because the loss was divided by something. What to do: a smaller
    epsilon (1e-15 costs nothing in float32), or a loss that is not divided; where weights or gradients shrink for
    another reason, look there first.

    False-positive guards: in ``consecutive_steps`` = 20 verdicts in a row, because moments begin at 0; at
    least ``values`` = 64 are not 0; and values that are 0 do not count: they are of rows of an embedding that no token
    has met. A bias whose gradient is below ``cancelled`` = 1e-4 of that of its weight is not judged: that of a key's
    bias in attention is 0 but for rounding.
    """
    nonzero, means = step.totals.count - step.totals.zeros, step.totals.mean
    judged = step.find_fired(_KIND) & (nonzero >= values) & (step.nonfinite == 0)
    weights = step.find_partner(_KIND, _KIND, "bias", "weight")
    judged &= ~((weights >= 0) & judged[weights] & (means < cancelled**2 * means[weights]))
    if not judged.any():
        return None
    below = np.zeros(len(step.sites))
    # Where even the mean is so small, most values may be; it spares the others.
    ids, counts = step.exponents(judged & (means < 1e4 * eps**2))
    last = 126 + math.floor(math.log2(eps**2))  # of the bins whose values are all below
    below[ids] = (counts[:, : last + 1].sum(1) - step.totals.zeros[ids]) / nonzero[ids]
    text = (
        f"the square root of Adam's second moment of {{name}} is below epsilon, {number(eps)}, in {{value:%}} of its "
        "values: there epsilon limits the step, and it learns more slowly than its learning rate says. Lower epsilon, "
        "or find out why its gradients are so small."
    )
    return Ill(below > share, text, below, share, judged=judged, steps=consecutive_steps)
