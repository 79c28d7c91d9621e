"""The softmax of each row of a tensor in a few numbers, from one read."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hookstats import _native

_MOST_TOP_K = 16


class SoftmaxRows(NamedTuple):
    """Result of `softmax_rows` for each row of logits ``[..., n]``: tensors ``[...]``, float32, or float64 of those.

    ``max``: the largest logit. ``logsumexp``: log(sum exp(x)). ``entropy``: -sum p log(p) in nats, from 0 to log(n).
    ``p_max`` and ``p_first``: the probabilities of the largest and of the first entry (which in attention is often a
    sink). ``margin``: the k-th largest logit minus the next one, for ``top_k`` = k, else None.
    """

    max: torch.Tensor
    logsumexp: torch.Tensor
    entropy: torch.Tensor
    p_max: torch.Tensor
    p_first: torch.Tensor
    margin: torch.Tensor | None


def softmax_rows(logits: torch.Tensor, top_k: int | None = None) -> SoftmaxRows:
    """The softmax of each row of logits in numbers: largest logit, logsumexp, entropy, p(largest), p(first) and margin.

    The logits are read once, and no probability is written.

        rows = hookstats.softmax_rows(router_logits, top_k=2)  # [tokens, experts]
        rows.entropy.mean(), rows.margin.amin()

    logits: ``[..., n]``, rows along the last dimension, with any strides; float32, bfloat16, float16, float64, float8.
    top_k: from 1 to 16 and below n, the number of chosen entries, for ``margin``.

    An entry of -Inf is masked and counts nowhere; in a row of nothing else every number is -Inf, as torch.logsumexp has
    it, and so is a margin without top_k + 1 entries that are not masked. A row that holds NaN or Inf has NaN in all its
    numbers. Sums are relative to the largest logit: nothing overflows, and no term of the entropy cancels another (H =
    log s - w / s with s = sum exp(x - max), w = sum (x - max) exp(x - max)). It has no gradient; torch.compile keeps it
    in the graph.

    Raises:
        TypeError: for what is no tensor, or one of another dtype. ValueError: for a tensor of no dimensions, or a top_k
            out of range.
    """
    if not isinstance(logits, torch.Tensor):
        raise TypeError(f"softmax_rows: expected a tensor of logits [..., n], got {type(logits).__name__}")
    if logits.dtype not in _native.DTYPES:
        raise TypeError(f"softmax_rows: expected one of {', '.join(map(str, _native.DTYPES))}; got {logits.dtype}")
    if logits.dim() == 0:
        raise ValueError("softmax_rows: expected logits [..., n], got a tensor of no dimensions")
    if top_k is not None:
        if isinstance(top_k, bool) or not isinstance(top_k, int):
            raise TypeError(f"softmax_rows: top_k: expected an int or None, got {top_k!r}")
        if not 1 <= top_k <= _MOST_TOP_K or top_k >= logits.shape[-1]:
            raise ValueError(
                f"softmax_rows: top_k: expected 1 to {_MOST_TOP_K}, and less than the {logits.shape[-1]} entries of a "
                f"row; got {top_k}"
            )
    numbers = _native.softmax_rows(logits, top_k or 0)
    largest, logsumexp, entropy, p_max, p_first, *margin = numbers.unbind()
    return SoftmaxRows(largest, logsumexp, entropy, p_max, p_first, margin[0] if margin else None)
