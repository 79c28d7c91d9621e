"""Gradients that explode or vanish: over the depth of the model, and against their own past."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import numpy as np

from hookstats.numbers.fields import Array
from hookstats.rules.finding import Finding
from hookstats.rules.formatting import number, tensor_of, times
from hookstats.rules.history import Streak, Window
from hookstats.rules.step import Mask, Step
from hookstats.rules.thresholds import rule

_SHORTEST = 6  # gradients of outputs, before which there is no depth to speak of


class _Depth(NamedTuple):
    """The norms of the gradients of outputs near the input, over those near the loss."""

    ends: float  # of the last gradient that backward made, over the first
    thirds: float  # of the median of the last third, over that of the first
    near: int  # the id of the site nearest to the loss
    far: int

    @property
    def ratio(self) -> float:
        """That of both which is further from 1."""
        return max(self.ends, self.thirds, key=lambda each: abs(math.log(each)) if each > 0 else math.inf)

    def exceeds(self, depth: float) -> bool:
        """The one does, and the other by half as many orders of magnitude."""
        sign = 1 if depth > 1 else -1
        both = sorted(sign * math.log10(max(each, 1e-300)) for each in (self.ends, self.thirds))
        return both[1] > abs(math.log10(depth)) and both[0] > abs(math.log10(depth)) / 2

    def path(self, step: Step) -> str:
        """How it was measured, and from where to where."""
        how = "from end to end" if self.ratio == self.ends else "by the medians of the first and the last third"
        near, far = (step.sites[site].name or "the model" for site in (self.near, self.far))
        return f"{how}, from the output of {near} back to that of {far}"


def _depth(step: Step) -> _Depth | None:
    """Of L2 norms: pooling divides a gradient's values by an area, and as many more values there are; the norm does not
    know."""
    backward = step.in_order(step.is_kind("grad_output") & (step.totals.count > 0))
    if len(backward) < _SHORTEST:
        return None
    norms, third = step.totals.l2_norm[backward], len(backward) // 3
    ends, thirds = norms[[0, -1]], (np.median(norms[:third]), np.median(norms[-third:]))
    if min(ends[0], thirds[0]) <= 0:
        return None
    return _Depth(float(ends[1] / ends[0]), float(thirds[1] / thirds[0]), backward[0], backward[-1])


def _measured(step: Step) -> Mask:
    """Gradients of outputs and of parameters that came."""
    return (step.is_kind("grad_output") | step.is_kind("param_grad")) & (step.totals.count > 0)


@rule
class ExplodingGradients:
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

    So that a healthy run is silent: a site has a past when it has ``min_history`` = 16 values; single bursts do not
    count; nor does a gradient that was negligible and finds its size (of queries and keys, when attention begins to
    form; behind a layer scale that grows): it must be ``beyond`` = 10 times the median of every other of its kind; and
    models with fewer than six outputs that have gradients have no depth.
    """

    depth: float = 1e4
    depth_consecutive_steps: int = 5
    past: float = 100.0
    beyond: float = 10.0
    consecutive_steps: int = 3
    window: int = 128
    min_history: int = 16
    per_site: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._deep = Streak(self.depth_consecutive_steps)
        self._past, self._streak = Window(self.window, self.min_history), Streak(self.consecutive_steps)

    def __call__(self, step: Step) -> list[Finding] | None:
        measured = _measured(step)
        return [*self._over_depth(step), *self._against_past(step, measured)] if measured.any() else None

    def _over_depth(self, step: Step) -> Iterator[Finding]:
        depth = _depth(step)
        if depth is not None and self._deep.push_one(step.number, depth.exceeds(self.depth)):
            sentence = (
                f"the gradients grow {number(depth.ratio)} times {depth.path(step)}. Lower the initial weights, "
                "normalise, or add residual connections."
            )
            far, since = depth.far, self._deep.since[0]
            yield step.finding("exploding-gradients", far, depth.ratio, self.depth, "warning", sentence, since=since)

    def _against_past(self, step: Step, measured: Mask) -> Iterator[Finding]:
        rms, median = step.totals.rms, self._past.median(len(measured))
        ratio: Array = np.divide(rms, median, out=np.zeros_like(rms), where=measured & (median > 0))
        grown = (ratio > self.past) & (rms > self.beyond * _largest_of_kind(step, median))
        ill = step.in_order(self._streak.push(step.number, grown, measured))
        if ill:
            first = ill[0]
            severity = "critical" if ratio[first] > 100 * self.past else "warning"
            sentence = (
                f"{tensor_of(step.sites[first])} has been {number(self.past)} times its usual size for "
                f"{self.consecutive_steps} measured steps, now {number(ratio[first])} times{_and_others(ill)}. Lower "
                "the learning rate, or clip gradients."
            )
            value, since = ratio[first], self._streak.since[first]
            yield step.finding(
                "exploding-gradients", first, value, self.past, severity, sentence, since=since, sites=ill
            )
        self._past.push(rms, measured)


@rule
class VanishingGradients:
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

    So that a healthy run is silent: what all gradients do together, when a model has learned its data by heart, is no
    illness; a gradient of fewer than ``values`` = 16 numbers may be 0 by chance, and is not compared with its past; a
    site has a past when it has ``min_history`` = 16 values, and none where half of them are 0 (an expert without
    tokens); a zero gradient behind weights that begin at zero (LoRA, the last norm of a residual block) lasts a step or
    two; and models with fewer than six outputs that have gradients have no depth.
    """

    depth: float = 1e-4
    past: float = 1e-4
    consecutive_steps: int = 5
    window: int = 128
    min_history: int = 16
    values: int = 16
    per_site: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._deep = Streak(self.consecutive_steps)
        self._past, self._streak = Window(self.window, self.min_history), Streak(self.consecutive_steps)

    def __call__(self, step: Step) -> list[Finding] | None:
        measured = _measured(step)
        return [*self._over_depth(step), *self._against_past(step, measured)] if measured.any() else None

    def _over_depth(self, step: Step) -> Iterator[Finding]:
        depth = _depth(step)
        if depth is not None and self._deep.push_one(step.number, depth.exceeds(self.depth)):
            sentence = (
                f"the gradients fall to {number(depth.ratio)} {depth.path(step)}: they vanish, and what lies there "
                "does not learn. Use ReLU or GELU instead of sigmoid and tanh, normalise, or add residual connections."
            )
            far, since = depth.far, self._deep.since[0]
            yield step.finding("vanishing-gradients", far, depth.ratio, self.depth, "warning", sentence, since=since)

    def _against_past(self, step: Step, measured: Mask) -> Iterator[Finding]:
        rms, median = step.totals.rms, self._past.median(len(measured))
        known = measured & (median > 0) & (step.totals.count >= self.values * step.calls)
        if known.any():
            ratio: Array = np.divide(rms, median, out=np.full_like(rms, np.nan), where=known)
            usual = float(np.median(ratio[known]))
            ill = step.in_order(self._streak.push(step.number, known & (ratio < self.past * usual), known))
            if ill:
                first, value = ill[0], ratio[ill[0]] / usual
                sentence = (
                    f"{tensor_of(step.sites[first])} has fallen to {number(value)} of its usual size, while the others "
                    f"have not{_and_others(ill)}: what it belongs to does not learn any more. Look for dead or "
                    "saturated units behind it, or a layer that was cut off."
                )
                since = self._streak.since[first]
                yield step.finding(
                    "vanishing-gradients", first, value, self.past, "warning", sentence, since=since, sites=ill
                )
        self._past.push(rms, measured)


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
