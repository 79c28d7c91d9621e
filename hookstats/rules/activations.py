"""Channels that have stopped working: dead ones behind a ReLU, saturated ones behind a tanh or a sigmoid."""

from __future__ import annotations

import numpy as np

from hookstats.numbers.fields import Array
from hookstats.rules.finding import Finding
from hookstats.rules.formatting import percent, tensor_of
from hookstats.rules.history import Streak, extended
from hookstats.rules.step import Mask, Step
from hookstats.rules.thresholds import rule

_INITIAL = 20  # verdicts, by which what was so from the start is told
_LEAST_VALUES = 100  # of a channel, over all verdicts in a row, or a share of 1 % cannot be told


@rule
class DeadChannels:
    """A ReLU whose channels are 0 nearly always: more than half of them (warning), or all (critical).

    A channel is dead where fewer than ``active`` = 1 % of its values are not 0, and a layer is ill where more than
    ``share`` = 0.5 of its channels are dead (SageMaker Debugger, dead-relu), in ``consecutive_steps`` = 5 verdicts in a
    row if all of them are, and in ``some_consecutive_steps`` = 20 if some are alive: small layers begin like that by
    chance, and come back. Outputs are judged that are never negative and hold zeros, which is what a ReLU leaves; of
    those without channels, the layer as a whole.

    What else looks like it: a mask, and the sparse weights of a router; both are recognised. What to do: lower the
    learning rate, look at the bias before the ReLU and at the initial weights, or use a LeakyReLU or GELU.

    So that a healthy run is silent: half of a ReLU's values may be 0, and single dead channels are common; a channel
    needs 100 values over the row of steps; an output with exactly as many zeros in each of these is sparse by design
    (the weights of a router), unless all are 0; one that no gradient comes back to, while others get theirs, is a
    mask; of a module's several outputs only the first is a layer's (others count, weigh, or are a logarithm that is 0);
    where the output before has as many channels, a ReLU lets no gradient through to those that are dead, or it is a
    mask; and of outputs that follow each other, a ReLU and its pooling, the first is named.
    """

    active: float = 0.01
    share: float = 0.5
    consecutive_steps: int = 5
    some_consecutive_steps: int = 20

    def __post_init__(self) -> None:
        self._some_dead, self._all_dead = Streak(self.some_consecutive_steps), Streak(self.consecutive_steps)
        self._same, self._actives = Streak(self.consecutive_steps - 1), np.empty(0)

    def __call__(self, step: Step) -> list[Finding] | None:
        outputs = step.in_order(step.is_kind("output"))
        if not outputs:
            return None
        shares, judged = self._shares(step, outputs)
        some = self._some_dead.push(step.number, shares > self.share, judged)
        is_dead = some | self._all_dead.push(step.number, shares == 1, judged)
        before = [False, *is_dead[outputs].tolist()]  # of outputs that follow each other, the first is named
        named = [site for site, follows in zip(outputs, before, strict=False) if is_dead[site] and not follows]
        return [self._finding(step, site, float(shares[site])) for site in named]

    def _shares(self, step: Step, outputs: list[int]) -> tuple[Array, Mask]:
        """``[n]``: the share of each output's channels that are dead; and which outputs are judged."""
        totals, n = step.totals, len(step.sites)
        actives_before, actives = extended(self._actives, n, np.nan), totals.count - totals.zeros
        by_design = self._same.push(step.number, (actives == actives_before) & (actives > 0))
        self._actives = np.where(totals.count > 0, actives, actives_before)
        # More than `share` dead channels of equal size leave at most this many values.
        most = (1 - self.share) + self.share * self.active
        gradients = step.partner("output", "grad_output")
        is_trained = (gradients >= 0) & (step.calls[gradients] > 0)
        judged = step.is_kind("output") & (totals.count > 0) & (is_trained | ~step.is_kind("grad_output").any())
        judged &= np.array([site.tensor in ("output", "output.0") for site in step.sites], bool)
        candidates = judged & (totals.min >= 0) & (actives < most * totals.count) & ~by_design
        shares = np.zeros(n)
        before = dict(zip(outputs[1:], outputs, strict=False))
        for site in np.flatnonzero(candidates).tolist():
            shares[site] = self._share(step, site, int(gradients[before[site]]) if site in before else -1)
        return shares, judged

    def _finding(self, step: Step, site: int, share: float) -> Finding:
        if has_zero_weights(step, site):
            why = "all of its weights are 0. Nothing behind it can learn from it: look at how they are initialised."
        else:
            why = (
                f"0 for more than {percent(1 - self.active)} of what they see. They get no gradient, and seldom come "
                "back: lower the learning rate, look at the bias before them, or use a LeakyReLU or GELU."
            )
        sentence = f"{_channels(share)} of {tensor_of(step.sites[site])} are dead: {why}"
        severity = "critical" if share == 1 else "warning"
        since = (self._all_dead if share == 1 else self._some_dead).since[site]
        return step.finding("dead-channels", site, share, self.share, severity, sentence, since=since)

    def _share(self, step: Step, site: int, gradient: int) -> float:
        """Of the channels that are dead. gradient: the id of that of the output before; -1 without one."""
        stats = step.channels_or_whole(site)
        known = stats.count * self.consecutive_steps >= _LEAST_VALUES
        if not known.any():
            return 0.0
        dead = stats.count - stats.zeros < self.active * stats.count
        through = step.channels(gradient) if gradient >= 0 else None
        if through is not None and np.array_equal(through.count, stats.count):
            dead &= through.zeros >= (1 - self.active) * through.count
        return float(dead[known].mean())


def has_zero_weights(step: Step, output: int) -> bool:
    """Whether the weight of the module that an output belongs to has nothing but zeros, as far as it is measured."""
    name = f"{step.sites[output].name}.weight".lstrip(".")
    weights = [i for i, site in enumerate(step.sites) if site.name == name and site.tensor in ("param", "param_sample")]
    return any(step.totals.count[i] > 0 and step.totals.abs_max[i] == 0 for i in weights)


@rule
class SaturatedChannels:
    """A tanh or sigmoid whose channels sit at their ends, where they let no gradient through (warning).

    The mean slope of a channel follows exactly from its moments: of a tanh it is 1 - E[x^2], of a sigmoid E[x] -
    E[x^2]. A channel is saturated where it is less than ``slope`` = 0.01 of the steepest one (1, and 1/4), and a layer
    is ill where more than ``share`` = 0.5 of its channels are, in ``consecutive_steps`` = 100 verdicts in a row. A tanh
    is ill after 20, too, where more than half of its channels have had a slope below ``initial_slope`` = 0.1 in every
    verdict since the run began: initial weights leave it above 0.5. The figures are ours: SageMaker Debugger
    (saturated-activation) counts inputs beyond 9.5 on either side, where the slope of a tanh is 2e-8, far beyond where
    learning has stopped.

    What else looks like it: gates that are meant to stay open or closed. What to do: make what comes in smaller, by
    smaller weights, a lower learning rate, scaled inputs, or a norm before it.

    So that a healthy run is silent: outputs are judged if they have a gradient, have stayed within [-1, 1] or [0, 1]
    since the run began, and come near 1; not those with zeros (ReLU, masks), nor those whose channels have equal means
    or add up to 1 (softmax), nor the last output of the model, which is to be sure of its answer. What recovers within
    a hundred measured steps, as narrow layers do, is no illness.
    """

    slope: float = 0.01
    share: float = 0.5
    consecutive_steps: int = 100
    initial_slope: float = 0.1

    def __post_init__(self) -> None:
        self._streak, self._initial = Streak(self.consecutive_steps), Streak(_INITIAL)
        self._verdicts = np.empty(0, np.int64)
        self._beyond, self._negative = np.empty(0, bool), np.empty(0, bool)  # where values have been

    def __call__(self, step: Step) -> list[Finding] | None:
        outputs = step.in_order(step.is_kind("output"))
        if not outputs:
            return None
        totals, n, answer = step.totals, len(step.sites), outputs[-1]
        self._beyond = extended(self._beyond, n, False) | (totals.abs_max > 1) | (step.nonfinite > 0)
        self._negative = extended(self._negative, n, False) | (totals.min < 0)
        gradients = step.partner("output", "grad_output")
        judged = step.is_kind("output") & (totals.count > 0) & (gradients >= 0)
        candidates = judged & ~self._beyond & (totals.abs_max > 0.9) & (totals.zeros == 0)
        shares, initial = np.zeros(n), np.zeros(n)
        for site in np.flatnonzero(candidates).tolist():
            if site != answer and step.calls[gradients[site]]:
                shares[site] = self._share(step, site, self.slope)
                if self._negative[site]:
                    initial[site] = self._share(step, site, self.initial_slope)
        self._verdicts = extended(self._verdicts, n, 0) + judged
        ill = self._streak.push(step.number, shares > self.share, judged)
        from_start = self._initial.push(step.number, initial > self.share, judged)
        from_start &= (self._initial.lengths == self._verdicts) & ~ill
        return [
            self._finding(step, site, float((shares if ill[site] else initial)[site]), bool(from_start[site]))
            for site in step.in_order(ill | from_start)
        ]

    def _finding(self, step: Step, site: int, share: float, is_initial: bool) -> Finding:
        slope = self.initial_slope if is_initial else self.slope
        sentence = (
            f"{_channels(share)} of {tensor_of(step.sites[site])} {'have been' if is_initial else 'are'} saturated"
            f"{' from the start' if is_initial else ''}: they sit at the ends of the "
            f"{'tanh' if self._negative[site] else 'sigmoid'}, and let less than {percent(slope)} of the "
            "gradient through. Make what comes in smaller: "
            f"{'lower initial weights' if is_initial else 'lower weights or learning rate'}, or a norm before it."
        )
        since = (self._initial if is_initial else self._streak).since[site]
        return step.finding("saturated-channels", site, share, self.share, "warning", sentence, since=since)

    def _share(self, step: Step, site: int, slope: float) -> float:
        """Of the channels that are saturated."""
        stats = step.channels_or_whole(site)
        square = stats.rms**2
        if self._negative[site]:
            saturated = 1 - square < slope
        else:
            means = stats.mean
            if (
                len(means) > 1
                and means.mean() < 0.99
                and (np.ptp(means) < 1e-4 * means.mean() or abs(means.sum() - 1) < 1e-3)
            ):
                return 0.0  # a softmax
            saturated = means - square < slope / 4
        return float(saturated.mean())


def _channels(share: float) -> str:
    return "all channels" if share == 1 else f"{percent(share)} of the channels"
