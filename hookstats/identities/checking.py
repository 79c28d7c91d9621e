"""Identities of a model, and whether the gradients of a backward fulfil them. Over torch alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hookstats.identities.runs import tensors_in
from hookstats.identities.terms import COARSEST, UNIT, Break, Identity, judge
from hookstats.modules.order import ModuleHook

MANY = 4  # identities, of which more than half are broken by something else than a wrong gradient


class Identities:
    """The identities of a model, as `find_identities` has proved them. Prints as a list.

    Attributes:
        identities: each, with its parameters on both sides.
    """

    def __init__(self, model: nn.Module, identities: list[Identity], unseen: list[str]) -> None:
        self._model = model
        self.identities = identities
        held = {name for each in identities for name in each.parameters}
        self._unseen = [name for name in unseen if name not in held]

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
        model = self._model if model is None else model
        parameters = dict(model.named_parameters())
        missing = [name for each in self.identities for name in each.parameters if name not in parameters]
        if missing:
            raise ValueError(f"check: expected a model with the parameter {missing[0]!r}, got {type(model).__name__}")
        before = {name: each.grad for name, each in parameters.items()}
        modules = dict(model.named_modules())
        owners = {name.rpartition(".")[0] for each in self.identities for name in each.parameters}
        spreads = {name: _Spread() for name in owners if name in modules}
        handles = [modules[name].register_forward_hook(spread) for name, spread in spreads.items()]
        try:
            for each in parameters.values():
                each.grad = None
            run()
            with torch.no_grad():
                return self._judge(parameters, spreads)
        finally:
            for handle in handles:
                handle.remove()
            for name, each in parameters.items():
                each.grad = before[name]

    def _judge(self, parameters: dict[str, nn.Parameter], spreads: dict[str, _Spread]) -> Checked:
        breaks, left_out, judged = list[Break](), dict[str, str](), 0
        right_ones = set[str]()  # parameters of an identity that holds
        woken = {_place(name): name for name in self._unseen if _moves(parameters[name].grad)}
        for each in self.identities:
            reason = _reason(each, parameters, woken)
            if reason is not None:
                left_out[str(each)] = reason
                continue
            left, right = (
                [
                    term.sums(_whole(parameters[term.parameter]), _whole(parameters[term.parameter].grad), each.groups)
                    for term in side
                ]
                for side in (each.left, each.right)
            )
            ran = [spreads[owner] for name in each.parameters if (owner := name.rpartition(".")[0]) in spreads]
            dtypes = {parameters[name].dtype for name in each.parameters}.union(*(spread.dtypes for spread in ran))
            unit = max(UNIT.get(dtype, COARSEST) for dtype in dtypes)
            known = spreads[each.module].of(each) if each.module in spreads else None
            broken = judge(each, left, right, unit, known)
            judged += 1
            if broken is None:
                right_ones.update(each.parameters)
            else:
                breaks.append(broken)
        return Checked([_narrowed(each, right_ones) for each in breaks], judged, left_out)


def _narrowed(broken: Break, right_ones: set[str]) -> Break:
    """Return a break without suspects that another identity clears, unless none is left."""
    suspects = tuple(each for each in broken.suspects if each[0] not in right_ones)
    return replace(broken, suspects=suspects or broken.suspects)


class Checked:
    """What a check has found. True where nothing is broken and something was judged.

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


class _Spread(ModuleHook):
    """Measures N rms(y)^2 rms(dy)^2 of each channel of a module's output, added up over its calls."""

    def __init__(self) -> None:
        self.sums: dict[int, torch.Tensor] = {}  # by the number of channels, of each dimension that may be theirs
        self.dtypes = set[torch.dtype]()

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        outputs = tensors_in(output)
        if outputs and outputs[0].requires_grad:
            y = outputs[0]
            self.dtypes.add(y.dtype)
            squares = [_squares(y.detach(), dim) for dim in range(y.dim())]
            y.register_hook(lambda gradient: self._add(squares, gradient))

    def _add(self, squares: list[torch.Tensor], gradient: torch.Tensor) -> None:
        for dim, square in enumerate(squares):
            count = len(square)
            product = square * _squares(gradient.detach(), dim) * count / gradient.numel()
            self.sums[count] = self.sums.get(count, 0) + product

    def of(self, identity: Identity) -> torch.Tensor | None:
        """Return it for each of an identity's groups; None where no gradient arrived."""
        fitting = [sums for count, sums in self.sums.items() if count > int(identity.channels.max())]
        if not fitting:
            return None
        chosen = fitting[0].cpu()[identity.channels]
        return chosen.new_zeros(identity.groups).index_add_(0, identity.channel_groups, chosen)


def _squares(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    others = [each for each in range(tensor.dim()) if each != dim]
    squares = tensor.double().square()
    return squares.sum(others) if others else squares


def _whole(tensor: Any) -> torch.Tensor:
    """Return all of a DTensor, or the tensor."""
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def _place(name: str) -> str:
    """Return a parameter's name without its numbers: experts of all layers have one place."""
    return re.sub(r"\b\d+\b", "*", name)


def _moves(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and bool(_whole(gradient).any())


def _reason(identity: Identity, parameters: dict[str, nn.Parameter], woken: dict[str, str]) -> str | None:
    """Return why an identity is not judged.

    woken: parameters that had no part in the runs by which identities were found, and have one now, by their place.
    """
    for name in identity.parameters:
        gradient = parameters[name].grad
        if _place(name) in woken:
            return (
                f"{woken[_place(name)]} did not run when identities were found; find them with a batch that reaches it"
            )
        if gradient is None:
            return f"{name} has no gradient"
        if not _whole(gradient).isfinite().all():
            return f"the gradient of {name} is not finite"
    return None
