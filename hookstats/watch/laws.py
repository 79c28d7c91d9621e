"""The laws that are held against a training, where, and why others are not: `Monitor.laws`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from hookstats.numbers.fields import Site
from hookstats.numbers.frame import StepFrame
from hookstats.numbers.identities import KIND, ROUNDING
from hookstats.numbers.kinds import is_of_kind
from hookstats.numbers.token_weights import LOGITS, NAMES, LogitsGradient, TokenWeights, logits_of

# Of each law the kinds of tensors that it needs.
NEEDS = {
    "bias": ("grad_output", "param_grad"),
    "cross_entropy": ("grad_output",),
    "optimizer": ("optimizer_law",),
    "step": ("outside_update",),
    "replica": ("param_sample",),
    "reduction": ("reduction",),
    "identity": ("identity",),
    "adjoint": ("adjoint",),
}


class Law(NamedTuple):
    """A law; ``is_applied``: whether the latest measured step was held against it; ``where``, or why not."""

    name: str
    is_applied: bool
    where: str

    def __str__(self) -> str:
        return f"{self.name:14} {'yes' if self.is_applied else 'no':8} {self.where}"


class Laws(Mapping[str, Law]):
    """Each `Law` by its name, as `Monitor.laws` returns them. Printed, they are a table."""

    def __init__(self, laws: list[Law]) -> None:
        self._laws = {law.name: law for law in laws}

    def __getitem__(self, name: str) -> Law:
        return self._laws[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._laws)

    def __len__(self) -> int:
        return len(self._laws)

    def __repr__(self) -> str:
        return "\n".join([f"{'law':14} {'applied':8} where, or why not", *map(str, self._laws.values())])


def laws(
    frame: StepFrame | None,
    kinds: set[str],
    declared: Mapping[str, bool],
    left_out: Mapping[str, Mapping[str, int]],
    is_judged: bool,
) -> Laws:
    """frame: of the latest step; kinds: that are measured; declared: laws that are broken by design, as False.

    left_out: of a law, how many parameters or identities it leaves out, by the reason.
    """

    def law(name: str) -> Law:
        if declared.get(name) is False:
            return Law(name, False, "it is declared as broken by design: Options(laws=...)")
        missing = [kind for kind in NEEDS[name] if kind not in kinds]
        if missing and name == "identity":
            return Law(name, False, "needs Options(identities=hookstats.find_identities(model, forward))")
        if missing:
            return Law(name, False, f"needs {' and '.join(map(repr, missing))} among the tensors")
        if not is_judged:
            return Law(name, False, "nothing judges: attach(sinks=[hookstats.record(...)])")
        if frame is None:
            return Law(name, False, "no measured step has arrived yet")
        where, why = _APPLIED[name](frame)
        own = left_out.get(name)
        if own and name == "cross_entropy":
            why = why or next(iter(own))
        elif own:
            noun = {"identity": "identities", "adjoint": "modules"}.get(name, "parameters")
            why = "; ".join(f"{count} {noun}: {reason}" for reason, count in own.items())
            where = f"{where}; not at {why}" if where else None
        return Law(name, where is not None, where or why)

    return Laws([law(name) for name in NEEDS])


_Applied = tuple[str | None, str]  # where; else why not


def _list_fired(frame: StepFrame, kind: str) -> list[int]:
    return [i for i in frame.order.tolist() if is_of_kind(frame.sites.names[i].tensor, kind)]


def _bias(frame: StepFrame) -> _Applied:
    biases = [
        frame.sites.names[i].name.removesuffix(".bias")
        for i in _list_fired(frame, "param_grad")
        if frame.sites.names[i].name.endswith(".bias")
    ]
    places = [frame.sites.place.get(Site(name, "grad_output")) for name in biases]
    count = sum(place is not None and frame.calls[place] > 0 for place in places)
    where = f"{count} layer{'s' if count > 1 else ''} with a bias" if count else None
    if where and frame.rows > 1:
        return None, (
            f"one of {frame.rows} rows was read: a sum over all rows is known in ten of 500 measured steps, and in "
            "ten after a finding"
        )
    return where, "no layer has a bias, and a gradient of its output"


def _cross_entropy(frame: StepFrame) -> _Applied:
    if len(frame.ranks.present) < frame.ranks.world_size:
        return None, "other ranks have tokens, too: attach(process_group=...)"
    found = [_list_fired(frame, f"token_weights.{name}") for name in NAMES]
    if not found[0]:
        return _by_norm(frame)
    weights = None
    if all(len(places) == 1 for places in found):
        weights = TokenWeights.of(
            [frame.totals.entries(np.array(places)) for places in found], len(frame.ranks.present)
        )
    if weights is None:
        return None, (
            "the gradient of the logits is that of no plain cross entropy: label smoothing, weights of classes, soft "
            "targets, a z-loss, a soft cap, or a part of the vocabulary"
        )
    if "loss" not in frame.scalars:
        return None, "the loss was not given: monitor.step(loss=loss)"
    if not weights.is_mean(frame.scalars["loss"]):
        given = f"{frame.scalars['loss']:.3g}"
        return None, f"the loss that was given, {given}, is not the mean over tokens: about {weights.loss:.3g}"
    return f"logits of {weights.microbatches:g} forwards, {weights.tokens * weights.microbatches:.0f} tokens", ""


def _by_norm(frame: StepFrame) -> _Applied:
    """Without token weights."""
    name = logits_of(frame.scalars)
    if name is None:
        return None, ""
    place = frame.sites.place.get(Site(name.removeprefix(LOGITS), "grad_output"))
    if place is None or not frame.calls[place]:
        return None, "the output of the module that gives the logits has no measured gradient"
    if frame.rows > 1:
        return None, f"one of {frame.rows} rows was read: a sum over all rows is known in ten of 500 measured steps"
    gradient = LogitsGradient.of(
        frame.scalars[name],
        frame.scalars["loss"],
        frame.totals.entries(np.array([place])),
        int(frame.calls[place]),
        len(frame.ranks.present),
    )
    where = f"the size of the gradient of {frame.scalars[name]:.0f} rows of logits; weights by 'token_weights'"
    return (where if gradient else None), "the loss is too small to tell anything of its gradient"


def _identity(frame: StepFrame) -> _Applied:
    if len(frame.ranks.present) < frame.ranks.world_size:
        return None, "other ranks may have parts of each sum: this step is not of all of them"
    found = _list_fired(frame, KIND)
    chosen = [i for i in found if frame.sites.names[i].tensor.endswith(f".{ROUNDING}")]
    sums = round(sum(frame.totals.count[i] / frame.calls[i] for i in chosen))
    where = f"{sums} sums of {len(chosen)} identities" if chosen else None
    return where, "no gradient came before an optimizer's step"


def _adjoint(frame: StepFrame) -> _Applied:
    told = _list_fired(frame, "adjoint")
    where = f"{len(told)} gradients that {frame.sites.names[told[0]].name or 'the model'} computes" if told else None
    return where, "the module in turn has not run, its forward is not smooth here, or is another one in float32"


def _apply_to_parameters(kind: str, why: str) -> Callable[[StepFrame], _Applied]:
    def apply(frame: StepFrame) -> _Applied:
        count = len(_list_fired(frame, kind))
        return (f"{count} parameters" if count else None), why

    return apply


def _apply_to_ranks(*kinds: str) -> Callable[[StepFrame], _Applied]:
    def apply(frame: StepFrame) -> _Applied:
        if len(frame.ranks.present) == 1:
            return None, "there is one rank: attach(process_group=...) measures several together"
        count = len({frame.sites.names[i].name for each in kinds for i in _list_fired(frame, each)})
        where = f"{count} parameters on {len(frame.ranks.present)} ranks"
        return (where if count else None), "no parameter was measured"

    return apply


_APPLIED: dict[str, Callable[[StepFrame], _Applied]] = {
    "bias": _bias,
    "cross_entropy": _cross_entropy,
    "optimizer": _apply_to_parameters("optimizer_law", "no step of SGD, Adam or AdamW was measured"),
    "step": _apply_to_parameters("outside_update", "no optimizer has stepped in two measured steps"),
    "replica": _apply_to_ranks("param_sample"),
    "reduction": _apply_to_ranks("reduction"),
    "identity": _identity,
    "adjoint": _adjoint,
}
