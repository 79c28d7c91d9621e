"""Gradients that explode or vanish: over the depth of the model, and against their own past."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from hookstats.numbers.fields import Array, Counts
from hookstats.rules.activations import has_zero_weights
from hookstats.rules.engine import Ill, rule
from hookstats.rules.formatting import number, tensor_of, times
from hookstats.rules.history import middle
from hookstats.rules.memory import Memory
from hookstats.rules.step import Mask, Step

_SHORTEST = 6  # gradients of outputs, before which there is no depth to speak of


class _Depth(NamedTuple):
    """The norms of the gradients of outputs near the input, over those near the loss."""

    ends: float  # of the last gradient that backward made, over the first
    thirds: float  # of the median of the last third, over that of the first
    near: int  # the id of the site nearest to the loss
    far: int

    @property
    def ratio(self) -> float:
        """The one of both that is further from 1."""
        return max(self.ends, self.thirds, key=lambda each: abs(math.log(each)) if each > 0 else math.inf)

    def exceeds(self, depth: float) -> bool:
        """The one does, and the other by half as many orders of magnitude."""
        sign = 1 if depth > 1 else -1
        both = sorted(sign * math.log10(max(each, 1e-300)) for each in (self.ends, self.thirds))
        return both[1] > abs(math.log10(depth)) and both[0] > abs(math.log10(depth)) / 2

    def path(self, step: Step) -> str:
        """Return how it was measured, and from where to where."""
        how = "from end to end" if self.ratio == self.ends else "by the medians of the first and the last third"
        near, far = (step.sites[site].name or "the model" for site in (self.near, self.far))
        return f"{how}, from the output of {near} back to that of {far}"


def _over_depth(step: Step, memory: Memory, depth: float, steps: int, say: Callable[[_Depth], str]) -> Iterator[Ill]:
    """Yield the problem where gradients exceed `depth`; nothing where they surely do not, and did not."""
    backward, norms = step.ordered("grad_output"), step.totals.l2_norm
    if len(backward) < _SHORTEST:
        return
    ends = norms[backward[-1]] / norms[backward[0]]
    if not memory.streak("depth").goes_on and (ends < depth**0.5 if depth > 1 else ends > depth**0.5):
        return
    over = step.cached(_depth)
    if over is not None:
        found, ill = over, over.exceeds(depth)
        yield Ill(ill, lambda _, since: say(found), over.ratio, depth, steps=steps, key="depth", site=over.far)


def _depth(step: Step) -> _Depth | None:
    """Compare L2 norms: pooling divides a gradient's values by an area, and makes as many more of them, so that their
    norm stays."""
    backward = step.ordered("grad_output")
    norms, third = step.totals.l2_norm[backward], len(backward) // 3
    if _are_side_by_side(step, backward, norms):
        return None
    ends, thirds = norms[[0, -1]], (middle(norms[:third]), middle(norms[-third:]))
    if min(ends[0], thirds[0]) <= 0:
        return None
    return _Depth(float(ends[1] / ends[0]), float(thirds[1] / thirds[0]), backward[0], backward[-1])


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


def _measured(step: Step) -> Mask:
    """Gradients of outputs and of parameters that came."""
    return step.valued("grad_output") | step.valued("param_grad")


def _measured_ids(step: Step) -> Counts:
    return np.flatnonzero(_measured(step))


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
    """Gradients grow on their way back, or against their own past.

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
    measured, ids = step.alike(_measured), step.alike(_measured_ids)
    if not len(ids):
        return None

    def say_over_depth(over: _Depth) -> str:
        return (
            f"the gradients grow {number(over.ratio)} times {over.path(step)}. Lower the initial weights, "
            "normalise, or add residual connections."
        )

    found = list(_over_depth(step, memory, depth, depth_consecutive_steps, say_over_depth))
    rms, usual = step.totals.rms, memory.window("rms", window, min_history)
    grown, ratios = measured & (rms > past * usual.bounds(len(rms))[0]), np.zeros(len(rms))
    if np.count_nonzero(grown):  # by the least that the medians can be
        median = usual.median(len(rms))
        np.divide(rms, median, out=ratios, where=measured & (median > 0))
        grown = (ratios > past) & (rms > beyond * _largest_of_kind(step, median))
    usual.push(rms, ids)
    if not np.count_nonzero(grown) and not memory.streak("past").goes_on:
        return found

    def say(sites: list[int], since: int) -> str:
        return (
            f"{tensor_of(step.sites[sites[0]])} has been {number(past)} times its usual size for {consecutive_steps} "
            f"measured steps, now {number(ratios[sites[0]])} times{_and_others(sites)}. Lower the learning rate, or "
            "clip gradients."
        )

    def severity(site: int) -> str:
        return "critical" if ratios[site] > 100 * past else "warning"

    found.append(Ill(grown, say, ratios, past, severity, measured, consecutive_steps, key="past", together=True))
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
    """Gradients disappear on their way back, or against their own past (warning).

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
    ids = step.alike(_measured_ids)
    if not len(ids):
        return None

    def say_over_depth(over: _Depth) -> str:
        zero = [site for site in step.ordered("output") if has_zero_weights(step, site)]
        return (
            f"the gradients fall to {number(over.ratio)} {over.path(step)}: they vanish, and what lies there "
            "does not learn. "
        ) + (
            f"All weights of {step.names_of(zero)} are 0, and let nothing through: initialise those of norms with 1, "
            "others at random."
            if zero
            else "Use ReLU or GELU instead of sigmoid and tanh, normalise, or add residual connections."
        )

    found = list(_over_depth(step, memory, depth, consecutive_steps, say_over_depth))
    rms, usual = step.totals.rms, memory.window("rms", window, min_history)
    if memory.streak("past").goes_on or _may_have_fallen(step, usual.bounds(len(rms)), ids, past, values):
        compared = step.alike(_measured) & (step.totals.count >= values * step.calls)
        median = usual.median(len(rms))
        known = compared & (median > 0)
        if known.any():
            ratios = np.divide(rms, median, out=np.full_like(rms, np.nan), where=known)
            ratios /= middle(ratios[known])

            def say(sites: list[int], since: int) -> str:
                return (
                    f"{tensor_of(step.sites[sites[0]])} has fallen to {number(ratios[sites[0]])} of its usual size, "
                    f"while the others have not{_and_others(sites)}: what it belongs to does not learn any more. Look "
                    "for dead or saturated units behind it, or a layer that was cut off."
                )

            fallen, steps = known & (ratios < past), consecutive_steps
            found.append(Ill(fallen, say, ratios, past, judged=known, steps=steps, key="past", together=True))
    usual.push(rms, ids)
    return found


def _may_have_fallen(step: Step, bounds: Array, ids: Counts, past: float, values: int) -> bool:
    """Return whether any may be so far below its median, beside the others: from the bounds of the medians."""
    ids = ids[step.totals.count[ids] >= values * step.calls[ids]]
    low, high = bounds[0][ids], bounds[1][ids]
    known = low > 0
    count = np.count_nonzero(known)
    if count < len(known):
        if np.count_nonzero(high > 0) > count:
            return True
        ids, low, high = ids[known], low[known], high[known]
    rms = step.totals.rms[ids]
    return bool(count) and bool((rms / high).min() <= past * (rms / low).max())


def _largest_of_kind(step: Step, median: Array) -> Array:
    """``[n]``: the largest of the medians of gradients of outputs, for these, and of parameters."""
    result = np.full(len(median), np.inf)
    for kind in ("grad_output", "param_grad"):
        known = step.is_kind(kind) & (median > 0)
        if known.any():
            result[step.is_kind(kind)] = median[known].max()
    return result


def _and_others(ill: list[int]) -> str:
    return f", and so have {times(len(ill) - 1, 'other gradient')}" if len(ill) > 1 else ""
