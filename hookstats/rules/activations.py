"""Channels that have stopped working: dead ones behind a ReLU, saturated ones behind a tanh or a sigmoid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from hookstats.numbers.fields import Array
from hookstats.rules.finding import Finding
from hookstats.rules.history import Streak
from hookstats.rules.step import Mask, Step
from hookstats.rules.words import percent, tensor_of

_LEAST_VALUES = 100  # of a channel, over all verdicts in a row, or a share of 1 % cannot be told


@dataclass
class DeadChannels:
    """A ReLU whose channels are 0 nearly always: more than half of them (warning), or all (critical).

    A channel is dead where fewer than ``active`` = 1 % of its values are not 0, and a layer is ill where more than
    ``share`` = 0.5 of its channels are dead (SageMaker Debugger, dead-relu), in ``row`` = 5 verdicts in a row where all
    are, and in ``some_row`` = 20 where some are left: small layers begin so by chance, and come back. Outputs are
    judged that are never negative and hold zeros, which is what a ReLU leaves; of those without channels, the layer as
    a whole.

    So that a healthy run is silent: half of a ReLU's values may be 0, and single dead channels are common; a channel
    needs 100 values over the row of steps; an output with exactly as many zeros in each of these is sparse by design
    (the weights of a router), unless all are 0; one that no gradient comes back to, while others get theirs, is a
    mask; of a module's several outputs only the first is a layer's (others count, weigh, or are a logarithm that is 0);
    where the output before has as many channels, a ReLU lets no gradient through to those that are dead, or it is a
    mask; and of outputs that follow each other, a ReLU and its pooling, the first is named.
    """

    active: float = 0.01
    share: float = 0.5
    row: int = 5
    some_row: int = 20
    _streak: Streak = field(default_factory=Streak, init=False, repr=False, compare=False)
    _all: Streak = field(default_factory=Streak, init=False, repr=False, compare=False)
    _same: Streak = field(default_factory=Streak, init=False, repr=False, compare=False)
    _actives: Array = field(default_factory=lambda: np.empty(0), init=False, repr=False, compare=False)

    def __call__(self, step: Step) -> Iterator[Finding] | None:
        outputs = step.in_order(step.of("output"))
        return self._of(step, outputs) if outputs else None

    def _of(self, step: Step, outputs: list[int]) -> Iterator[Finding]:
        totals, n = step.totals, len(step.sites)
        actives_before = np.concatenate([self._actives, np.full(n - len(self._actives), np.nan)])
        actives = totals.count - totals.zeros
        by_design = self._same.longer((actives == actives_before) & (actives > 0)) >= self.row - 1
        self._actives = np.where(totals.count > 0, actives, actives_before)
        # More than `share` dead channels of equal size leave at most this many values.
        most = (1 - self.share) + self.share * self.active
        gradients = step.partner("output", "grad_output")
        is_trained = (gradients >= 0) & (step.calls[gradients] > 0)
        judged = step.of("output") & (totals.count > 0) & (is_trained | ~step.of("grad_output").any())
        judged &= np.array([site.tensor in ("output", "output.0") for site in step.sites], bool)
        candidates = judged & (totals.min >= 0) & (actives < most * totals.count) & ~by_design
        shares = np.zeros(n)
        before = dict(zip(outputs[1:], outputs, strict=False))
        for site in np.flatnonzero(candidates).tolist():
            shares[site] = self._share(step, site, int(gradients[before[site]]) if site in before else -1)
        of_some = self._streak.longer(shares > self.share, judged) >= self.some_row
        of_all = self._all.longer(shares == 1, judged) >= self.row
        is_dead = (of_some & (shares > self.share)) | (of_all & (shares == 1))
        for place, site in enumerate(outputs):
            if not is_dead[site] or (place and is_dead[outputs[place - 1]]):
                continue
            what = "all channels" if shares[site] == 1 else f"{percent(shares[site])} of the channels"
            sentence = (
                f"{what} of {tensor_of(step.sites[site])} are dead: 0 for more than "
                f"{percent(1 - self.active)} of what they see. They get no gradient, and seldom come back: lower the "
                "learning rate, look at the bias before them, or use a LeakyReLU or GELU."
            )
            severity = "critical" if shares[site] == 1 else "warning"
            yield step.finding("dead-channels", site, shares[site], self.share, severity, sentence)

    def _share(self, step: Step, site: int, gradient: int) -> float:
        """Of the channels that are dead. gradient: the id of that of the output before; -1 without one."""
        channels = step.channels(site) if step.has_channels[site] else None
        stats = step.totals.entries(np.array([site])) if channels is None else channels
        known = stats.count * self.row >= _LEAST_VALUES
        if not known.any():
            return 0.0
        dead = stats.count - stats.zeros < self.active * stats.count
        through = step.channels(gradient) if gradient >= 0 and step.has_channels[gradient] else None
        if through is not None and np.array_equal(through.count, stats.count):
            dead &= through.zeros >= (1 - self.active) * through.count
        return float(dead[known].mean())


@dataclass
class SaturatedChannels:
    """A tanh or sigmoid whose channels sit at their ends, where they let no gradient through (warning).

    The mean slope of a channel follows exactly from its moments: of a tanh it is 1 - E[x^2], of a sigmoid
    E[x] - E[x^2]. A channel is saturated where it is less than ``slope`` = 0.01 of the steepest one (1, and 1/4), and a
    layer is ill where more than ``share`` = 0.5 of its channels are, in ``row`` = 100 verdicts in a row. The figures
    are ours: SageMaker Debugger (saturated-activation) counts inputs beyond 9.5 on either side, where the slope of a
    tanh is 2e-8, far beyond where learning has stopped.

    So that a healthy run is silent: judged are outputs with a gradient that have stayed within [-1, 1] or [0, 1] since
    the run began, and come near 1; not those with zeros (ReLU, masks), nor those whose channels have equal means or
    add up to 1 (softmax), nor the last output of the model, which is to be sure of its answer. What recovers within a
    hundred measured steps, as narrow layers do, is no illness.
    """

    slope: float = 0.01
    share: float = 0.5
    row: int = 100
    _streak: Streak = field(default_factory=Streak, init=False, repr=False, compare=False)
    _beyond: Mask = field(default_factory=lambda: np.empty(0, bool), init=False, repr=False, compare=False)
    _negative: Mask = field(default_factory=lambda: np.empty(0, bool), init=False, repr=False, compare=False)

    def __call__(self, step: Step) -> Iterator[Finding] | None:
        outputs = step.in_order(step.of("output"))
        return self._of(step, outputs[-1]) if outputs else None

    def _of(self, step: Step, answer: int) -> Iterator[Finding]:
        totals, n = step.totals, len(step.sites)
        self._learn(step)
        gradients = step.partner("output", "grad_output")
        judged = step.of("output") & (totals.count > 0) & (gradients >= 0)
        candidates = judged & ~self._beyond & (totals.abs_max > 0.9) & (totals.zeros == 0)
        shares = np.zeros(n)
        for site in np.flatnonzero(candidates).tolist():
            if site != answer and step.calls[gradients[site]]:
                shares[site] = self._share(step, site)
        lengths = self._streak.longer(shares > self.share, judged)
        for site in step.in_order((lengths >= self.row) & (shares > self.share)):
            what = "all channels" if shares[site] == 1 else f"{percent(shares[site])} of the channels"
            sentence = (
                f"{what} of {tensor_of(step.sites[site])} are saturated: they sit at the ends of the "
                f"{'tanh' if self._negative[site] else 'sigmoid'}, and let less than {percent(self.slope)} of the "
                "gradient through. Make what comes in smaller: lower weights or learning rate, or a norm before it."
            )
            yield step.finding("saturated-channels", site, shares[site], self.share, "warning", sentence)

    def _learn(self, step: Step) -> None:
        """Where values have been."""
        totals, new = step.totals, len(step.sites) - len(self._beyond)
        if new:
            self._beyond, self._negative = (
                np.append(each, np.zeros(new, bool)) for each in (self._beyond, self._negative)
            )
        self._beyond |= (totals.abs_max > 1) | (step.nonfinite > 0)
        self._negative |= totals.min < 0

    def _share(self, step: Step, site: int) -> float:
        """Of the channels that are saturated."""
        channels = step.channels(site) if step.has_channels[site] else None
        stats = step.totals.entries(np.array([site])) if channels is None else channels
        square = stats.rms**2
        if self._negative[site]:
            saturated = 1 - square < self.slope
        else:
            means = stats.mean
            if (
                len(means) > 1
                and means.mean() < 0.99
                and (np.ptp(means) < 1e-4 * means.mean() or abs(means.sum() - 1) < 1e-3)
            ):
                return 0.0  # a softmax
            saturated = means - square < self.slope / 4
        return float(saturated.mean())
