"""Targets of a squared error: what its gradient tells of them, by arithmetic."""

from __future__ import annotations

import math
from typing import NamedTuple

from hookstats.rules.answers import find_answer, has_weights, is_of_softmax
from hookstats.rules.engine import Ill, rule
from hookstats.rules.step import Step

_EXACT = 0.01  # of the loss: bfloat16 rounds the gradient by 0.4 %


class _SquaredError(NamedTuple):
    """The model's answers y and their targets t, where the loss is the mean of (y - t)^2."""

    site: int
    error: float  # the root of the loss
    lowest: float  # some target is at most so large
    highest: float  # some target is at least so large
    mean: float  # of all targets


def _recognise_squared_error(step: Step) -> _SquaredError | None:
    """Recognise a mean squared error by its gradient g = 2 (y - t) / N, which has rms(g) N = 2 sqrt(loss).

    So t = y - g N / 2: where g is largest, t is at most the largest y less that g, and the other way round.
    """
    found, loss = find_answer(step), step.scalars.get("loss")
    if found is None or loss is None or found[2] > 1 or not 0 < loss < math.inf:
        return None
    site, gradient, _ = found
    totals, count = step.totals, float(step.totals.count[gradient])
    if step.calls[site] > 1 or count < 8 or count != totals.count[site] or step.nonfinite[[site, gradient]].any():
        return None
    is_exact = abs(float(totals.rms[gradient]) * count / (2 * math.sqrt(loss)) - 1) <= _EXACT
    if not is_exact or is_of_softmax(step, gradient):  # which has the same size by chance, of ten classes at first
        return None
    lowest = float(totals.max[site] - totals.max[gradient] * count / 2)
    highest = float(totals.min[site] - totals.min[gradient] * count / 2)
    mean = float(totals.mean[site] - totals.mean[gradient] * count / 2)
    return _SquaredError(site, math.sqrt(loss), lowest, highest, mean)


@rule(of="grad_output", depth=2, sums=True)
def unscaled_targets(step: Step, size: float = 100.0, consecutive_steps: int = 20) -> Ill | None:
    """The targets of a regression are hundreds of times as large as the model's answers (warning).

    The loss is a mean squared error, which its gradient proves, to 1 %. Its root is above ``size`` = 100, and above 100
    times the rms of the answers, in ``consecutive_steps`` = 20 measured steps in a row. The mean of the targets that
    the sentence names follows from the gradient. The law is arithmetic; the figures are ours.

    What else looks like it: answers that are to grow that far, with a learning rate that lets them. What to do:
    subtract the mean of the training targets and divide by their standard deviation, and undo that where answers are
    used.

    False-positive guards: the error itself must be large, as answers may begin at 0; a loss that has come down to half
    of the first ones, and one that is no mean squared error of the model's last output, are not judged.
    """
    found = _recognise_squared_error(step)
    if found is None:
        return None
    ratio = found.error / max(float(step.totals.rms[found.site]), 1e-30)
    text = (
        "{tensor} is off by {value}, more than {threshold} times its own size, since step {since}: the targets, with "
        "a mean of {mean}, are not scaled. Subtract their mean and divide by their standard deviation, or the model "
        "needs very long to reach them."
    )
    is_ill = found.error > size and ratio > size and not step.losses.have_fallen(0.5)
    return Ill(is_ill, text, found.error, size, steps=consecutive_steps, site=found.site, words={"mean": found.mean})


@rule(of="grad_output", depth=2, sums=True)
def unreachable_targets(step: Step, share: float = 0.01, consecutive_steps: int = 10) -> Ill | None:
    """Targets are outside the range of the last activation: below 0 after a ReLU, beyond 1 after a sigmoid (warning).

    The loss is a mean squared error, which its gradient proves, to 1 %, and the last output is that of a module without
    parameters. Its values end at 0 (the lowest is exactly 0, and so are ``share`` = 1 % of all), or lie between 0 and
    1, or between -1 and 1, and come within 1 % of such an end. Some target certainly lies beyond: the gradient at its
    place says how far. In ``consecutive_steps`` = 10 measured steps in a row. The law is arithmetic; the figures are
    ours.

    What else looks like it: targets that are beyond on purpose, so that the model saturates. What to do: leave out the
    last activation, or scale the targets to where it ends.

    False-positive guards: a target beyond the end by less than 1 % of the error counts as reached.
    """
    found = _recognise_squared_error(step)
    if found is None:
        return None
    totals, site = step.totals, found.site
    low, high = float(totals.min[site]), float(totals.max[site])
    near, ends = 0.01, (-math.inf, math.inf)
    if low == 0 and totals.zeros[site] > share * totals.count[site]:
        ends = 0.0, math.inf
    elif low >= 0 and high <= 1 and (low < near or high > 1 - near):
        ends = 0.0, 1.0
    elif low >= -1 and high <= 1 and (low < near - 1 or high > 1 - near):
        ends = -1.0, 1.0
    below, above = ends[0] - found.lowest, found.highest - ends[1]
    is_ill = max(below, above) > near * found.error and not step.make_for_sites(has_weights)[site]
    side, end, target = ("below", ends[0], found.lowest) if below > above else ("above", ends[1], found.highest)
    text = (
        "{tensor} never goes {side} {threshold}, but its targets do: one is {value} or beyond, since step {since}. "
        "Remove the activation before the loss, or scale the targets to its range."
    )
    return Ill(bool(is_ill), text, target, end, steps=consecutive_steps, site=site, words={"side": side})
