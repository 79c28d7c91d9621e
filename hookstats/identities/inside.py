"""Identities between parameters of one module: experts in one tensor, the projections of nn.MultiheadAttention."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Any, NamedTuple

import torch

from hookstats.identities.runs import RepeatableModel, draw_powers_of_two, is_same, join_name, scale
from hookstats.identities.terms import Identity, Term


class _Rows(NamedTuple):
    """Some entries of one dimension of a parameter."""

    parameter: str
    dim: int
    places: torch.Tensor


def find_identities_inside(runs: RepeatableModel, name: str, generator: torch.Generator) -> list[Identity]:
    """Prove which rows and columns of a module's own parameters may be scaled against each other."""
    own = runs.fill_zero_vectors(name)
    rows = [
        _Rows(key, dim, places)
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
    taken: list[_Rows] = []
    for left, right in permutations(rows, 2):
        if len(left.places) != len(right.places) or len(left.places) < 2 or _is_overlapping(left, right):
            continue
        if any(_is_overlapping(each, other) for each in (left, right) for other in taken):
            continue
        draws = [draw_powers_of_two(len(left.places), generator) for _ in range(2)]
        for others in ([], _find_biases(own, right)):
            sides = [left, *_find_biases(own, left)], [right, *others]
            if all(_is_proved(runs, name, own, plain, sides, powers) for powers in draws):
                groups = torch.arange(len(left.places))
                terms = [
                    tuple(Term(join_name(name, e.parameter), e.dim, e.places, groups) for e in side) for side in sides
                ]
                found.append(Identity("channels", terms[0], terms[1], len(groups), "", -1, left.places, groups))
                taken += [left, right]
                break
    return found


def _is_proved(
    runs: RepeatableModel,
    name: str,
    own: dict[str, torch.Tensor],
    plain: Any,
    sides: tuple[list[_Rows], ...],
    powers: torch.Tensor,
) -> bool:
    both = runs.call(name, _scale_sides(own, [(sides[0], powers), (sides[1], 1 / powers)]))
    if both is None or not is_same(both, plain):
        return False
    alone = (runs.call(name, _scale_sides(own, [(side, powers)])) for side in sides)
    return not any(output is None or is_same(output, plain) for output in alone)


def _scale_sides(
    own: dict[str, torch.Tensor], sides: list[tuple[list[_Rows], torch.Tensor]]
) -> dict[str, torch.Tensor]:
    changed = dict(own)
    for rows, powers in sides:
        for each in rows:
            before = changed[each.parameter]
            every = torch.ones(before.shape[each.dim], dtype=torch.float64)
            every[each.places] = powers
            changed[each.parameter] = scale(before, each.dim, every)
    return changed


def _find_biases(own: dict[str, torch.Tensor], rows: _Rows) -> list[_Rows]:
    """Return what is added to these rows' outputs."""
    weight = own[rows.parameter]
    width = weight.shape[rows.dim]
    return [
        _Rows(key, each.dim() - 1, rows.places)
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


def _is_overlapping(left: _Rows, right: _Rows) -> bool:
    same_place = (left.parameter, left.dim) == (right.parameter, right.dim)
    return same_place and bool(torch.isin(left.places, right.places).any())
