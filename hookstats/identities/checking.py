"""Identities of a model, and whether the gradients of a backward fulfil them. Over torch alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from hookstats.identities.layout import IdentityLayout, LocalParameter
from hookstats.identities.runs import place_of
from hookstats.identities.spreads import SpreadHook, find_unit
from hookstats.identities.terms import Break, Identity, judge
from hookstats.numbers.fields import Array
from hookstats.numbers.identities import MANY, Named
from hookstats.tools.undo import unwrap_parallel


class Identities:
    """The identities of a model, as `find_identities` has proved them. Prints as a list.

    Attributes:
        identities: each, with its parameters on both sides.
        unseen: parameters that had no part in the runs by which they were found.
    """

    def __init__(self, model: nn.Module, identities: list[Identity], unseen: list[str]) -> None:
        self._model = model
        self.identities = identities
        held = {name for each in identities for name in each.parameters}
        self.unseen = [name for name in unseen if name not in held]
        seen = {place_of(name) for name, _ in model.named_parameters() if name not in unseen}
        self._places = {name: place if (place := place_of(name)) in seen else None for name in self.unseen}

    def __len__(self) -> int:
        return len(self.identities)

    def __str__(self) -> str:
        total = sum(each.numel() for each in self._model.parameters())
        held = {name for each in self.identities for name in each.parameters}
        share = sum(each.numel() for name, each in self._model.named_parameters() if name in held)
        noun = "identity" if len(self) == 1 else "identities"
        head = f"{len(self)} {noun}, {sum(each.groups for each in self.identities):,} sums"
        head += f", {share / max(total, 1):.0%} of the parameters"
        return "\n".join([head, *map(str, self.identities)])

    __repr__ = __str__

    def list_rivals(self, identity: Identity) -> list[str]:
        """Return the parameters that had no part in the proof, and with a gradient may be a part of the identity.

        These are experts beside those that it holds, and modules of a name that nothing had that ran, such as a head
        that is added later.
        """
        own = {place_of(name) for name in identity.parameters}
        return [name for name, place in self._places.items() if place is None or place in own]

    def check(self, run: Callable[[], Any], model: nn.Module | None = None) -> Checked:
        """Run a forward and backward, and compare both sides of each identity in its gradients.

        The parameters' gradients are set aside before and are put back afterwards. Call it where gradients are as
        autograd and reductions between ranks have made them: clipping parameter by parameter, or by value, breaks them.
        All gradients may be scaled by one number.

        Args:
            run: a forward and its backward, of one batch or of several that add up.
            model: the same model after `fully_shard` or another wrapper that keeps parameters' names; None: the one
                that they were found in. All ranks call it.

        Returns:
            `Checked`: prints as a list of what is broken.
        """
        model = unwrap_parallel(self._model if model is None else model)
        parameters = dict(model.named_parameters())
        missing = [name for each in self.identities for name in each.parameters if name not in parameters]
        if missing:
            raise ValueError(f"check: expected a model with the parameter {missing[0]!r}, got {type(model).__name__}")
        if not self.identities:
            return Checked([], 0, {})
        before = {name: each.grad for name, each in parameters.items()}
        modules = dict(model.named_modules())
        layout = IdentityLayout(self.identities, lambda name: parameters[name].dim())
        spreads = layout.spreads(modules)
        handles = [modules[name].register_forward_hook(spread) for name, spread in spreads.items()]
        try:
            for each in parameters.values():
                each.grad = None
            run()
            with torch.no_grad():
                return self._judge(parameters, layout, spreads)
        finally:
            for handle in handles:
                handle.remove()
            for name, each in parameters.items():
                each.grad = before[name]

    def _judge(
        self, parameters: dict[str, nn.Parameter], layout: IdentityLayout, spreads: dict[str, SpreadHook]
    ) -> Checked:
        found, read = self._read(parameters, layout)
        compared = [each.cpu().numpy() for each in layout.compare(read, spreads)]
        given, left_out = list[tuple[Identity, list[Named], list[Named], Array]](), dict[str, str]()
        for number, each in enumerate(self.identities):
            woken = [name for name in self.list_rivals(each) if found[name].moves]
            reason = _find_reason(each, found, parameters, woken)
            if reason is not None:
                left_out[str(each)] = reason
                continue
            left, right = (
                [
                    (owner.parameter, compared[0][owner.values])
                    for owner in layout.owners_of[number]
                    if owner.side == side
                ]
                for side in range(2)
            )
            squares, spread = (values[layout.groups[number]] for values in compared[1:])
            unit = find_unit(each, spreads, [parameters[name] for name in each.parameters])
            given.append((each, left, right, (squares + spread) * unit**2))
        broken = [judge(*one, ()) is not None for one in given]
        held = {name for one, off in zip(given, broken, strict=True) if not off for name in one[0].parameters}
        breaks = [judge(*one, held) for one, off in zip(given, broken, strict=True) if off]
        return Checked([each for each in breaks if each is not None], len(given), left_out)

    def _read(
        self, parameters: dict[str, nn.Parameter], layout: IdentityLayout
    ) -> tuple[dict[str, _Gradient], torch.Tensor]:
        """Return what is to be known of each gradient, and all sums. What ranks have parts of is put together."""
        held = {name for each in self.identities for name in each.parameters}
        found, read = dict[str, _Gradient](), torch.zeros((), dtype=torch.float64)
        for name in sorted({*held, *self.unseen}):  # in one order on all ranks
            parameter = parameters[name]
            # All ranks take part, also those to which no gradient came.
            gradient = _get_whole(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            found[name] = _Gradient(bool(gradient.any()), bool(gradient.isfinite().all()))
            if name in held:
                part = {name: LocalParameter(_get_whole(parameter.detach()), gradient)}
                parts = {number: part for number, each in enumerate(self.identities) if name in each.parameters}
                read = read + layout.read(parts, torch.device("cpu"))
        return found, read


class _Gradient(NamedTuple):
    moves: bool  # it is not 0
    is_finite: bool


class Checked:
    """Result of a check. True where nothing is broken and something was judged.

    Attributes:
        breaks: the identities that are broken, the worst first.
        judged: how many were judged.
        left_out: those that were not, each with the reason.
    """

    def __init__(self, breaks: list[Break], judged: int, left_out: dict[str, str]) -> None:
        self.breaks = sorted(breaks, key=lambda each: -each.z)
        self.judged = judged
        self.left_out = left_out

    def __bool__(self) -> bool:
        return bool(self.judged) and not self.breaks

    def __str__(self) -> str:
        verb = "is" if len(self.breaks) == 1 else "are"
        head = f"{len(self.breaks)} of {self.judged} identities {verb} broken"
        if 2 * len(self.breaks) > self.judged >= MANY:
            head += ". More than half: look first for what changes gradients after backward, parameter by parameter"
        if self.left_out:
            head += f"; {len(self.left_out)} were not judged"
        return "\n".join([head, *map(str, self.breaks)])

    __repr__ = __str__


def _get_whole(tensor: Any) -> torch.Tensor:
    """Return all of a DTensor, or the tensor."""
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.to_dense() if full.layout != torch.strided else full


def _find_reason(
    identity: Identity, read: dict[str, _Gradient], parameters: dict[str, nn.Parameter], woken: list[str]
) -> str | None:
    """Return why an identity is not judged.

    woken: parameters that had no part in the runs by which identities were found, and have one now.
    """
    if not any(read[name].moves for name in identity.parameters):
        return "its gradients are 0"
    if woken:
        return f"{woken[0]} did not run when identities were found; find them with a batch that reaches it"
    for name in identity.parameters:
        if not parameters[name].requires_grad:
            return f"{name} is frozen"
        if not read[name].is_finite:
            return f"the gradient of {name} is not finite"
    return None
