"""The loss and the norm of the gradients against their own last steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from hookstats.rules.finding import Finding
from hookstats.rules.history import Course
from hookstats.rules.step import Step
from hookstats.rules.words import number

_CLIMB = 1.5  # standard deviations: the last value of a steady climb is 1.73 of them above the mean


@dataclass
class LossSpike:
    """The loss jumps (warning), or stays up (critical): the ``scalar`` "loss" of `Monitor.step`.

    A jump: more than ``sigmas`` = 6 standard deviations above the mean of the last ``window`` = 128 measured steps
    (OLMo-core, stability_monitor.py), in logarithms. It stays up: ``row`` = 5 measured steps in a row at ``factor`` = 2
    times the mean (llm-foundry, kill_loss_spike_callback.py), or times the first loss where that is lower.

    So that a healthy run is silent: a jump is judged when the window has ``least`` = 32 steps; either must undo a share
    ``undone`` = 0.05 (a setting of ours) of what the loss has come down since the first steps, because a model that has
    learned its data by heart has losses near 0 that vary by any factor; what stays up must be 1.5 standard deviations
    above the mean, too, and all losses positive; and a jump counts in the window as one of half the limit: one does not
    hide the next, and yet a new level (other data) becomes the normal one.
    """

    scalar: str = "loss"
    sigmas: float = 6.0
    window: int = 128
    least: int = 32
    factor: float = 2.0
    row: int = 5
    undone: float = 0.05
    per_site: ClassVar[bool] = False
    _past: Course = field(init=False, repr=False, compare=False)
    _first: float = field(default=math.nan, init=False, repr=False, compare=False)
    _lowest: float = field(default=math.inf, init=False, repr=False, compare=False)  # mean of the window
    _high: int = field(default=0, init=False, repr=False, compare=False)  # steps in a row

    def __post_init__(self) -> None:
        self._past = Course(self.window)

    def __call__(self, step: Step) -> Iterator[Finding] | None:
        value = step.scalars.get(self.scalar)
        if value is None or not math.isfinite(value):
            return None
        return self._of(step, value)

    def _of(self, step: Step, value: float) -> Iterator[Finding]:
        past = self._past
        if not len(past):
            self._first = value
            past.push(value)
            return
        mean, limit = past.mean, math.inf
        self._lowest = min(self._lowest, mean)
        undoes = value - mean >= self.undone * (self._first - self._lowest)
        normal = min(mean, self._first)
        is_high = undoes and past.is_positive and value >= self.factor * normal
        if len(past) >= self.least:
            limit = past.limit(self.sigmas)
            is_high = is_high and value > past.limit(_CLIMB)
        self._high = self._high + 1 if is_high else 0
        if self._high >= self.row:
            sentence = (
                f"the {self.scalar} is {number(value)}, and has been far above {number(normal)} for {self._high} "
                "measured steps: training diverges. Go back to a checkpoint, and lower the learning rate, warm it up "
                "longer, or clip gradients."
            )
            yield step.finding("loss-spike", None, value, self.factor * normal, "critical", sentence)
        elif undoes and value > limit:
            sentence = (
                f"the {self.scalar} jumped to {number(value)}, from {number(mean)} on average of the last {len(past)} "
                "measured steps. Look at this batch; if it happens again, lower the learning rate or clip gradients."
            )
            yield step.finding("loss-spike", None, value, limit, "warning", sentence)
        past.push(value if value <= limit else past.limit(self.sigmas / 2))


@dataclass
class GradientNormSpike:
    """The norm of all gradients jumps: the scalar ``grad_norm``, or where there is none `Snapshot.grad_norm`.

    More than ``sigmas`` = 6 standard deviations above the mean of the last ``window`` = 128 measured steps (OLMo-core,
    stability_monitor.py), in logarithms: a note; a warning where there were ``many`` = 3 such steps in the window.

    So that a healthy run is silent: a single batch of another kind is no illness, and without clipping they are common
    in small language models; judged when the window has ``least`` = 32 steps; and ``factor`` = 5 times the mean at
    least (a setting of ours), because norms that are clipped do not vary at all. Norms that are clipped say nothing:
    see `Monitor.measure_gradients`.
    """

    sigmas: float = 6.0
    window: int = 128
    least: int = 32
    factor: float = 5.0
    many: int = 3
    per_site: ClassVar[bool] = False
    _spikes: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)
    _past: Course = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._past = Course(self.window)

    def __call__(self, step: Step) -> Iterator[Finding] | None:
        value = step.scalars.get("grad_norm", step.grad_norm)
        if value is None or not math.isfinite(value):
            return None
        return self._of(step, value)

    def _of(self, step: Step, value: float) -> Iterator[Finding]:
        limit = math.inf
        if len(self._past) >= self.least:
            mean = self._past.mean
            limit = max(self._past.limit(self.sigmas), self.factor * mean)
            self._spikes = [*self._spikes[1 - self.window :], value > limit]
            if value > limit:
                severity = "warning" if sum(self._spikes) >= self.many else "note"
                sentence = (
                    f"the norm of the gradients jumped to {number(value)}, from {number(mean)} on average of the last "
                    f"{len(self._past)} measured steps. Look at this batch; clip gradients, or lower the learning "
                    "rate, before the loss follows."
                )
                yield step.finding("gradient-norm-spike", None, value, limit, severity, sentence)
        self._past.push(value if value <= limit else self._past.limit(self.sigmas / 2))
