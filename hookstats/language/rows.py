"""The attention of a sample of queries, computed again: the logits themselves exist nowhere in a flash kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hookstats import _native
from hookstats._warn import WarnOnce
from hookstats.watch.ignoring import rows_of

MOST_TOP_K = 16  # of csrc/softmax.h
_PIECE_BYTES = 8 << 20  # of logits at a time
_MASKED = 0.5  # an additive mask at most so many times its dtype's smallest number masks


class AttentionRows(NamedTuple):
    """Statistics of the queries that were looked at: ``[batch, rows, heads]``, float32, or float64 of float64.

    ``max``, ``entropy``, ``sink``: `SoftmaxRows`' max, entropy and p_first of each row of logits. ``row_index``,
    ``kept``: the rows that attend to anything and count, as `watch.memory.Rows` has them. ``bound``: no logit of the
    item and the head is larger, the same in all rows; None where there were logits.
    """

    max: torch.Tensor
    entropy: torch.Tensor
    sink: torch.Tensor
    row_index: torch.Tensor
    kept: torch.Tensor
    bound: torch.Tensor | None


def count_rows(length: int, rows: int | None) -> int:
    """Return how many of `length` queries are looked at."""
    return length if rows is None else min(length, rows)


def choose_rows(length: int, rows: int, turn: torch.Tensor) -> torch.Tensor:
    """Choose rows: spread over the sequence, others at each turn, and always the last. int64, on the device of `turn`.

    Of j from 0 to rows - 2, the rows floor((j (length - 1) + turn mod (length - 1)) / (rows - 1)): in length - 1 turns
    every query is met.
    """
    number = torch.arange(rows, device=turn.device)
    if rows == length:
        return number
    if rows == 1:
        return number + (length - 1)
    before = (number * (length - 1) + turn % (length - 1)).div(rows - 1, rounding_mode="floor")
    return before.clamp(max=length - 1)


def _compute(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None,
    turn: torch.Tensor,
    row_index: torch.Tensor | None,
    kept: torch.Tensor | None,
    rows: int,
    is_causal: bool,
    scale: float,
    softcap: float,
) -> list[torch.Tensor]:
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        q, k = q.detach(), k.detach()
        batch, heads, queries, width = q.shape
        of_keys, keys = k.shape[1:3]
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        at = choose_rows(queries, rows, turn)
        numbers = torch.empty((3, batch, rows, heads), dtype=dtype, device=q.device)
        row_bytes = heads * keys * dtype.itemsize
        together = max(1, _PIECE_BYTES // max(1, rows * row_bytes))  # items of the batch
        some = max(1, min(rows, _PIECE_BYTES // max(1, row_bytes)))  # rows
        for item in range(0, batch, together):
            items = slice(item, item + together)
            of_items = k[items].to(dtype).mT
            for row in range(0, rows, some):
                now = at[row : row + some]
                asked = q[items].index_select(2, now).to(dtype) * scale
                asked = asked.reshape(len(asked), of_keys, -1, width)  # of grouped queries, those of one key together
                logits = torch.matmul(asked, of_items).reshape(len(asked), heads, len(now), keys)
                if softcap:
                    logits = logits.div_(softcap).tanh_().mul_(softcap)
                if mask is not None:
                    _apply_mask(logits, mask[items] if mask.shape[0] > 1 else mask, now)
                if is_causal:
                    later = torch.arange(keys, device=q.device) > now[:, None]
                    logits.add_(torch.zeros_like(later, dtype=dtype).masked_fill_(later, -torch.inf))
                numbers[:, items, row : row + some] = _native.softmax_rows(logits)[:5:2].mT  # max, entropy, p_first
        bound = _bound_logits(q, k, heads // of_keys, scale, softcap, mask)[:, None].expand(-1, rows, -1).contiguous()
        return [numbers, *_select_queries(numbers[0], queries, at, row_index, kept), bound]


def _compute_of_logits(
    logits: torch.Tensor, turn: torch.Tensor, row_index: torch.Tensor | None, kept: torch.Tensor | None, rows: int
) -> list[torch.Tensor]:
    with torch.no_grad():
        queries = logits.shape[2]
        at = choose_rows(queries, rows, turn)
        some = logits.detach().index_select(2, at)
        some.masked_fill_(some <= torch.finfo(some.dtype).min * _MASKED, -torch.inf)
        numbers = _native.softmax_rows(some)[:5:2].mT.contiguous()  # max, entropy, p_first
        return [numbers, *_select_queries(numbers[0], queries, at, row_index, kept)]


def _select_queries(
    largest: torch.Tensor, queries: int, at: torch.Tensor, row_index: torch.Tensor | None, kept: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    counted = largest.ne(-torch.inf).all(-1)
    left = select_counted(len(largest) * queries, row_index, kept)
    if left is not None:
        counted &= left.reshape(len(largest), queries).index_select(1, at)
    return rows_of(counted)


def _apply_mask(logits: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> None:
    if mask.shape[2] > 1:
        mask = mask.index_select(2, rows)
    if mask.dtype == torch.bool:
        logits.masked_fill_(~mask, -torch.inf)
    else:
        logits.add_(mask.masked_fill(mask <= torch.finfo(mask.dtype).min * _MASKED, -torch.inf))


def select_counted(count: int, row_index: torch.Tensor | None, kept: torch.Tensor | None) -> torch.Tensor | None:
    """Return which of so many rows `Monitor.ignore` leaves: bool ``[count]``. None: all, or its rows are other ones.

    row_index, kept: `watch.memory.Rows`.
    """
    if row_index is None or kept is None or row_index.numel() != count:
        return None
    left = torch.zeros(count, dtype=torch.bool, device=row_index.device)
    return left.scatter_(0, row_index.reshape(-1).long(), torch.arange(count, device=row_index.device) < kept)


def _bound_logits(
    q: torch.Tensor, k: torch.Tensor, group: int, scale: float, softcap: float, mask: torch.Tensor | None
) -> torch.Tensor:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    of_q, of_k = (torch.linalg.vector_norm(x, dim=-1, dtype=dtype).amax(-1) for x in (q, k))
    bound: torch.Tensor = of_q * of_k.repeat_interleave(group, 1) * abs(scale)
    if softcap:
        bound = bound.div(softcap).tanh().mul(softcap)
    if mask is not None and mask.dtype != torch.bool:
        bound = bound + mask.amax((2, 3)).to(dtype)
    return bound


def _infer_shapes(
    q: torch.Tensor, k: torch.Tensor, mask: object, turn: object, row_index: object, kept: object, rows: int, *_: object
) -> list[torch.Tensor]:
    found = _infer_shapes_of_logits(q, turn, row_index, kept, rows)
    return [*found, q.new_empty(found[0].shape[1:], dtype=found[0].dtype)]


def _infer_shapes_of_logits(
    logits: torch.Tensor, turn: object, row_index: object, kept: object, rows: int
) -> list[torch.Tensor]:
    batch, heads = logits.shape[:2]
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return [
        logits.new_empty((3, batch, rows, heads), dtype=dtype),
        logits.new_empty((batch, rows), dtype=torch.int32),
        logits.new_empty((1,), dtype=torch.int32),
    ]


_warn_once = WarnOnce()


def operator(
    schema: str, compute: Callable[..., list[torch.Tensor]], shapes: Callable[..., list[torch.Tensor]]
) -> Callable[..., list[torch.Tensor]]:
    """Run a function in a graph, where an error would end training: it is said once, and the results are 0.

    So one of them is to say how many rows count, and none may be measured without it.
    """

    def run(*arguments: Any) -> list[torch.Tensor]:
        try:
            return compute(*arguments)
        except Exception as error:
            _warn_once(compute, f"not measured in a graph, by {compute.__module__}: {type(error).__name__}: {error}")
            return [torch.zeros_like(each) for each in shapes(*arguments)]

    made: Callable[..., list[torch.Tensor]] = _native.operator(schema, run, shapes=shapes)
    return made


_operator = operator(
    "attention_rows(Tensor q, Tensor k, Tensor? mask, Tensor turn, Tensor? row_index, Tensor? kept, int rows, "
    "bool is_causal, float scale, float softcap) -> Tensor[]",
    _compute,
    _infer_shapes,
)
_of_logits = operator(
    "logits_rows(Tensor logits, Tensor turn, Tensor? row_index, Tensor? kept, int rows) -> Tensor[]",
    _compute_of_logits,
    _infer_shapes_of_logits,
)


def measure_logits_rows(
    logits: torch.Tensor, turn: torch.Tensor, ignoring: tuple[torch.Tensor, torch.Tensor] | None, rows: int | None
) -> AttentionRows:
    """The same, where there are logits: ``[batch, heads, queries, keys]``, of which the smallest numbers are masked."""
    row_index, kept = ignoring or (None, None)
    compute = _of_logits if torch.compiler.is_compiling() else _compute_of_logits
    numbers, index, count = compute(logits, turn, row_index, kept, count_rows(logits.shape[2], rows))
    return AttentionRows(numbers[0], numbers[1], numbers[2], index, count, None)


def attention_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None,
    turn: torch.Tensor,
    ignoring: tuple[torch.Tensor, torch.Tensor] | None,
    rows: int | None,
    is_causal: bool,
    scale: float | None,
    softcap: float = 0.0,
) -> AttentionRows:
    """Compute statistics of the softmax of some queries' logits. Can be traced; nothing is kept, no gradient flows.

    q: ``[batch, heads, queries, width]``. k: ``[batch, key heads, keys, width]``, each key head for the same number of
    heads in a row. mask: None, bool (True: attend), or added to the logits; of four dimensions, 1 where it is the same
    for all. turn: int64 ``[1]``, on their device, another one at each step. ignoring: `watch.memory.Rows` of what
    `Monitor.ignore` leaves. rows: of each head; None: all. is_causal: query i sees keys 0 to i. scale: None, one over
    the root of the width. softcap: logits become softcap tanh(logits / softcap), before the mask; 0: they do not.

    Logits are computed in float32 (float64 of float64), whatever autocast says, in pieces of some megabytes.
    """
    q, k, mask = check_shapes(q, k, mask)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    row_index, kept = ignoring or (None, None)
    compute = _operator if torch.compiler.is_compiling() else _compute
    numbers, index, count, bound = compute(
        q, k, mask, turn, row_index, kept, count_rows(q.shape[2], rows), is_causal, scale, softcap
    )
    return AttentionRows(numbers[0], numbers[1], numbers[2], index, count, bound)


def check_shapes(q: Any, k: Any, mask: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return q, k and mask with four dimensions. TypeError, ValueError for what cannot be the attention of q and k."""
    problem = explain_problem(q, k, mask)
    if problem is not None:
        raise problem
    if q.dim() == 3:  # of one head
        q, k, mask = (x if x is None or x.dim() < 3 else x[:, None] for x in (q, k, mask))
    if mask is not None:
        mask = mask.detach()[(None,) * (q.dim() - mask.dim())]
        if q.dim() > 4:
            mask = mask.expand(*q.shape[:-3], *mask.shape[-3:])
        mask = mask.reshape(-1, *mask.shape[-3:])
    return q.reshape(-1, *q.shape[-3:]), k.reshape(-1, *k.shape[-3:]), mask


def explain_problem(q: Any, k: Any, mask: Any) -> Exception | None:
    """Return the error that says why they are no attention; None: they are. Can be traced."""
    heads, key_heads = (1, 1) if q.dim() == k.dim() == 3 else (q.shape[-3:-2].numel(), k.shape[-3:-2].numel())
    if q.dim() < 3 or k.dim() != q.dim() or q.shape[-1] != k.shape[-1] or q.shape[:-3] != k.shape[:-3]:
        return ValueError(
            "attention: expected q [..., heads, queries, width] and k [..., key heads, keys, width], got "
            f"{tuple(q.shape)} and {tuple(k.shape)}"
        )
    if key_heads == 0 or heads % key_heads:
        return ValueError(f"attention: expected as many heads as key heads, or a multiple, got {heads} and {key_heads}")
    if q.device != k.device or (mask is not None and mask.device != q.device):
        devices = ", ".join(str(x.device) for x in (q, k, mask) if x is not None)
        return ValueError(f"attention: expected q, k and mask on one device, got {devices}")
    if q.dtype not in _native.DTYPES or k.dtype not in _native.DTYPES:
        return TypeError(
            f"attention: expected q and k of one of {', '.join(map(str, _native.DTYPES))}; got {q.dtype} and {k.dtype}"
        )
    if mask is None:
        return None
    wanted = (*q.shape[:-1], k.shape[-2])
    sizes = zip(reversed(mask.shape), reversed(wanted), strict=False)
    if mask.dim() > len(wanted) or any(own not in (1, size) for own, size in sizes):
        return ValueError(f"attention: expected a mask that broadcasts to {wanted}, got {tuple(mask.shape)}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        return TypeError(f"attention: expected a mask of bool or floating numbers, got {mask.dtype}")
    return None
