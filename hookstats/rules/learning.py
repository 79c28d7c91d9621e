"""Parameters that do not learn: those that never change, updates that are lost to rounding, weights that only decay."""

from __future__ import annotations

import numpy as np

from hookstats.numbers.fields import Counts
from hookstats.numbers.significands import SIGNIFICANT_BITS, count_bits
from hookstats.rules.engine import Ill, rule
from hookstats.rules.history import middle
from hookstats.rules.memory import Memory
from hookstats.rules.step import Mask, Step

SPARSE = 0.5  # share of a gradient that is 0, from which on it is one of rows that were not in the batch
_LEAST = 3  # measured steps, by which anything is said to last
_ACCUMULATED = 100  # steps, in which gradients may be accumulated
_TINY = 1e-4  # of the usual size of a gradient
_FOUND = 1e-3  # of the size of the first gradients: what is sought has been found


@rule(depth=2)
def unchanged_parameters(step: Step, memory: Memory, steps: int = 20, all_steps: int = 30) -> list[Ill] | None:
    """Parameters do not change, although gradients arrive (warning; critical if no parameter changes).

    For ``steps`` = 20 steps, in which other parameters changed, or ``all_steps`` = 30 in which none did, of which at
    least three were measured. The sample of each parameter is judged: "update_sample" has nothing but zeros, and
    "param_sample" is what it was in the measured step before, so that nothing happened between them, either. Where
    every gradient is exactly 0 from the start, though the model runs, that is told, too, whatever weight decay does to
    the parameters. The figures are ours.

    What else looks like it: updates that are lost to rounding (lost_updates), a learning rate of 0 on purpose, a
    schedule that has ended. What to do: see that the optimizer was made of ``model.parameters()`` of this very model,
    after it was moved, wrapped or replaced, and print the learning rates of its groups.

    False-positive guards: frozen parameters (``requires_grad=False``) have no gradient, and neither have
    those whose modules do not run; both are not judged, nor are gradients that are mostly 0 (an embedding, whose rows
    are not in each batch), below 1e-4 of the others' (these vanish), or what they were in the measured step before
    (nobody has computed them anew). A training whose gradients have fallen to 1e-3 of what they were has found what it
    was looking for. Warmup from 0 and turns of several optimizers end before; while gradients grow from step to step,
    as they do when they are accumulated, it waits for 100 steps.
    """
    measured, totals = step.make_for_alike(find_measured_updates), step.totals
    if not np.count_nonzero(measured):
        return None
    found = [] if memory.get("has gradients") else _judge_zero(step, memory, measured, all_steps)
    changed, streak, sizes = memory.keep_by_site("changed", False), memory.streak(), memory.get("sizes")
    still = measured & (totals.zeros == totals.count)
    memory["sizes"], stands = totals.l2_norm, bool(np.count_nonzero(still))
    if streak.goes_on and sizes is not None and sizes.shape == totals.l2_norm.shape:
        # What has moved between measured steps does not stand still.
        weights, stood = step.weights_of_updates, streak.lengths > 0
        still &= ~(stood & (weights >= 0) & (abs(totals.l2_norm - sizes) > 0)[weights])
    moves = measured & ~still if stands else measured
    changed |= moves
    lasts = streak.push(step.number, still, measured, _LEAST, over=steps)
    is_new = _is_computed_anew(step, memory, stands)
    norm = step.grad_norm or 0.0
    memory["norm"] = max(memory.get("norm", 0.0), norm if np.isfinite(norm) else 0.0)
    norms = memory.setdefault("norms", [])
    if np.count_nonzero(moves):
        norms.clear()
        if found or not stands or not lasts.any():
            return found
        gradients = step.gradients_of_updates
        sizes = np.where(gradients >= 0, totals.rms[gradients], np.nan)
        usual = sizes[moves & (sizes > 0)]
        lasts &= is_new & _has_gradient(step) & ~_is_rounded(step)
        lasts &= ~(sizes < _TINY * (np.median(usual) if usual.size else 0.0))
        never = (
            "{names} never changed, although gradients arrive and other parameters learn. No optimizer has them, or "
            "the learning rate of their group is 0: compare the optimizer's param_groups with "
            "model.named_parameters()."
        )
        stopped = (
            "{names} has not changed since step {since}, although gradients arrive and other parameters learn. Check "
            "the learning rate of the group, and whether the optimizer was made anew without it; to freeze it on "
            "purpose, set requires_grad=False."
        )
        each = [(lasts & ~changed, never), (lasts & changed, stopped)]
        return [Ill(where, text, 1.0, 1.0, since=streak.since, together=True) for where, text in each]
    if not norms:
        memory["all since"] = step.number
    norms.append(norm)
    third = -(-len(norms) // 3)
    grows = middle(np.array(norms[-third:])) > 1.5 * middle(np.array(norms[:third]))  # as it does when accumulated
    if len(norms) < _LEAST or step.number - memory["all since"] + 1 < (_ACCUMULATED if grows else all_steps):
        return found
    ill = step.put_in_order(_has_gradient(step) & ~(still & _is_rounded(step)))
    has_changed = bool(changed[ill].any())
    text = (
        "no parameter of the model has ever changed, although gradients arrive. The learning rate is 0, step() is not "
    )
    text += "called, or the optimizer has the parameters of another model: make it after this one is moved or wrapped."
    if has_changed:
        text = "no parameter has changed since step {since}, although gradients arrive. Check whether the schedule has "
        text += "brought the learning rate to 0, and whether step() is called."
    is_ill = bool(ill) and not (has_changed and norm < _FOUND * memory["norm"])
    return [*found, Ill(is_ill, text, 1.0, 1.0, "critical", since=memory["all since"], sites=ill)]


def _is_computed_anew(step: Step, memory: Memory, is_asked: bool) -> Mask:
    """``[n]``: of each update, whether its gradient is other than it was in the measured step before."""
    gradients, before = step.gradients_of_updates, memory.keep_by_site("gradients", np.nan)
    now, ids = step.totals.l1_norm, step.find_fired_ids("param_grad")
    is_new = (gradients >= 0) & (now[gradients] != before[gradients]) if is_asked else gradients >= 0
    before[ids] = now[ids]
    return np.asarray(is_new)


def _judge_zero(step: Step, memory: Memory, measured: Mask, steps: int) -> list[Ill]:
    """Return what is said where every gradient of a parameter has been 0 since the run began."""
    through = step.find_fired("grad_output")
    changes = bool((step.totals.abs_max[measured] > 0).any())
    # None: gradients that are not measured, such as sparse ones.
    memory["has gradients"] = bool(step.grad_norm) or (changes and through.any() and step.grad_norm is None)
    if memory["has gradients"] or not through.any():
        return []
    since, count = memory.setdefault("zero since", step.number), memory.get("zeros", 0) + 1
    memory["zeros"] = count
    if count < _LEAST or step.number - since + 1 < steps:
        return []
    text = "only weight decay changes the parameters: " if changes else "no parameter of the model changes: "
    outputs = step.make_for_alike(_find_outputs_of_biases)
    if np.count_nonzero(step.sums[outputs]):
        text += (
            "gradients pass through the outputs, but no parameter has one when the optimizer steps. Call zero_grad() "
            "before backward(), not between backward() and step()."
        )
    elif step.totals.abs_max[through].any():
        text += (
            "gradients of the outputs arrive, but those of all parameters are 0. Look for dead units, weights that "
            "are 0, and gradients that are too small for float16 (use a GradScaler)."
        )
    else:
        text += (
            "the gradients of all outputs are 0. The loss does not depend on the outputs: check whether it ignores "
            "every label (ignore_index, an empty mask), has a single class, or is multiplied by 0."
        )
    return [Ill(True, text, 1.0, 1.0, "critical", since=since, sites=step.put_in_order(measured))]


def _find_outputs_of_biases(step: Step) -> Counts:
    """The ids of gradients of outputs that add up to gradients of biases that came, or of weights without one.

    Where no gradient of a parameter came, as after zero_grad(set_to_none=True), all of them.
    """
    outputs, came = step.find_partner("param_grad", "grad_output", "*"), step.find_fired("param_grad")
    return outputs[step.make_for_sites(are_sums_of_outputs) & (came if came.any() else True)]


def are_sums_of_outputs(step: Step) -> Mask:
    """``[n]``: gradients of biases, and of weights without one, which may be embeddings: what they add up to is the sum
    of the gradient of their module's output."""
    biases = step.find_partner("param_grad", "param_grad", "weight", "bias")
    of_module = step.find_partner("param_grad", "grad_output", "*") >= 0
    keys = [name.rpartition(".")[2] for name, _ in step.sites]
    is_alone = np.array([key == "weight" for key in keys], bool) & (biases < 0)
    return of_module & (np.array([key == "bias" for key in keys], bool) | is_alone)


@rule(per_site=False, depth=2)
def lost_updates(step: Step, memory: Memory, share: float = 0.8, steps: int = 20) -> Ill | list[Ill] | None:
    """Updates are lost to rounding: parameters of a low precision do not change (note, or warning).

    A parameter whose values are all of bfloat16 or float16 keeps a change only if it is half a unit in the last place:
    1/512 of a value in bfloat16. A model is ill if ``share`` = 0.8 of all sampled elements stay as they are in each
    measured step, of which there are at least five, for ``steps`` = 20 steps. It is a warning where the loss has not
    come down since the run began. The dtype is told by the smallest and largest values of the parameters, which it
    holds exactly. The share is ours; the cause is described in arXiv 2010.06192 (Zamirai et al. 2020).

    What else looks like it: an optimizer that keeps float32 copies of the parameters, whose changes add up unseen until
    they show here; then the loss comes down, and it is a note. What to do: keep float32 parameters and use autocast, or
    an optimizer with float32 copies or stochastic rounding.

    False-positive guards: gradients that are mostly 0 (rows of an embedding) are not judged.
    """
    totals, streak = step.totals, memory.streak()
    judged, count, zeros = step.make_for_alike(find_measured_updates), 0.0, 0.0
    may_be = np.count_nonzero(judged & (totals.zeros > share * totals.count)) > 0
    if not may_be and not streak.goes_on:
        return None
    if not np.count_nonzero(judged := judged & _has_gradient(step)):
        return None
    if may_be:
        judged = judged & _is_rounded(step)
        count, zeros = float(totals.count[judged].sum()), float(totals.zeros[judged].sum())
    if not count or zeros <= share * count:
        return Ill(False, "", steps=5)
    most = step.put_in_order(judged & (totals.zeros > 0))
    most.sort(key=lambda site: -float(totals.zeros[site] / totals.count[site]))
    dtype, came_down = _find_dtype(step, most[0]), step.losses.have_fallen()
    text = (
        f"{{value:%}} of the sampled elements of the parameters do not change in a step: in {dtype} a change below "
        f"1/{2 ** (SIGNIFICANT_BITS[dtype] + 1)} of a value is lost to rounding. "
    )
    if came_down:
        text += "The loss falls, so the optimizer may keep float32 copies; then nothing is wrong."
    else:
        text += "The loss does not fall. " if came_down is False else ""
        text += "Keep the parameters in float32 and use autocast, or take an optimizer with float32 copies or "
        text += "stochastic rounding."
    severity = "warning" if came_down is False else "note"
    return Ill(True, text, zeros / count, share, severity, steps=5, over=steps, site=most[0], sites=most)


@rule(per_site=False, depth=2)
def shrinking_weights(
    step: Step, memory: Memory, part: float = 0.5, rate: float = 5e-4, steps: int = 20, values: int = 64
) -> Ill | list[Ill] | None:
    """Weights shrink by weight decay alone (note; warning if the loss does not fall).

    Where only weight decay changes a parameter, all of its values go towards 0 together: what mean |w| loses is the
    mean |update|. A model is ill if more than half of its matrices lose more than ``part`` = 0.5 of their updates in
    this way, and in each step at least ``rate`` = 5e-4 of their size, in five measured steps in a row, for ``steps`` =
    20 steps. A decay of 0.1 at a learning rate of 1e-3 is 1e-4 a step. The figures are ours.

    What else looks like it: data that were learned by heart, behind which nothing but the decay is left. What to do:
    lower weight_decay, or leave out norms and biases; AdamW multiplies it by the learning rate, Adam does not.

    False-positive guards: parameters with fewer than ``values`` = 64 sampled elements, and those that have
    one value, are not judged; ordinary updates go anywhere.
    """
    totals, weights = step.totals, step.weights_of_updates
    measured = (weights >= 0) & (totals.count >= values)
    measured &= (totals.min != totals.max)[weights]
    if not np.count_nonzero(measured):
        return None
    sizes, before = np.where(measured, totals.abs_mean[weights], np.nan), memory.keep_by_site("sizes", np.nan)
    passed = step.number - memory.get("at", -1)
    memory["sizes"], memory["at"] = sizes, step.number
    path, streak = totals.abs_mean * passed, memory.streak()
    lost = (before - sizes) / path
    ill = (lost > part) & (path > rate * passed * sizes)
    if not np.count_nonzero(ill) and not streak.goes_on:
        return []
    going = streak.push(step.number, ill & measured, measured & np.isfinite(lost), 5, over=steps)
    if 2 * np.count_nonzero(going) <= np.count_nonzero(measured):
        return []
    came_down = step.losses.have_fallen()
    text = (
        "{names}: {value:%} smaller after each step, and almost nothing else changes: weight decay is stronger than "
        f"the gradient{', and the loss does not fall' if came_down is False else ''}. Lower weight_decay: AdamW "
        "multiplies it by the learning rate, Adam and SGD add it to the gradient."
    )
    severity = "warning" if came_down is False else "note"
    return Ill(going, text, totals.abs_mean / sizes, rate, severity, since=streak.since, together=True)


def find_measured_updates(step: Step) -> Mask:
    """``[n]``: the updates that have values in this step."""
    return step.updates & (step.totals.count > 0)


def _has_gradient(step: Step) -> Mask:
    """``[n]``: of each update, whether the gradient of its parameter arrived, and is not mostly 0."""
    totals, gradients = step.totals, step.gradients_of_updates
    dense = (totals.abs_max > 0) & (totals.zeros < SPARSE * totals.count)
    return (gradients >= 0) & dense[gradients]


def _find_dtype(step: Step, site: int) -> str:
    """Return the narrower dtype that holds the extremes of a parameter exactly, of two."""
    weights = int(step.weights_of_updates[site])
    bits = count_bits(np.array([step.totals.min[weights], step.totals.max[weights]])).max()
    return "bfloat16" if bits <= SIGNIFICANT_BITS["bfloat16"] else "float16"


def _is_rounded(step: Step) -> Mask:
    """``[n]``: of each update, whether its parameter is of a low precision, as far as its extremes tell.

    One parameter may have such extremes by chance, or hold nothing but ones: so it is that of most which have others.
    """
    weights, totals = step.weights_of_updates, step.totals
    known = (weights >= 0) & (totals.min != totals.max)[weights] & (totals.count > 0)
    extremes = np.stack([totals.min, totals.max])
    fits = np.isfinite(extremes).all(0) & (count_bits(extremes).max(0) <= SIGNIFICANT_BITS["float16"])
    low = known & fits[weights]
    return (weights >= 0) & (totals.count > 0) if known.any() and (low == known).all() else low
