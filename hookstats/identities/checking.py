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
from hookstats.tools.undo import bare

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
        model = bare(self._model if model is None else model)
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
                    term.sums(_whole(parameters[term.parameter]), _gradient(parameters[term.parameter]), each.groups)
                    for term in side
                ]
                for side in (each.left, each.right)
            )
            ran = [spreads[owner] for name in each.parameters if (owner := name.rpartition(".")[0]) in spreads]
            dtypes = {parameters[name].dtype for name in each.parameters}.union(*(spread.dtypes for spread in ran))
            unit = max(UNIT.get(dtype, COARSEST) for dtype in dtypes)
            known = _spread_of(each, spreads, parameters)
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
    """Measures of a module's output and of its gradient what bounds the rounding of sums over tokens."""

    def __init__(self) -> None:
        self.dtypes = set[torch.dtype]()
        # By the dimension of channels, -1 and 1, added up over calls: N ms(y) ms(dy), ms(x) sum dy^2, sum y^2.
        self._sums: dict[tuple[str, int], torch.Tensor] = {}
        self.gradient = 0.0  # the mean square of the output's gradient

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        outputs, inputs = tensors_in(output), tensors_in(args)
        if outputs and outputs[0].requires_grad and outputs[0].dim():
            y = outputs[0]
            self.dtypes.add(y.dtype)
            size = inputs[0].detach().double().square().mean() if inputs else torch.zeros((), device=y.device)
            squares = {dim: _squares(y.detach(), dim) for dim in ((-1, 1) if y.dim() > 2 else (-1,))}
            y.register_hook(lambda gradient: self._add(squares, size, gradient))

    def _add(self, squares: dict[int, torch.Tensor], size: torch.Tensor, gradient: torch.Tensor) -> None:
        self.gradient += float(gradient.detach().double().square().mean()) if gradient.numel() else 0.0
        for dim, square in squares.items():
            of_gradient = _squares(gradient.detach(), dim)
            rows = max(gradient.numel() // len(square), 1)
            for what, product in (("both", square * of_gradient / rows), ("x", size * of_gradient), ("y", square)):
                known = self._sums.get((what, dim))
                self._sums[what, dim] = product if known is None or known.shape != product.shape else known + product

    def channels(self, what: str, identity: Identity) -> torch.Tensor | None:
        """Return a sum for each of an identity's channels; None where no gradient arrived."""
        found = self._sums.get((what, identity.channel_dim))
        if found is None or len(found) <= int(identity.channels.max()):
            return None
        return found.cpu()[identity.channels]


def _spread_of(
    identity: Identity, spreads: dict[str, _Spread], parameters: dict[str, nn.Parameter]
) -> torch.Tensor | None:
    """Return what terms of single tokens would add up to if their signs were random, for each group; None: not known.

    By the output between both sides it is N rms(y)^2 rms(dy)^2. Where y is small because what makes it has cancelled,
    by the input and the weights of the left side; where dy is, by the weights and the output's gradient of the right.
    """
    own = spreads.get(identity.module)
    both, of_x, of_y = (None if own is None else own.channels(what, identity) for what in ("both", "x", "y"))
    if both is None or of_x is None or of_y is None:
        return None
    for term in identity.left:
        weight = _whole(parameters[term.parameter].detach())
        if weight.dim() > 1 and len(term.places) == len(both):  # a norm's weight multiplies what is normalised
            both = both + of_x * _squares(weight, term.dim).cpu()[term.places]
    summed = both.new_zeros(identity.groups).index_add_(0, identity.channel_groups, both)
    if identity.kind == "channels":
        for term in identity.right:
            reader = spreads.get(term.parameter.rpartition(".")[0])
            weight = _whole(parameters[term.parameter].detach())
            if reader is not None and weight.dim() > 1:
                columns = _squares(weight, term.dim).cpu()[term.places]
                of_columns = both.new_zeros(identity.groups).index_add_(0, term.groups, columns)
                of_groups = both.new_zeros(identity.groups).index_add_(0, identity.channel_groups, of_y)
                summed = summed + of_groups * of_columns * reader.gradient
    return summed


def _squares(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    others = [each for each in range(tensor.dim()) if each != dim % tensor.dim()]
    squares = tensor.double().square()
    return squares.sum(others) if others else squares


def _whole(tensor: Any) -> torch.Tensor:
    """Return all of a DTensor, or the tensor."""
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.to_dense() if full.layout != torch.strided else full


def _place(name: str) -> str:
    """Return a parameter's name without its numbers: experts of all layers have one place."""
    return re.sub(r"\b\d+\b", "*", name)


def _moves(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and bool(_whole(gradient).any())


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return all of a gradient; zeros where none came, as others of its identity have one."""
    return torch.zeros_like(_whole(parameter.detach())) if parameter.grad is None else _whole(parameter.grad)


def _reason(identity: Identity, parameters: dict[str, nn.Parameter], woken: dict[str, str]) -> str | None:
    """Return why an identity is not judged.

    woken: parameters that had no part in the runs by which identities were found, and have one now, by their place.
    """
    if not any(_moves(parameters[name].grad) for name in identity.parameters):
        return "its gradients are 0"
    for name in identity.parameters:
        if _place(name) in woken:
            return (
                f"{woken[_place(name)]} did not run when identities were found; find them with a batch that reaches it"
            )
        if not parameters[name].requires_grad:
            return f"{name} is frozen"
        if not _gradient(parameters[name]).isfinite().all():
            return f"the gradient of {name} is not finite"
    return None
