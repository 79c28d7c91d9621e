"""Finds by evidence which dimension of a tensor has its channels, where the module's type does not tell.

Sizes tell most: of the vectors that a module owns, of what ran before it. Pure functions of sizes, and `Ran`,
which remembers what ran. Nothing here runs in a hook whose site is settled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from hookstats.modules.channels import find_channel_dim, find_natural_channels

_REMEMBERED = 1024  # shapes and widths: as many as a large model has


class Widths(NamedTuple):
    """The sizes that a module's channels may have: of its own vectors; of its weights, or of what is inside of it."""

    vectors: frozenset[int]
    inside: frozenset[int]
    is_leaf: bool


def find_widths(module: nn.Module | None) -> Widths:
    """Return the widths that parameters, buffers and the types of the modules inside show."""
    if module is None:
        return Widths(frozenset(), frozenset(), True)
    vectors, inside = set[int](), set[int]()
    for part in module.modules():
        inside.add(find_natural_channels(part).width or 1)
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is None or nn.parameter.is_lazy(tensor) or not tensor.is_floating_point():
                continue
            if tensor.dim() == 1 and part is module:
                vectors.add(tensor.numel())
            if tensor.dim() == 1 or (part is module and isinstance(tensor, nn.Parameter)):
                inside.update(tensor.shape)
    is_leaf = next(module.children(), None) is None
    return Widths(frozenset(vectors - {1}), frozenset(inside - {1}), is_leaf)


class Ran:
    """Shapes of what has run, as they were first seen, with their channel dimensions and widths, the latest last."""

    def __init__(self) -> None:
        self.dims: dict[tuple[int, ...], int] = {}
        self.dims_by_ndim: dict[int, int] = {}
        self._widths: dict[int, None] = {}

    def note(self, sizes: tuple[int, ...], dim: int) -> None:
        """A tensor of these sizes had its channels there."""
        if sizes:
            self.dims_by_ndim[len(sizes)] = dim
            _put_last(self.dims, sizes, dim)
            _put_last(self._widths, sizes[dim], None)

    def widths(self) -> Iterable[int]:
        """The latest first."""
        return (width for width in reversed(self._widths) if width > 1)


def _put_last(remembered: dict[Any, Any], key: Any, value: Any) -> None:
    """Put an entry behind all others. The oldest is forgotten where there are too many."""
    remembered.pop(key, None)
    remembered[key] = value
    if len(remembered) > _REMEMBERED:
        del remembered[next(iter(remembered))]


def find_channel_dim_by_evidence(x: torch.Tensor, widths: Widths, ran: Ran) -> int:
    """The channel dimension of a module's output, counted from 0."""
    ndim = len(x.shape)
    if ndim < 2 or ndim > 7:  # 7: as far as csrc/ops.h keeps apart
        return max(ndim - 1, 0)
    if dims := _match_sizes(x, widths.vectors):
        return _choose_likeliest(dims, x, ran)
    same = ran.dims.get(tuple(x.shape))
    if widths.is_leaf and same is not None:
        return same
    if dims := _match_sizes(x, widths.inside):
        return _choose_likeliest(dims, x, ran)
    if same is not None:
        return same
    for width in ran.widths():
        if dims := [dim for dim in _match_sizes(x, {width}) if dim]:
            return _choose_likeliest(dims, x, ran)
    return find_channel_dim(x, None) % ndim


def _match_sizes(x: torch.Tensor, widths: Collection[int]) -> list[int]:
    """The dimensions of one of these sizes; the first, mostly a batch, only where there is no other."""
    dims = [dim for dim, size in enumerate(x.shape) if size in widths]
    return [dim for dim in dims if dim] or dims


def _choose_likeliest(dims: list[int], x: torch.Tensor, ran: Ran) -> int:
    """The one of several dimensions, of sizes that channels may have."""
    ndim = len(x.shape)
    if ndim > 3:
        adjacent = [dim for dim in dims if x.stride()[dim] == 1 and dim < ndim - 1]
        if adjacent:  # an NHWC buffer seen as NCHW
            return adjacent[0]
        square = [dim for dim in dims if len({x.shape[d] for d in range(1, ndim) if d != dim}) == 1]
        if len(square) == 1:
            return square[0]
    usual = find_channel_dim(x, ran.dims_by_ndim.get(ndim)) % ndim
    return usual if usual in dims else dims[-1]
