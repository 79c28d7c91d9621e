"""Gradients on their way: whether they reach all parameters, and are those of one step alone."""

from __future__ import annotations

import numpy as np

from hookstats.numbers.fields import Array, Counts
from hookstats.numbers.kinds import is_of_kind
from hookstats.rules.engine import rule
from hookstats.rules.finding import Finding
from hookstats.rules.formatting import number
from hookstats.rules.memory import Memory
from hookstats.rules.step import Mask, Step

SPARSE = 0.5  # share of a gradient that is 0, from which on it is one of rows that were not in the batch


@rule(of="param_grad", per_site=False, depth=4)
def missing_gradients(step: Step, memory: Memory, steps: int = 20) -> list[Finding] | None:
    """Parameters that never get a gradient, although what they belong to runs and others get theirs: note, or warning.

    A warning where the path from the loss is cut for certain: everything that runs before has no gradient either, or
    what runs behind it in the same block has one. The parameters have had no
    gradient, or one that is 0 throughout, from the start and for ``steps`` = 20 steps in which the module ran, at least
    five of them measured. The finding names the last module without one in order of execution: behind it the path from
    the loss is cut, by ``detach()``, ``no_grad``, an integer, ``.item()``, or weights that are 0. The figures are ours.

    What else looks like it: a head that this loss does not use, or not yet. What to do: look at what is done with the
    output that is named, up to the next module; freeze what is not to learn with ``requires_grad=False``.

    False-positive guards: frozen parameters have no gradient to wait for; modules that do not run are not
    judged, nor is what ever had a gradient, or has changed without one; a gradient that is 0 behind weights that begin
    with 0 (LoRA, the last norm of a residual block) lasts a step or two.
    """
    gradients, totals = step.is_kind("param_grad"), step.totals
    arrived = step.valued("param_grad")
    if step.has_nonfinite:
        arrived = gradients & (totals.count + step.nonfinite > 0)
    if not np.count_nonzero(arrived):
        return None
    outputs = step.once(_outputs_of_gradients)
    reached, waited, first = (
        memory.of_sites("reached", False),
        memory.of_sites("waited", 0),
        memory.of_sites("first", 0),
    )
    updates = step.updates_of_gradients
    reached |= arrived & ((totals.abs_max > 0) | (step.nonfinite > 0) if step.has_nonfinite else totals.abs_max > 0)
    waits = gradients & ~reached
    if not np.count_nonzero(waits):
        return []
    waits &= (outputs >= 0) & (totals.count > 0)[outputs]
    if not waits.any():
        return []
    changes = (updates >= 0) & ((totals.abs_max > 0) & (totals.count > 0))[updates] & ~arrived
    reached |= gradients & changes
    waits &= ~reached
    first[waits & (waited == 0)] = step.number
    waited[waits] += 1
    ill = waits & (waited >= 5) & (step.number - first + 1 >= steps)
    if not ill.any() or not reached[gradients].any():
        return []
    places = {site: place for place, site in enumerate(step.order.tolist())}
    sites = sorted(np.flatnonzero(ill).tolist(), key=lambda site: places[int(outputs[site])])
    ran = {step.sites[site].name: place for place, site in enumerate(step.ordered("output"))}
    last, is_one = step.sites[sites[-1]].name.rpartition(".")[0], len(sites) == 1
    behind = [name for name, place in ran.items() if place > ran[last]]
    is_zero = bool((step.calls[sites] > 0).any())
    what = "only a gradient that is 0" if is_zero else "no gradient"
    cut = f"between {last or 'the model'} and {behind[0]}" if behind else f"after {last or 'the model'}"
    why = (
        "weights that are all 0, or units that are dead or saturated, let nothing through"
        if is_zero
        else "look for detach(), no_grad, .item() or an integer there, or an output that the loss does not use"
    )
    sentence = (
        f"{step.names_of(sites[::-1])} {'gets' if is_one else 'get'} {what}, in all {int(waited[sites[-1]])} measured "
        f"steps, and {'does' if is_one else 'do'} not learn: the way back from the loss ends {cut}: {why}."
    )
    severity = "warning" if _is_cut(step, sites, ran, reached) else "note"
    listed = [sites[-1], *sites[:-1]]
    return [
        step.finding("missing-gradients", listed[0], 0.0, 0.0, severity, sentence, since=first[listed[0]], sites=listed)
    ]


def _is_cut(step: Step, missing: list[int], ran: dict[str, int], reached: Mask) -> bool:
    """Return whether all that runs up to there lacks gradients, or what runs after it in the same block has some.

    Otherwise it may be a head of its own.
    """
    places = {
        module: ran[module]
        for site in np.flatnonzero(reached & step.is_kind("param_grad")).tolist()
        if (module := step.sites[site].name.rpartition(".")[0]) in ran
    }
    modules = [step.sites[site].name.rpartition(".")[0] for site in missing]
    if not places or max(ran[module] for module in modules) <= min(places.values()):
        return True
    for module in modules:
        block = module.rpartition(".")[0]
        if block and any(each.startswith(f"{block}.") and places[each] > ran[module] for each in places):
            return True
    return False


@rule(of="param_grad", per_site=False, depth=2, sums=True)
def growing_gradients(
    step: Step, memory: Memory, residual: float = 0.05, growth: float = 3.0, consecutive_steps: int = 5
) -> list[Finding] | None:
    """Gradients are added to those of the steps before, because nobody zeroes them (warning).

    The gradient of the bias of a linear layer, a convolution or a norm adds up to the same as the gradient of its
    output; so does that of an embedding. A model is ill if what these add up to is the sum of this step and of what it
    was in the measured step before. This must hold to a residual of ``residual`` = 0.05, while this step alone leaves
    0.3, in ``consecutive_steps`` = 5 steps in a row that were measured one after another; or for a single one of them,
    to 0.01, in eight such steps. Where steps between were not measured, or only a part of a step's gradients is there
    when an optimizer takes them, a model is ill if it has been ``growth`` = 3 times that of this step, in the direction
    of the step before and not in that of this one, for twice as many steps. It follows from the definition; the figures
    are ours.

    What else looks like it: gradient accumulation. What to do: call ``optimizer.zero_grad()`` once in each step, before
    backward, of the optimizer that has these parameters.

    False-positive guards: only steps in which the parameters change are judged, and only what changes: so
    accumulation over several calls of `Monitor.step` is in order, and a parameter that no optimizer has is another
    problem. What is a multiple of this step's gradient was scaled, and not added up.
    """
    gradients, outputs = _pairs(step)
    if not gradients.size:
        return None
    sums = step.sums
    follows, is_once = step.number == memory.get("at", -2) + 1, step.calls[outputs] == 1
    before = memory.of_sites("sums", np.nan)[gradients]
    now, fresh = sums[gradients], sums[outputs]
    memory["at"], memory["sums"] = step.number, sums
    known = np.isfinite(now + fresh + before)
    if np.count_nonzero(known) < len(known):
        now, fresh, before, gradients, is_once = (each[known] for each in (now, fresh, before, gradients, is_once))
    if not now @ now > 0:
        return []
    goes_on = memory.get("for", 0) or memory.get("grown_for", 0) or memory.streak("alone").goes_on
    off = now - fresh
    may_be_added = (abs(off) > 0.3 * abs(now)) & (abs(off - before) < 0.02 * abs(now))
    if not goes_on and not np.count_nonzero(may_be_added) and off @ off <= 0.3 * (now @ now):
        return []  # then none of what follows is so
    alone = _added_alone(step, memory, gradients, now, before, fresh, is_once & follows)
    size = float(now @ now)
    is_added = is_once.any() and ((now - before - fresh)[is_once] ** 2).sum() < residual * (now[is_once] ** 2).sum()
    is_not_fresh = ((now - fresh) ** 2).sum() > 0.3 * size
    multiple = float(now @ fresh) / max(float(fresh @ fresh), 1e-300)
    is_scaled = ((now - multiple * fresh) ** 2).sum() < residual * size and len(now) > 2
    is_along = now @ before > 0.8 * float(np.sqrt(size * (before @ before)))
    is_grown = size > growth**2 * (fresh @ fresh) and is_along and not is_scaled
    memory["for"] = memory.get("for", 0) + 1 if follows and is_added and is_not_fresh else 0
    memory["grown_for"] = memory.get("grown_for", 0) + 1 if is_grown else 0
    if max(memory["for"], memory["grown_for"]) == 1:
        memory["since"] = step.number
    sites = step.in_order(alone)
    if memory["for"] < consecutive_steps and memory["grown_for"] < 2 * consecutive_steps:
        if not sites:
            return []
        chosen = np.isin(gradients, sites)
        size, fresh = float(now[chosen] @ now[chosen]), fresh[chosen]
        memory["since"] = int(memory.streak("alone").since[sites[0]])
    grown = float(np.sqrt(size / max(fresh @ fresh, 1e-300)))
    sentence = (
        f"the gradients {f'of {step.names_of(sites)} ' if sites else ''}are added to those of the steps before, and "
        f"are {number(grown)} times those of this step alone: nobody zeroes them. Call optimizer.zero_grad() once in "
        "each step, before backward, of the optimizer that has these parameters."
    )
    first = sites[0] if sites else int(gradients[0])
    return [
        step.finding("growing-gradients", first, grown, 1.0, "warning", sentence, since=memory["since"], sites=sites)
    ]


def _added_alone(
    step: Step, memory: Memory, gradients: Counts, now: Array, before: Array, fresh: Array, follows: Mask
) -> Mask:
    """``[n]``: the gradients that are those of the step before and of this one, for eight steps in a row."""
    ill, judged = np.zeros(len(step.sites), bool), np.zeros(len(step.sites), bool)
    is_added = (abs(now - before - fresh) < 0.01 * abs(now)) & (abs(now - fresh) > 0.3 * abs(now))
    ill[gradients], judged[gradients] = is_added & follows, True
    return memory.streak("alone").push(step.number, ill, judged, 8)


def _pairs(step: Step) -> Counts:
    """``[2, pairs]``: the ids of gradients, and of the gradients of outputs that add up to the same."""
    totals = step.totals
    pairs, has_embeddings, updates = step.alike(_pairs_that_came)
    chosen = np.ones(pairs.shape[1], bool)
    if has_embeddings:
        gradients, _, is_embedding = pairs
        chosen = (totals.zeros[gradients] > SPARSE * totals.count[gradients]) | (is_embedding == 0)
    if updates is not None:  # what this step changed; all, where that is not measured
        chosen &= (updates >= 0) & (totals.zeros[updates] < totals.count[updates])
    result: Counts = pairs[:2] if np.count_nonzero(chosen) == len(chosen) else pairs[:2, chosen]
    return result


def _pairs_that_came(step: Step) -> tuple[Counts, bool, Counts | None]:
    """Return the pairs of `sums_of_outputs` that came, whether some are of weights, and their updates' ids."""
    pairs, count = step.once(sums_of_outputs), step.totals.count
    pairs = pairs[:, (count[pairs[0]] > 0) & (count[pairs[1]] > 0)]
    return pairs, bool(pairs[2].any()), step.updates_of_gradients[pairs[0]] if step.updates.any() else None


def sums_of_outputs(step: Step) -> Counts:
    """``[3, pairs]``: the ids of gradients of biases, and of weights without one, which may be embeddings; those of the
    gradients of the outputs of their modules; and which are of weights."""
    found = []
    for site in np.flatnonzero(step.is_kind("param_grad")).tolist():
        module, _, name = step.sites[site].name.rpartition(".")
        output = step.id_of(module, "grad_output")
        is_weight = name == "weight" and step.id_of(f"{module}.bias".lstrip("."), "param_grad") < 0
        if output >= 0 and (name == "bias" or is_weight):
            found.append((site, output, int(is_weight)))
    result: Counts = np.array(found, np.int64).reshape(-1, 3).T
    return result


def _outputs_of_gradients(step: Step) -> Counts:
    """``[n]``: of each gradient of a parameter, the id of the output of the module that has it; -1 without one."""
    ids = {site.name: place for place, site in enumerate(step.sites) if is_of_kind(site.tensor, "output")}
    result = np.full(len(step.sites), -1, np.int64)
    for site in np.flatnonzero(step.is_kind("param_grad")).tolist():
        result[site] = ids.get(step.sites[site].name.rpartition(".")[0], -1)
    return result
