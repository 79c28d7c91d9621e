"""Updates against the weights that they change: too large, or next to nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from hookstats.rules.engine import Ill, rule
from hookstats.rules.history import middle
from hookstats.rules.memory import Memory
from hookstats.rules.step import Mask, Step, is_bias

_AFTER = 10  # steps, in which the loss shows what an update did


@rule(depth=4)
def update_ratio(
    step: Step,
    memory: Memory,
    ratio: float = 0.1,
    consecutive_steps: int = 10,
    whole: float = 1.0,
    worse: float = 0.1,
    begun: float = 1e-5,
    values: int = 64,
) -> list[Ill] | None:
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

    False-positive guards: parameters that began with one value throughout (LoRA with 0, a layer scale with
    1e-6) or with a mean absolute value below ``begun`` = 1e-5 (timm's class tokens, with a deviation of 1e-6) have no
    size but that of their updates, and neither have biases, which may pass through 0 (those of keys in attention change
    nothing, and only tremble): these are not judged; nor are parameters of fewer than ``values`` = 64 numbers.
    """
    losses: dict[int, float] = memory.setdefault("losses", {})
    losses |= step.read_scalar("loss")
    rewritten: dict[int, tuple[int, float]] = memory.setdefault("rewritten", {})  # in which step, and how far, by id
    weights, means = step.weights_of_updates, step.totals.abs_mean
    measured, sizes = (weights >= 0) & (step.totals.count >= values), means[weights]
    if not np.count_nonzero(measured) and not rewritten:
        return None
    seen, unsized = memory.keep_by_site("seen", False), memory.keep_by_site("unsized", False)
    begins = measured & ~seen
    if np.count_nonzero(begins):
        is_constant = (step.totals.min == step.totals.max)[weights]
        unsized |= begins & (is_constant | (sizes < begun) | step.make_for_sites(_are_biases))
        seen |= begins
    too_large, streak = measured & (means > 0.99 * ratio * sizes) & ~unsized, memory.streak()
    if not np.count_nonzero(too_large) and not streak.goes_on and not rewritten:
        memory["losses"] = {at: loss for at, loss in losses.items() if at > step.number - 3}
        return []
    ratios = np.divide(means, sizes, out=np.zeros(len(means)), where=measured & (sizes > 0))
    too_large = (ratios > ratio) & ~unsized
    lasting, found = streak.push(step.number, too_large, measured, consecutive_steps), list[Ill]()

    def say(site: int, at: int, value: float, is_note: bool, is_whole: bool) -> None:
        text = f"{consecutive_steps} measured steps in a row changed {{name}} by {{value}} of its size each"
        if is_whole:
            text = f"step {at} changed {{name}} by {{value}} times its own size"
        if is_note:
            text += ". If the loss does not go up, " if is_whole else ". The loss fell meanwhile, so "
            text += "nothing needs to be done; about 0.001 is usual later on."
        else:
            text += f", and the loss {'went up' if is_whole else 'does not fall'}" if losses else ""
            text += ". About 0.001 is usual. Lower its learning rate, or warm it up longer."
        began, threshold = (at, whole) if is_whole else (int(streak.since[site]), ratio)
        severity = "note" if is_note else "warning"
        found.append(Ill(True, text, value, threshold, severity, since=began, site=site, at=at))

    for site in step.put_in_order(too_large & (lasting | (ratios > whole))):
        value = float(ratios[site])
        if value > whole:
            rewritten[site] = step.number, value
            say(site, step.number, value, bool(losses), True)
        else:
            came_down = _find_loss_before(losses, step.number) < _find_loss_before(losses, int(streak.since[site]))
            say(site, step.number, value, came_down, False)
    for site, (at, value) in list(rewritten.items()):
        went_up = _has_risen(losses, at, worse)
        if went_up:
            say(site, at, value, False, True)
        if went_up or step.number >= at + _AFTER:
            del rewritten[site]
    going_on = streak.since[streak.lengths > 0].tolist() if streak.goes_on else []
    first = min([step.number, *going_on, *(at for at, _ in rewritten.values())])
    memory["losses"] = {at: loss for at, loss in losses.items() if at > first - 3}
    return found


@rule(per_site=False, depth=2)
def tiny_updates(
    step: Step,
    memory: Memory,
    ratio: float = 5e-6,
    fallen: float = 1e-4,
    consecutive_steps: int = 20,
    part: float = 0.1,
    values: int = 64,
) -> Ill | list[Ill] | None:
    """Steps change all parameters by almost nothing (warning; note if the loss fell).

    Mean |update| over mean |parameter| is 1e-3 as a rule, and 1e-4 at least in the healthy models of the fleet. A model
    is ill if that of none of its weights comes to ``ratio`` = 5e-6, nor grows, and the loss does not come down; or if
    the norm of all updates has fallen to ``fallen`` = 1e-4 of what it was, and a hundred times as far as that of the
    gradients, so that it is the learning rate that fell: as of a schedule that counts epochs and is stepped at each
    batch. Either in ``consecutive_steps`` = 20 measured steps in a row, and in the last ``part`` = 0.1 of all steps. It
    is a note where the loss has come down to half. The figures are ours.

    What else looks like it: a schedule that ends so, on purpose, which lasts for a smaller part of a run. What to do:
    print the learning rate in each step; look at the unit in which the schedule counts, at what clips or divides the
    gradients, and at the epsilon of the optimizer.

    False-positive guards: warmup, in which updates grow; updates of which all are exactly 0, or most from the start,
    which are another problem (`unchanged_parameters`, `lost_updates`); biases, weights of one value, and those of fewer
    than ``values`` = 64 numbers; a training whose gradients have fallen as far has found what it was looking for.
    """
    weights, totals, norm = step.weights_of_updates, step.totals, step.grad_norm or 0.0
    measured = (weights >= 0) & (totals.count >= values) & ~step.make_for_sites(_are_biases)
    measured &= (totals.min < totals.max)[weights]
    ids = np.flatnonzero(measured)
    if not len(ids) or not 0 < norm < np.inf:
        return None
    largest = float((totals.abs_mean[ids] / totals.abs_mean[weights[ids]]).max())
    size, recent = float(np.sqrt(totals.l2_norm[ids] @ totals.l2_norm[ids])), memory.last("recent", consecutive_steps)
    recent.append((largest, size, norm))
    usual, of_gradients = memory.get("usual", (0.0, 0.0))
    if size > usual or norm > of_gradients:
        _, sizes, norms = np.array(recent)[-9:].T
        usual, of_gradients = memory["usual"] = max(usual, middle(sizes)), max(of_gradients, middle(norms))
    memory["reached"] = memory.get("reached", False) or largest > 10 * ratio
    is_small = largest < ratio and not memory["reached"]
    has_ended = 0 < size < fallen * usual and 100 * size / usual < norm / of_gradients
    streaks = [memory.streak("small"), memory.streak("ended")]
    if not (is_small or has_ended or any(each.goes_on for each in streaks)):
        return []
    if is_small:
        rising, third = np.array(recent)[:, 0], -(-len(recent) // 3)
        is_lost = 2 * totals.zeros[ids].sum() > totals.count[ids].sum()
        grows = middle(rising[-third:]) > 1.5 * middle(rising[:third])
        is_small = not (grows or is_lost) and step.losses.have_fallen() is False
    small = (
        "no step has changed a weight by more than {value} of its size since step {since}, and the loss does not "
        "fall. About 0.001 is usual: check the learning rate, and what clips or divides the gradients."
    )
    ended = (
        "the updates have fallen to {value} of what they were since step {since}, and the gradients have not: the "
        "learning rate is almost 0, and the model no longer learns. Check the schedule: one that counts epochs must "
        "not be stepped at each batch."
    )
    severity = "note" if step.losses.have_fallen(0.5) else "warning"
    lasting: dict[str, Any] = {"severity": severity, "steps": consecutive_steps, "over": part * (step.number + 1)}
    return [
        Ill(bool(is_small), small, largest, ratio, key="small", **lasting),
        Ill(has_ended, ended, size / usual if usual else 0.0, fallen, key="ended", **lasting),
    ]


def _are_biases(step: Step) -> Mask:
    return np.array([is_bias(name) for name, _ in step.sites], bool)


def _find_loss_before(losses: dict[int, float], at: int) -> float:
    """The loss up to a step, which comes before its update."""
    return middle(np.array([loss for number, loss in losses.items() if at - 3 < number <= at]))


def _has_risen(losses: dict[int, float], at: int, worse: float) -> bool:
    before, after = (
        _find_loss_before(losses, at),
        [loss for number, loss in losses.items() if at < number <= at + _AFTER],
    )
    limit = before + worse * abs(before)
    return any(middle(np.array(after[i : i + 3])) > limit for i in range(len(after) - 2))
