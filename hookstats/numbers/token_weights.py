"""The gradient of logits: its size against the loss, and the weights of tokens, and whether a loss is their mean."""

from __future__ import annotations

from collections.abc import Mapping
from math import expm1
from typing import NamedTuple

import numpy as np

from hookstats.numbers.fields import Array, Stats

NAMES = ("each", "least", "most", "loss")  # of the tensors, behind "token_weights."
LOGITS = "cross_entropy."  # begins a scalar: the rows of the logits of a mean cross entropy, by their module
ROUNDING = 0.01  # of a gradient, in bfloat16: 1/N is rounded to 8 bits before it is multiplied with anything
_LEAST_LOSS = 1e-3  # below which 1 - p is rounded too coarsely
_DEVIATIONS, _EQUAL = 4, 0.02  # of the mean loss of the sampled tokens, that a loss which is their mean may be off


class TokenWeights(NamedTuple):
    """The plain cross entropies of a step.

    ``microbatches``: of a rank, each with a loss. ``each``: the mean weight of a token; ``low``, ``high``: of all
    microbatches. ``least``, ``most``: what all tokens of a rank weigh together lies between these. ``loss``: the mean
    over the sampled tokens, ``deviation``: of that mean.
    """

    microbatches: float
    each: float
    low: float
    high: float
    least: float
    most: float
    loss: float
    deviation: float

    @property
    def tokens(self) -> float:
        """The tokens of a microbatch, at least."""
        return self.least / self.each / self.microbatches

    def is_mean(self, loss: float) -> bool:
        """Say whether a loss may be the mean over all tokens, or its part of one microbatch."""
        return any(self._is_about(loss * times, 1.0) for times in (1, self.microbatches))

    def is_differentiated(self, loss: float) -> bool:
        """Say whether a loss may be the one whose gradient it is, whatever that divides by."""
        return self._is_about(loss, self.least)

    def _is_about(self, loss: float, weight: float) -> bool:
        off = abs(loss - weight * self.loss)
        return off <= weight * (_DEVIATIONS * self.deviation + _EQUAL * self.loss)

    @classmethod
    def of(cls, totals: list[Stats[Array]], ranks: int) -> TokenWeights | None:
        """totals: of each of `NAMES`, arrays ``[1]``. None: some loss is no plain cross entropy."""
        each, least, most, losses = totals
        if each.min.item() <= 0:
            return None
        weight, count = each.mean.item(), each.count.item()
        return cls(
            microbatches=count / ranks,
            each=weight,
            low=each.min.item(),
            high=each.max.item(),
            least=(least.mean * count).item() / ranks,
            most=(most.mean * count).item() / ranks,
            loss=losses.mean.item() / weight,
            deviation=(losses.std / np.sqrt(losses.count / count)).item() / weight,
        )


class LogitsGradient(NamedTuple):
    """The gradient of the logits of a mean cross entropy, over what its loss allows.

    A row of it is w (p - e), whose L1 norm is 2 w (1 - p) at the target, and the loss is the mean of -log p. 1 - p is
    concave in -log p: all rows together have at most 2 (1 - exp(-loss)), and at least what they have where one row
    brings the whole loss. ``over``, ``under``: the norm over the largest, and over the smallest that it may be.
    ``sum``: over the norm; 0 but for rounding.
    """

    rows: float
    over: float
    under: float
    sum: float

    @classmethod
    def of(cls, rows: float, loss: float, gradient: Stats[Array], calls: int, ranks: int) -> LogitsGradient | None:
        """gradient: of the logits, ``[1]``, of so many backwards. None: the loss, or the gradient, says nothing."""
        size = gradient.l1_norm.item()
        if not (loss >= _LEAST_LOSS and 0 < size < np.inf):
            return None
        is_one = calls == ranks  # of several backwards, the loss is that of the last
        most = 2.0 * calls * (-expm1(-loss) if is_one else 1.0)
        least = -2.0 * expm1(-rows * loss) / rows if is_one else 0.0
        under = size / least if least else np.inf
        return cls(rows, size / most, under, (gradient.mean * gradient.count).item() / size)


def logits_of(scalars: Mapping[str, float]) -> str | None:
    """Return the name of the scalar that says which module's output are the logits."""
    return next((name for name in scalars if name.startswith(LOGITS)), None)
