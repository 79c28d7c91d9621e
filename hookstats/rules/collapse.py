"""Differences that have gone: rows that get one answer, channels or modules that are one, rows of weights at rest."""

from __future__ import annotations

import numpy as np

from hookstats.numbers.fields import FIELDS, Array, Counts
from hookstats.rules.answers import find_answer
from hookstats.rules.engine import Ill, rule
from hookstats.rules.formatting import times
from hookstats.rules.memory import Memory
from hookstats.rules.step import Step, is_bias

_COUNT, _MEAN, _M2 = map(FIELDS.index, ("count", "mean", "m2"))


@rule(of="output", depth=5)
def constant_output(
    step: Step, ratio: float = 0.003, exactly: float = 1e-5, consecutive_steps: int = 10, rows: int = 8
) -> Ill | None:
    """The model gives all rows the same answer: its output does not depend on its input (warning).

    How far the channels of the model's last output vary from row to row, their standard deviation, is less than
    ``ratio`` = 0.003 of that of all its values; where there is one channel, its largest and smallest value agree to
    ``exactly`` = 1e-5. In ``consecutive_steps`` = 10 measured steps in a row. Healthy models of the fleet, a third of
    them language models that have learned little but how often a token comes, have 0.03 and more. The figures are ours.

    What else looks like it: data of which the input says nothing about the target. What to do: look for a mean over the
    batch in place of the features, inputs that are far too small, layers that are dead, a loss that is least where all
    is one point (embeddings without negatives, a KL term that is too large).

    False-positive guards: channels of fewer than ``rows`` = 8 values are not judged, nor is an output of
    nothing but zeros, or without a gradient, nor what is constant because the inputs are (`constant_input`).
    """
    found = find_answer(step)
    if found is None:
        return None
    site, totals, state = found[0], step.totals, step.state(found[0])
    if totals.abs_max[site] == 0 or (totals.count[site] if state is None else state[_COUNT].min()) < rows:
        return None
    if state is None or state.shape[1] == 1:
        varies, limit, of_what = float((totals.max - totals.min)[site] / totals.abs_max[site]), exactly, "its size"
    else:
        varies, limit, of_what = 1.0, ratio, "the variation of all its values"
        within = float(state[_M2].sum()) / float(step.scales[site]) ** 2
        if within <= 2 * ratio**2 * totals.l2_norm[site] ** 2:  # this spares most the rest
            varies = float(np.sqrt(within / (totals.var[site] * (totals.count[site] - 1))))
    text = (
        "all rows get the same answer: {tensor} varies from row to row by {value} of {what} since step {since}. Look "
        "for a mean over the batch dimension, inputs that are far too small, dead layers, and a loss that is smallest "
        "where everything is one point."
    )
    return Ill(varies < limit, text, varies, limit, steps=consecutive_steps, site=site, words={"what": of_what})


@rule(of="grad_output", depth=4)
def posterior_collapse(
    step: Step, memory: Memory, size: float = 0.1, equal: float = 0.25, consecutive_steps: int = 20
) -> Ill | list[Ill] | None:
    """A layer is driven to 0 by a penalty on its size alone: the KL term of a variational autoencoder (warning).

    The gradient of such a penalty is the output itself, times one number for all channels. A layer is ill if the rms
    of its output is below ``size`` = 0.1 (beside noise of 1, as a posterior has it, it says nothing), and the rms of
    its gradient over that of its output is the same in all channels and in the measured step before, to ``equal`` =
    0.25, in ``consecutive_steps`` = 20 measured steps in a row: then nothing but the penalty reaches it (Bowman et al.
    2016, arXiv 1511.06349). The law follows from the definition; the figures are ours.

    What else looks like it: activations that are penalised on purpose, and are not needed. What to do: a smaller weight
    of the KL term, one that grows from 0, or a least number of bits for each dimension (free bits); a weaker decoder.

    False-positive guards: outputs of fewer than 4 channels, or that have several gradients in a step, are not judged.
    """
    ids, gradients = step.make_for_alike(_pair_outputs_with_gradients)
    rms, known = step.totals.rms, memory.keep_by_site("ratios", np.nan)
    is_small = rms[ids] < size
    if not np.count_nonzero(is_small) and not memory.streak().goes_on:
        return []
    ratios = rms[gradients] / rms[ids]
    likely = is_small & (abs(ratios / known[ids] - 1) < equal) & (ratios > 0)
    known[ids] = np.where(is_small, ratios, np.nan)
    ill, judged = np.zeros((2, len(step.sites)), bool)
    judged[ids] = True
    for output, gradient in zip(ids[likely].tolist(), gradients[likely].tolist(), strict=True):
        of_output, of_gradient = step.state(output), step.state(gradient)
        if of_output is not None and of_gradient is not None and of_output.shape == of_gradient.shape:
            of_channels = np.sqrt(_sum_squares(of_gradient) / _sum_squares(of_output))
            if len(of_channels) >= 4:
                ill[output] = bool(of_channels.max() * (1 - equal) < of_channels.min() * (1 + equal))
    text = (
        "the gradient of {tensor} has been this output times one number, in all channels, since step {since}, and its "
        "rms has fallen to {value}: only a penalty on its size reaches it, and it says nothing about the input. In a "
        "variational autoencoder the posterior has collapsed: lower the weight of the KL term, raise it slowly from "
        "0, or allow each dimension some free bits."
    )
    return Ill(ill, text, rms, size, judged=judged, steps=consecutive_steps)


def _sum_squares(state: Array) -> Array:
    """Return the sum of the squares of each channel's values."""
    squares: Array = state[_M2] + state[_COUNT] * state[_MEAN] ** 2
    return squares


def _pair_outputs_with_gradients(step: Step) -> Counts:
    """``[2, pairs]``: the ids of outputs with one gradient in the step, and of these gradients."""
    gradients = step.find_partner("output", "grad_output")
    known = step.find_finite("output") & (gradients >= 0) & (step.calls == 1)
    known &= step.find_finite("grad_output")[gradients] & (step.calls[gradients] == 1)
    ids = np.flatnonzero(known)
    return np.array([ids, gradients[ids]])


@rule(of="output", per_site=False, depth=1)
def equal_channels(step: Step, memory: Memory, consecutive_steps: int = 5, width: int = 8) -> Ill | None:
    """All channels of a layer are equal, because its weights started from one value (warning).

    Rows of weights that are equal get equal gradients, and stay so: of all of its channels the layer has one. The mean,
    the deviation and both extremes of all channels of its output agree to 1e-6, in the first ``consecutive_steps`` = 5
    measured steps. It follows from the chain rule; the figures are ours.

    What else looks like it: nothing that we know. What to do: initialise weights at random; biases may be constant.

    False-positive guards: outputs that do not vary at all, fewer than ``width`` = 8 channels, and modules
    without weights are not judged.
    """
    known = memory.keep_by_site("different", False)
    judged = step.find_finite("output") & ~known
    if not np.count_nonzero(judged):
        return None
    equal, weights = np.zeros(len(step.sites), bool), {name for name, _ in step.sites if name.endswith("weight")}
    for site in step.put_in_order(judged):
        channels, weight = step.channels(site), f"{step.sites[site].name}.weight".lstrip(".")
        if channels is None or weight not in weights or len(channels.count) < width or channels.count.min() < 8:
            known[site] = True
        elif step.totals.std[site] > 0:
            rows = np.array([channels.mean, channels.std, channels.min, channels.max])
            equal[site] = bool((np.ptp(rows, axis=1) <= 1e-6 * np.abs(rows).max(axis=1)).all())
            known[site] = not equal[site]
    text = (
        "all {count} channels of {tensor} are the same{more}: the weights started from one value, so all rows get the "
        "same gradient and stay equal. Initialise them at random."
    )
    words = {
        "count": lambda sites: str(len(step.read_channels_or_whole(sites[0]).count)),
        "more": lambda sites: f", and so are those of {times(len(sites) - 1, 'other layer')}" if len(sites) > 1 else "",
    }
    return Ill(equal, text, 1.0, 1.0, judged=judged, steps=consecutive_steps, together=True, words=words)


@rule(of="param_grad", per_site=False, depth=1)
def equal_modules(
    step: Step, memory: Memory, consecutive_steps: int = 5, values: int = 64, first: int = 20
) -> Ill | None:
    """Modules started with the same weights, and learn the same (warning).

    Two weights are equal, and so are their gradients, and those of their modules' outputs: sample, mean, rms and both
    extremes agree to the last bit, in ``consecutive_steps`` = 5 measured steps in a row, from one of the ``first`` = 20
    on. Both see the same and are asked the same, so that nothing will ever part them: a copy (``deepcopy``), or a seed
    that is set before each of them. It follows from the chain rule; the figures are ours.

    What else looks like it: nothing that we know. What to do: initialise each anew, with another seed.

    False-positive guards: copies that see other things, as the layers of a stack do, get other gradients; where these
    are averaged afterwards, as of replicas in one process, those of the outputs differ; biases,
    weights of one value, and those of fewer than ``values`` = 64 numbers are not judged; shared parameters are one.
    """
    weights, totals, streak = step.find_partner("param_grad", "param_sample"), step.totals, memory.streak()
    outputs = step.find_partner("param_grad", "grad_output", "*")
    age = memory["age"] = memory.get("age", 0) + 1
    if age > first and not streak.goes_on:
        return None
    ids = step.find_finite_ids("param_grad")
    ids = ids[(weights[ids] >= 0) & (totals.count[ids] >= values) & (totals.abs_max[ids] > 0)]
    sizes = np.sort(totals.rms[ids])
    equal, groups = np.zeros(len(step.sites), bool), dict[bytes, list[int]]()
    if np.count_nonzero(sizes[1:] == sizes[:-1]):
        for site, weight in zip(ids.tolist(), weights[ids].tolist(), strict=True):
            if totals.min[weight] < totals.max[weight] and not is_bias(step.sites[site].name):
                both = [[site, weight, *([int(outputs[site])] if outputs[site] >= 0 else [])]]
                key = np.concatenate([getattr(totals, name)[both] for name in ("count", "mean", "rms", "min", "max")])
                groups.setdefault(key.tobytes(), []).append(site)
        for group in groups.values():
            equal[group] = len(group) > 1
    text = (
        "{pair}{more} are equal, and get equal gradients, to the last bit, since step {since}: they started as "
        "copies, get the same inputs, and will never differ. Initialise each separately; deepcopy, and a seed that is "
        "set again, copy the values."
    )

    def name_pair(sites: list[int]) -> str:
        group = next(each for each in groups.values() if sites[0] in each)
        return " and ".join(step.sites[site].name for site in group)

    words = {
        "pair": name_pair,
        "more": lambda sites: f", and {times(len(sites) - 2, 'other')} alike," if len(sites) > 2 else "",
    }
    return Ill(equal, text, 1.0, 1.0, steps=consecutive_steps, together=True, words=words)


@rule(of="param_grad", depth=4)
def silent_rows(step: Step, memory: Memory, share: float = 0.7, consecutive_steps: int = 50) -> Ill | list[Ill] | None:
    """Most neurons or heads of a layer get no gradient at all (note; warning if they had one before).

    ``share`` = 0.7 of the rows of a weight's gradient are exactly 0, and so are the gradients of the same channels of
    the layer's output, in ``consecutive_steps`` = 50 measured steps in a row: what comes after them is masked, dead or
    never chosen. In a healthy ReLU network it is 0.6 at most, for a while. The figures are ours.

    What else looks like it: a network that was pruned, or is masked, on purpose. What to do: look at masks of heads and
    neurons after this layer, and at whether a ReLU after it is dead.

    False-positive guards: embeddings, whose rows are tokens, have no such channels in their outputs; fewer
    than 8 rows are not judged.
    """
    outputs, totals, had = (
        step.find_partner("param_grad", "grad_output", "weight"),
        step.totals,
        memory.keep_by_site("had", False),
    )
    judged = step.find_finite("param_grad")
    likely = judged & (outputs >= 0) & (totals.zeros >= share * totals.count)
    if np.count_nonzero(likely):
        likely &= (totals.count[outputs] > 0) & (totals.zeros < totals.count)
    had |= judged & ~likely
    if not np.count_nonzero(likely) and not memory.streak().goes_on:
        return []
    silent, counts = np.zeros((2, len(step.sites)))
    for weight in np.flatnonzero(likely).tolist():
        rows, channels = step.channels(weight), step.channels(int(outputs[weight]))
        if rows is not None and channels is not None and len(rows.count) == len(channels.count) >= 8:
            silent[weight] = float(((rows.zeros == rows.count) & (channels.zeros == channels.count)).mean())
            counts[weight] = len(rows.count)
    text = (
        "{silent} of {count} rows of {tensor} have been exactly 0 since step {since}: these neurons or heads do not "
        "learn. Look for masks after this layer, and for dead units there; nothing is wrong if they were pruned on "
        "purpose."
    )
    return Ill(
        silent >= share, text, silent, share, np.where(had, "warning", "note"), judged,
        consecutive_steps, words={"silent": np.rint(silent * counts), "count": counts},
    )  # fmt: skip
