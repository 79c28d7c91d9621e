"""A law: the gradient of a mean over tokens is a mean over tokens, all of one weight."""

from __future__ import annotations

import numpy as np

from hookstats.numbers.token_weights import NAMES, TokenWeights
from hookstats.rules.engine import Ill, rule
from hookstats.rules.formatting import number
from hookstats.rules.memory import Memory
from hookstats.rules.step import Step

_ROUNDING = 0.01  # of a weight, in bfloat16: 1/N is rounded to 8 bits before it is multiplied with anything
_LEAST_SCALE = 256.0  # powers of two from here on are taken for a GradScaler's


@rule(of="token_weights", per_site=False, depth=2, law="cross_entropy")
def cross_entropy_gradient(
    step: Step, memory: Memory, factor: float = 1.5, consecutive_steps: int = 2, scalar: str = "loss"
) -> list[Ill] | None:
    """The gradient is not that of the mean loss that was given: critical from a factor on, or a warning.

    Needs ``"token_weights"`` among the tensors, and the ``scalar``: ``monitor.step(loss=loss)``. The gradient of a
    plain cross entropy at a row of logits is the row's probabilities, less 1 at its target, times its weight: 1
    over the number of tokens, where the loss is their mean. So the weights of all tokens of a step, those of all of its
    microbatches, add up to 1. They are read from up to 64 rows, exact to rounding: 1e-3, and 1 % in bfloat16. Where
    their sum is off in ``consecutive_steps`` = 2 measured steps in a row, the sentence says by which factor and what
    that factor is: losses that are summed instead of averaged, that are divided by the number of tokens or of
    microbatches twice, or by the number of microbatches not at all. It is critical from ``factor`` = 1.5 on, else a
    warning. Tokens of microbatches, or of ranks, that weigh differently are a note, and a warning from ``factor`` on:
    their losses were averaged one by one, however many tokens each has (transformers#34191).

    What else looks like it: by design, a loss that is multiplied by hand after it was given to ``step``, a hook on the
    logits, a reversal layer behind them; ``Options(laws={"cross_entropy": False})`` declares it. What to do: divide the
    sum of the losses by the number of all tokens of the step, once.

    False-positive guards: it is arithmetic. Judged is a plain cross entropy, which shows at all entries of the sampled
    rows, of every forward of the step. Others are not: label smoothing, weights of classes, soft targets, a z-loss, a
    soft cap behind the logits. The loss that was given must be the mean over tokens, or its part of one microbatch:
    within four deviations of the mean loss of the sampled tokens; and it must not be what was differentiated, to these.
    A sum that is a power of two from 256 on is taken for a GradScaler's scale that `attach` was not told of.
    """
    found = [np.flatnonzero(step.valued(f"token_weights.{name}")) for name in NAMES]
    if any(len(sites) != 1 for sites in found) or scalar not in step.scalars or not step.is_of_all_ranks:
        return None
    weights = TokenWeights.of([step.totals.entries(sites) for sites in found], step.ranks)
    if weights is None or not weights.is_mean(step.scalars[scalar]):
        return None
    is_less = weights.most < 1 - _ROUNDING and not _is_of_ranks(weights, step.ranks)
    is_off = is_less or (weights.least > 1 + _ROUNDING and not _is_scale(weights))
    is_off = is_off and not weights.is_differentiated(step.scalars[scalar])
    unequal = weights.high / weights.low

    def say(site: int, since: int) -> str:
        return (
            f"the gradient of the logits is {_factor(weights.least)} that of the mean over tokens, whose loss "
            f"({number(step.scalars[scalar])}) was given, in each measured step since step {since}. {_cause(weights)}"
        )

    def say_unequal(site: int, since: int) -> str:
        fewest, most = (number(round(1 / each / weights.microbatches)) for each in (weights.high, weights.low))
        return (
            f"some tokens weigh {number(unequal)} times as much as others of the same step, in each measured step "
            f"since step {since}: the losses of {number(weights.microbatches * step.ranks)} microbatches are averaged "
            f"one by one, over {fewest} to {most} tokens. Divide the sum of the losses by the number of all tokens of "
            "the step."
        )

    def severity(site: int) -> str:
        return "critical" if not 1 / factor < weights.least < factor else "warning"

    how, site = "warning" if unequal >= factor else "note", int(found[0][0])
    of_sum = Ill(is_off, say, weights.least, 1.0, severity, steps=consecutive_steps, key="sum", site=site)
    is_unequal = not is_off and unequal > 1 + 2 * _ROUNDING
    return [of_sum, Ill(is_unequal, say_unequal, unequal, 1.0, how, steps=consecutive_steps, key="each", site=site)]


def _is_of_ranks(weights: TokenWeights, ranks: int) -> bool:
    """Return whether the sum is 1 over a number of ranks that divides all of them: these add their gradients up."""
    low, high = (1 - _ROUNDING) / weights.most, (1 + _ROUNDING) / weights.least
    return any(ranks % count == 0 and low <= count <= high for count in range(2, ranks + 1))


def _is_scale(weights: TokenWeights) -> bool:
    """Return whether the sum is a power of two, and not because losses were summed."""
    octaves = np.log2(weights.least)
    is_power = weights.least >= _LEAST_SCALE * (1 - _ROUNDING) and bool(abs(octaves - np.rint(octaves)) < _ROUNDING)
    return is_power and not _is_summed(weights)


def _is_summed(weights: TokenWeights) -> bool:
    return _is_about(weights.each, 1) or _is_about(weights.each * weights.microbatches, 1)


def _is_about(value: float, expected: float) -> bool:
    return abs(value / expected - 1) < 2 * _ROUNDING


def _factor(value: float) -> str:
    return f"{number(value)} times" if value > 0.95 else f"1/{number(1 / value)} of"


def _cause(weights: TokenWeights) -> str:
    total, count, tokens = weights.least, weights.microbatches, weights.tokens
    if _is_summed(weights):
        return "That is the number of tokens: their losses are summed instead of averaged."
    if count > 1 and _is_about(total, count):
        return f"That is the number of microbatches, whose gradients are added up: divide each loss by {number(count)}."
    if count > 1 and _is_about(total * count, 1):
        return "That is one over the number of microbatches: their losses are divided by it twice."
    if _is_about(total * tokens, 1) or _is_about(total * tokens * count, 1):
        return "That is one over the number of tokens: their losses are divided by it twice."
    return "Look at what multiplies or divides the loss between the mean and its backward."
