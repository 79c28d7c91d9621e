"""The number that a cross entropy divides its tokens by, as the gradient of the logits shows it, in measured steps.

Where a loss is a plain cross entropy, the gradient of a row of logits is w (p - e): its probabilities less 1 at its
target, times the weight of the row. w follows from the entries that are no targets, without knowing the targets: from 8
entries of up to 64 rows. Whether the loss is a plain cross entropy is seen from these, and from what is left for the
target, and not from its `grad_fn`, which fused, compiled and detached losses do not have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hookstats.language.feeding import Fed
from hookstats.modules import order
from hookstats.modules.channels import ChannelAxis
from hookstats.modules.containers import walk
from hookstats.modules.sharding import is_dtensor
from hookstats.numbers.token_weights import NAMES
from hookstats.watch.binding import SiteBinder
from hookstats.watch.hooks import FedGradientHook, SiteSpec
from hookstats.watch.ignoring import rows_of
from hookstats.watch.wrappers import is_a_mere_shape

KIND = "token_weights"
# Of each forward: the weight of a row; of all rows that count together, at least and at most; the loss of sampled rows.
TENSORS = tuple(f"{KIND}.{name}" for name in NAMES)
_ROWS, _ENTRIES, _ENTRIES_OF_ALL = 64, 8, 1 << 22
_LOGITS = ".logits"  # what Hugging Face's models call them
_MISFIT, _ROUNDINGS = 1e-3, 8  # of the L1 norm of the gradient, at most: in float32, and of the dtype's own rounding


class TokenWeightsHook(order.ModuleHook, Fed):
    """A forward hook on the model, and the sites that it feeds."""

    def __init__(self, binder: SiteBinder, model: nn.Module, device: torch.device) -> None:
        specs = [SiteSpec("", "", ChannelAxis(-1, None), False, (None, kind), model) for kind in TENSORS]
        Fed.__init__(self, binder, specs, device, FedGradientHook)
        self._latest: tuple[Any, torch.Tensor] | None = None

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        """Waits for the gradient of the logits. Can be traced."""
        if self.is_wanted():
            logits = find_logits(output)
            if logits is not None:
                self._watch(logits)

    def _watch(self, logits: torch.Tensor) -> None:
        with torch.no_grad():
            index = self._find_index(logits)
            rows = _take_rows(logits, index).detach()
        logits.register_hook(lambda gradient: self._see(rows, index, gradient))

    def _find_index(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the rows that are read, made once for logits of a shape."""
        if torch.compiler.is_compiling():
            return choose_rows(logits)
        key = logits.shape, logits.device
        if self._latest is None or self._latest[0] != key:
            self._latest = key, choose_rows(logits)
        return self._latest[1]

    def _see(self, rows: torch.Tensor, index: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the gradient: inside of a graph, compiled autograd takes None for what is to replace it."""
        if gradient is None:
            return None
        if torch.compiler.is_compiling():
            self._feed(rows, index, gradient)
        elif self._binder.store.flags.is_open():
            try:
                with self._binder.span_of_a_hook():
                    self._feed(rows, index, gradient)
            except Exception as error:  # inside backward, where nothing can be said
                if self._binder.store.strict:
                    raise
                for hook in self.hooks:
                    for entry in hook.spec.entries.values():
                        self._binder._add_failure(entry.index, error)
        return gradient

    def _feed(self, rows: torch.Tensor, index: torch.Tensor, gradient: torch.Tensor) -> None:
        with torch.no_grad():
            *numbers, losses, counts = weights(rows, _take_rows(gradient, index), gradient)
        for hook, number in zip(self.hooks, numbers, strict=False):
            hook.feed(number.reshape(1, 1), None)
        self.hooks[-1].feed(losses[:, None], rows_of(counts))


def find_logits(output: Any) -> torch.Tensor | None:
    """Return the tensor of a model's output that may be logits ``[..., classes]``: named so, or the only one."""
    found = [(path, tensor) for path, tensor in walk(output) if _may_be_logits(tensor)]
    named = [tensor for path, tensor in found if path == _LOGITS]
    if named:
        return named[0]
    return found[0][1] if len(found) == 1 else None


def _may_be_logits(tensor: torch.Tensor) -> bool:
    is_plain = tensor.is_floating_point() and not is_dtensor(tensor)
    has_rows = tensor.dim() >= 2 and tensor.shape[-1] >= 2 and tensor.requires_grad and not tensor.is_leaf
    return is_plain and has_rows and (torch.compiler.is_compiling() or not is_a_mere_shape(tensor))


def choose_rows(logits: torch.Tensor) -> torch.Tensor:
    """Choose the rows that are read: one of each of up to 64 stretches.

    They lie at another place in each stretch, so that padding is met as often as it is there.
    """
    rows = logits[..., 0].numel()
    count = min(rows, _ROWS, max(_ENTRIES_OF_ALL // logits.shape[-1], 4))
    stretch = torch.arange(count, dtype=torch.float64, device=logits.device)
    places = (stretch + (stretch * 0.6180339887498949).frac()) * (rows / count)
    return places.long() if count < rows else stretch.long()


def _take_rows(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of ``[..., classes]``, by their number, wherever they lie."""
    if not torch.compiler.is_compiling() and tensor.is_contiguous():
        return tensor.view(-1, tensor.shape[-1]).index_select(0, index)
    places: list[torch.Tensor] = []
    for size in reversed(tensor.shape[:-1]):
        places.insert(0, index % size)
        index = index // size
    return tensor[tuple(places)]


def weights(rows: torch.Tensor, some: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The weight of a token; of all tokens together, at least and at most; of sampled rows the weighted loss, and
    whether each counts.

    rows, some: sampled rows of the logits, and of their gradient. 0, and no row counts, where the loss is no plain
    cross entropy: soft targets, label smoothing, a z-loss, weights of classes or tokens, or something else.
    """
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    allowed = _MISFIT + (_ROUNDINGS * torch.finfo(gradient.dtype).eps if gradient.dtype != wide else 0.0)
    entries = torch.arange(_ENTRIES, device=rows.device) * (gradient.shape[-1] - 1) // (_ENTRIES - 1)
    least, targets = some.to(wide).min(-1, keepdim=True)  # below 0 at the target, and 0 in a row that does not count
    sizes = rows.to(wide).logsumexp(-1, keepdim=True)
    losses = sizes - rows.gather(-1, targets).to(wide)
    is_other = (entries != targets) & (least != 0)
    others = (rows[:, entries].to(wide) - sizes).exp_() * is_other  # probabilities of what is no target
    seen = some[:, entries].to(wide) * is_other
    weight = seen.sum() / others.sum()
    of_target = least - weight * torch.expm1(-losses) * (least != 0)
    misfit = (seen - weight * others).abs_().sum() / seen.abs().sum() + of_target.abs_().sum() / least.abs().sum()
    fits = (misfit <= allowed) & (weight > 0)
    weight = torch.where(fits, weight, 0.0)
    count = torch.maximum((gradient.index_select(-1, entries) != 0).any(-1).sum(), (least != 0).sum())
    return weight, weight * count, weight * gradient[..., 0].numel(), losses[:, 0] * weight, (least[:, 0] != 0) & fits
