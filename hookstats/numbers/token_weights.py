"""The weights of tokens in a step's loss: how much they are together, and whether a loss is their mean."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hookstats.numbers.fields import Array, Stats

NAMES = ("each", "least", "most", "loss")  # of the tensors, behind "token_weights."
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
