"""A step's changes of elements: a law by the optimizer's formula, and a sign that its state was lost."""

from __future__ import annotations

from fnmatch import fnmatchcase

import numpy as np

from hookstats.rules.engine import Ill, rule
from hookstats.rules.formatting import number, times
from hookstats.rules.memory import Memory
from hookstats.rules.step import Step

_ALIKE = 0.3  # of their mean, how far the ratios of sampled elements may lie apart that have one factor


@rule(of="optimizer_law", depth=2, law="optimizer")
def optimizer_formula(step: Step, memory: Memory, factor: float = 1.5, consecutive_steps: int = 2) -> list[Ill]:
    """A step changes a parameter otherwise than the optimizer's formula says (critical from a factor on, or warning).

    Needs ``"optimizer_law"`` among the tensors: at up to 4,096 elements of each parameter, what SGD, Adam
    (arXiv 1412.6980) or AdamW (arXiv 1711.05101) make of the gradient, of their states before the step, and of the
    group's lr, betas, eps, momentum and weight decay, against what the step has changed. Both agree within rounding:
    1e-3 of the terms, 8 roundings of the parameter's dtype, and that of the written value. A second moment that is less
    than (1 - beta2) times the square of the first one, which no gradients can make of it, counts as that: so one that
    stays 0 is found. It is critical where an element is ``factor`` = 1.5 times off, or 0, in ``consecutive_steps`` = 2
    measured steps in a row, else a warning. What groups say is recorded as scalars (``optimizer.0.lr``); a learning
    rate that is ``factor`` times another one than before the run was resumed, from one recorded step to the next, is a
    warning.

    What else looks like it: by design, a hook on the optimizer that clips or changes gradients or parameters, each by
    itself; ``Options(laws={"optimizer": False})`` declares it. What to do: look at what changes
    gradients, states or parameters while the optimizer steps: a shard that is never stepped (0), a clip coefficient
    that differs, a learning rate that is another one than the group says.

    False-positive guards: not judged are other optimizers, derived ones among them, closures, float16, gradients that a
    fused optimizer unscales, and gradients and states that lie in memory in another order than their parameter, whose
    sampled places are other elements; ``monitor.laws()`` says how many. Moments that were all loaded in one wrong order
    are not seen: the formula holds for whatever moments there are.
    """
    judged = step.is_kind("optimizer_law") & (step.calls > 0)
    low, high, mean = step.totals.min, step.totals.max, step.totals.mean
    far = np.where(abs(high - 1) >= abs(low - 1), high, low)
    where = judged & (far != 1)
    is_all = where & (low != 1) & (high != 1) & (high - low < _ALIKE * abs(mean))  # of all elements, but for rounding
    far = np.where(is_all, mean, far)

    def say(site: int, since: int) -> str:
        at = "all sampled elements" if is_all[site] else "at least one sampled element"
        size = (
            f"changes by {number(far[site])} times what the optimizer's formula says"
            if far[site]
            else "does not change"
        )
        return (
            f"the parameter {step.sites[site].name} {size} in {at}, since step {since}. Check what changes gradients, "
            "states or parameters while it steps, and shards that are not stepped."
        )

    severity = np.where((far > 1 / factor) & (far < factor), "warning", "critical")
    of_formula = Ill(where, say, far, factor, severity, judged=judged, steps=consecutive_steps)
    return [of_formula, *_judge_resumed(step, memory, factor)]


def _judge_resumed(step: Step, memory: Memory, factor: float) -> list[Ill]:
    """Learning rates that are others than those before the run was resumed."""
    rates = {name: value for name, value in step.scalars.items() if fnmatchcase(name, "optimizer.*.lr")}
    before, attempt = memory.get("rates", {}), memory.get("attempt", step.attempt)
    memory["rates"], memory["attempt"] = rates or before, step.attempt
    if attempt == step.attempt:
        return []
    changes = {name: value / before[name] for name, value in rates.items() if before.get(name) and value}
    changed = {name: ratio for name, ratio in changes.items() if not 1 / factor < ratio < factor}
    if not changed:
        return []
    name, ratio = max(changed.items(), key=lambda each: abs(np.log(each[1])))
    others = times(len(changed) - 1, "other group")

    def say(site: None, since: int) -> str:
        return (
            f"the learning rate is {number(rates[name])} since the run was resumed, and was {number(before[name])} "
            f"before ({name}{f', and {others}' if len(changed) > 1 else ''}). Check whether the states of the "
            "optimizer and of its schedule were loaded."
        )

    return [Ill(True, say, ratio, factor, key="resumed")]


@rule(of="update_sample", per_site=False, depth=2)
def lost_moments(step: Step, memory: Memory, equal: float = 0.98, consecutive_steps: int = 50) -> Ill:
    """Each step moves all values by one amount, as only Adam's first step does: its state is lost (note).

    The first step of Adam (arXiv 1412.6980) is the learning rate times the sign of the gradient; later ones depend on
    the moments, and differ from value to value. Judged are parameters of which 16 sampled values moved: in two thirds
    of them the mean |update| is at least ``equal`` = 0.98 of the largest, in ``consecutive_steps`` = 50 measured steps
    in a row.

    What else looks like it: by design, optimizers that step by the sign (signSGD, Lion), and Adam where the gradient
    hardly changes. What to do: make the optimizer once, before the loop, and load its state when a run is resumed.

    False-positive guards: values that did not move are left out; weight decay and a small ``eps`` change an update by
    less than 2 %.
    """
    totals, moved = step.totals, step.totals.count - step.totals.zeros
    judged = step.is_kind("update_sample") & (step.calls > 0) & (moved >= 16)
    size = np.divide(totals.l1_norm, moved * totals.abs_max, out=np.zeros(len(moved)), where=judged)
    alike, many = judged & (size >= equal), int(np.count_nonzero(judged))
    say = (
        "all values of {names} change by one amount, since step {since}: each update is the learning rate times the "
        "sign of the gradient, as in Adam's first step. An optimizer that is made anew in each step, or loses its "
        "state, does that: make it once, before the loop. This is right for Lion and signSGD."
    )
    sites = np.flatnonzero(alike).tolist()
    ill = many > 0 and 3 * len(sites) >= 2 * many
    return Ill(ill, say, len(sites), many, "note", steps=consecutive_steps, site=sites[0] if ill else None, sites=sites)
