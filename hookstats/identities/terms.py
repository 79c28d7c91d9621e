"""Identities: two sides, each a sum of weight times gradient over some channels. Over torch and numbers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from hookstats.numbers.fields import Array
from hookstats.numbers.identities import LARGEST_Z, Named, deviations, relative_of, residual_of, suspects

UNIT = {torch.float64: 2.0**-40, torch.float32: 2.0**-18, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
COARSEST = 2.0**-4  # of float8, and of what is not known


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


def judge(
    identity: Identity, left: list[Named], right: list[Named], variance: Array, cleared: Collection[str]
) -> Break | None:
    """Compare both sides of an identity with what rounding explains; None: it explains the difference.

    left, right: of each term of that side. variance: of their difference, by rounding, of each group. cleared: see
    `suspects`.
    """
    residual = residual_of(left, right)
    z = deviations(residual, variance)
    if not z.max() > LARGEST_Z:
        return None
    groups = torch.from_numpy((z > LARGEST_Z).nonzero()[0])
    return Break(identity, float(z.max()), groups, relative_of(left, right), suspects(left, right, cleared))
