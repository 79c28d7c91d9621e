"""A law: the gradient of a mean over tokens is a mean over tokens, all of one weight."""

from __future__ import annotations

import numpy as np

from hookstats.numbers.token_weights import LOGITS, NAMES, ROUNDING, LogitsGradient, TokenWeights, logits_of
from hookstats.rules.engine import Ill, rule
from hookstats.rules.formatting import number
from hookstats.rules.memory import Memory
from hookstats.rules.step import Step

_SUM = 0.05  # of the norm of a gradient; what a small z-loss adds, that was not given with the loss, is less
_UPDATES, _UNDECIDED = ("update_sample", "param_update"), 8  # measured steps
_LEAST_SCALE = 256.0  # powers of two from here on are taken for a GradScaler's


@rule(per_site=False, depth=2, law="cross_entropy")
def cross_entropy_gradient(
    step: Step, memory: Memory, factor: float = 1.5, consecutive_steps: int = 2, scalar: str = "loss"
) -> list[Ill] | None:
    """The gradient of the logits is not that of the mean loss that was given (critical from a factor on, or warning).

    Needs the ``scalar``: ``monitor.step(loss=loss)``. The gradient of a plain cross entropy at a row of logits is the
    row's probabilities, less 1 at its target, times its weight: 1 over the number of tokens, where the loss is their
    mean. So its L1 norm over all rows is at most 2 (1 - exp(-loss)), for 1 - p is concave in -log p, and its positive
    and negative values add up to the same, to 5 % of it. This is judged by default where the loss is given as torch's
    cross_entropy returned it, with its ``grad_fn``, which tells the module whose output are the logits.

    With ``"token_weights"`` among the tensors, as in the preset for language models, more is known: the weights of
    all tokens of a step, those of all of its microbatches, add up to 1. They are read from up to 64 rows, exact to
    rounding: 1e-3, and 1 % in bfloat16. Then the sentence says by which factor their sum is off, and what
    that factor is: losses that are summed instead of averaged, that are divided by the number of tokens or of
    microbatches twice, or by the number of microbatches not at all. Either is told in ``consecutive_steps`` = 2
    measured steps in a row, as critical from ``factor`` = 1.5 on, else as a warning. Tokens of microbatches, or of
    ranks, that weigh differently are a note, and a warning from ``factor`` on: their losses were averaged one by one,
    however many tokens each has (transformers#34191).

    What else looks like it: by design, a loss that is multiplied by hand after it was given to ``step``, terms of the
    loss that were not given (distillation, a z-loss), a hook on the logits, a reversal layer behind them;
    ``Options(laws={"cross_entropy": False})`` declares it. What to do: divide the sum of the losses by the number of
    all tokens of the step, once.

    False-positive guards: it is arithmetic. An optimizer has stepped in every measured step so far, where updates are
    measured: else a step may be a microbatch, whose loss is divided. Of several backwards in a step a norm of 2 each is
    allowed. Weights are judged of a plain cross entropy, which shows at all entries of the sampled rows, of every
    forward of the step; others are not: label smoothing, weights of classes, soft targets, a z-loss, a soft cap behind
    the logits. The loss that was given must be the mean over tokens, or its part of one microbatch: within four
    deviations of the mean loss of the sampled tokens; and it must not be what was differentiated, to these. What may be
    the scale of a GradScaler that is not known, a power of two from 256 on, is not told.
    """
    if scalar not in step.scalars or not step.is_of_all_ranks or not _has_always_updated(step, memory):
        return None
    if not step.find_fired("token_weights").any():
        return _judge_norm(step, factor, consecutive_steps, step.scalars[scalar])
    found = [np.flatnonzero(step.find_finite(f"token_weights.{name}")) for name in NAMES]
    if any(len(sites) != 1 for sites in found):
        return None
    weights = TokenWeights.of([step.totals.entries(sites) for sites in found], step.ranks)
    if weights is None or not weights.is_mean(step.scalars[scalar]):
        return None
    is_less = weights.most < 1 - ROUNDING and not _is_of_ranks(weights, step.ranks)
    is_off = is_less or (weights.least > 1 + ROUNDING and not _is_scale(weights))
    is_off = is_off and not weights.is_differentiated(step.scalars[scalar])
    unequal = weights.high / weights.low

    def say(site: int, since: int) -> str:
        return (
            f"the gradient of the logits has been {_say_factor(weights.least)} that of the mean over tokens, whose "
            f"loss ({number(step.scalars[scalar])}) was given, since step {since}. {_say_cause(weights)}"
        )

    def say_unequal(site: int, since: int) -> str:
        fewest, most = (number(round(1 / each / weights.microbatches)) for each in (weights.high, weights.low))
        return (
            f"some tokens weigh {number(unequal)} times as much as others of the same step, since step {since}: the "
            f"losses of {number(weights.microbatches * step.ranks)} microbatches are averaged one by one, over "
            f"{fewest} to {most} tokens. Divide the sum of the losses by the number of all tokens in the step."
        )

    severity = "warning" if 1 / factor < weights.least < factor else "critical"
    how, site = "warning" if unequal >= factor else "note", int(found[0][0])
    of_sum = Ill(is_off, say, weights.least, 1.0, severity, steps=consecutive_steps, key="sum", site=site)
    is_unequal = not is_off and unequal > 1 + 2 * ROUNDING
    return [of_sum, Ill(is_unequal, say_unequal, unequal, 1.0, how, steps=consecutive_steps, key="each", site=site)]


def _has_always_updated(step: Step, memory: Memory) -> bool:
    """Tell whether an optimizer stepped in every measured step so far: else a step may be one of microbatches.

    Without an update in the first steps nobody knows yet whether updates are measured at all.
    """
    if step.find_fired("param_sample").any() and not step.has_any(_UPDATES):
        memory["without update"] = memory.get("without update", 0) + 1
    count, are_measured = memory.get("without update", 0), any(step.is_kind(kind).any() for kind in _UPDATES)
    return count == 0 or (count > _UNDECIDED and not are_measured)


def _judge_norm(step: Step, factor: float, consecutive_steps: int, loss: float) -> list[Ill] | None:
    """Judge the norm and the sum of the gradient of all logits."""
    name = logits_of(step.scalars)
    site = -1 if name is None else step.find_id(name.removeprefix(LOGITS), "grad_output")
    if name is None or site < 0 or step.is_sampled or step.nonfinite[site] or not step.calls[site]:
        return None
    totals, calls = step.totals.entries(np.array([site])), int(step.calls[site])
    gradient = LogitsGradient.of(step.scalars[name], loss, totals, calls, step.ranks)
    if gradient is None:
        return None
    over, under, rows = gradient.over, gradient.under, gradient.rows
    is_scale = over > max(rows, _LEAST_SCALE / 2)
    is_large = over > (1 + ROUNDING) * step.ranks and not is_scale  # ranks may add up their gradients

    def say(site: int, since: int) -> str:
        size, than, most = (over, "at least", "largest") if is_large else (under, "at most", "smallest")
        cause = _say_cause_of_norm(over, rows) if is_large else "Something divides it twice."
        return (
            f"the gradient of the logits, the output of {step.sites[site].name}, is {than} {_say_factor(size)} the "
            f"{most} that the mean over tokens can have, since step {since}; the loss of that mean ({number(loss)}) "
            f"was given. {cause}"
        )

    def say_of_sum(site: int, since: int) -> str:
        return (
            f"the gradient of the logits, the output of {step.sites[site].name}, has a sum of "
            f"{number(100 * abs(gradient.sum))} % of its L1 norm, since step {since}. For the cross-entropy that was "
            "given it is 0 in each row: check what changes the gradient, and what else is differentiated."
        )

    size = over if is_large else under
    severity = "critical" if not 1 / factor < size < factor else "warning"
    is_off = is_large or under < 1 - ROUNDING
    of_norm = Ill(is_off, say, size, 1.0, severity, steps=consecutive_steps, key="norm", site=site)
    is_unequal = not is_off and abs(gradient.sum) > _SUM
    of_sum = Ill(is_unequal, say_of_sum, abs(gradient.sum), _SUM, steps=consecutive_steps, key="of norm", site=site)
    return [of_norm, of_sum]


def _say_cause_of_norm(over: float, rows: float) -> str:
    if rows / 8 < over <= rows > 8:
        return f"There are {number(rows)} rows: the losses are summed instead of averaged."
    return "Check what multiplies the loss between the mean and its backward."


def _is_of_ranks(weights: TokenWeights, ranks: int) -> bool:
    """Return whether the sum is 1 over a number of ranks that divides all of them: these add their gradients up."""
    low, high = (1 - ROUNDING) / weights.most, (1 + ROUNDING) / weights.least
    return any(ranks % count == 0 and low <= count <= high for count in range(2, ranks + 1))


def _is_scale(weights: TokenWeights) -> bool:
    """Return whether the sum is a power of two, and not because losses were summed."""
    octaves = np.log2(weights.least)
    is_power = weights.least >= _LEAST_SCALE * (1 - ROUNDING) and bool(abs(octaves - np.rint(octaves)) < ROUNDING)
    return is_power and not _is_summed(weights)


def _is_summed(weights: TokenWeights) -> bool:
    return _is_about(weights.each, 1) or _is_about(weights.each * weights.microbatches, 1)


def _is_about(value: float, expected: float) -> bool:
    return abs(value / expected - 1) < 2 * ROUNDING


def _say_factor(value: float) -> str:
    return f"{number(value)} times" if value > 0.95 else f"1/{number(1 / value)} of"


def _say_cause(weights: TokenWeights) -> str:
    total, count, tokens = weights.least, weights.microbatches, weights.tokens
    if _is_summed(weights):
        return "That is the number of tokens: their losses are summed instead of averaged."
    if count > 1 and _is_about(total, count):
        return f"That is the number of microbatches, whose gradients are added up: divide each loss by {number(count)}."
    if count > 1 and _is_about(total * count, 1):
        return "That is one over the number of microbatches: their losses are divided by it twice."
    if _is_about(total * tokens, 1) or _is_about(total * tokens * count, 1):
        return "That is one over the number of tokens: their losses are divided by it twice."
    return "Check what multiplies or divides the loss between the mean and its backward."
