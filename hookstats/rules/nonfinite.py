"""The first tensor that holds NaN or an infinity."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hookstats.numbers.fields import Array
from hookstats.numbers.kinds import kind_of
from hookstats.rules.engine import Ill, rule
from hookstats.rules.formatting import number, tensor_of, times
from hookstats.rules.memory import Memory
from hookstats.rules.step import Step


@rule(per_site=False, depth=1)
def nonfinite(step: Step, memory: Memory, overflows: int = 16) -> list[Ill]:
    """The first tensor, in order of execution, that holds NaN, Inf or -Inf, in forward or in backward (critical).

    There is no threshold to set: one such value ends most trainings. Two things are in order, and are recognised. -Inf
    alone in an output or input that has it from its first step on is a mask, of attention or of a router. Gradients in
    a step that a GradScaler has skipped are how it finds its scale: a note, unless that happens in ``overflows``
    measured steps in a row (a scaler that begins at 65536 has come to 1 after 16 of them).

    A loss that is not finite in a step that was not measured is critical where it goes on, and a warning where
    everything is finite again in the next measured step.

    Where some rows alone are read (``attach(rows=8)``), it is the first tensor in which one of these holds such a
    value; it may have begun earlier, in a row that was not read.

    What else looks like it: masks that hold -Inf from the start, and a GradScaler at work; both are recognised. What to
    do: where the data hold it, leave out the batch and see what made it; where a layer made it, look for a division, a
    logarithm or a root of what can be 0, and for float16; where only the loss is not finite, look at the loss and the
    labels. Go back to a checkpoint before the step.
    """
    bad = _count(step, memory)  # None: all is finite
    memory["skipped"] = memory.get("skipped", 0) + 1 if step.overflowed else 0
    lost, found = _note_losses(step, memory), []
    if bad is not None:
        place = int(np.flatnonzero(bad)[0])
        found = [_judge_tensor(step, memory, place, bad[place], overflows)]
    elif memory["lost"] is not None:
        masks = step.put_in_order(memory.keep_by_site("masks", False) & ~step.is_kind("buffer_sample"))
        masks = [site for site in masks if step.totals.neginfs[site]]
        text = (
            "the loss is {loss}, and every watched tensor is finite{clean}. It began after the model, in the loss "
            "itself: look for a logarithm or a division there, and check the labels."
        )
        if masks:
            text = (
                "the loss is {loss}, and of the watched tensors {mask} holds -Inf, since its first step{clean}. If "
                "that is not a mask, it began there: look for a logarithm of 0 (clamp before it, or use log_softmax). "
                "Otherwise it began in the loss."
            )
        loss = step.scalars.get("loss", math.nan)
        words = {"loss": str(loss), "clean": _say_clean(memory)}
        words |= {"mask": tensor_of(step.sites[masks[0]])} if masks else {}
        found = [Ill(True, text, loss, 0, "critical", at=memory["lost"], words=words)]
    elif lost:
        at, loss = lost[0]
        more = f", and in {times(len(lost) - 1, 'more step')}" if len(lost) > 1 else ""
        text = (
            f"the loss was {loss} in step {at}, which was not measured{more}; in step {step.number} everything is "
            "finite again. Check the batch of that step, and look for a logarithm or a division in the loss. With "
            "every=1, the finding names the tensor in which it begins."
        )
        found = [Ill(True, text, loss, 0, at=at)]
    if memory["lost"] is None and bad is None:
        memory["clean"] = step.number  # the last step in which everything was finite
    memory["latest"] = step.number
    return found


def _count(step: Step, memory: Memory) -> Array | None:
    """Count values that are not finite, in order of execution, without those of masks, in which -Inf is in order. None
    where there are none."""
    seen, masks, totals, bad = (
        memory.keep_by_site("seen", False),
        memory.keep_by_site("masks", False),
        step.totals,
        None,
    )
    if step.has_nonfinite:
        of_buffers = step.is_kind("buffer_sample")  # what these hold from the first step on is `uninitialised_buffer`'s
        may_mask = step.is_kind("output") | step.is_kind("input") | step.is_kind("buffer")
        masks |= ~seen & may_mask & (totals.neginfs > 0) & (totals.nans + totals.posinfs == 0)
        masks |= ~seen & of_buffers & (step.nonfinite > 0)
        bad = np.where(masks, (totals.nans + totals.posinfs) * ~of_buffers, step.nonfinite)[step.order]
    seen |= step.calls > 0
    return bad if bad is not None and bad.any() else None


def _note_losses(step: Step, memory: Memory) -> list[tuple[int, float]]:
    """Take note of since when the loss has not been finite; return those of the steps before this one that were not."""
    losses = [(at, each["loss"]) for at, each in step.earlier_scalars.items() if "loss" in each]
    memory.setdefault("lost", None)
    for at, loss in [*losses, (step.number, step.scalars.get("loss", 0.0))]:
        if math.isfinite(loss):
            memory["lost"] = None
        elif memory["lost"] is None:
            memory["lost"] = at
    return [(at, loss) for at, loss in losses if not math.isfinite(loss)]


def _judge_tensor(step: Step, memory: Memory, place: int, bad: float, overflows: int) -> Ill:
    """place: in the order of execution. bad: how many of its values are not finite."""
    first, skipped = int(step.order[place]), memory["skipped"]
    kind, is_nan = kind_of(step.sites[first].tensor), bool(step.totals.nans[first])
    words: dict[str, Any] = {"bad": bad, "all": bad + step.totals.count[first]}
    text = f"{{bad}} of {{all}} values of {{tensor}} are {'NaN' if is_nan else 'an infinity'}"
    if step.overflowed and kind.is_gradient and skipped < overflows:
        text += ": the GradScaler has skipped this step and lowers its scale. Nothing needs to be done."
        return Ill(True, text, bad, 0, "note", site=first, words=words)
    advice = _say_gap(step, memory)
    if not advice and kind.is_gradient and memory["lost"] == step.number:
        advice = (
            "It began in the loss, which is not finite while all outputs are: look for a logarithm or a division "
            "there, and check the labels."
        )
    advice = advice or _say_where(step, place, memory.get("clean"))
    if step.overflowed:
        advice += f" The GradScaler has now skipped {skipped} measured steps in a row."
    if step.is_sampled:
        advice += " Only some rows were read: it may have begun earlier, in another row."
    words |= {"advice": advice, "also": _say_since(step, memory)}
    text += ", the first in this step{also}. {advice} Go back to a checkpoint before it."
    severity = "warning" if kind.of == "buffer" else "critical"  # all else is finite
    return Ill(True, text, bad, 0, severity, site=first, words=words)


def _say_gap(step: Step, memory: Memory) -> str:
    """Return that it may have begun in steps that were not measured; empty where there are none, or it has not."""
    latest, lost = memory.get("latest"), memory["lost"]
    first = 0 if latest is None else latest + 1
    if first >= step.number or latest != memory.get("clean"):
        return ""
    steps = f"step {first} was" if first == step.number - 1 else f"steps {first} to {step.number - 1} were"
    where = "It may have begun before this step"
    if lost is not None and lost < step.number:
        where = f"It began in step {lost}, in which the loss was not finite any more, or just before"
    return (
        f"{where}: {steps} not measured, so it may have been in any layer, in the loss or in the optimizer; to see "
        "where, start again from an earlier checkpoint with every=1."
    )


def _say_since(step: Step, memory: Memory) -> str:
    """Return since when the loss is not finite, and when all was, to be added to a sentence."""
    text, lost = "", memory["lost"]
    if lost is not None:
        text = "; the loss is not finite, either" + ("" if lost == step.number else f", since step {lost}")
    return text + _say_clean(memory)


def _say_clean(memory: Memory) -> str:
    """Return when all was finite, to be added to a sentence."""
    clean = memory.get("clean")
    return "" if clean is None else f"; in step {clean} everything was finite"


def _say_where(step: Step, place: int, clean: int | None) -> str:
    """Return where in this step it began. place: of the first tensor that holds it, in the order of execution.

    clean: the last measured step in which everything was finite.
    """
    first = int(step.order[place])
    kind, module = kind_of(step.sites[first].tensor), step.sites[first].name or "the model"
    before = tensor_of(step.sites[int(step.order[place - 1])]) if place else ""
    rows, of_rows = _say_rows(step, first)
    if kind.name == "input" and not place:
        return (
            "It is in the data, because no layer has run yet: check this batch and what loads and prepares it, and "
            "leave it out."
        )
    if kind.name == "input":
        return (
            f"It came in there, and {before} is finite, as all before it: it is in the data, where these reach "
            f"{module} directly, or in what is computed between the watched modules."
        )
    if kind.name == "output" and not place:
        look, why = [f"the weights and the arithmetic of {module}", "this batch and what loads it"], ""
        if of_rows is not False:
            look.reverse()
        if of_rows is not None:
            why = "; some of its channels are finite, which points to the weights"
            if of_rows:
                why = "; all its channels hold equally many, which points to the batch"
        elif clean == step.number - 1 and any(
            name.startswith(f"{module}.") and tensor == "param" for name, tensor in step.sites
        ):
            why = f"; its weights were finite after step {clean}"
        return (
            'It began in forward, in the first watched module or in its input, which only tensors=("input", ...) '
            f"watches: check {look[0]}, then {look[1]}{why}."
        )
    if kind.name == "output" and of_rows:
        return (
            f"It began in forward, after {before}, which is finite: in {rows} all channels hold it, which "
            "weights cannot cause: check what is computed between the two, such as a division, a logarithm or a root, "
            f"the arithmetic of {module}, and these rows."
        )
    if kind.name == "output":
        return (
            f"It began in forward, after {before}, which is finite: check the weights and the arithmetic of {module}."
        )
    if kind.is_gradient:
        return (
            "It began in backward, where all outputs are finite: check what follows it in forward, up to the loss, "
            "for a square root or a division at 0."
        )
    if kind.of == "buffer":
        return "It began in the buffer; outputs and gradients are finite: check how the model updates it."
    return "It began in the optimizer; outputs and gradients are finite: check its state and its settings."


def _say_rows(step: Step, site: int) -> tuple[str, bool | None]:
    """Return "1 of 16 rows", how many hold it, and whether all channels hold as many, which data cause; None: it is not
    known, or no channel is finite."""
    channels = step.channels(site)
    if channels is None or len(channels.nans) < 2:
        return "", None
    bad = channels.nans + channels.posinfs + channels.neginfs
    of_rows = True if bad.min() == bad.max() and channels.count.min() > 0 else None
    some = f"{number(float(bad[0]))} of {number(float(bad[0] + channels.count[0]))} rows"
    return some, False if bad.min() == 0 else of_rows
