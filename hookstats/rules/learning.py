"""Whether parameters learn: those that never change, updates that are lost to rounding, weights that only decay."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from hookstats.numbers.fields import Array
from hookstats.rules.arriving import SPARSE
from hookstats.rules.finding import Finding
from hookstats.rules.formatting import percent
from hookstats.rules.history import Streak, extended
from hookstats.rules.step import Mask, Step
from hookstats.rules.thresholds import rule

_LEAST = 3  # measured steps, by which anything is said to last
_ACCUMULATED = 100  # steps, in which gradients may be accumulated
_TINY = 1e-4  # of the usual size of a gradient
_ROUNDED = {"bfloat16": 8, "float16": 11}  # bits of the mantissa, with the one that is not stored


class _Losses:
    """Whether the loss has come down since the run began."""

    def __init__(self) -> None:
        self._firsts: list[float] = []
        self._last: deque[float] = deque(maxlen=10)

    def push(self, step: Step) -> None:
        for loss in step.given("loss").values():
            if len(self._firsts) < 5:
                self._firsts.append(loss)
            self._last.append(loss)

    def came_down(self) -> bool | None:
        """None: that is not known."""
        if len(self._last) < 10:
            return None
        first, last = float(np.median(self._firsts)), float(np.median(self._last))
        return last < first - 0.02 * abs(first)


class _Still:
    """From which step on each parameter has stayed as it was, between measured steps as well."""

    def __init__(self) -> None:
        self.since, self._measured = np.empty(0, np.int64), np.empty(0, np.int64)
        self._values = np.empty(0)

    def push(self, step: Step, measured: Mask) -> Mask:
        """``[n]``: of each update that was measured, whether its parameter has not changed."""
        n = len(measured)
        weights = step.weights_of_updates
        values = np.where(measured & (weights >= 0), step.totals.l2_norm[weights], np.nan)
        before = extended(self._values, n, np.nan)
        self._values = np.where(np.isfinite(values), values, before)
        still = measured & (step.totals.zeros == step.totals.count)
        counts, since = extended(self._measured, n, 0), extended(self.since, n, 0)
        is_other = (counts > 0) & np.isfinite(values) & np.isfinite(before) & (values != before)
        begins = still & ((counts == 0) | is_other)
        self.since = np.where(begins, step.number, since)
        self._measured = np.where(begins, 1, np.where(still, counts + 1, np.where(measured, 0, counts)))
        result: Mask = still & ~is_other
        return result

    def lasts(self, step: Step, steps: int) -> Mask:
        """``[n]``: those that have stayed so for so many steps."""
        return (self._measured >= _LEAST) & (step.number - self.since + 1 >= steps)


@rule
class UnchangedParameters:
    """Parameters that no step changes, although gradients arrive: warning; critical where none of the model changes.

    For ``steps`` = 20 steps, in which other parameters changed, or ``all_steps`` = 30 in which none did, of which at
    least three were measured. The sample of each parameter is judged: "update_sample" has nothing but zeros, and
    "param_sample" is what it was in the measured step before, so that nothing happened between them, either. The
    figures are ours.

    What else looks like it: updates that are lost to rounding (LostUpdates), a learning rate of 0 on purpose, a
    schedule that has ended. What to do: see that the optimizer was made of ``model.parameters()`` of this very model,
    after it was moved, wrapped or replaced, and print the learning rates of its groups.

    So that a healthy run is silent: frozen parameters (``requires_grad=False``) have no gradient, and neither have
    those whose modules do not run; both are not judged, nor are gradients that are mostly 0 (an embedding, whose rows
    are not in each batch) or below 1e-4 of the others' (these vanish). Warmup from 0 and turns of several optimizers
    end before; while gradients grow from step to step, as they do when they are accumulated, it waits for 100 steps.
    """

    steps: int = 20
    all_steps: int = 30

    def __post_init__(self) -> None:
        self._still, self._changed = _Still(), np.empty(0, bool)
        self._all_since, self._norms = -1, list[float]()

    def __call__(self, step: Step) -> list[Finding] | None:
        measured = step.updates & (step.totals.count > 0)
        if not measured.any():
            return None
        still = self._still.push(step, measured)
        self._changed = extended(self._changed, len(measured), False) | (measured & ~still)
        if (measured & ~still).any():
            self._all_since, self._norms = -1, []
            held_back = still & _gets_gradient(step) & ~_is_rounded_away(step, still)
            held_back &= ~self._is_tiny(step, measured & ~still)
            return list(self._of_some(step, step.in_order(held_back & self._still.lasts(step, self.steps))))
        if self._all_since < 0:
            self._all_since = step.number
        self._norms.append(step.grad_norm or 0.0)
        waits = _ACCUMULATED if self._is_accumulated() else self.all_steps
        if len(self._norms) < _LEAST or step.number - self._all_since + 1 < waits:
            return []
        gets_gradient = _gets_gradient(step)
        ill = step.in_order(gets_gradient & ~_is_rounded_away(step, still))
        if ill:
            return [self._of_all(step, ill)]
        through_outputs = step.is_kind("grad_output") & (step.calls > 0)
        if gets_gradient.any() or not through_outputs.any() or max(self._norms):
            return []
        return [self._of_zeroed(step, step.in_order(measured), bool(step.totals.abs_max[through_outputs].any()))]

    def _is_accumulated(self) -> bool:
        """Whether gradients have grown since nothing changes."""
        third = -(-len(self._norms) // 3)
        first, last = float(np.median(self._norms[:third])), float(np.median(self._norms[-third:]))
        return last > 1.5 * first

    @staticmethod
    def _is_tiny(step: Step, changed: Mask) -> Mask:
        """``[n]``: of each update, whether its gradient is so small beside others' that a change may be lost."""
        gradients = step.gradients_of_updates
        sizes = np.where(gradients >= 0, step.totals.rms[gradients], np.nan)
        usual = sizes[changed & (sizes > 0)]
        with np.errstate(invalid="ignore"):
            return np.asarray(sizes < _TINY * (np.median(usual) if usual.size else 0.0))

    def _of_zeroed(self, step: Step, sites: list[int], has_gradients: bool) -> Finding:
        """has_gradients: whether those of the outputs are other than 0."""
        if has_gradients:
            sentence = (
                "no parameter of the model changes: gradients go through the outputs, and no parameter has one when "
                "the optimizer steps. Call zero_grad() before backward(), not between backward() and step()."
            )
        else:
            sentence = (
                "no parameter of the model changes: gradients of the outputs arrive, and all of them are 0. The loss "
                "does not depend on the outputs: look whether it ignores every label (ignore_index, an empty mask), "
                "or is multiplied by 0."
            )
        return step.finding(
            "unchanged-parameters", None, 1.0, 1.0, "critical", sentence, since=self._all_since, sites=sites
        )

    def _of_all(self, step: Step, ill: list[int]) -> Finding:
        if self._changed[ill].any():
            what = f"no parameter has changed since step {self._all_since}"
            advice = "Look at the schedule: its learning rate may have become 0; and at whether step() is called."
        else:
            what = "no parameter of the model has ever changed"
            advice = (
                "Either the learning rate is 0, or step() is not called, or the optimizer holds the parameters of "
                "another model: make it of this one's, after it is moved or wrapped."
            )
        sentence = f"{what}, although gradients arrive. {advice}"
        return step.finding(
            "unchanged-parameters", None, 1.0, 1.0, "critical", sentence, since=self._all_since, sites=ill
        )

    def _of_some(self, step: Step, ill: list[int]) -> Iterator[Finding]:
        stopped = [site for site in ill if self._changed[site]]
        never = [site for site in ill if not self._changed[site]]
        if never:
            sentence = (
                f"{step.names_of(never)} never {'changes' if len(never) == 1 else 'change'}, although gradients arrive "
                "and other parameters learn. No optimizer has "
                f"{'it' if len(never) == 1 else 'them'}, or the learning rate of the group is 0: compare the "
                "optimizer's param_groups with model.named_parameters()."
            )
            yield self._finding(step, never, sentence)
        if stopped:
            since = int(self._still.since[stopped[0]])
            sentence = (
                f"{step.names_of(stopped)} {'has' if len(stopped) == 1 else 'have'} not changed since step {since}, "
                "although gradients arrive and other parameters learn. Look at the learning rate of the group, and at "
                "whether the optimizer was made anew without them; freeze with requires_grad=False, if it is meant."
            )
            yield self._finding(step, stopped, sentence)

    def _finding(self, step: Step, ill: list[int], sentence: str) -> Finding:
        since = self._still.since[ill[0]]
        return step.finding("unchanged-parameters", ill[0], 1.0, 1.0, "warning", sentence, since=since, sites=ill)


@rule
class LostUpdates:
    """Updates that are lost to rounding: parameters of a low precision stay as they are (a note, or a warning).

    A parameter whose values are all of bfloat16 or float16 keeps a change only if it is half a unit in the last place:
    1/512 of a value in bfloat16. A model is ill if ``share`` = 0.8 of all sampled elements stay as they are in each
    measured step, of which there are at least five, for ``steps`` = 20 steps. It is a warning where the loss has not
    come down since the run began. The dtype is told by the smallest and largest values of the parameters, which it
    holds exactly. The share is ours; the cause is described in arXiv 2010.06192 (Zamirai et al. 2020).

    What else looks like it: an optimizer that keeps float32 copies of the parameters, whose changes add up unseen until
    they show here; then the loss comes down, and it is a note. What to do: keep float32 parameters and use autocast, or
    an optimizer with float32 copies or stochastic rounding.

    So that a healthy run is silent: gradients that are mostly 0 (rows of an embedding) are not judged.
    """

    share: float = 0.8
    steps: int = 20
    per_site: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._losses, self._streak = _Losses(), Streak(5)

    def __call__(self, step: Step) -> list[Finding] | None:
        self._losses.push(step)
        judged = step.updates & (step.totals.count > 0) & _gets_gradient(step)
        if not judged.any():
            return None
        judged &= _is_rounded(step)
        totals = step.totals
        sites = step.in_order(judged & (totals.zeros > 0))
        count, zeros = totals.count[judged].sum(), totals.zeros[judged].sum()
        is_ill = self._streak.push_one(step.number, bool(count and zeros > self.share * count))
        since = self._streak.since[0]
        if not is_ill or step.number - since + 1 < self.steps or not sites:
            return []
        came_down = self._losses.came_down()
        most = sorted(sites, key=lambda site: -totals.zeros[site] / totals.count[site])
        dtype = _dtype_of(step, most[0])
        sentence = (
            f"{percent(zeros / count)} of the sampled elements of the parameters stay as they are in each step: in "
            f"{dtype} a change below 1/{2 ** (_ROUNDED[dtype] + 1)} of a value is lost to rounding. "
        )
        if came_down:
            sentence += "The loss comes down, so the optimizer may keep float32 copies; then nothing is wrong."
        else:
            sentence += (
                f"{'The loss does not come down. ' if came_down is False else ''}Keep the parameters in float32 and "
                "use autocast, or take an optimizer with float32 copies or stochastic rounding."
            )
        severity = "warning" if came_down is False else "note"
        value = float(zeros / count)
        return [step.finding("lost-updates", most[0], value, self.share, severity, sentence, since=since, sites=most)]


@rule
class ShrinkingWeights:
    """Weights that become smaller by decay alone (a note; a warning where the loss does not come down).

    Where only weight decay changes a parameter, all of its values go towards 0 together: what mean |w| loses is the
    mean |update|. A model is ill if more than half of its matrices lose more than ``part`` = 0.5 of their updates in
    this way, and in each step at least ``rate`` = 5e-4 of their size, in five measured steps in a row, for ``steps`` =
    20 steps. A decay of 0.1 at a learning rate of 1e-3 is 1e-4 a step. The figures are ours.

    What else looks like it: data that were learned by heart, behind which nothing but the decay is left. What to do:
    lower weight_decay, or leave out norms and biases; AdamW multiplies it by the learning rate, Adam does not.

    So that a healthy run is silent: parameters with fewer than ``values`` = 64 sampled elements, and those that have
    one value, are not judged; ordinary updates go anywhere.
    """

    part: float = 0.5
    rate: float = 5e-4
    steps: int = 20
    values: int = 64
    per_site: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._streak, self._losses = Streak(5), _Losses()
        self._sizes, self._at = np.empty(0), -1
        self._firsts: dict[int, float] = {}

    def __call__(self, step: Step) -> list[Finding] | None:
        self._losses.push(step)
        weights = step.weights_of_updates
        measured = (weights >= 0) & (step.totals.count >= self.values)
        measured &= (step.totals.min != step.totals.max)[weights]
        if not measured.any():
            return None
        sizes = np.where(measured, step.totals.abs_mean[weights], np.nan)
        before = extended(self._sizes, len(sizes), np.nan)
        passed, self._sizes, self._at = step.number - self._at, sizes, step.number
        path = step.totals.abs_mean * passed
        with np.errstate(invalid="ignore", divide="ignore"):
            lost = (before - sizes) / path
            ill = measured & (lost > self.part) & (path > self.rate * passed * sizes)
        going = self._streak.push(step.number, ill, measured & np.isfinite(lost))
        sites = step.in_order(going & (step.number - self._streak.since + 1 >= self.steps))
        for site in sites:
            self._firsts.setdefault(site, float(sizes[site]))
        if 2 * len(sites) <= int(measured.sum()):
            return []
        first = sites[0]
        rate = float(step.totals.abs_mean[first] / sizes[first])
        came_down = self._losses.came_down()
        sentence = (
            f"{step.names_of(sites)} {'becomes' if len(sites) == 1 else 'become'} smaller by {percent(rate)} in each "
            f"step, and nearly nothing else changes them: weight decay is stronger than the gradient"
            f"{', and the loss does not come down' if came_down is False else ''}. Lower weight_decay; AdamW "
            "multiplies it by the learning rate, Adam and SGD add it to the gradient."
        )
        severity = "warning" if came_down is False else "note"
        since = self._streak.since[first]
        return [step.finding("shrinking-weights", first, rate, self.rate, severity, sentence, since=since, sites=sites)]


def _gets_gradient(step: Step) -> Mask:
    """``[n]``: of each update, whether the gradient of its parameter arrived, and is not mostly 0."""
    totals, gradients = step.totals, step.gradients_of_updates
    dense = (totals.abs_max > 0) & (totals.zeros < SPARSE * totals.count)
    return (gradients >= 0) & dense[gradients]


def _holds(values: Array, bits: int) -> Mask:
    """``[n]``: whether a significand of `bits` bits holds a value exactly."""
    mantissa, _ = np.frexp(values)
    scaled = mantissa * 2.0**bits
    return np.asarray(np.isfinite(values) & (scaled == np.rint(scaled)))


def _dtype_of(step: Step, site: int) -> str:
    """The narrowest of those that hold the extremes of a parameter exactly."""
    weights = int(step.weights_of_updates[site])
    extremes = np.array([step.totals.min[weights], step.totals.max[weights]])
    return next((name for name, bits in _ROUNDED.items() if _holds(extremes, bits).all()), "float16")


def _is_rounded(step: Step) -> Mask:
    """``[n]``: of each update, whether its parameter is of a low precision, as far as its extremes tell.

    One parameter may have such extremes by chance, or hold nothing but ones: so it is that of most which have others.
    """
    weights, totals = step.weights_of_updates, step.totals
    known = (weights >= 0) & (totals.min != totals.max)[weights] & (totals.count > 0)
    bits = max(_ROUNDED.values())
    low = known & (_holds(totals.min, bits) & _holds(totals.max, bits))[weights]
    return (weights >= 0) & (totals.count > 0) if known.any() and (low == known).all() else low


def _is_rounded_away(step: Step, unchanged: Mask) -> Mask:
    """``[n]``: updates that may be lost to rounding, which `LostUpdates` tells."""
    return unchanged & _is_rounded(step) if unchanged.any() else unchanged
