"""Updates against the weights that they change."""

from __future__ import annotations

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
    seen, unsized = memory.of_sites("seen", False), memory.of_sites("unsized", False)
    begins = measured & ~seen
    if np.count_nonzero(begins):
        is_constant = (step.totals.min == step.totals.max)[weights]
        unsized |= begins & (is_constant | (sizes < begun) | step.once(_are_biases))
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
            text += ". The loss has not suffered, so nothing needs to be done; about 0.001 is usual later on."
        else:
            text += f", and the loss {'went up' if is_whole else 'does not come down'}" if losses else ""
            text += ". About 0.001 is usual. Lower its learning rate, or warm it up longer."
        began, threshold = (at, whole) if is_whole else (int(streak.since[site]), ratio)
        severity = "note" if is_note else "warning"
        found.append(Ill(True, text, value, threshold, severity, since=began, site=site, at=at))

    for site in step.in_order(too_large & (lasting | (ratios > whole))):
        value = float(ratios[site])
        if value > whole:
            rewritten[site] = step.number, value
            say(site, step.number, value, bool(losses), True)
        else:
            came_down = _before(losses, step.number) < _before(losses, int(streak.since[site]))
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


def _are_biases(step: Step) -> Mask:
    return np.array([is_bias(name) for name, _ in step.sites], bool)


def _before(losses: dict[int, float], at: int) -> float:
    """The loss up to a step, which comes before its update."""
    return middle(np.array([loss for number, loss in losses.items() if at - 3 < number <= at]))


def _has_risen(losses: dict[int, float], at: int, worse: float) -> bool:
    before, after = _before(losses, at), [loss for number, loss in losses.items() if at < number <= at + _AFTER]
    limit = before + worse * abs(before)
    return any(middle(np.array(after[i : i + 3])) > limit for i in range(len(after) - 2))
