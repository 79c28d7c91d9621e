"""The loss and the norm of the gradients against their own last steps."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hookstats.rules.engine import Ill, rule
from hookstats.rules.formatting import times
from hookstats.rules.history import Course, middle
from hookstats.rules.memory import Memory
from hookstats.rules.step import Step

_LEAST_RISE = 0.05  # of what jumps, or rises from one third of the steps to the next
_MOVED, _KNOWN = 3.0, 3  # times the largest of the last moves; how many of them there must be
_DESCENDED = 0.8  # of the first loss: below that it has been going down
_BAD_DATA = 1.5  # times the first losses, what one batch must have reached
_ADVICE = "lower the learning rate, warm it up longer, or clip gradients."


class _Jump(NamedTuple):
    """A jump that may come back."""

    step: int
    level: float  # before it
    limit: float
    value: float
    has_moved: bool  # the model, with it


@rule(per_site=False, depth=5)
def loss_spike(
    step: Step,
    memory: Memory,
    scalar: str = "loss",
    sigmas: float = 6.0,
    tail: float = 2.0,
    window: int = 128,
    min_history: int = 16,
    undone: float = 0.05,
    moved: float = 0.3,
    consecutive_steps: int = 5,
) -> list[Ill] | None:
    """The loss jumps, or keeps rising: the ``scalar`` "loss" of `Monitor.step`, of every step, measured or not.

    A jump is a loss more than ``sigmas`` = 6 deviations above the level of the last steps (OLMo-core,
    stability_monitor.py, has 6 standard deviations from the mean), in logarithms, and ``tail`` = 2 times as far as any
    of the last ``window`` = 128 losses. The level is a median and the deviation that from it, so that the descent at
    the beginning does not count as noise.

    A jump alone is a note: a task or data that are added, and a target that is exchanged, do that. It is a warning
    where the model changes with it, at once or while the loss stays up (half of its outputs by a factor of
    exp(``moved`` = 0.3) in rms since the last measured step, and 3 times what they did before the jump); where it goes
    above the first losses, and no outputs are measured that could tell; or where, from above the first losses, it comes
    back at once, within ``consecutive_steps`` = 5 steps, and was 1.5 times these: that is bad data. (Not of losses of
    both signs, as those of policies are: they say nothing of what was learned.)

    Divergence (critical): after a jump with which the model changed, the loss has been above the first losses for
    ``consecutive_steps`` steps; or it goes on rising over 9 steps, or 30, from third to third and beyond its noise:
    above the first losses, although it had come down before, or twofold each time. A level that is higher is no
    divergence.

    What else looks like it: data of another kind, a task that is added, a target that is exchanged. What to do: look at
    the batch of the step; if it happens again, clip gradients, lower the learning rate, or leave such batches out;
    where the loss stays up, go back to a checkpoint before it.

    False-positive guards: a jump is judged when there are ``min_history`` = 16 losses, must be one by 5 % of
    the level, and must undo a share ``undone`` = 0.05 of what the loss has come down since the first steps, because a
    model that has learned its data by heart has losses near 0 that vary by any factor. What OLMo-core does not say is a
    setting of ours.
    """
    values = {at: value for at, value in step.read_scalar(scalar).items() if math.isfinite(value)}
    move, moves = _measure_move(step, memory), memory.last("moves", 8)
    if not values:
        return None
    has_moved = None  # beside what the outputs did before; not known yet
    if move is not None and len(moves) >= _KNOWN:
        has_moved = move > max(moved, _MOVED * max(moves))
    found = list[Ill | None]()
    past, last, firsts = memory.course("past", window), memory.last("last", 30), memory.setdefault("firsts", [])
    for at, value in values.items():
        is_known, limit = len(past) >= min_history, math.inf
        if is_known and (memory.get("jump") is not None or not past.is_surely_usual(value, tail)):
            limit = past.limit(sigmas, tail)
        if past.in_logs and is_known:
            limit = max(limit, past.level * (1 + _LEAST_RISE))
        found.append(_judge_jump_end(memory, at, value, past.in_logs, consecutive_steps))
        least = undone * (firsts[0] - memory["lowest"]) if firsts else math.inf
        found.append(_judge_jump(memory, at, value, past.level, limit, least, has_moved))
        rising = _count_rising(memory, value, past if is_known else None)
        if rising:
            text = "training diverges: the {scalar} has risen for {rising} steps, to {value}. Go back to a checkpoint, "
            text, words = f"{text}and {_ADVICE}", {"rising": str(rising)}
            since = at - rising + 1
            found.append(Ill(True, text, value, max(firsts), "critical", since=since, at=at, words=words))
        past.push(value, limit)
        last.append(value)
        memory["lowest"] = min(memory.get("lowest", math.inf), past.level)
        if len(firsts) < consecutive_steps:
            firsts.append(value)
    if move is not None and memory.get("jump") is None:  # else it belongs to the jump, and not to what was before
        moves.append(move)
    problems = [each for each in found if each is not None]
    for each in problems:
        each.words = {**each.words, "scalar": scalar}
    return problems


def _judge_jump(
    memory: Memory, at: int, value: float, level: float, limit: float, least: float, has_moved: bool | None
) -> Ill | None:
    """least: what it must have undone of what the loss has come down."""
    known, since = memory.get("jump"), at
    if known is None:
        if not value > limit or value - level < least:
            return None
        text = "the {scalar} jumped to {value}, from {level} in the steps before. "
    else:  # a known one, with which the outputs change only now
        jump = _Jump(*known)
        if jump.has_moved or not (has_moved and value > jump.limit):
            return None
        level, since = jump.level, jump.step
        text = "the {scalar} is {value}, and was {level} before step {since}. "
    first = max(memory["firsts"])
    is_ill = has_moved or (has_moved is None and value > first)
    if has_moved:
        text += "The outputs of the model changed at the same time: check this batch, the learning rate and the "
        text += "weights; if it stays up, go back to a checkpoint before it."
    elif is_ill:
        text += (
            "The first steps had at most {first}: check this batch; if it stays up, go back to a checkpoint before it, "
        )
        text += "and lower the learning rate or clip gradients."
    else:
        text += "If the data, the task or the target changed in this step, nothing is wrong."
    memory["jump"] = _Jump(at, level, limit, value, bool(has_moved))
    words = {"level": level, "first": first}
    return Ill(True, text, value, limit, "warning" if is_ill else "note", since=since, at=at, words=words)


def _judge_jump_end(memory: Memory, at: int, value: float, in_logs: bool, consecutive_steps: int) -> Ill | None:
    """Return what a jump was: the loss has come back from it, all at once, or it has not."""
    if memory.get("jump") is None:
        return None
    began, level, limit, peak, has_moved = _Jump(*memory["jump"])
    first, last = max(memory["firsts"]), memory.last("last", 30)
    quarter = level * (peak / level) ** 0.25 if in_logs else level + (peak - level) / 4
    came_back, count = value <= min(quarter, first), at - began
    if not came_back and count < consecutive_steps:
        return None
    memory["jump"] = None
    words = {"level": level, "count": times(count, "step")}
    if came_back and in_logs and peak > _BAD_DATA * first and last[-1] > peak / 2:
        text = "the {scalar} jumped to {value}, from {level}, and came back after {count}: check the data of step "
        text += "{since}; if it happens again, clip gradients, or leave such batches out."
        return Ill(True, text, peak, limit, at=began, words=words)
    if not came_back and has_moved and min([*last, value][-consecutive_steps:]) > first:
        text = (
            "training diverges: the {scalar} jumped in step {since} together with the outputs of the model; it is "
            "{value} after {count}, where the first steps had at most {threshold}. Go back to a checkpoint before step "
            "{since}, and "
        )
        return Ill(True, text + _ADVICE, value, first, "critical", since=began, at=at, words=words)
    return None


def _count_rising(memory: Memory, value: float, past: Course | None) -> int:
    """Return over how many steps the loss has risen; 0: it has not. past: None: how much it varies is not known yet."""
    firsts, last = memory["firsts"], [*memory.last("last", 30), value]
    if len(last) < 9 or not firsts or max(last) <= firsts[0] or min(last) <= 0 or min(firsts) <= 0:
        return 0
    first, descended = math.log(firsts[0]), memory["lowest"] < _DESCENDED * firsts[0]
    start, doubled = math.log(max(firsts)) if descended else first, 0.0 if descended else math.log(2)
    for third in (3, 10):
        if len(last) < 3 * third:
            break
        values = np.log(last[-3 * third :])
        one, two, three = (middle(values[i * third : (i + 1) * third]) for i in range(3))
        rise = min(two - one, three - two)
        if not one > start + doubled or not rise > max(_LEAST_RISE, doubled):
            continue
        if np.diff(values).min() > 0 if past is None else rise > 7 * past.deviation / math.sqrt(third):
            return 3 * third
    return 0


def _measure_move(step: Step, memory: Memory) -> float | None:
    """Return by how much half of the outputs changed since the last measured step, in logarithms, if any can tell."""
    known, ids = memory.keep_by_site("outputs", np.nan), step.find_finite_ids("output")
    now, before = step.totals.rms[ids], known[ids]
    known[ids] = now
    moves = np.abs(np.log(now / before))
    if not moves.max(initial=0.0) < np.inf:  # some were 0, or are
        moves = moves[moves < np.inf]
    return middle(moves) if len(moves) else None


@rule(per_site=False, depth=4)
def gradient_norm_spike(
    step: Step,
    memory: Memory,
    sigmas: float = 6.0,
    tail: float = 2.0,
    window: int = 128,
    min_history: int = 32,
    factor: float = 5.0,
    many: int = 3,
) -> Ill | None:
    """The norm of all gradients jumps: the scalar ``grad_norm``, or else `Snapshot.grad_norm` (warning, or note).

    More than ``sigmas`` = 6 deviations above the level of the last steps (OLMo-core, stability_monitor.py, has 6
    standard deviations from the mean), in logarithms, and ``tail`` = 2 times as far as any of the last ``window`` = 128
    norms, is a note. It is a warning where that happened ``many`` = 3 times in the window.

    What else looks like it: a batch with more tokens or another task. What to do: look at the batch of the step, clip
    gradients, and lower the learning rate where it happens again.

    False-positive guards: a single batch of another kind is no problem, and without clipping they are common
    in small language models; steps in a row are one jump; judged when there are ``min_history`` = 32 norms; and
    ``factor`` = 5 times the level at least (a setting of ours), because norms that are clipped do not vary at all.
    Norms that are clipped say nothing: see `Monitor.measure_gradients`.
    """
    value = step.scalars.get("grad_norm", step.grad_norm)
    if value is None or not math.isfinite(value):
        return None
    past, limit, begins = memory.course("past", window), math.inf, 0
    level = past.level
    if len(past) >= min_history:
        limit = factor * level
        if value > limit:
            limit = max(past.limit(sigmas, tail), limit)
        spikes = memory.last("spikes", window)
        spikes.append(value > limit)
        begins = int(np.diff(np.array([False, *spikes]).astype(int)).clip(0).sum()) if spikes[-1] else 0
    past.push(value, limit)
    text = (
        "the norm of the gradients jumped to {value}, from {level} in the measured steps before. Check this batch; "
        "clip gradients, or lower the learning rate, before the loss follows."
    )
    return Ill(value > limit, text, value, limit, "warning" if begins >= many else "note", words={"level": level})
