"""A law: what an optimizer's step has left of a parameter is what the next step finds."""

from __future__ import annotations

import numpy as np

from hookstats.rules.engine import Ill, rule
from hookstats.rules.formatting import number, times
from hookstats.rules.memory import Memory
from hookstats.rules.step import Step


@rule(depth=2, law="step")
def outside_write(step: Step, memory: Memory, most_steps: int = 3) -> Ill | None:
    """Something other than an optimizer writes parameters between two of its steps (warning).

    Needs ``"outside_update"`` among the tensors: up to 4,096 elements of each parameter, after a measured step, against
    the same ones before the next step of an optimizer, which need not be measured. They are equal, bit for bit: there
    is no threshold. A finding names the parameter that was changed by most, relative to its values, and how many more
    were. Where it happens after ``most_steps`` = 3 looks in a row it is a note from then on: by design, it seems.

    What else looks like it: by design, weights that are clamped or projected after each step, averages of weights or of
    ranks that are put in on purpose, pruning masks; ``Options(laws={"step": False})`` declares them. What to do: look
    for what runs between two steps: an average of the weights (EMA) that was put in to evaluate and not put back, a
    checkpoint that was loaded into a running training, a second optimizer that torch does not know, initialisation that
    comes late, weights that are no longer tied.

    False-positive guards: it is arithmetic. Looked at is what an optimizer has stepped in a measured step, once, before
    its next step; a parameter that was replaced by another tensor is not, nor are steps inside a CUDA graph.
    """
    last, memory["last"] = memory.get("last", 0), step.number  # the measured step before this one
    if not step.has_any(("outside_update",)):
        return None
    changed = step.is_kind("outside_update") & (step.calls > 0) & (step.totals.abs_max > 0)
    memory["looks"] = int(memory.get("looks", 0)) + 1 if changed.any() else 0
    values = step.totals.rms[np.maximum(step.find_partner("outside_update", "param_sample"), 0)]
    has_values = step.find_partner("outside_update", "param_sample") >= 0
    share = np.where(changed & has_values & (values > 0), step.totals.rms / values, 0.0)
    worst = int(np.argmax(np.where(changed, share, -1.0)))
    where = np.zeros(len(changed), bool)
    where[worst] = changed[worst]

    def say(site: int, since: int) -> str:
        others = int(changed.sum()) - 1
        size = f"by {number(step.totals.rms[site])} (rms)"
        if share[site]:
            size = f"by {number(100 * share[site])} % of its rms"
        sentence = (
            f"something other than an optimizer changed the parameter {step.sites[site].name} {size}"
            + (f", and {times(others, 'other')}," if others else "")
            + f" between its step {last} and the next one. Look for averaged weights (EMA) that were put in and not "
            "put back, a checkpoint that was loaded, or a second optimizer."
        )
        if memory["looks"] > most_steps:
            sentence += " This happens each time: it is right where weights are clamped or averaged by design."
        return sentence

    return Ill(where, say, share, 0.0, "warning" if memory["looks"] <= most_steps else "note", since=last)
