"""Models that are trained in evaluation mode."""

from __future__ import annotations

from hookstats.rules.engine import Ill, rule
from hookstats.rules.memory import Memory
from hookstats.rules.step import Step


@rule(of="param_grad", per_site=False, depth=0)
def evaluation_mode(step: Step, memory: Memory, consecutive_steps: int = 3) -> Ill | None:
    """The model is trained in evaluation mode (warning).

    Forwards in evaluation mode are not measured. So a model of which outputs were measured, and none is any more while
    its parameters still get gradients, is trained in evaluation mode: without dropout, and with the running statistics
    of its norms as they were then. In ``consecutive_steps`` = 3 measured steps in a row. It follows from what is
    measured; the figure is ours.

    What else looks like it: forwards below ``monitor.pause()``, or of a copy that shares the parameters. What to do:
    call ``model.train()`` after each validation, before the next step. If it is meant, attach with
    ``options=hookstats.Options(training_only=False)``, and outputs are measured again.

    False-positive guards: a model that never ran in training mode, a step without a gradient other than 0,
    and a model of which some outputs are measured are not judged.
    """
    runs = bool(step.find_fired("output").any())
    has_run = memory.get("has_run", False)
    memory["has_run"] = has_run or runs
    if not has_run:
        return None
    trains = not runs and bool((step.totals.abs_max[step.find_fired("param_grad")] > 0).any())
    text = (
        "the model has been trained in evaluation mode since step {since}: dropout is off, and norms use their "
        "running statistics. Call model.train() after a validation, before the next step."
    )
    return Ill(trains, text, consecutive_steps, consecutive_steps, steps=consecutive_steps)
