"""Finds which entries of a tensor belong to which sample and token of a batch: by sizes, in all ways."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch


class Axis(NamedTuple):
    """A dimension along which samples lie, or tokens: ``labels[i]`` is which of them index i belongs to."""

    dim: int
    labels: torch.Tensor
    step: int  # from an index to the same one of the next sample
    is_exact: bool  # an index for each


class SampleLayout(NamedTuple):
    """A way to read a tensor: where samples lie, and tokens. Several axes: of products, such as attention's scores."""

    samples: tuple[Axis, ...]
    tokens: tuple[Axis, ...]

    def spread(self, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """``[samples]`` or ``[samples, tokens]`` of bools at the entries of a tensor: true where an axis says so."""
        found = torch.zeros((), dtype=torch.bool)
        for sample in self.samples:
            rows = _index_along(sample, shape)
            found = found | values[rows] if values.dim() == 1 else found
            for token in self.tokens if values.dim() == 2 else ():
                found = found | values[rows, _index_along(token, shape)]
        return found

    def gather(self, differs: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
        """Return where entries of a tensor are true: ``[samples]``, or ``[samples, tokens]``, by the first axes."""
        found = torch.zeros(size, dtype=torch.bool)
        at = differs.nonzero(as_tuple=True)
        axes = [self.samples[0], *self.tokens[:1]][: len(size)]
        found[tuple(axis.labels[at[axis.dim]] for axis in axes)] = True
        return found


def _index_along(axis: Axis, shape: torch.Size) -> torch.Tensor:
    return axis.labels.view([-1 if dim == axis.dim else 1 for dim in range(len(shape))])


def places(shape: torch.Size, samples: int, tokens: int | None, batch_dim: int) -> Iterator[SampleLayout]:
    """All ways to read a tensor of this shape, the likeliest first. tokens: None to ask for samples alone."""
    rows = sorted(_is_exact(shape, samples), key=lambda axis: axis.dim != batch_dim)
    if tokens is None:
        yield from (SampleLayout((axis,), ()) for axis in rows)
        if len(rows) > 1:
            yield SampleLayout(tuple(rows), ())
        yield from (SampleLayout((axis,), ()) for axis in _list_folded(shape, samples))
        return
    columns = _is_exact(shape, tokens)
    for row in [*rows, *_list_folded(shape, samples)]:
        beside = [axis for axis in columns if axis.dim != row.dim]
        if len(beside) > 1:
            yield SampleLayout((row,), tuple(beside))
        yield from (SampleLayout((row,), (axis,)) for axis in beside)
    if shape and shape[0] and shape[0] % (samples * tokens) == 0:  # [batch * tokens, ...]
        rest = shape[0] // (samples * tokens)
        for by_sample, by_token in ((tokens * rest, rest), (rest, samples * rest), (tokens * rest, 1)):
            yield SampleLayout(
                (_find_axis(0, shape[0], samples, by_sample),), (_find_axis(0, shape[0], tokens, by_token),)
            )


def _is_exact(shape: torch.Size, count: int) -> list[Axis]:
    return [Axis(dim, torch.arange(count), 1, True) for dim, size in enumerate(shape) if size == count]


def _list_folded(shape: torch.Size, count: int) -> Iterator[Axis]:
    """Dimensions in which they lie together with something else, as ``[batch * heads, ...]``; in all orders."""
    for dim, size in enumerate(shape):
        if size > count and size % count == 0:
            rest = size // count
            steps = [each for each in range(1, rest + 1) if rest % each == 0]
            steps.sort(key=lambda each: (each != rest, each != 1))
            yield from (_find_axis(dim, size, count, step) for step in steps)


def _find_axis(dim: int, size: int, count: int, step: int) -> Axis:
    return Axis(dim, torch.arange(size) // step % count, step, False)
