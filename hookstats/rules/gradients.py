"""Gradients that explode or vanish: over the depth of the model, and against their own past."""

from __future__ import annotations

import numpy as np

from hookstats.numbers.fields import Array, Counts
from hookstats.rules.activations import has_zero_weights
from hookstats.rules.engine import Ill, rule
from hookstats.rules.formatting import times
from hookstats.rules.history import middle
from hookstats.rules.memory import Memory
from hookstats.rules.step import Mask, Step

_MARGIN = 4.0  # of what is far from a median that is not exact
_SHORTEST = 6  # gradients of outputs, before which there is no depth to speak of


def _judge_depth(step: Step, memory: Memory, depth: float, steps: int, text: str) -> Ill | None:
    """Compare the norms of gradients near the input with those near the loss: the problem where they part by `depth`.

    L2 norms are compared: pooling divides a gradient's values by an area, and makes as many more of them, so that their
    norm stays. text: with {value}, and {path} for how it was measured, and from where to where.
    """
    backward = step.list_finite("grad_output")
    if len(backward) < _SHORTEST:
        return None
    norms, third, sign = step.totals.l2_norm, len(backward) // 3, 1 if depth > 1 else -1
    ends, limit = norms[backward[-1]] / norms[backward[0]], abs(np.log10(depth))
    if not memory.streak("depth").goes_on and sign * np.log10(ends) < limit / 2:
        return None
    first, last = middle(norms[backward[:third]]), middle(norms[backward[-third:]])
    if min(norms[backward[0]], first) <= 0 or _are_side_by_side(step, backward, norms[backward]):
        return None
    ratios = np.maximum([ends, last / first], 1e-300)  # from end to end; of the medians of the thirds
    orders = sign * np.log10(ratios)
    further = int(abs(np.log10(ratios)).argmax())
    how = "(medians of the first and the last third)" if further else "from end to end"
    near, far = (step.sites[backward[place]].name or "the model" for place in (0, -1))
    path = f"{how}, from the output of {near} back to that of {far}"
    # The one does, and the other by half as many orders of magnitude.
    ill, value = bool(orders.max() > limit and orders.min() > limit / 2), float([ends, last / first][further])
    return Ill(ill, text, value, depth, steps=steps, key="depth", site=backward[-1], words={"path": path})


def _are_side_by_side(step: Step, backward: list[int], norms: Array) -> bool:
    """Return whether the norms change between large parts of the model, and hardly within any: actor and critic, each
    with a loss of its own, are no chain."""
    if not norms.all() or max(norms[0] / norms[-1], norms[-1] / norms[0]) < 100:
        return False  # not judged as one
    parts = [step.sites[site].name.partition(".")[0] for site in backward]
    borders = [i for i in range(1, len(parts)) if parts[i] != parts[i - 1]]
    sizes = np.diff([0, *borders, len(parts)])
    if not borders or len(borders) > 3 or sizes.min() < _SHORTEST // 2:
        return False
    steps = np.log(norms[1:] / norms[:-1])
    between = float(steps[[i - 1 for i in borders]].sum())
    return abs(between) > 2 * abs(float(steps.sum()) - between)


def _find_measured(step: Step) -> Mask:
    """Gradients of outputs and of parameters that came."""
    return step.find_finite("grad_output") | step.find_finite("param_grad")


def _list_measured(step: Step) -> Counts:
    return np.flatnonzero(_find_measured(step))


@rule(of=("grad_output", "param_grad"), per_site=False, depth=4)
def exploding_gradients(
    step: Step,
    memory: Memory,
    depth: float = 1e4,
    depth_consecutive_steps: int = 5,
    past: float = 100.0,
    beyond: float = 10.0,
    consecutive_steps: int = 3,
    window: int = 128,
    min_history: int = 16,
) -> list[Ill] | None:
    """Gradients grow on their way back through the model, or against their own past (warning, or critical).

    Over depth (warning): ``depth`` = 1e4 times over the model, in ``depth_consecutive_steps`` = 5 measured steps in a
    row: from end to end, the norm of the gradient of the first output in order of execution over that of the last, or
    by the medians of the first and the last third; the other one is 1e2 at least, so that it is neither one odd layer
    at an end nor only a part between. Against their past (warning, from 100 times ``past`` on critical): the rms of a
    gradient is ``past`` = 100 times its median over the last ``window`` = 128 measured steps, in ``consecutive_steps``
    = 3 of them in a row. The first in order of execution is named. There are no agreed figures: these are ours, beyond
    what healthy models show (see docs/rules.md).

    What else looks like it: a task or a loss term that is added, behind which gradients are larger for good. What to
    do: clip gradients, lower the learning rate, warm it up longer; over depth, lower the initial weights, normalise, or
    add residual connections.

    False-positive guards: a site has a past when it has ``min_history`` = 16 values; single bursts do not
    count; nor does a gradient that was negligible and finds its size (of queries and keys, when attention begins to
    form; behind a layer scale that grows): it must be ``beyond`` = 10 times the median of every other of its kind; and
    models with fewer than six outputs that have gradients have no depth.
    """
    measured, ids = step.make_for_alike(_find_measured), step.make_for_alike(_list_measured)
    if not len(ids):
        return None
    text = "the gradients grow {value} times {path}. Lower the initial weights, normalise, or add residual connections."
    over = _judge_depth(step, memory, depth, depth_consecutive_steps, text)
    rms, usual = step.totals.rms, memory.window("rms", window, min_history)
    grown, ratios = measured & (rms > past / _MARGIN * usual.median(len(rms), is_exact=False)), rms
    if np.count_nonzero(grown):
        median, ratios = usual.median(len(rms)), np.zeros(len(rms))
        np.divide(rms, median, out=ratios, where=measured & (median > 0))
        grown = (ratios > past) & (rms > beyond * _find_largest_of_kind(step, median))
    usual.push(rms, ids)
    found = [] if over is None else [over]
    if np.count_nonzero(grown) or memory.streak("past").goes_on:
        text = (
            "{tensor} has been more than {threshold} times its usual size for {steps} measured steps, now {value} "
            "times{others}. Lower the learning rate, or clip gradients."
        )
        words = {"others": _say_others, "steps": str(consecutive_steps)}
        found.append(
            Ill(grown, text, ratios, past, np.where(ratios > 100 * past, "critical", "warning"),
                measured, consecutive_steps, key="past", together=True, words=words)
        )  # fmt: skip
    return found


@rule(of=("grad_output", "param_grad"), per_site=False, depth=4)
def vanishing_gradients(
    step: Step,
    memory: Memory,
    depth: float = 1e-4,
    past: float = 1e-4,
    consecutive_steps: int = 5,
    window: int = 128,
    min_history: int = 16,
    values: int = 16,
) -> list[Ill] | None:
    """Gradients vanish on their way back through the model, or against their own past (warning).

    Over depth: ``depth`` = 1e-4 over the model: from end to end, the norm of the gradient of the first output in order
    of execution over that of the last, or by the medians of the first and the last third; the other one is 1e-2 at
    most. Against their past: the rms of a gradient, over its median of the last ``window`` = 128 measured steps, is
    ``past`` = 1e-4 of the median of that ratio over all gradients. Either in ``consecutive_steps`` = 5 measured steps
    in a row. SageMaker's absolute figure (a mean of |x| below 1e-7) depends on the loss's scale; "falling by orders
    over depth" does not. How many orders is ours.

    What else looks like it: a part of the model that is frozen little by little, or has learned all that its data tell.
    What to do: replace sigmoid and tanh by ReLU or GELU, normalise, add residual connections, and look at dead or
    saturated layers first, because they let nothing through.

    False-positive guards: what all gradients do together, when a model has learned its data by heart, is no
    problem; a gradient of fewer than ``values`` = 16 numbers may be 0 by chance, and is not compared with its past; a
    site has a past when it has ``min_history`` = 16 values, and none where half of them are 0 (an expert without
    tokens); a zero gradient behind weights that begin at zero (LoRA, the last norm of a residual block) lasts a step or
    two; and models with fewer than six outputs that have gradients have no depth.
    """
    ids = step.make_for_alike(_list_measured)
    if not len(ids):
        return None
    text = "the gradients shrink to {value} {path}, so the layers there do not learn. "
    over = _judge_depth(step, memory, depth, consecutive_steps, text)
    if over is not None and over.where:
        zero = [site for site in step.list_finite("output") if has_zero_weights(step, site)]
        over.words = {**over.words, "zero": step.name_sites(zero)}
        over.say = text + (
            "All weights of {zero} are 0 and pass no gradient: initialise those of norms with 1, others at random."
            if zero
            else "Use ReLU or GELU instead of sigmoid and tanh, normalise, or add residual connections."
        )
    found = [] if over is None else [over]
    rms, usual = step.totals.rms, memory.window("rms", window, min_history)
    each = rms[ids] / usual.median(len(rms), is_exact=False)[ids]
    if memory.streak("past").goes_on or np.fmin.reduce(each) <= _MARGIN * past * np.fmax.reduce(each):  # seldom
        median = usual.median(len(rms))
        known = step.make_for_alike(_find_measured) & (step.totals.count >= values * step.calls) & (median > 0)
        ratios = np.divide(rms, median, out=np.full_like(rms, np.nan), where=known)
        ratios /= middle(ratios[known])
        text = (
            "{tensor} has fallen to {value} of its usual size{others}, while the rest have not: its module no longer "
            "learns. Look for dead or saturated units after it, or a layer that was cut off."
        )
        found.append(
            Ill(known & (ratios < past), text, ratios, past, judged=known, steps=consecutive_steps, key="past",
                together=True, words={"others": _say_others})
        )  # fmt: skip
    usual.push(rms, ids)
    return found


def _find_largest_of_kind(step: Step, median: Array) -> Array:
    """``[n]``: the largest of the medians of gradients of outputs, for these, and of parameters."""
    result = np.full(len(median), np.inf)
    for kind in ("grad_output", "param_grad"):
        known = step.is_kind(kind) & (median > 0)
        if known.any():
            result[step.is_kind(kind)] = median[known].max()
    return result


def _say_others(ill: list[int]) -> str:
    others = len(ill) - 1
    return f", and so {'has' if others == 1 else 'have'} {times(others, 'other gradient')}" if others else ""
