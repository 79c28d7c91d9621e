"""Channels that do not work: dead ones behind a ReLU, saturated ones behind a tanh or a sigmoid, dropped ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from hookstats.numbers.fields import FIELDS, Counts
from hookstats.rules.answers import count_classes, find_answer
from hookstats.rules.engine import Ill, rule
from hookstats.rules.formatting import percent
from hookstats.rules.memory import Memory
from hookstats.rules.step import Mask, Step

_INITIAL = 20  # verdicts, by which what was so from the start is told
_COUNT, _ZEROS = FIELDS.index("count"), FIELDS.index("zeros")
_LEAST_VALUES = 100  # of a channel, over all verdicts in a row, or a share of 1 % cannot be told


@rule(of="output", depth=3)
def dead_channels(
    step: Step,
    memory: Memory,
    active: float = 0.01,
    share: float = 0.5,
    consecutive_steps: int = 5,
    some_consecutive_steps: int = 20,
) -> Ill | list[Ill] | None:
    """A ReLU whose channels are 0 nearly always: more than half of them (warning), or all (critical).

    More than half are a note where the loss has come down to half of the first ones: the others are enough then.

    A channel is dead where fewer than ``active`` = 1 % of its values are not 0, and a layer is ill where more than
    ``share`` = 0.5 of its channels are dead (SageMaker Debugger, dead-relu), in ``consecutive_steps`` = 5 verdicts in a
    row if all of them are, and in ``some_consecutive_steps`` = 20 if some are alive: small layers begin like that by
    chance, and come back. Outputs are judged that are never negative and hold zeros, which is what a ReLU leaves; of
    those without channels, the layer as a whole.

    What else looks like it: a mask, and the sparse weights of a router; both are recognised. What to do: lower the
    learning rate, look at the bias before the ReLU and at the initial weights, or use a LeakyReLU or GELU.

    False-positive guards: half of a ReLU's values may be 0, and single dead channels are common; a channel
    needs 100 values over the row of steps; an output with exactly as many zeros in each of these is sparse by design
    (the weights of a router), unless all are 0; one that no gradient comes back to, while others get theirs, is a
    mask; of a module's several outputs only the first is a layer's (others count, weigh, or are a logarithm that is 0);
    where the output before has as many channels, a ReLU lets no gradient through to those that are dead, or it is a
    mask; and of outputs that follow each other, a ReLU and its pooling, the first is named.
    """
    outputs, totals = step.list_finite("output"), step.totals
    if not outputs:
        return None
    counts, actives = totals.count, totals.count - totals.zeros
    before = memory.keep_by_site("actives", np.nan)
    by_design = (actives == before) & (actives > 0) & (actives < counts)  # as many in each of these steps
    by_design = memory.streak("by design").push(step.number, by_design, None, consecutive_steps - 1)
    memory["actives"] = np.where(counts > 0, actives, before)
    judged = step.make_for_alike(_find_layers)
    # More than `share` dead channels of equal size leave at most this many values.
    most = (1 - share) + share * active
    candidates = judged & (totals.min >= 0) & (actives < most * counts) & ~by_design
    of_some, of_all = memory.streak("some"), memory.streak("every")
    if not np.count_nonzero(candidates) and not of_some.goes_on and not of_all.goes_on:
        return []
    shares, gradients = np.zeros(len(step.sites)), step.find_partner("output", "grad_output")
    for site in np.flatnonzero(candidates).tolist():
        place = outputs.index(site)
        gradient = int(gradients[outputs[place - 1]]) if place else -1
        shares[site] = _measure_dead(step, site, gradient, active, consecutive_steps)
    some = of_some.push(step.number, shares > share, judged, some_consecutive_steps)
    dead = some | of_all.push(step.number, shares == 1, judged, consecutive_steps)
    if dead.any():  # of outputs that follow each other, the first is named
        dead[outputs] &= ~np.append(False, dead[outputs][:-1])
    since = np.where(shares == 1, of_all.since, of_some.since)
    of_dead = (
        f"they are 0 for more than {percent(1 - active)} of their inputs. They get no gradient and rarely recover: "
    )
    of_dead += "lower the learning rate, check the bias before them, or use a LeakyReLU or GELU."
    of_zeros = "all weights of the module are 0, so nothing after it can learn. Check how they are initialised."
    learns = step.losses.have_fallen(0.5)
    if learns:
        of_dead += " The loss falls all the same."
    return Ill(
        dead, "{channels} of {tensor} are dead: {why}", shares, share,
        np.where(shares == 1, "critical", "note" if learns else "warning"), since=since,
        words={
            "channels": lambda site: _say_channels(shares[site]),
            "why": lambda site: of_zeros if has_zero_weights(step, site) else of_dead,
        },
    )  # fmt: skip


def _find_layers(step: Step) -> Mask:
    """``[n]``: the outputs with values that are judged, of which gradients come back if any do."""
    gradients = step.find_partner("output", "grad_output")
    firsts: Mask = np.array([site.tensor in ("output", "output.0") for site in step.sites], bool)
    judged = step.find_finite("output") & firsts
    return judged & (gradients >= 0) & (step.calls[gradients] > 0) if step.is_kind("grad_output").any() else judged


def _measure_dead(step: Step, site: int, gradient: int, active: float, verdicts: int) -> float:
    """The share of the channels that are dead. gradient: the id of that of the output before; -1 without one."""
    state = step.state(site)
    if state is None:
        count, zeros = step.totals.count[[site]], step.totals.zeros[[site]]
    else:
        count, zeros = state[_COUNT], state[_ZEROS]
    known = count * verdicts >= _LEAST_VALUES
    dead = known & (count - zeros < active * count)
    if not np.count_nonzero(dead):
        return 0.0
    through = step.state(gradient) if gradient >= 0 else None
    if through is not None and np.array_equal(through[_COUNT], count):
        dead &= through[_ZEROS] >= (1 - active) * count
    return float(np.count_nonzero(dead) / np.count_nonzero(known))


def has_zero_weights(step: Step, output: int) -> bool:
    """Return whether the weight of an output's module has nothing but zeros, as far as it is measured."""
    name = f"{step.sites[output].name}.weight".lstrip(".")
    weights = [step.find_id(name, kind) for kind in ("param", "param_sample")]
    return any(i >= 0 and step.totals.count[i] > 0 and step.totals.abs_max[i] == 0 for i in weights)


@rule(of="output", depth=3)
def saturated_channels(
    step: Step,
    memory: Memory,
    slope: float = 0.01,
    share: float = 0.5,
    consecutive_steps: int = 100,
    initial_slope: float = 0.1,
) -> Ill | list[Ill] | None:
    """A tanh or sigmoid whose channels are at its ends, where no gradient passes (warning).

    The mean slope of a channel follows exactly from its moments: of a tanh it is 1 - E[x^2], of a sigmoid E[x] -
    E[x^2]. A channel is saturated where it is less than ``slope`` = 0.01 of the steepest one (1, and 1/4), and a layer
    is ill where more than ``share`` = 0.5 of its channels are, in ``consecutive_steps`` = 100 verdicts in a row. A tanh
    is ill after 20, too, where more than half of its channels have had a slope below ``initial_slope`` = 0.1 in every
    verdict since the run began: initial weights leave it above 0.5. The figures are ours: SageMaker Debugger
    (saturated-activation) counts inputs beyond 9.5 on either side, where the slope of a tanh is 2e-8, far beyond where
    learning has stopped.

    What else looks like it: gates that are meant to stay open or closed. What to do: make what comes in smaller, by
    smaller weights, a lower learning rate, scaled inputs, or a norm before it.

    False-positive guards: outputs are judged if they have a gradient, have stayed within [-1, 1] or [0, 1]
    since the run began, and come near 1; not those with zeros (ReLU, masks), nor those whose channels have equal means
    or add up to 1 (softmax), nor the last output of the model, which is to be sure of its answer. What recovers within
    a hundred measured steps, as narrow layers do, is no problem.
    """
    outputs, totals = step.list_finite("output"), step.totals
    if not outputs:
        return None
    beyond, negative = (
        memory.keep_by_site("beyond", False),
        memory.keep_by_site("negative", False),
    )  # where values have been
    beyond |= (totals.abs_max > 1) | (step.nonfinite > 0) if step.has_nonfinite else totals.abs_max > 1
    negative |= totals.min < 0
    gradients, judged = step.find_partner("output", "grad_output"), step.make_for_alike(_find_outputs_with_gradients)
    candidates = judged & ~beyond & (totals.abs_max > 0.9) & (totals.zeros == 0)
    verdicts: Counts = memory.keep_by_site("verdicts", 0)
    verdicts += judged
    lasting, first = memory.streak("lasting"), memory.streak("from the start")
    if not np.count_nonzero(candidates) and not lasting.goes_on and not first.goes_on:
        return []
    shares, initial = np.zeros((2, len(step.sites)))
    for site in np.flatnonzero(candidates).tolist():
        if site != outputs[-1] and step.calls[gradients[site]]:
            shares[site] = _measure_saturation(step, site, slope, negative[site])
            if negative[site]:
                initial[site] = _measure_saturation(step, site, initial_slope, True)
    ill = lasting.push(step.number, shares > share, judged, consecutive_steps)
    from_start = first.push(step.number, initial > share, judged, _INITIAL) & (first.lengths == verdicts) & ~ill
    end = "they sit at the ends of the {kind} and pass less than {least:%} of the gradient. Make the input smaller: "
    end += "{smaller}, or a norm before it."
    words = {
        "channels": lambda site: _say_channels((initial if from_start[site] else shares)[site]),
        "kind": np.where(negative, "tanh", "sigmoid"),
    }
    lately = {**words, "least": slope, "smaller": "smaller weights, a lower learning rate"}
    at_first = {**words, "least": initial_slope, "smaller": "smaller initial weights"}
    begin = "{channels} of {tensor} "
    return [
        Ill(ill, f"{begin}are saturated: {end}", shares, share, since=lasting.since, words=lately),
        Ill(from_start, f"{begin}have been saturated from the start: {end}", initial, share, since=first.since,
            words=at_first),
    ]  # fmt: skip


def _find_outputs_with_gradients(step: Step) -> Mask:
    return step.find_finite("output") & (step.find_partner("output", "grad_output") >= 0)


def _measure_saturation(step: Step, site: int, slope: float, is_tanh: bool) -> float:
    """The share of the channels that are saturated."""
    stats = step.read_channels_or_whole(site)
    square, means = stats.rms**2, stats.mean
    if is_tanh:
        return float((1 - square < slope).mean())
    if len(means) > 1 and means.mean() < 0.99 and (np.ptp(means) < 1e-4 * means.mean() or abs(means.sum() - 1) < 1e-3):
        return 0.0  # a softmax
    return float((means - square < slope / 4).mean())


def _say_channels(share: Any) -> str:
    return "all channels" if share == 1 else f"{percent(share)} of the channels"


@rule(of="grad_output", depth=3)
def heavy_dropout(
    step: Step,
    memory: Memory,
    share: float = 0.75,
    of_answers: float = 0.02,
    consecutive_steps: int = 10,
    late: int = 50,
    channels: int = 8,
) -> Ill | None:
    """A dropout keeps almost nothing, or drops the model's answers (note, or warning).

    What a dropout leaves out gets no gradient: in the gradient of the output before it, as many values of each channel
    are exactly 0, but for chance. So a layer is ill where more than ``share`` = 0.75 of its gradient are 0, or
    ``of_answers`` = 0.02 of that of the model's last output and more than one in each row, in ``consecutive_steps`` =
    10 measured steps in a row, and where the zeros of its channels, added up over these steps, vary from one channel to
    the next as a coin's throws do, and those of all of them from step to step. It is a warning where answers are
    dropped, and where the loss has not come down after ``late`` = 50 of these steps. The law is arithmetic; the figures
    are ours.

    What else looks like it: a network that is to be as noisy. What to do: give the share that is left out (0.1 to 0.5
    as a rule), not the share that is kept; no dropout comes after the last layer.

    False-positive guards: zeros of a ReLU, a mask or pooling are not equally many in all channels, or exactly as many,
    or as many in each step; gradients of fewer than ``channels`` = 8 channels are not judged.
    """
    totals, counted = step.totals, memory.setdefault("counted", {})  # steps, values, zeros, since when, chance
    found, limits = find_answer(step), np.full(len(step.sites), share)
    if found is not None:  # of a row that is sure, the right class may have none
        limits[found[1]] = max(of_answers, 1.5 / max(count_classes(step, found[0]), 1))
    likely = step.find_finite("grad_output") & (totals.zeros > limits * totals.count) & (totals.zeros < totals.count)
    if not np.count_nonzero(likely) and not counted:
        return None
    for site in [each for each in counted if step.calls[each] and not likely[each]]:
        del counted[site]
    ill, rates, since = np.zeros(len(step.sites), bool), totals.zeros / totals.count, np.zeros(len(step.sites), int)
    for site in np.flatnonzero(likely).tolist():
        state = step.state(site)
        if state is None or state.shape[1] < channels:
            continue
        values, zeros, steps, off, began = counted.get(site, (np.zeros(state.shape[1]), 0.0, 0, 0.0, step.number))
        if len(values) == state.shape[1]:
            rate = float(np.sum(zeros) / values.sum()) if steps else float(rates[site])
            count = float(totals.count[site])
            off += (float(totals.zeros[site]) - rate * count) ** 2 / (count * rate * (1 - rate))
            values, zeros, steps = values + state[_COUNT], zeros + state[_ZEROS], steps + 1
            counted[site] = values, zeros, steps, off, began
        if steps >= consecutive_steps:
            rate = zeros.sum() / values.sum()
            chance = float(((zeros - rate * values) ** 2 / (values * rate * (1 - rate))).mean())
            ill[site], rates[site], since[site] = 1 / 3 < chance < 3 and 0.1 * steps < off < 4 * steps, rate, began
    stands = step.losses.have_fallen() is False
    text = (
        "{value:%} of the gradient of the output of {name} is 0, evenly over its channels: a dropout after it keeps "
        "only {left:%}{advice}."
    )
    last = -1 if found is None else found[1]
    of_last = " of the model's outputs. Remove the dropout after the last layer"
    usual = ". Its argument is the share to drop, usually 0.1 to 0.5, not the share to keep"
    words = {
        "left": 1 - rates,
        "advice": lambda site: of_last if site == last else usual,
    }
    long = [site for site, (*_, steps, _, _) in counted.items() if site == last or (stands and steps >= late)]
    severity = np.where(np.isin(np.arange(len(ill)), long), "warning", "note")
    return Ill(ill, text, rates, share, severity, since=since, words=words)
