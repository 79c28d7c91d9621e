"""The first tensor that holds NaN or an infinity."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from hookstats.numbers.fields import Array
from hookstats.numbers.kinds import kind_of
from hookstats.rules.finding import Finding
from hookstats.rules.formatting import number, tensor_of, times
from hookstats.rules.history import extended
from hookstats.rules.step import Step
from hookstats.rules.thresholds import rule


@rule
class NonFinite:
    """The first tensor, in order of execution, that holds NaN, Inf or -Inf, in forward or in backward: critical.

    There is no threshold to set: one such value ends most trainings. Two things are in order, and are recognised. -Inf
    alone in an output or input that has it from its first step on is a mask, of attention or of a router. Gradients in
    a step that a GradScaler has skipped are how it finds its scale: a note, unless that happens in ``overflows``
    measured steps in a row (a scaler that begins at 65536 has come to 1 after 16 of them).

    A loss that is not finite in a step that was not measured is critical where it goes on, and a warning where
    everything is finite again in the next measured step.

    What else looks like it: masks that hold -Inf from the start, and a GradScaler at work; both are recognised. What to
    do: where the data hold it, leave out the batch and see what made it; where a layer made it, look for a division, a
    logarithm or a root of what can be 0, and for float16; where only the loss is not finite, look at the loss and the
    labels. Go back to a checkpoint before the step.
    """

    overflows: int = 16
    per_site: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._seen, self._masks = np.empty(0, bool), np.empty(0, bool)  # sites; those in which -Inf is in order
        self._clean: int | None = None  # the last step in which everything was finite
        self._latest: int | None = None  # the last measured step
        self._lost: int | None = None  # since when the loss is not finite
        self._skipped = 0  # steps in a row, by the scaler

    def __call__(self, step: Step) -> list[Finding]:
        bad = self._count(step)[step.order]
        self._skipped = self._skipped + 1 if step.overflowed else 0
        lost = self._note_losses(step)
        found = self._finding(step, bad, lost)
        if self._lost is None and not bad.any():
            self._clean = step.number
        self._latest = step.number
        return [] if found is None else [found]

    def _finding(self, step: Step, bad: Array, lost: list[tuple[int, float]]) -> Finding | None:
        """bad: values that are not finite, of sites in the order of execution. lost: losses of steps before this."""
        if bad.any():
            place = int(np.flatnonzero(bad)[0])
            return self._tensor_finding(step, place, bad[place])
        if self._lost is not None:
            loss = step.scalars.get("loss", math.nan)
            masks = [site for site in step.in_order(self._masks) if step.totals.neginfs[site]]
            if masks:
                where = tensor_of(step.sites[masks[0]])
                sentence = (
                    f"the loss is {loss}, and of the watched tensors {where} holds -Inf, as it has from its first step "
                    "on. If that is no mask, it began there: look for a logarithm of 0 (clamp before it, or use "
                    f"log_softmax). Else it began in the loss.{self._since(step)}"
                )
            else:
                sentence = (
                    f"the loss is {loss}, and every watched tensor is finite: it began behind the model, in the loss "
                    f"itself. Look for a logarithm or a division there, and at the labels.{self._since(step)}"
                )
            return step.finding("nonfinite", None, loss, 0, "critical", sentence, self._lost)
        if not lost:
            return None
        at, loss = lost[0]
        more = f", and in {times(len(lost) - 1, 'more step')}" if len(lost) > 1 else ""
        sentence = (
            f"the loss was {loss} in step {at}, which was not measured{more}; in step {step.number} everything is "
            "finite again. Look at the batch of that step, and for a logarithm or a division in the loss. With "
            "every=1, the tensor is named in which it begins."
        )
        return step.finding("nonfinite", None, loss, 0, "warning", sentence, at)

    def _note_losses(self, step: Step) -> list[tuple[int, float]]:
        """Takes note of since when it has not been finite; those of the steps before this one that were not."""
        losses = [(at, each["loss"]) for at, each in step.earlier_scalars.items() if "loss" in each]
        for at, loss in [*losses, (step.number, step.scalars.get("loss", 0.0))]:
            if np.isfinite(loss):
                self._lost = None
            elif self._lost is None:
                self._lost = at
        return [(at, loss) for at, loss in losses if not np.isfinite(loss)]

    def _tensor_finding(self, step: Step, place: int, bad: float) -> Finding:
        """place: in the order of execution."""
        first = int(step.order[place])
        is_backward = kind_of(step.sites[first].tensor).is_gradient
        what = "NaN" if step.totals.nans[first] else "an infinity"
        text = f"{number(bad)} of {number(bad + step.totals.count[first])} values of {tensor_of(step.sites[first])}"
        if step.overflowed and is_backward and self._skipped < self.overflows:
            sentence = (
                f"{text} are {what}: the GradScaler has skipped this step and lowers its scale. Nothing is to be done."
            )
            return step.finding("nonfinite", first, bad, 0, "note", sentence)
        advice = self._in_between(step)
        if not advice and is_backward and self._lost == step.number:
            advice = (
                "It began in the loss, which is not finite while all outputs are: look for a logarithm or a division "
                "there, and at the labels."
            )
        advice = advice or _began(step, place, self._clean)
        if step.overflowed:
            advice += f" The GradScaler has now skipped {self._skipped} measured steps in a row."
        sentence = (
            f"{text} are {what}, the first in this step. {advice}{self._since(step)} Go back to a checkpoint before it."
        )
        return step.finding("nonfinite", first, bad, 0, "critical", sentence)

    def _in_between(self, step: Step) -> str:
        """That it may have begun in steps that were not measured; empty where there are none, or it has not."""
        first = 0 if self._latest is None else self._latest + 1
        if first >= step.number or self._latest != self._clean:
            return ""
        steps = f"step {first} was" if first == step.number - 1 else f"steps {first} to {step.number - 1} were"
        if self._lost is not None and self._lost < step.number:
            where = f"It began in step {self._lost}, in which the loss was not finite any more, or just before"
        else:
            where = "It may have begun in any of them"
        return (
            f"{where}: {steps} not measured, and so it may have been in forward, in the loss, in backward or in the "
            "optimizer, and in any layer. To see where, begin again from a checkpoint before it with every=1."
        )

    def _since(self, step: Step) -> str:
        text = ""
        if self._lost is not None:
            text = " The loss is not finite, either"
            text += "." if self._lost == step.number else f", since step {self._lost}."
        return text if self._clean is None else f"{text} In step {self._clean} everything was finite."

    def _count(self, step: Step) -> Array:
        """``[n]``: values that are not finite, without those of masks."""
        self._seen, self._masks = (extended(each, len(step.sites), False) for each in (self._seen, self._masks))
        totals, begins = step.totals, (step.calls > 0) & ~self._seen
        if begins.any():
            may_mask = step.is_kind("output") | step.is_kind("input") | step.is_kind("buffer")
            self._masks |= begins & may_mask & (totals.neginfs > 0) & (totals.nans + totals.posinfs == 0)
            self._seen |= begins
        return np.where(self._masks, totals.nans + totals.posinfs, step.nonfinite)


def _began(step: Step, place: int, clean: int | None) -> str:
    """Where in this step it did. place: of the first tensor that holds it, in the order of execution.

    clean: the last measured step in which everything was finite.
    """
    first = int(step.order[place])
    name, tensor = step.sites[first]
    kind = kind_of(tensor)
    module = name or "the model"
    before = tensor_of(step.sites[int(step.order[place - 1])]) if place else ""
    if kind.name == "input" and not place:
        return (
            "The data hold it: nothing of the model has run before. Look at this batch, at what loads and prepares it, "
            "and leave it out."
        )
    if kind.name == "input":
        return (
            f"It came in there, and {before} and all before it are finite: it is in the data, where these reach "
            f"{module} directly, or in what is computed on the way, between the watched modules."
        )
    if kind.name == "output" and not place:
        weights, batch = f"the weights and the arithmetic of {module}", "this batch and what loads it"
        by_data = _is_of_rows(step, first)
        one, two = (weights, batch) if by_data is False else (batch, weights)
        why = "" if by_data is None else _ROWS[by_data]
        if by_data is None and clean == step.number - 1 and _has_weights(step, name):
            why = f" Its weights were finite after step {clean}."
        return (
            "It began in forward, in the first module that is watched, whose input is not: it is in the batch, or "
            f"begins here. Look at {one}, then at {two}.{why} "
            'tensors=("input", "output", ...) tells these apart.'
        )
    if kind.name == "output":
        return (
            f"It began in forward, behind {before}, which is finite: look at the weights and the arithmetic of "
            f"{module}."
        )
    if kind.is_gradient:
        return (
            "It began in backward, all outputs are finite: look at what follows it in forward, up to the loss, for a "
            "square root or a division at 0."
        )
    if kind.of == "buffer":
        return "It began in the buffer, outputs and gradients are finite: look at how the model updates it."
    return "It began in the optimizer, outputs and gradients are finite: look at its state and its settings."


_ROWS = {
    True: " All its channels hold as many: a batch does that in which some values are not finite.",
    False: " Some of its channels are finite: weights do that which are not.",
}


def _has_weights(step: Step, module: str) -> bool:
    """Whether those of a module are watched."""
    return any(step.sites[i].name.startswith(f"{module}.") for i in np.flatnonzero(step.is_kind("param")).tolist())


def _is_of_rows(step: Step, site: int) -> bool | None:
    """Whether all channels hold as many, which data cause; None: it is not known, or no channel is finite."""
    channels = step.channels(site)
    if channels is None or len(channels.nans) < 2:
        return None
    bad = channels.nans + channels.posinfs + channels.neginfs
    if bad.min() == 0:
        return False
    return True if bad.min() == bad.max() and channels.count.min() > 0 else None
