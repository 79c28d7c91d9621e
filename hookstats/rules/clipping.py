"""Clipping that decides how long every step is."""

from __future__ import annotations

import math

import numpy as np

from hookstats.rules.arriving import sums_of_outputs
from hookstats.rules.engine import Ill, rule
from hookstats.rules.formatting import number
from hookstats.rules.memory import Memory
from hookstats.rules.step import Step


@rule(of="param_grad", per_site=False, depth=1)
def clipped_gradients(
    step: Step, memory: Memory, equal: float = 1e-5, consecutive_steps: int = 30, tiny: float = 1e-3
) -> Ill | None:
    """The gradients are clipped in every step, to one norm (a note; a warning where that is next to nothing).

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
    before, size = memory.get("norm", 0.0), float(step.totals.l1_norm[step.valued("grad_output")].sum())
    moved = size != memory.get("size", size)
    memory["norm"], memory["size"] = norm, size

    def say(_: object, since: int) -> str:
        cut = _cut(step)
        text = (
            f"the norm of the gradients has been {number(norm)} in each measured step since step {since}: they are "
            f"clipped in all of them{f', now to 1/{number(cut)} of what they were' if cut > 1.01 else ''}. "
        )
        if norm < tiny:
            return text + (
                "Next to nothing is left of them. With a GradScaler call scaler.unscale_(optimizer) before clipping; "
                "else look at max_norm."
            )
        return text + "So the length of each step is that of the learning rate, whatever the loss says."

    severity = "warning" if norm < tiny else "note"
    is_equal = before > 0 and abs(norm / before - 1) < equal and moved
    return Ill(is_equal, say, norm, tiny, severity, steps=consecutive_steps)


def _cut(step: Step) -> float:
    """Return by how much clipping has cut the gradients of biases, from those of outputs; 0 where that is not known."""
    if step.is_sampled:
        return 0.0
    gradients, outputs, is_weight = step.once(sums_of_outputs)
    known = (is_weight == 0) & (step.calls[outputs] == 1) & (step.totals.count[gradients] > 0)
    now, fresh = step.sums[gradients[known]], step.sums[outputs[known]]
    ratios = np.abs(fresh[now != 0] / now[now != 0])
    return float(np.median(ratios)) if ratios.size else 0.0
