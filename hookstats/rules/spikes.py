"""The loss and the norm of the gradients against their own last steps."""

from __future__ import annotations

import math
from collections import deque
from typing import ClassVar, NamedTuple

import numpy as np

from hookstats.rules.finding import Finding
from hookstats.rules.formatting import number, times
from hookstats.rules.history import Course, extended
from hookstats.rules.step import Step
from hookstats.rules.thresholds import rule

_LEAST_RISE = 0.05  # of what rises, from one third of the steps to the next
_MOVED, _KNOWN = 3.0, 3  # times the largest of the last moves; how many of them there must be
_DESCENDED = 0.8  # of the first loss: below that it has been going down


class _Jump(NamedTuple):
    """One that may come back."""

    step: int
    level: float  # before it
    limit: float
    value: float
    has_moved: bool  # the model, with it


@rule
class LossSpike:
    """The loss jumps, or goes on rising: the ``scalar`` "loss" of `Monitor.step`, of every step, measured or not.

    A jump is a loss more than ``sigmas`` = 6 deviations above the level of the last steps (OLMo-core,
    stability_monitor.py, has 6 standard deviations from the mean), in logarithms, and ``tail`` = 2 times as far as any
    of the last ``window`` = 128 losses. The level is a median and the deviation that from it, so that the descent at
    the beginning does not count as noise.

    A jump alone is a note: a task or data that are added, and a target that is exchanged, do that. It is a warning
    where the model changes with it, at once or while the loss stays up (half of its outputs by a factor of
    exp(``moved`` = 0.3) in rms since the last measured step, and 3 times what they did before the jump); where it goes
    above the first losses, and no outputs are measured that could tell; or where, from above the first losses, it comes
    back at once, within ``consecutive_steps`` = 5 steps: that is bad data. (Not of losses of both signs, as those of
    policies are: they say nothing of what was learned.)

    Divergence (critical): after a jump with which the model changed, the loss has been above the first losses for
    ``consecutive_steps`` steps; or it goes on rising over 9 steps, or 30, from third to third and beyond its noise:
    above the first losses, although it had come down before, or twofold each time. A level that is higher is no
    divergence.

    What else looks like it: data of another kind, a task that is added, a target that is exchanged. What to do: look at
    the batch of the step; if it happens again, clip gradients, lower the learning rate, or leave such batches out;
    where the loss stays up, go back to a checkpoint before it.

    So that a healthy run is silent: a jump is judged when there are ``min_history`` = 16 losses, and must undo a share
    ``undone`` = 0.05 of what the loss has come down since the first steps, because a model that has learned its data by
    heart has losses near 0 that vary by any factor. What OLMo-core does not say is a setting of ours.
    """

    scalar: str = "loss"
    sigmas: float = 6.0
    tail: float = 2.0
    window: int = 128
    min_history: int = 16
    undone: float = 0.05
    moved: float = 0.3
    consecutive_steps: int = 5
    per_site: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._past = Course(self.window)
        self._last: deque[float] = deque(maxlen=30)
        self._firsts: list[float] = []
        self._lowest = math.inf  # level
        self._jump: _Jump | None = None
        self._outputs = np.empty(0)  # rms
        self._moves: deque[float] = deque(maxlen=8)

    def __call__(self, step: Step) -> list[Finding] | None:
        values = {at: value for at, value in step.given(self.scalar).items() if math.isfinite(value)}
        move = self._move(step)
        if not values:
            return None
        has_moved = None if move is None else self._is_abrupt(move)
        found = [finding for at, value in values.items() for finding in self._judge(step, at, value, has_moved)]
        if move is not None and self._jump is None:  # else it belongs to the jump, and not to what was before
            self._moves.append(move)
        return found

    def _judge(self, step: Step, at: int, value: float, has_moved: bool | None) -> list[Finding]:
        """at: the step of this value, which may be an earlier one."""
        limit = self._past.limit(self.sigmas, self.tail) if len(self._past) >= self.min_history else math.inf
        found = [
            self._jump_ended(step, at, value),
            self._jumped(step, at, value, limit, has_moved),
            self._rose(step, at, value),
        ]
        self._past.push(value, limit)
        self._last.append(value)
        self._lowest = min(self._lowest, self._past.level)
        if len(self._firsts) < self.consecutive_steps:
            self._firsts.append(value)
        return [finding for finding in found if finding is not None]

    def _jumped(self, step: Step, at: int, value: float, limit: float, has_moved: bool | None) -> Finding | None:
        jump, level = self._jump, self._past.level
        sentence = f"the {self.scalar} jumped to {number(value)}, from {number(level)} in the steps before. "
        if jump is None:
            undoes = self._firsts and value - level >= self.undone * (self._firsts[0] - self._lowest)
            if not (undoes and value > limit):
                return None
        else:  # a known one, with which the outputs change only now
            if jump.has_moved or not (has_moved and value > jump.limit):
                return None
            level = jump.level
            sentence = f"the {self.scalar} is {number(value)}, and was {number(level)} before step {jump.step}. "
        is_ill = has_moved or (has_moved is None and value > max(self._firsts))
        if has_moved:
            sentence += (
                "The outputs of the model changed with it: look at this batch, and at the learning rate and the "
                "weights; if it stays up, go back to a checkpoint before it."
            )
        elif is_ill:
            sentence += (
                f"That is above the first ones, {number(max(self._firsts))}: look at this batch; if it stays up, "
                "go back to a checkpoint before it, and lower the learning rate or clip gradients."
            )
        else:
            sentence += "Where the data, the task or the target changed in this step, nothing needs to be wrong."
        since, severity = at if jump is None else jump.step, "warning" if is_ill else "note"
        self._jump = _Jump(at, level, limit, value, bool(has_moved))
        return step.finding("loss-spike", None, value, limit, severity, sentence, at, since)

    def _jump_ended(self, step: Step, at: int, value: float) -> Finding | None:
        """What a jump was: the loss has come back from it, all at once, or it has not."""
        if self._jump is None:
            return None
        began, level, limit, peak, has_moved = self._jump
        first, in_logs = max(self._firsts), self._past.in_logs
        quarter = level * (peak / level) ** 0.25 if in_logs else level + (peak - level) / 4
        came_back, count = value <= min(quarter, first), at - began
        if not came_back and count < self.consecutive_steps:
            return None
        self._jump = None
        if came_back and peak > first and in_logs and self._last[-1] > peak / 2:
            sentence = (
                f"the {self.scalar} jumped to {number(peak)}, from {number(level)}, and came back after "
                f"{times(count, 'step')}: look at the data of step {began}; if it happens again, clip gradients, or "
                "leave such batches out."
            )
            return step.finding("loss-spike", None, peak, limit, "warning", sentence, began)
        if not came_back and has_moved and min([*self._last, value][-self.consecutive_steps :]) > first:
            sentence = (
                f"the {self.scalar} is {number(value)}, and has been above the first ones for {count} steps, since it "
                f"jumped in step {began} and the outputs of the model changed: training diverges. Go back to a "
                "checkpoint, and lower the learning rate, warm it up longer, or clip gradients."
            )
            return step.finding("loss-spike", None, value, first, "critical", sentence, at, began)
        return None

    def _rose(self, step: Step, at: int, value: float) -> Finding | None:
        rising = self._rising(value)
        if not rising:
            return None
        sentence = (
            f"the {self.scalar} is {number(value)}, and has gone on rising for {rising} steps: training diverges. "
            "Go back to a checkpoint, and lower the learning rate, warm it up longer, or clip gradients."
        )
        return step.finding("loss-spike", None, value, max(self._firsts), "critical", sentence, at, at - rising + 1)

    def _rising(self, value: float) -> int:
        """Over how many steps; 0: it does not."""
        values = np.array([*self._last, value])
        if values.min() <= 0 or min(self._firsts, default=1.0) <= 0:
            return 0
        values = np.log(values)
        first = math.log(self._firsts[0]) if self._firsts else math.inf
        descended = self._lowest < _DESCENDED * self._firsts[0] if self._firsts else False
        start = math.log(max(self._firsts)) if descended else first
        deviation = self._past.deviation if len(self._past) >= self.min_history else 0.0
        for third in (3, 10):
            if len(values) < 3 * third:
                break
            one, two, three = np.median(values[-3 * third :].reshape(3, third), axis=1)
            if len(self._past) < self.min_history and np.diff(values[-3 * third :]).min() <= 0:
                continue  # how much they vary is not known yet
            least = max(7 * deviation / math.sqrt(third), _LEAST_RISE, 0.0 if descended else math.log(2))
            if one > start + (0.0 if descended else math.log(2)) and min(two - one, three - two) > least:
                return 3 * third
        return 0

    def _move(self, step: Step) -> float | None:
        """By how much, in logarithms, half of the outputs changed since the last measured step; None: none can tell."""
        mask = step.is_kind("output") & (step.totals.count > 0)
        rms = np.where(mask, step.totals.rms, np.nan)
        before = extended(self._outputs, len(rms), np.nan)
        self._outputs = np.where(mask, rms, before)
        both = (rms > 0) & (before > 0)
        return float(np.median(np.abs(np.log(rms[both] / before[both])))) if both.any() else None

    def _is_abrupt(self, move: float) -> bool | None:
        """Beside what the outputs did before; None: that is not known yet."""
        known = len(self._moves) >= _KNOWN
        return move > max(self.moved, _MOVED * max(self._moves)) if known else None


@rule
class GradientNormSpike:
    """The norm of all gradients jumps: the scalar ``grad_norm``, or where there is none `Snapshot.grad_norm`.

    More than ``sigmas`` = 6 deviations above the level of the last steps (OLMo-core, stability_monitor.py, has 6
    standard deviations from the mean), in logarithms, and ``tail`` = 2 times as far as any of the last ``window`` = 128
    norms, is a note. It is a warning where that happened ``many`` = 3 times in the window.

    What else looks like it: a batch with more tokens or another task. What to do: look at the batch of the step, clip
    gradients, and lower the learning rate where it happens again.

    So that a healthy run is silent: a single batch of another kind is no illness, and without clipping they are common
    in small language models; steps in a row are one jump; judged when there are ``min_history`` = 32 norms; and
    ``factor`` = 5 times the level at least (a setting of ours), because norms that are clipped do not vary at all.
    Norms that are clipped say nothing: see `Monitor.measure_gradients`.
    """

    sigmas: float = 6.0
    tail: float = 2.0
    window: int = 128
    min_history: int = 32
    factor: float = 5.0
    many: int = 3
    per_site: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._past = Course(self.window)
        self._spikes: deque[bool] = deque(maxlen=self.window)

    def __call__(self, step: Step) -> list[Finding] | None:
        value = step.scalars.get("grad_norm", step.grad_norm)
        if value is None or not math.isfinite(value):
            return None
        found, limit = [], math.inf
        if len(self._past) >= self.min_history:
            level = self._past.level
            limit = max(self._past.limit(self.sigmas, self.tail), self.factor * level)
            self._spikes.append(value > limit)
            if value > limit:
                flags = np.array(self._spikes)
                begins = int((flags[1:] & ~flags[:-1]).sum()) + int(flags[0])
                severity = "warning" if begins >= self.many else "note"
                sentence = (
                    f"the norm of the gradients jumped to {number(value)}, from {number(level)} in the measured steps "
                    "before. Look at this batch; clip gradients, or lower the learning rate, before the loss follows."
                )
                found.append(step.finding("gradient-norm-spike", None, value, limit, severity, sentence))
        self._past.push(value, limit)
        return found
