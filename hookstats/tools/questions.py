"""Questions of a probe to a model: batches in which one thing is changed, and the results that must not change."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from hookstats.modules.containers import rebuild, walk
from hookstats.tools.places import SampleLayout

_NOT_TOKENS = re.compile(r"mask|position|type|label|target|seq|doc|segment|length|lens")
_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "tgt", "input_ids", "inputs_embeds", "src")
_DOCUMENTS = re.compile(r"document_ids?|doc_ids?|seq(uence)?_id(x|s)|segment_ids?")
_TRUE_IS_PADDING = re.compile(r"key_padding_mask|padding_mask|pad_mask")


class Question(NamedTuple):
    """A batch in which something is another one.

    ``free``: ``[samples]`` or ``[samples, tokens]``, whose results may change. ``move``: what is expected of a tensor
    that is read in one way, of what it was before; None where nothing can be said. ``base``: the batch to compare with,
    if it is not the one that was given. ``padding``: indices of tokens, and of which the vectors may be
    exchanged instead.
    """

    kind: str
    batch: Any
    free: torch.Tensor
    move: Callable[[torch.Tensor, SampleLayout], torch.Tensor | None] | None = None
    base: Any = None
    padding: tuple[torch.Tensor, torch.Tensor] | None = None
    is_pooled_judged: bool = False  # tensors [samples] and [samples, features], too
    is_asked_in_training: bool = True


class ModelBatch:
    """A batch as a model is called with it. ``tensors``: by name."""

    def __init__(self, model: nn.Module, given: Any, batch_dim: int) -> None:
        if isinstance(given, Mapping):
            self.given: Any = dict(given)
        else:
            self.given = tuple(given) if isinstance(given, tuple | list) else (given,)
        self.batch_dim = batch_dim
        names = _list_argument_names(model, self.given)
        tensors = {names.get(path, path.lstrip(".")): tensor for path, tensor in walk(self.given)}
        if not tensors:
            raise TypeError(f"batch: expected a tensor, or a tuple or dict of some, got {type(given).__name__} of none")
        self.first = next((name for name in _TOKENS if name in tensors), next(iter(tensors)))
        shape = tensors[self.first].shape
        self.size = shape[batch_dim] if len(shape) > batch_dim else 0
        if self.size < 2:
            raise ValueError(
                f"batch: expected two rows at least along dimension {batch_dim}, to see whether one depends on "
                f"another; got {self.first} of {list(shape)}"
            )
        self.tensors, self._paths = tensors, {names.get(path, path.lstrip(".")): path for path, _ in walk(self.given)}

    def shorten(self, model: nn.Module, tokens: str | None, count: int) -> ModelBatch:
        """The first tokens of each sample; None: the first samples."""

        def cut(name: str, x: torch.Tensor) -> torch.Tensor:
            if tokens is None:
                return x.narrow(self.batch_dim, 0, count) if self.has_rows(name) else x
            for dim, size in enumerate(x.shape):
                is_row = dim == self.batch_dim and self.has_rows(name)
                if size == whole and not is_row and (name != tokens or dim == 1 - self.batch_dim):
                    x = x.narrow(dim, 0, count)
            return x

        whole = 0 if tokens is None else self.length(tokens)
        return ModelBatch(model, self.replace_tensors(cut), self.batch_dim)

    def name_token(self, of_floats: bool) -> str | None:
        """The tensor of tokens: indices ``[samples, tokens]``, or, where asked for, floats with features behind."""
        return next(self._list_token_names(of_floats), None)

    def find_masked(self) -> str | None:
        """Tokens of which a mask of padding is there."""
        return next((name for name in self._list_token_names(of_floats=True) if _find_mask_tensor(self, name)), None)

    def _list_token_names(self, of_floats: bool) -> Iterator[str]:
        named = [*(name for name in _TOKENS if name in self.tensors), *self.tensors]
        for is_index, dims in ((True, 2), (False, 3)):
            for name in named if is_index or of_floats else ():
                x, short = self.tensors[name], name.rsplit(".", 1)[-1]
                fits = x.dim() == dims and self.has_rows(name) and not _NOT_TOKENS.search(short)
                if fits and x.is_floating_point() != is_index and x.dtype != torch.bool and self.length(name) > 1:
                    yield name

    def has_rows(self, name: str) -> bool:
        """Return whether samples lie in it."""
        x = self.tensors[name]
        is_square = "mask" in name and x.dim() == 2 and x.shape[0] == x.shape[1]  # of queries and keys
        return x.dim() > self.batch_dim and x.shape[self.batch_dim] == self.size and not is_square

    def length(self, name: str) -> int:
        """The number of its tokens."""
        return self.tensors[name].shape[1 - self.batch_dim]

    def find(self, pattern: str | re.Pattern[str], like: str) -> tuple[str, torch.Tensor] | None:
        """A tensor ``[samples, tokens]`` of such a name, beside the tokens `like`; on the CPU."""
        rows, columns = self.size, self.length(like)
        for name, x in self.tensors.items():
            is_decoders = name.startswith(("decoder", "tgt")) == like.startswith(("decoder", "tgt"))
            if (
                re.search(pattern, name)
                and is_decoders
                and x.dim() == 2
                and x.shape in {(rows, columns), (columns, rows)}
            ):
                is_turned = x.shape != (rows, columns)
                return name, (x.T if is_turned else x).detach().cpu()
        return None

    def replace_tensors(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
        """Return the model's arguments with other tensors. `change` gets a tensor's name and the tensor."""
        names = {path: name for name, path in self._paths.items()}
        return rebuild(self.given, lambda path, x: change(names[path], x))

    def draw_other_values(self, name: str, where: torch.Tensor) -> torch.Tensor:
        """A tensor with other values at some ``[samples, tokens]``: of its other samples or tokens, if they differ.

        They are indices that the model knows. Where all are equal: the index before, or 1 more of a number.
        """
        x = self.tensors[name]
        left = self._index_at(x, where) & torch.ones_like(x, dtype=torch.bool)
        changed = x.clone()
        for dim in (self.batch_dim, 1 - self.batch_dim) if x.dim() > 1 else (0,):
            for shift in (1, 2, -1):
                other = x.roll(shift, dim)
                takes = left & (other != x)
                changed, left = torch.where(takes, other, changed), left & ~takes
        if x.dtype == torch.bool:
            return torch.where(left, ~x, changed)
        return torch.where(left, x + 1 if x.is_floating_point() else torch.where(x > 0, x - 1, x + 1), changed)

    def _index_at(self, x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        """``[samples, tokens]``, or ``[samples]``, over a tensor's entries."""
        if where.dim() == 1:
            shape = [-1 if dim == self.batch_dim else 1 for dim in range(x.dim())]
            return where.view(shape).to(x.device)
        where = where.T if self.batch_dim == 1 else where
        return where.reshape(*where.shape, *[1] * (x.dim() - 2)).to(x.device)


def _list_argument_names(model: nn.Module, given: Any) -> dict[str, str]:
    """Names for the paths of positional arguments, as `forward` has them."""
    if isinstance(given, Mapping):
        return {}
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return {}
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {f".{number}": each.name for number, each in enumerate(parameters) if each.kind in kinds}


def questions(batch: ModelBatch, is_causal: bool | None, why_not: dict[str, str]) -> Iterator[Question]:
    """Return the questions that this batch allows, in order. why_not: gets the others, and the reason."""
    yield from _ask_samples(batch)
    name = batch.name_token(of_floats=is_causal is True or any("mask" in each for each in batch.tensors))
    if name is None:
        for kind in ("later tokens", "padding", "documents", "positions"):
            why_not[kind] = "no tokens are seen in the batch"
        return
    mask = _mask(batch, name)
    if is_causal is False:
        why_not["later tokens"] = "the model is not causal"
    elif is_causal is None and batch.tensors[name].is_floating_point():
        why_not["later tokens"] = "whether the model is causal is not known: causal=True"
    else:
        yield from _ask_later_tokens(batch, name, mask)
    yield from _ask_documents(batch, name, mask, why_not)
    yield from _ask_positions(batch, name, mask, why_not)
    yield from _ask_padding(batch, why_not)


def _ask_samples(batch: ModelBatch) -> Iterator[Question]:
    last = batch.size - 1
    for row, other in ((0, 1), (last, last - 1)):
        free = torch.zeros(batch.size, dtype=torch.bool)
        free[row] = True

        def replace(name: str, x: torch.Tensor, row: int = row, other: int = other) -> torch.Tensor:
            if not batch.has_rows(name):
                return x
            x = x.clone()
            x.select(batch.batch_dim, row).copy_(x.select(batch.batch_dim, other))
            return x

        changed = batch.replace_tensors(replace)
        if all(torch.equal(x, y) for (_, x), (_, y) in zip(walk(changed), walk(batch.given), strict=True)):
            changed = _replace(batch, {batch.first: batch.draw_other_values(batch.first, free)})  # all rows are equal
        yield Question("samples", changed, free)

    def flip(name: str, x: torch.Tensor) -> torch.Tensor:
        return x.flip(batch.batch_dim) if batch.has_rows(name) else x

    def flip_result(x: torch.Tensor, place: SampleLayout) -> torch.Tensor:
        for axis in place.samples:
            moved = torch.arange(x.shape[axis.dim]) + (batch.size - 1 - 2 * axis.labels) * axis.step
            x = x.index_select(axis.dim, moved.to(x.device))
        return x

    nothing = torch.zeros(batch.size, dtype=torch.bool)
    yield Question("places in the batch", batch.replace_tensors(flip), nothing, flip_result, is_asked_in_training=False)


def _ask_later_tokens(batch: ModelBatch, name: str, mask: torch.Tensor | None) -> Iterator[Question]:
    columns = torch.arange(batch.length(name)).expand(batch.size, -1)
    last = columns.amax(1) if mask is None else torch.where(mask, columns, -1).amax(1)
    first = torch.zeros_like(last) if mask is None else torch.where(mask, columns, batch.length(name)).amin(1)
    for begin in (last, torch.minimum((first + last + 1) // 2, last)):
        later = (columns >= begin[:, None]) & (begin >= 0)[:, None]
        if mask is not None:
            later = later & mask
        values = batch.draw_other_values(name, later)
        free = columns >= begin[:, None]
        if mask is not None:
            free = free | ~mask  # what padding has for results is nobody's
        yield Question("later tokens", _replace(batch, {name: values}), free)


def _ask_documents(
    batch: ModelBatch, name: str, mask: torch.Tensor | None, why_not: dict[str, str]
) -> Iterator[Question]:
    named, places = batch.find(_DOCUMENTS, name), batch.find("position", name)
    if named is not None:
        numbers = named[1]
    elif places is not None:
        numbers = torch.cat([torch.zeros(batch.size, 1, dtype=torch.int64), (places[1].diff(dim=1) < 0).cumsum(1)], 1)
    else:
        why_not["documents"] = "neither position_ids nor numbers of documents are in the batch"
        return
    real = torch.ones(batch.size, batch.length(name), dtype=torch.bool) if mask is None else mask
    firsts = torch.where(real, numbers, numbers.amax() + 1).amin(1, keepdim=True)
    changed = real & (numbers == firsts) & (real & (numbers != firsts)).any(1, keepdim=True)
    if not changed.any():
        why_not["documents"] = "no row of the batch has two documents"
        return
    yield Question("documents", _replace(batch, {name: batch.draw_other_values(name, changed)}), changed | ~real)


def _ask_positions(
    batch: ModelBatch, name: str, mask: torch.Tensor | None, why_not: dict[str, str]
) -> Iterator[Question]:
    begins = None if mask is None else torch.where(mask.any(1), mask.int().argmax(1), 0)
    if mask is None or begins is None or not begins.any():
        why_not["positions"] = "no row of the batch has padding on its left"
        return
    if batch.find("position", name) is not None:
        why_not["positions"] = "the batch gives position_ids"
        return
    shifts = begins.tolist()

    def roll(name: str, x: torch.Tensor) -> torch.Tensor:
        if x.dim() < 2 or not batch.has_rows(name) or x.shape[1 - batch.batch_dim] != mask.shape[1]:
            return x
        x = x.clone()
        for row, shift in enumerate(shifts):
            part = x.select(batch.batch_dim, row)
            part.copy_(part.roll(-shift, 0))
        return x

    def roll_result(x: torch.Tensor, place: SampleLayout) -> torch.Tensor | None:
        row_axis = place.samples[0]
        if not row_axis.is_exact or not all(axis.is_exact for axis in place.tokens):
            return None
        dims = [axis.dim - (axis.dim > row_axis.dim) for axis in place.tokens]
        x = x.clone()
        for row, shift in enumerate(shifts):
            part = x.select(row_axis.dim, row)
            part.copy_(part.roll([-shift] * len(dims), dims))
        return x

    free = torch.stack([~row.roll(-shift) for row, shift in zip(mask, shifts, strict=True)])
    yield Question("positions", batch.replace_tensors(roll), free, roll_result, is_asked_in_training=False)


def _ask_padding(batch: ModelBatch, why_not: dict[str, str]) -> Iterator[Question]:
    name = batch.find_masked()
    found, mask = (None, None) if name is None else (_find_mask_tensor(batch, name), _mask(batch, name))
    if name is None or found is None or mask is None:
        why_not["padding"] = "no mask of padding is in the batch"
        return
    base = dict[str, torch.Tensor]()
    if mask.all():  # some is made
        mask = mask.clone()
        mask[0, -max(1, mask.shape[1] // 4) :] = False
        own, x = found[0], batch.tensors[found[0]]
        marked = ~mask if _TRUE_IS_PADDING.search(own) else mask
        base[own] = (marked if x.shape == marked.shape else marked.T).to(x.device, x.dtype)
    ids = batch.tensors[name]
    yield Question(
        "padding",
        _replace(batch, base | {name: batch.draw_other_values(name, ~mask)}),
        ~mask,
        base=_replace(batch, base) if base else None,
        padding=None if ids.is_floating_point() else (ids, ~mask if ids.shape == mask.shape else ~mask.T),
        is_pooled_judged=True,
    )


def _replace(batch: ModelBatch, tensors: Mapping[str, torch.Tensor]) -> Any:
    return batch.replace_tensors(lambda name, x: tensors.get(name, x))


def _find_mask_tensor(batch: ModelBatch, name: str) -> tuple[str, torch.Tensor] | None:
    return batch.find(_TRUE_IS_PADDING, name) or batch.find(r"^(.*\.)?(decoder_)?(attention|attn)_mask$", name)


def _mask(batch: ModelBatch, name: str) -> torch.Tensor | None:
    """``[samples, tokens]``: where a token is no padding. None: nobody says."""
    found = _find_mask_tensor(batch, name)
    if found is None:
        return None
    is_added = found[1].is_floating_point() and bool((found[1] < 0).any())  # to scores
    is_set = (found[1] >= 0) if is_added else found[1] != 0
    return ~is_set if _TRUE_IS_PADDING.search(found[0]) else is_set
