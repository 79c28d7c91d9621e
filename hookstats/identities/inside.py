"""Identities between parameters of one module: experts in one tensor, the projections of nn.MultiheadAttention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from typing import Any

import torch

from hookstats.identities.runs import RepeatableModel, draw_powers_of_two, is_same, join_name, scale_terms
from hookstats.identities.terms import Identity, Term


def find_identities_inside(runs: RepeatableModel, name: str, generator: torch.Generator) -> list[Identity]:
    """Prove which rows and columns of a module's own parameters may be scaled against each other."""
    own = runs.fill_zero_vectors(name)
    rows = [
        Term(key, dim, places, torch.arange(len(places)))
        for key, each in own.items()
        if each.dim() > 1
        for dim in range(each.dim())
        for places in _cut_parts(each.shape[dim])
    ]
    if len({each.parameter for each in rows}) < 2:
        return []
    if not is_same(runs.call(name, {}), runs.calls[name][0].output):
        return []
    plain = runs.call(name, own)
    found: list[Identity] = []
    taken: list[Term] = []
    for left, right in permutations(rows, 2):
        if len(left.places) != len(right.places) or len(left.places) < 2 or _is_overlapping(left, right):
            continue
        if any(_is_overlapping(each, other) for each in (left, right) for other in taken):
            continue
        draws = [draw_powers_of_two(len(left.places), generator) for _ in range(2)]
        for others in ([], _find_biases(own, right)):
            sides = [left, *_find_biases(own, left)], [right, *others]
            if all(_is_proved(runs, name, own, plain, sides, powers) for powers in draws):
                named = [tuple(replace(e, parameter=join_name(name, e.parameter)) for e in side) for side in sides]
                groups = left.groups
                found.append(Identity("channels", named[0], named[1], len(groups), "", -1, left.places, groups))
                taken += [left, right]
                break
    return found


def _is_proved(
    runs: RepeatableModel,
    name: str,
    own: dict[str, torch.Tensor],
    plain: Any,
    sides: tuple[list[Term], list[Term]],
    powers: torch.Tensor,
) -> bool:
    both = runs.call(name, own | scale_terms(own, (sides[0], powers), (sides[1], 1 / powers)))
    if both is None or not is_same(both, plain):
        return False
    alone = (runs.call(name, own | scale_terms(own, (side, powers))) for side in sides)
    return not any(output is None or is_same(output, plain) for output in alone)


def _find_biases(own: dict[str, torch.Tensor], rows: Term) -> list[Term]:
    """Return what is added to these rows' outputs."""
    weight = own[rows.parameter]
    width = weight.shape[rows.dim]
    return [
        replace(rows, parameter=key, dim=each.dim() - 1)
        for key, each in own.items()
        if each.dim() < weight.dim() and each.dim() and each.shape[-1] == width
    ]


def _cut_parts(width: int) -> Iterator[torch.Tensor]:
    """Yield all of a dimension, its halves and thirds, side by side and interleaved."""
    every = torch.arange(width)
    yield every
    for count in (2, 3):
        if width % count == 0 and width > count:
            yield from every.chunk(count)
            if count == 2:
                yield from every.view(-1, count).unbind(1)


def _is_overlapping(left: Term, right: Term) -> bool:
    same_place = (left.parameter, left.dim) == (right.parameter, right.dim)
    return same_place and bool(torch.isin(left.places, right.places).any())
