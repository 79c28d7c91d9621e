"""What an identity is: two sides, each a sum of weight times gradient over some channels. Knows torch alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

UNIT = {torch.float64: 2.0**-40, torch.float32: 2.0**-18, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
COARSEST = 2.0**-4  # of float8, and of what is not known
LEFT_OVER = 0.3  # of a difference, where a single parameter is said to explain it
LARGEST_Z = 8.0  # healthy: 1.5 at most, 6.7 where the output between both sides was not measured


@dataclass(frozen=True)
class Term:
    """A parameter's part of one side: the sum of (weight + offset) * gradient over all dimensions but one.

    Attributes:
        parameter: its name in the model.
        dim: the dimension along which its channels lie.
        places: int64[k], which entries of this dimension count.
        groups: int64[k], to which group of the identity each belongs.
        offset: 1 where the weight is stored less 1, as by Gemma's norms, else 0.
    """

    parameter: str
    dim: int
    places: torch.Tensor
    groups: torch.Tensor
    offset: float = 0.0

    def sums(self, weight: torch.Tensor, gradient: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums of w g and of (w g)^2, float64[groups] each."""
        products = (weight.detach().double() + self.offset) * gradient.detach().double()
        others = [dim for dim in range(products.dim()) if dim != self.dim]
        both = []
        for values in (products, products.square()):
            per_channel = values.sum(others) if others else values
            chosen = per_channel[self.places.to(per_channel.device)]
            summed = chosen.new_zeros(groups).index_add_(0, self.groups.to(chosen.device), chosen)
            both.append(summed.cpu())
        return both[0], both[1]


@dataclass(frozen=True)
class Identity:
    """Two sums that are equal in every step, for every loss and batch, if the gradients are right.

    Attributes:
        kind: "channels" (scaling a channel of the left side's output is undone by the columns of the right side) or
            "pair" (scaling both sides' outputs against each other changes nothing: queries and keys).
        left, right: the parts of each side.
        groups: how many sums there are on each side: channels, rotated pairs, or heads.
        module: whose output lies between both sides, which bounds the rounding; "" where none does.
        channel_dim: along which its channels lie: -1, or 1.
        channels: int64[k], which channels of this output; channel_groups: int64[k], the group of each.
    """

    kind: str
    left: tuple[Term, ...]
    right: tuple[Term, ...]
    groups: int
    module: str
    channel_dim: int
    channels: torch.Tensor
    channel_groups: torch.Tensor

    @property
    def parameters(self) -> list[str]:
        """The names of all parameters that it holds together."""
        return [each.parameter for each in (*self.left, *self.right)]

    def __str__(self) -> str:
        sides = [" + ".join(dict.fromkeys(each.parameter for each in side)) for side in (self.left, self.right)]
        return f"{sides[0]} = {sides[1]} ({self.groups} {'sums' if self.groups > 1 else 'sum'})"


@dataclass(frozen=True)
class Break:
    """An identity that the gradients do not fulfil.

    Attributes:
        identity: which one.
        z: the largest difference of both sides, over what rounding explains. Above 8 is a break; healthy is about 1.
        groups: int64[k], which of its sums differ by more than that.
        relative: the largest difference over the largest sum of both sides, 0 to 2.
        suspects: the parameters of which a single one explains it, each with the factor by which its gradient looks too
            large; the likeliest first.
    """

    identity: Identity
    z: float
    groups: torch.Tensor
    relative: float
    suspects: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        where = (
            f"{len(self.groups)} of {self.identity.groups} sums differ" if self.identity.groups > 1 else "they differ"
        )
        text = (
            f"{self.identity}: {where} by {self.relative:.2g} of their size, {self.z:.3g} times what rounding explains"
        )
        said = [
            f"the gradient of {name} looks {factor:.3g} times as large as it should be"
            if factor
            else f"that of {name} is 0"
            for name, factor in self.suspects[:2]
        ]
        return text + ("; " if said else "") + ", or ".join(said)


Sums = list[tuple[torch.Tensor, torch.Tensor]]  # of each term of a side, as of Term.sums


def judge(identity: Identity, left: Sums, right: Sums, unit: float, spread: torch.Tensor | None) -> Break | None:
    """Compare both sides of an identity with what rounding explains.

    Each product w g was rounded once and what lies between both sides a few times, independently: the difference's
    standard deviation is about unit * sqrt(sum of (w g)^2 of both sides + N rms(y)^2 rms(dy)^2), with the output y
    between them over N tokens.

    Args:
        left, right: of each term of that side, as of `Term.sums`.
        unit: the relative rounding of the arithmetic.
        spread: float64[groups], N rms(y)^2 rms(dy)^2 added up over each group's channels; None: it was not measured.
    """
    sides = [torch.stack([sums for sums, _ in side]).sum(0) for side in (left, right)]
    squares = torch.stack([squares for _, squares in (*left, *right)]).sum(0)
    if spread is not None:
        squares = squares + spread
    residual = sides[0] - sides[1]
    bound = unit * squares.sqrt()
    z = torch.where(residual == 0, 0.0, residual.abs() / bound)
    if not z.max() > LARGEST_Z:
        return None
    size = max(float(side.abs().max()) for side in sides)
    groups = (z > LARGEST_Z).nonzero()[:, 0]
    suspects = _suspects(identity, left, right, residual)
    return Break(identity, float(z.max()), groups, float(residual.abs().max()) / size, suspects)


def _suspects(identity: Identity, left: Sums, right: Sums, residual: torch.Tensor) -> tuple[tuple[str, float], ...]:
    """Find the parameters of whose sums the difference is a multiple, and how far the gradient of each is off."""
    found = list[tuple[float, str, float]]()
    lost = [
        (term.parameter, 0.0)
        for side, terms in ((left, identity.left), (right, identity.right))
        for (_, squares), term in zip(side, terms, strict=True)
        if not squares.any()
    ]
    if lost:  # nothing else need be wrong
        return tuple(lost)
    for sign, side, terms in ((1.0, left, identity.left), (-1.0, right, identity.right)):
        for (own, _), term in zip(side, terms, strict=True):
            if not own.norm() > 0:
                continue
            share = float(residual @ own / (own @ own))
            rest = float((residual - share * own).norm() / residual.norm())
            if rest < LEFT_OVER and abs(1 - sign * share) > 1e-6:
                found.append((rest, term.parameter, 1 / (1 - sign * share)))
    best = min((rest for rest, *_ in found), default=0.0)
    return tuple((name, factor) for rest, name, factor in found if rest <= best + 1e-3)
