"""A law: the backward of a module is that of its forward."""

from __future__ import annotations

import numpy as np

from hookstats.rules.engine import Ill, rule
from hookstats.rules.formatting import number
from hookstats.rules.memory import Memory
from hookstats.rules.step import Step


@rule(of="adjoint", depth=3, law="adjoint")
def wrong_backward(step: Step, memory: Memory, share: float = 0.1, consecutive_steps: int = 2) -> Ill:
    """The backward of a module does not match its forward (critical if it did before, or warning).

    Needs ``"adjoint"`` among the tensors: in each measured step one module is run again on copies of what it is given,
    each in two measured steps in a row, one of each class and sizes first. For a random gradient of its output, the
    gradients that its backward makes of its input and of two parameters in turn are compared with differences of its
    forward in float32, in four random directions. What a backward forgets is seen so even where it keeps all
    symmetries, which `identity` does not see: a wrong derivative of an activation, a norm without its projection, an
    attention whose scale is lost. It is told where a gradient is off by more than ``share`` = 0.1 of its size in
    ``consecutive_steps`` = 2 tests in a row. The adjoint test is textbook; the figures are ours: healthy modules are
    off by 0.06 at most, wrong kernels by 0.2 and more.

    What else looks like it: by design, a straight-through estimator, a reversal layer, a ``detach`` inside of the
    module, gradients that it clips; ``Options(laws={"adjoint": False})`` declares it, or ``attach(exclude=...)`` leaves
    the module out. What to do: look at the backward of that module, at the tensor that is named; float32 and plain
    operators in its place tell whether it is the kernel.

    False-positive guards: a forward whose differences ahead and behind do not come together with the step, to 5 %, is
    not smooth there (a choice of experts, a tie of a maximum, rounding), and is not judged; nor is one whose output in
    float32 is another one. What a module is given must be tensors and plain values, on one device and not cut over
    ranks; ``monitor.laws()`` says what was left out.
    """
    judged = step.is_kind("adjoint") & (step.totals.count > 0)
    off = np.where(judged, step.totals.rms, np.nan)
    where = judged & (off > share)
    held = memory.keep_by_site("held", False)
    held |= judged & ~where

    def say(site: int, since: int) -> str:
        module, argument = step.sites[site].name or "the model", step.sites[site].tensor.partition(".")[2]
        of = "its input" if argument == "input" else f"its parameter {argument}"
        return (
            f"the backward of {module} does not match its forward: the gradient of {of} is off by {number(off[site])} "
            f"of its size since step {since}, compared with differences of its forward in float32. Check that "
            "backward: a kernel of your own, a hook inside the module, a detach()."
        )

    return Ill(where, say, off, share, np.where(held, "critical", "warning"), judged, consecutive_steps)
