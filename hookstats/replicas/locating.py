"""Where two ranks' tensors differ first: checksums of ever smaller parts, then the elements of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hookstats.replicas.contents import checksums
from hookstats.replicas.exchange import Exchange

_PARTS = 2048  # whose checksums are exchanged at a time
_ELEMENTS = 4096  # of a part that is exchanged itself
_ROUNDS = 2  # of narrowing: enough for 2048^2 x 4096 elements


class Pair(NamedTuple):
    """Two ranks, by their places in the group, whose local tensors differ."""

    number: int
    reference: int
    other: int


class Element(NamedTuple):
    """Its indices in the local tensors, what the two have there as numbers, and as bits in hexadecimal."""

    at: tuple[int, ...]
    values: tuple[Any, Any]
    bits: tuple[str, str]


def find_first(exchange: Exchange, pairs: Sequence[Pair], local: Mapping[int, torch.Tensor]) -> list[Element]:
    """The first element in which each pair differs. local: this rank's tensors, by number.

    All ranks take part, whether they are in a pair or not: 6 collectives, however many pairs there are.
    """
    mine = {i: local[pair.number] for i, pair in enumerate(pairs) if exchange.place in (pair.reference, pair.other)}
    flat = {i: tensor.reshape(-1) for i, tensor in mine.items()}
    begin = dict.fromkeys(mine, 0)
    for _ in range(_ROUNDS):
        parts = {i: each.split(_part_of(len(each))) for i, each in flat.items()}
        said = exchange.gather_json({i: checksums(each).tolist() for i, each in parts.items()})
        for i, each in parts.items():
            ours, theirs = (np.array(said[place][str(i)]) for place in pairs[i][1:])
            first = int(np.flatnonzero(ours != theirs)[0])
            begin[i] += first * _part_of(len(flat[i]))
            flat[i] = each[first]
    said = exchange.gather_json(
        {i: [begin[i], list(mine[i].shape), str(each.dtype), _bytes(each).hex()] for i, each in flat.items()}
    )
    return [_first(said[pair.reference][str(i)], said[pair.other][str(i)]) for i, pair in enumerate(pairs)]


def _part_of(elements: int) -> int:
    """Elements of each part, a multiple of 8: parts begin on whole words."""
    return max(_ELEMENTS, -(-elements // _PARTS // 8) * 8)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.resolve_conj().resolve_neg().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _first(reference: Any, other: Any) -> Element:
    begin, shape, dtype_name, text = reference
    dtype: torch.dtype = getattr(torch, dtype_name.removeprefix("torch."))
    pair = [np.frombuffer(bytes.fromhex(each), np.uint8).reshape(-1, dtype.itemsize) for each in (text, other[3])]
    first = int(np.flatnonzero((pair[0] != pair[1]).any(axis=1))[0])
    ours, theirs = (each[first].tobytes() for each in pair)
    return Element(
        tuple(int(i) for i in np.unravel_index(begin + first, shape)),
        (_number(ours, dtype), _number(theirs, dtype)),
        (ours[::-1].hex(), theirs[::-1].hex()),
    )


def _number(content: bytes, dtype: torch.dtype) -> Any:
    """One element as a Python number; None for a dtype whose elements are none."""
    one = torch.frombuffer(bytearray(content), dtype=dtype)[0]
    try:
        return (one.float() if dtype.is_floating_point and dtype.itemsize == 1 else one).item()
    except (RuntimeError, NotImplementedError):
        return None
