"""Updates against the weights that they change."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookstats.numbers.fields import Counts
from hookstats.rules.finding import Finding
from hookstats.rules.formatting import number
from hookstats.rules.history import Streak, extended
from hookstats.rules.step import Mask, Step, is_bias
from hookstats.rules.thresholds import rule

_AFTER = 10  # steps, in which the loss shows what an update did


@rule
class UpdateRatio:
    """An optimizer's step changes a parameter too much: mean |update| over mean |parameter| (warning).

    About 1e-3 is usual, far above 1e-2 is bad (bo-ke/llm-internal-medicine, docs/optim_update.md): a parameter is ill
    at ``ratio`` = 0.1 in ``consecutive_steps`` = 10 measured steps in a row while the loss does not come down, or once
    at more than ``whole`` = 1, all that the parameter was, where the loss goes up with it. It goes up if the median of
    3 losses in a row, of the next 10 steps, is beyond what it was by ``worse`` = 0.1 of that. These figures are ours.
    Where the loss does better, it is a note: small weights are to be rewritten at the beginning, and Muon does that.
    Without a loss, either is a warning. The rule judges "update_sample" and "param_sample", which are measured by
    default, or all of the values, where ``attach(tensors=(..., "param", "param_update"))`` asks for them.

    The rounding of low precision. Where an optimizer keeps float32 master weights of bfloat16 parameters, an update is
    seen as 0 or as a whole unit in the last place: its rms is then too large, 2.8 times at a learning rate of 1e-5 and
    weights of 0.02, 5 times at 3e-6. Subtracting ulp^2 / 12 for each value that changed leaves 2.7 and 4.8 times,
    because such a value has changed by a whole unit. The mean absolute value is right without knowing any dtype: an
    update of a 30th of a unit is seen in one value of 30. It is assumed that the masters lie evenly between the steps
    of the parameter's dtype. A parameter without masters is judged by how it did change, less than it was meant to.

    What else looks like it: small weights that are to be rewritten at the beginning, and optimizers like Muon, whose
    steps are large by design. What to do: lower the learning rate, warm it up, or clip gradients; see that weight decay
    is not meant for another optimizer.

    So that a healthy run is silent: parameters that began with one value throughout (LoRA with 0, a layer scale with
    1e-6) or with a mean absolute value below ``begun`` = 1e-5 (timm's class tokens, with a deviation of 1e-6) have no
    size but that of their updates, and neither have biases, which may pass through 0 (those of keys in attention change
    nothing, and only tremble): these are not judged; nor are parameters of fewer than ``values`` = 64 numbers.
    """

    ratio: float = 0.1
    consecutive_steps: int = 10
    whole: float = 1.0
    worse: float = 0.1
    begun: float = 1e-5
    values: int = 64

    def __post_init__(self) -> None:
        self._streak = Streak(self.consecutive_steps)
        self._seen, self._unsized = np.empty(0, bool), np.empty(0, bool)  # parameters; those without a size
        self._losses: dict[int, float] = {}
        self._rewritten: dict[int, tuple[int, float]] = {}  # in which step, and how far, by id

    def __call__(self, step: Step) -> list[Finding] | None:
        self._losses |= step.given("loss")
        weights = step.weights_of_updates
        measured = (weights >= 0) & (step.totals.count >= self.values)
        return list(self._changed(step, weights, measured)) if measured.any() or self._rewritten else None

    def _changed(self, step: Step, weights: Counts, measured: Mask) -> Iterator[Finding]:
        means = step.totals.abs_mean
        sizes = np.where(measured, means[weights], np.nan)
        new = step.sites[len(self._seen) :]
        self._seen = extended(self._seen, len(step.sites), False)
        self._unsized = np.append(self._unsized, np.array([is_bias(name) for name, _ in new], bool))
        begins = measured & ~self._seen
        self._unsized |= begins & ((step.totals.min == step.totals.max)[weights] | (sizes < self.begun))
        self._seen |= begins
        with np.errstate(invalid="ignore", divide="ignore"):
            ratios = np.where(measured & (sizes > 0), means / sizes, 0.0)
        too_large = (ratios > self.ratio) & ~self._unsized
        lasting = self._streak.push(step.number, too_large, measured)
        for site in step.in_order(too_large):
            value = float(ratios[site])
            if value > self.whole:
                self._rewritten[site] = step.number, value
                yield self._finding(step, site, value, self.whole, "note" if self._losses else "warning", step.number)
            elif lasting[site]:
                severity = "note" if self._came_down(int(self._streak.since[site]), step.number) else "warning"
                yield self._finding(step, site, value, self.ratio, severity, step.number)
        for site, (at, value) in list(self._rewritten.items()):
            if self._went_up(at):
                yield self._finding(step, site, value, self.whole, "warning", at)
            if self._went_up(at) or step.number >= at + _AFTER:
                del self._rewritten[site]
        going_on = self._streak.since[self._streak.lengths > 0].tolist()
        first = min([step.number, *going_on] + [at for at, _ in self._rewritten.values()])
        self._losses = {at: loss for at, loss in self._losses.items() if at > first - 3}

    def _finding(self, step: Step, site: int, value: float, threshold: float, severity: str, at: int) -> Finding:
        since = f"for {self.consecutive_steps} measured steps"
        if threshold == self.whole:
            since = "so that nothing is left of what it was"
        if severity == "note":
            advice = "The loss has not suffered, so nothing needs to be done; about 0.001 is usual later on."
        else:
            advice = "About 0.001 is usual. Lower its learning rate, or warm it up longer."
            if self._losses:
                since += f", and the loss {'went up' if threshold == self.whole else 'does not come down'}"
        sentence = f"a step changes {step.sites[site].name} by {number(value)} of its size, {since}. {advice}"
        began = at if threshold == self.whole else int(self._streak.since[site])
        return step.finding("update-ratio", site, value, threshold, severity, sentence, at, began)

    def _before(self, at: int) -> float:
        """The loss up to a step, which comes before its update."""
        return float(np.median([loss for number, loss in self._losses.items() if at - 3 < number <= at] or [np.nan]))

    def _went_up(self, at: int) -> bool:
        before, after = self._before(at), [loss for number, loss in self._losses.items() if at < number <= at + _AFTER]
        worse = before + self.worse * abs(before)
        return any(np.median(after[i : i + 3]) > worse for i in range(len(after) - 2))

    def _came_down(self, since: int, until: int) -> bool:
        return self._before(until) < self._before(since)
