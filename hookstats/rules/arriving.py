"""Gradients on their way: whether they reach all parameters, are those of one step alone, and are cut to one norm."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from hookstats.numbers.fields import Counts
from hookstats.rules.engine import Ill, rule
from hookstats.rules.formatting import number, times
from hookstats.rules.history import Streak
from hookstats.rules.learning import SPARSE, are_sums_of_outputs
from hookstats.rules.memory import Memory
from hookstats.rules.step import Mask, Step


@rule(of="param_grad", per_site=False, depth=4)
def missing_gradients(step: Step, memory: Memory, steps: int = 20) -> list[Ill] | None:
    """Parameters never get a gradient, although their module runs and others get theirs (note, or warning).

    A warning where the path from the loss is cut for certain: everything that runs before has no gradient either, or
    what runs behind it in the same block has one; or a gradient comes and is exactly 0, while what runs behind gets one
    that is not. The parameters have had no gradient, or one that is 0 throughout, from the start and for ``steps`` = 20
    steps in which the module ran, at least five of them measured. The finding names the last module without one in
    order of execution: behind it the path from the loss is cut, by ``detach()``, ``no_grad``, an integer, ``.item()``,
    or weights that are 0. Where modules have never run, while others have, in twice as many steps, that is a note: no
    forward calls them. The figures are ours.

    What else looks like it: a head that this loss does not use, or not yet. What to do: look at what is done with the
    output that is named, up to the next module; freeze what is not to learn with ``requires_grad=False``.

    False-positive guards: frozen parameters have no gradient to wait for; nothing is said of what ever had one, or has
    changed without; a gradient that is 0 behind weights that begin with 0 (LoRA, the last norm of a residual block)
    lasts a step or two; a last head whose loss is multiplied by 0 is a note.
    """
    gradients, totals = step.is_kind("param_grad"), step.totals
    arrived = step.find_finite("param_grad")
    if step.has_nonfinite:
        arrived = gradients & (totals.count + step.nonfinite > 0)
    if not np.count_nonzero(arrived):
        return None
    outputs, updates = step.find_partner("param_grad", "output", "*"), step.updates_of_gradients
    reached = memory.keep_by_site("reached", False)
    reached |= arrived & ((totals.abs_max > 0) | (step.nonfinite > 0) if step.has_nonfinite else totals.abs_max > 0)
    if not np.count_nonzero(gradients & ~reached):
        return []
    reached |= gradients & (updates >= 0) & ((totals.abs_max > 0) & (totals.count > 0))[updates] & ~arrived
    waits = gradients & ~reached & (outputs >= 0)
    runs = waits & (totals.count > 0)[outputs]
    streak, idle = memory.streak(), memory.streak("idle")
    ill = streak.push(step.number, runs, runs | reached, 5, over=steps)
    rests = idle.push(step.number, waits & ~runs, None, 5, over=2 * steps)
    found = [_say_idle(step, rests, idle)] if rests.any() and reached[gradients].any() else []
    if not ill.any() or not reached[gradients].any():
        return found
    places = {site: place for place, site in enumerate(step.order.tolist())}
    sites = sorted(np.flatnonzero(ill).tolist(), key=lambda site: places[int(outputs[site])])
    first, last = sites[-1], _name_module(step, sites[-1])
    ran = {step.sites[site].name: place for place, site in enumerate(step.list_finite("output"))}
    behind = [name for name, place in ran.items() if place > ran[last]]
    zero = [site for site in sites if step.calls[site]]
    text = (
        "{missing}: {what} in all {length} measured steps, so nothing there learns. The path back from the loss ends "
        "{cut}: {why}."
    )
    words = {
        "missing": step.name_sites(sites[::-1]),
        "what": "only a gradient that is 0" if zero else "no gradient",
        "length": str(streak.lengths[first]),
        "cut": f"between {last or 'the model'} and {behind[0]}" if behind else f"after {last or 'the model'}",
        "why": "weights that are all 0, units that are dead or saturated, or a factor of 0 pass no gradient"
        if zero
        else "look for detach(), no_grad, .item() or an integer there, or an output that the loss does not use",
    }
    others = {
        module: ran[module] for module in _name_modules(step, np.flatnonzero(reached & gradients)) if module in ran
    }
    is_cut = _is_cut(_name_modules(step, sites), _name_modules(step, zero), ran, others)
    severity, since = "warning" if is_cut else "note", int(streak.since[first])
    missing = Ill(True, text, 0.0, 0.0, severity, since=since, site=first, sites=[first, *sites[:-1]], words=words)
    return [missing, *found]


def _say_idle(step: Step, rests: Mask, idle: Streak) -> Ill:
    sites = np.flatnonzero(rests & (idle.since == idle.since[rests].min())).tolist()
    modules = list(dict.fromkeys(_name_module(step, site) for site in sites))
    more = f" and {times(len(modules) - 3, 'other')}" if len(modules) > 3 else ""
    text = (
        f"{', '.join(modules[:3])}{more}: no forward has called {'it' if len(modules) == 1 else 'them'} since step "
        f"{{since}}, and the parameters there get no gradient. Call a module that is meant to be used under this very "
        "name; remove what is not used from the model."
    )
    since = int(idle.since[sites[0]])
    return Ill(True, text, len(modules), 0.0, "note", since=since, site=sites[0], sites=sites)


def _name_module(step: Step, parameter: int) -> str:
    return step.sites[parameter].name.rpartition(".")[0]


def _name_modules(step: Step, parameters: Iterable[int]) -> set[str]:
    return {_name_module(step, each) for each in parameters}


def _is_cut(missing: set[str], zero: set[str], ran: dict[str, int], others: dict[str, int]) -> bool:
    """Return whether all that runs up to there lacks gradients, or what runs after it in the same block has some, or
    after those whose gradient is 0. Otherwise it may be a head of its own.

    ran, others: the places at which modules ran, and those of which gradients arrive.
    """
    if not others or max(ran[module] for module in missing) <= min(others.values()):
        return True
    if any(ran[module] < max(others.values()) for module in zero):
        return True
    blocks = {module: f"{module.rpartition('.')[0]}." for module in missing if "." in module}
    return any(
        each.startswith(block) and place > ran[module]
        for module, block in blocks.items()
        for each, place in others.items()
    )


@rule(of="output", per_site=False, depth=2)
def no_gradients(step: Step, memory: Memory, steps: int = 30) -> Ill | None:
    """No gradient reaches the model, although it runs and a loss is given (critical).

    From the start, and for ``steps`` = 30 steps, at least five of them measured, outputs came and losses were given, no
    gradient of an output or a parameter did, and no parameter changed: what ``backward()`` is called on does not come
    from the model. It follows from what is measured; the figure is ours.

    What else looks like it: a model that is only looked at, in training mode, whose parameters are not frozen. What to
    do: look between the outputs and the loss for ``detach()``, ``.item()``, ``numpy()``, ``argmax``, ``no_grad``, and a
    tensor that is made anew of the loss (``torch.tensor(loss, requires_grad=True)`` only hides that the path is cut);
    and see that ``backward()`` is called.

    False-positive guards: parameters that require no gradient have none to wait for; without a loss nothing is said.
    """
    weights = step.is_kind("param_grad")
    sizes, before = step.totals.rms[step.is_kind("param_sample")], memory.get("sizes")
    memory["sizes"] = sizes
    changes = before is not None and len(before) == len(sizes) and bool((sizes != before).any())
    comes = step.find_fired("grad_output").any() or step.find_fired("param_grad").any()
    memory["came"] = came = memory.get("came", False) or changes or bool(comes)
    if came or not weights.any():
        return None
    text = (
        "no gradient has reached the model in any measured step since step {since}, although it runs and has losses: "
        "backward() is called on something that does not depend on the outputs. Look for detach(), .item(), numpy(), "
        "argmax or no_grad between the outputs and the loss, and for a loss that is made anew by torch.tensor(..., "
        "requires_grad=True)."
    )
    return Ill(bool(step.read_scalar("loss")), text, 1.0, 1.0, "critical", steps=5, over=steps)


@rule(of="param_grad", per_site=False, depth=2, sums=True)
def growing_gradients(
    step: Step, memory: Memory, residual: float = 0.05, growth: float = 3.0, consecutive_steps: int = 5
) -> Ill | list[Ill] | None:
    """Gradients are added to those of earlier steps, because nothing zeroes them (warning).

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
    gradients, outputs = _find_pairs(step)
    if not gradients.size:
        return None
    sums, n = step.sums, len(step.sites)
    follows, is_once = step.number == memory.get("at", -2) + 1, step.calls[outputs] == 1
    before = memory.keep_by_site("sums", np.nan)[gradients]
    now, fresh = sums[gradients], sums[outputs]
    memory["at"], memory["sums"] = step.number, sums
    known = np.isfinite(now + fresh + before)
    now, fresh, before, gradients, is_once = (each[known] for each in (now, fresh, before, gradients, is_once))
    size, off = float(now @ now), now - fresh
    if not size > 0:
        return []
    streaks = {key: memory.streak(key) for key in ("alone", "all", "grown")}
    may_be_added = (abs(off) > 0.3 * abs(now)) & (abs(off - before) < 0.02 * abs(now))
    goes_on = any(each.goes_on for each in streaks.values())
    if not goes_on and not np.count_nonzero(may_be_added) and off @ off <= 0.3 * size:
        return []  # then none of what follows is so
    # Of each alone, of all together, and where steps between were not measured.
    ill, judged = np.zeros((2, n), bool)
    ill[gradients] = (abs(off - before) < 0.01 * abs(now)) & (abs(off) > 0.3 * abs(now)) & is_once & follows
    judged[gradients] = True
    is_added = is_once.any() and ((off - before)[is_once] ** 2).sum() < residual * (now[is_once] ** 2).sum()
    is_along = now @ before > 0.8 * float(np.sqrt(size * (before @ before)))
    multiple = float(now @ fresh) / max(float(fresh @ fresh), 1e-300)
    is_scaled = ((now - multiple * fresh) ** 2).sum() < residual * size and len(now) > 2
    is_grown = size > growth**2 * (fresh @ fresh) and is_along and not is_scaled
    is_all = follows and is_added and off @ off > 0.3 * size
    of_all = {
        key: streaks[key].push(step.number, np.array([bool(is_ill)]), steps=steps)[0]
        for key, is_ill, steps in (("all", is_all, consecutive_steps), ("grown", is_grown, 2 * consecutive_steps))
    }
    sites = step.put_in_order(streaks["alone"].push(step.number, ill, judged, 8))
    if not any(of_all.values()) and not sites:
        return []
    since = min([int(streaks[key].since[0]) for key in of_all if streaks[key].goes_on], default=step.number)
    if not any(of_all.values()):
        since, chosen = int(streaks["alone"].since[sites[0]]), np.isin(gradients, sites)
        size, fresh = float(now[chosen] @ now[chosen]), fresh[chosen]
    text = (
        f"the gradients {'of {names} ' if sites else ''}are added to those of the steps before, and are {{value}} "
        "times those of this step alone: nothing zeroes them. Call optimizer.zero_grad() once per step, before "
        "backward, on the optimizer that has these parameters."
    )
    grown, first = float(np.sqrt(size / max(fresh @ fresh, 1e-300))), sites[0] if sites else int(gradients[0])
    return Ill(True, text, grown, 1.0, since=since, site=first, sites=sites)


def _find_pairs(step: Step) -> tuple[Counts, Counts]:
    """The ids of gradients of parameters that this step changed, and of those of outputs that add up to the same."""
    totals = step.totals
    gradients, outputs, is_weight, updates = step.make_for_alike(_select_pairs)
    chosen = ~is_weight | (totals.zeros[gradients] > SPARSE * totals.count[gradients])  # of an embedding
    if step.updates.any():
        chosen &= (updates >= 0) & (totals.zeros[updates] < totals.count[updates])
    return gradients[chosen], outputs[chosen]


def _select_pairs(step: Step) -> tuple[Counts, Counts, Mask, Counts]:
    outputs, count = step.find_partner("param_grad", "grad_output", "*"), step.totals.count
    ids = np.flatnonzero(step.make_for_sites(are_sums_of_outputs) & (count > 0) & (count[outputs] > 0))
    is_weight = np.array([step.sites[i].name.rpartition(".")[2] == "weight" for i in ids.tolist()], bool)
    return ids, outputs[ids], is_weight, step.updates_of_gradients[ids]


@rule(of="param_grad", per_site=False, depth=1)
def clipped_gradients(
    step: Step, memory: Memory, equal: float = 1e-5, consecutive_steps: int = 30, tiny: float = 1e-3
) -> Ill | None:
    """The gradients are clipped in every step, to one norm (note; warning if almost nothing is left).

    The norm of all gradients is what it was in the measured step before, to ``equal`` = 1e-5, for ``consecutive_steps``
    = 30 of them: no training does that by itself. By how much they were cut is told by the gradients of biases, which
    without clipping are the sums of their outputs' gradients. It is a warning where the norm is below ``tiny`` = 1e-3,
    which nobody clips to on purpose: gradients that are clipped first and unscaled by a GradScaler then have a norm of
    1/65536. The figures are ours.

    What else looks like it: gradients that an optimizer or a hook normalises on purpose. What to do: nothing, if the
    training goes well, though the learning rate then sets the length of each step alone; otherwise a larger max_norm.
    With a GradScaler, call ``scaler.unscale_(optimizer)`` before clipping.

    False-positive guards: a norm that is clipped in some steps only is not judged; nor is one that is 0, or
    that of a model that stands still because all its outputs do.
    """
    norm = step.grad_norm
    if norm is None or not math.isfinite(norm) or norm <= 0:
        return None
    before, size = memory.get("norm", 0.0), float(step.totals.l1_norm[step.find_finite("grad_output")].sum())
    is_equal = before > 0 and abs(norm / before - 1) < equal and size != memory.get("size", size)
    memory["norm"], memory["size"] = norm, size
    text = (
        "the norm of the gradients has been {value} in each measured step since step {since}: they are always "
        "clipped{cut}. "
    )
    if norm < tiny:
        text += "Almost nothing is left of them: with a GradScaler, call scaler.unscale_(optimizer) before clipping; "
        text += "otherwise check max_norm."
    else:
        text += "So the learning rate alone decides how long a step is: raise max_norm if that is not intended."
    severity, words = "warning" if norm < tiny else "note", {"cut": lambda _: _say_cut(step)}
    return Ill(is_equal, text, norm, tiny, severity, steps=consecutive_steps, words=words)


def _say_cut(step: Step) -> str:
    """Say by how much clipping has cut the gradients of biases, as those of outputs tell; nothing where they do not."""
    if step.is_sampled:
        return ""
    gradients, outputs, is_weight, _ = step.make_for_alike(_select_pairs)
    known = ~is_weight & (step.calls[outputs] == 1)
    now, fresh = step.sums[gradients[known]], step.sums[outputs[known]]
    ratios = np.abs(fresh[now != 0] / now[now != 0])
    cut = float(np.median(ratios)) if ratios.size else 0.0
    return f", now to 1/{number(cut)} of their size" if cut > 1.01 else ""
