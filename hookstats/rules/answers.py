"""What comes out: probabilities where logits are expected, a loss that does not come down."""

from __future__ import annotations

import math
from collections import deque
from typing import ClassVar

import numpy as np

from hookstats.rules.finding import Finding
from hookstats.rules.formatting import number, tensor_of
from hookstats.rules.history import Streak
from hookstats.rules.step import Step
from hookstats.rules.thresholds import rule


@rule
class ProbabilitiesAsLogits:
    """Probabilities are given to a cross-entropy that expects logits: softmax or sigmoid before it (warning).

    The last output of the model lies in [0, 1]; the loss lies where the cross-entropy of such logits of ``n`` classes,
    as many as there are channels, must lie, between log(1 + (n - 1) / e) and log(1 + (n - 1) e); and the gradient is
    that of a softmax: not 0 anywhere, 0 on average, and of the size 2 (1 - exp(-loss)) in all that the loss implies.
    All this holds in ``consecutive_steps`` = 10 measured steps in a row. The rule is ours; it follows from the
    definition.

    What else looks like it: nothing that we know; a negative log likelihood of probabilities has a gradient at one
    class of each row. What to do: leave out the softmax or sigmoid; cross_entropy has its own.

    So that a healthy run is silent: the module of that output has no parameters, as a layer whose logits are small has.
    """

    consecutive_steps: int = 10

    def __post_init__(self) -> None:
        self._streak = Streak(self.consecutive_steps)

    def __call__(self, step: Step) -> list[Finding] | None:
        outputs = step.in_order(step.is_kind("output") & (step.totals.count > 0))
        loss = step.scalars.get("loss")
        if not outputs or loss is None:
            return None
        site = outputs[-1]
        if not self._streak.push_one(step.number, self._is_ill(step, site, loss)):
            return []
        least = math.log(1 + (self._classes(step, site) - 1) / math.e)
        sentence = (
            f"{tensor_of(step.sites[site])} lies in [0, 1], as probabilities do, and the loss is the cross-entropy of "
            f"these as if they were logits: it cannot come below {number(least)}, and its gradient is small. Leave out "
            "the softmax or sigmoid before the loss: cross_entropy has its own."
        )
        since = self._streak.since[0]
        return [step.finding("probabilities-as-logits", site, loss, least, "warning", sentence, since=since)]

    @staticmethod
    def _classes(step: Step, site: int) -> int:
        channels = step.channels(site)
        return 0 if channels is None else len(channels.count)

    def _is_ill(self, step: Step, site: int, loss: float) -> bool:
        totals = step.totals
        classes = self._classes(step, site)
        if not (totals.min[site] >= 0 and totals.max[site] <= 1 and step.nonfinite[site] == 0):
            return False
        if classes < 2 or _has_parameters(step, site):
            return False
        least, most = math.log(1 + (classes - 1) / math.e), math.log(1 + (classes - 1) * math.e)
        gradient = int(step.partner("output", "grad_output")[site])
        if not least * 0.999 <= loss <= most * 1.001 or gradient < 0 or not step.calls[gradient]:
            return False
        size, count = float(totals.l1_norm[gradient]), float(totals.count[gradient])
        zeros, mean = float(totals.zeros[gradient]), float(totals.mean[gradient])
        expected = 2 * (1 - math.exp(-loss)) * step.calls[gradient]
        is_softmax = zeros < 0.1 * count and abs(mean) * count < 1e-3 * size
        return is_softmax and 0.75 < size / expected < 1.25


def _has_parameters(step: Step, output: int) -> bool:
    """Whether the module of an output has parameters of its own: then it is no softmax or sigmoid."""
    names = {f"{step.sites[output].name}.{name}".lstrip(".") for name in ("weight", "bias")}
    return any(site.name in names for site in step.sites)


@rule
class InitialLoss:
    """The first loss is far above that of guessing: the model is sure of wrong answers from the start (a note).

    The first measured step is judged, if it is the first of the run: the loss is more than ``factor`` = 3 times
    log(classes), the cross-entropy of guessing, with as many classes as the last output has channels. That it is a
    cross-entropy shows in the gradient of this output: its mean is 0, and its L1 norm between 1 and 2, which is
    2 (1 - p) of the right class. That the loss has to begin near log(classes) is said by Karpathy, "A Recipe for
    Training Neural Networks" (2019); the factor is ours.

    What else looks like it: a pretrained model on data that it was not made for. What to do: look at the size of the
    initial weights, above all of the last layer and of embeddings that it shares its weight with; a deviation of 0.02
    is usual there.

    So that a healthy run is silent: other losses are not judged, nor those that add up over a batch.
    """

    factor: float = 3.0

    def __post_init__(self) -> None:
        self._is_judged = False

    def __call__(self, step: Step) -> list[Finding] | None:
        outputs = step.in_order(step.is_kind("output") & (step.totals.count > 0))
        loss = step.scalars.get("loss")
        if self._is_judged or step.number > 0 or not outputs or loss is None or not math.isfinite(loss):
            return None
        self._is_judged = True
        site = outputs[-1]
        channels, gradient = step.channels(site), int(step.partner("output", "grad_output")[site])
        if channels is None or len(channels.count) < 2 or gradient < 0 or step.calls[gradient] != 1:
            return []
        guessing = math.log(len(channels.count))
        size, total = (
            float(step.totals.l1_norm[gradient]),
            float(step.totals.mean[gradient] * step.totals.count[gradient]),
        )
        if not (1 <= size <= 2.01 and abs(total) < 1e-3 * size and loss > self.factor * guessing):
            return []
        sentence = (
            f"the first loss is {number(loss)}, and guessing among {len(channels.count)} classes would cost "
            f"{number(guessing)}: the model is sure of wrong answers before it has learned anything, because "
            f"{tensor_of(step.sites[site])} has a deviation of {number(float(step.totals.std[site]))}. Make initial "
            "weights smaller, above all those of the last layer."
        )
        return [step.finding("initial-loss", site, loss, guessing, "note", sentence)]


@rule
class NoProgress:
    """The loss is where it began (a note): what it was in the first 5 steps, after ``after`` = 100 of them.

    The median of the last 20 losses is judged: it has not come down by ``share`` = 0.02 of the first ones, nor by the
    deviation of these. Every step counts, measured or not; it is judged once. The figures are ours.

    What else looks like it: losses that do not say what was learned, of a policy, or of both sides of a GAN; a very
    long warmup. What to do: look at what else was found; train on one batch until it is known by heart; look at whether
    labels belong to their data.
    """

    share: float = 0.02
    after: int = 100
    per_site: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._firsts: list[float] = []
        self._last: deque[float] = deque(maxlen=20)
        self._count, self._is_judged = 0, False

    def __call__(self, step: Step) -> list[Finding] | None:
        losses = step.given("loss")
        if not losses:
            return None
        for loss in filter(math.isfinite, losses.values()):
            self._count += 1
            if len(self._firsts) < 5:
                self._firsts.append(loss)
            self._last.append(loss)
        if self._count < self.after or self._is_judged:
            return []
        self._is_judged = True
        first, last = float(np.median(self._firsts)), float(np.median(self._last))
        noise = float(np.std(self._last)) / math.sqrt(len(self._last))
        if last < first - max(self.share * abs(first), noise):
            return []
        sentence = (
            f"the loss is {number(last)} after {self._count} steps, and began at {number(first)}: nothing has been "
            "learned that it shows. If nothing else was found: train on a single batch until it is known by heart, and "
            "look at whether the labels belong to their data."
        )
        return [step.finding("no-progress", None, last, first, "note", sentence)]
