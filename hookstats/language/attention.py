"""Attention logits: what the softmax of each head of an attention module is like, at measured steps."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.attention import flex_attention as flex

from hookstats import _native
from hookstats.language.feeding import Fed
from hookstats.language.interception import AttentionMark, Interception, mark_of
from hookstats.language.rows import AttentionRows, attention_rows, check_shapes, explain_problem, measure_logits_rows
from hookstats.modules import order
from hookstats.modules.channels import ChannelAxis
from hookstats.modules.heads import find_heads
from hookstats.modules.sharding import Sharding, find_sharding, is_dtensor
from hookstats.numbers.fields import Site
from hookstats.watch.binding import SiteBinder
from hookstats.watch.flags import is_capturing
from hookstats.watch.graphs import mark_static_address
from hookstats.watch.hooks import SiteSpec
from hookstats.watch.ignoring import rows_on
from hookstats.watch.memory import local_part
from hookstats.watch.skipping import InsideCapture
from hookstats.watch.wrappers import is_a_mere_shape, note_sharding_of

KINDS = ("attention.max_logit", "attention.entropy", "attention.sink", "attention.bound")


class Attention(Fed):
    """Watches one module, from its forward to its sites."""

    def __init__(
        self,
        name: str,
        module: nn.Module | None,
        of: Attentions,
        device: torch.device,
        weighing: nn.Module | None = None,
    ) -> None:
        """of: those of its monitor. weighing: the module that has the weights of its queries."""
        specs = [SiteSpec(name, "", ChannelAxis(-1, None), of.keeps, (kind, None), module) for kind in KINDS]
        for spec in specs:
            spec.placed = weakref.WeakMethod(self._find_sharding)
        super().__init__(of.binder, specs, device)
        self.max_logit, self.entropy, self.sink, self.bound = self.hooks
        self._of = of
        self._rows = of.rows
        self.turn = of.turn_on(device)
        self.heads = None if module is None else find_heads(module)  # where logits have no dimension of heads
        self._weights = None if weighing is None else weakref.ref(weighing)

    def see(self, q: Any, k: Any, mask: Any, is_causal: bool, scale: float | None, softcap: float) -> None:
        """The attention that the module computes now. Can be traced. Never raises, but under strict."""
        if not self.is_wanted():
            return
        if torch.compiler.is_compiling():
            is_plain = type(q) is torch.Tensor and (mask is None or type(mask) is torch.Tensor)
            if is_plain and explain_problem(q, k, mask) is None:
                ignoring = rows_on(q.device, self.monitor)
                self._feed(attention_rows(q, k, mask, self.turn, ignoring, self._rows, is_causal, scale, softcap))
        else:
            self.carefully(self._see, q, k, mask, is_causal, scale, softcap)

    def see_logits(self, logits: Any) -> None:
        """The same, of which a softmax over the last dimension is taken."""
        if not self.is_wanted():
            return
        if torch.compiler.is_compiling():
            logits = self._split_heads(logits)
            if logits.dim() == 4 and logits.dtype in _native.DTYPES:
                self._feed(measure_logits_rows(logits, self.turn, rows_on(logits.device, self.monitor), self._rows))
        else:
            self.carefully(self._see_logits, logits)

    def _split_heads(self, logits: Any) -> Any:
        """Split a dimension that holds both heads and items of the batch into two."""
        if logits.dim() == 3 and self.heads and len(logits) % self.heads == 0:
            return logits.unflatten(0, (-1, self.heads))
        return logits

    def note_heads(self, q: Any) -> None:
        """The sites remember that each rank has some of the heads, where it does: q or logits say so, or weights."""
        sharding = find_sharding(q, q.dim() - 3) if is_dtensor(q) else self._find_sharding(q.shape[-3])
        for hook in self.hooks:
            for entry in hook.spec.entries.values():
                note_sharding_of(entry, sharding, self._binder.store.clears)

    def _find_sharding(self, heads: int) -> Sharding | None:
        """Return the sharding of so many heads here. With tensor parallelism q is a plain tensor, a part by rows."""
        module = None if self._weights is None else self._weights()
        weights: Any = () if module is None else module.parameters()
        for weight in weights:
            if is_dtensor(weight) and weight.dim() == 2 and any(each.is_shard(0) for each in weight.placements):
                found = find_sharding(weight, 0)
                here = local_part(weight).shape[0]
                return found._replace(channels=found.channels // here * heads) if here else None
        return None

    def _see(self, q: Any, k: Any, mask: Any, is_causal: bool, scale: float | None, softcap: float) -> None:
        if any(x.is_nested for x in (q, k)):
            raise TypeError("expected dense q and k, got nested ones")
        whole, q, k = q, local_part(q), local_part(k)
        if is_a_mere_shape(q):
            return
        self.note_heads(whole)
        mask, turn, ignoring = _as_tensor(mask, q.device), self._of.turn_on(q.device), rows_on(q.device, self.monitor)
        self._feed(attention_rows(q, k, mask, turn, ignoring, self._rows, is_causal, scale, softcap))

    def _see_logits(self, logits: Any) -> None:
        part = local_part(logits)
        found = self._split_heads(part)
        if found.dim() == 4 and found.dtype in _native.DTYPES and not is_a_mere_shape(found):
            self.note_heads(logits if found is part else found)
            turn, ignoring = self._of.turn_on(found.device), rows_on(found.device, self.monitor)
            self._feed(measure_logits_rows(found, turn, ignoring, self._rows))

    def _feed(self, found: AttentionRows) -> None:
        counting = found.row_index, found.kept
        self.max_logit.feed(found.max, counting)
        self.entropy.feed(found.entropy, counting)
        self.sink.feed(found.sink, counting)
        if found.bound is not None:
            self.bound.feed(found.bound, counting)


def _as_tensor(mask: Any, device: torch.device) -> torch.Tensor | None:
    if mask is None or type(mask) is torch.Tensor:
        return mask
    if hasattr(mask, "mask_mod"):  # flex attention's
        batch, heads, queries, keys = mask.shape
        dense: torch.Tensor = flex.create_mask(mask.mask_mod, batch or 1, heads or 1, queries, keys, str(device))
        return dense
    materialize = getattr(mask, "_materialize", None)  # torch.nn.attention.bias.CausalBias
    if materialize is not None:
        made: torch.Tensor = materialize(device)
        return made
    found: torch.Tensor = local_part(mask)
    return found


class _Watching:
    """A handle: a monitor watches a module until it is removed."""

    def __init__(self, module: nn.Module, attention: Attention) -> None:
        self._attention = attention
        self._mark = mark_of(module) or AttentionMark()
        if not self._mark.watchers:
            self._mark.handle = order.register(module, self._mark, on_inputs=True)
        self._mark.watchers = (*self._mark.watchers, attention)

    def remove(self) -> None:
        self._mark.watchers = tuple(each for each in self._mark.watchers if each is not self._attention)
        if not self._mark.watchers:
            self._mark.handle.remove()


def _find_weights_owner(name: str, modules: dict[str, nn.Module]) -> nn.Module:
    """The innermost of these modules around it, or itself, that has weights."""
    around = [
        each for each in modules if f"{name}.".startswith(f"{each}.") and any(True for _ in modules[each].parameters())
    ]
    return modules[max(around, key=len, default=name)]


class Attentions:
    """The attentions of a model that a monitor watches, and those that it is given by hand."""

    def __init__(self, binder: SiteBinder, rows: int | None, keeps: bool) -> None:
        """rows: of each head, how many queries are looked at; None: all. keeps: whether heads are kept apart."""
        self.binder = binder
        self.rows = rows
        self.keeps = keeps
        self._by_hand: dict[str, Attention] = {}
        self._turn = 0  # which rows are looked at: another number at each measured step
        self._turns: dict[torch.device, torch.Tensor] = {}

    def watch(self, modules: dict[str, nn.Module], devices: dict[str, torch.device]) -> list[Any]:
        """Hangs hooks on them; returns what takes them off again, and puts the replaced functions back."""
        handles: list[Any] = [
            _Watching(module, Attention(name, module, self, devices[name], _find_weights_owner(name, modules)))
            for name, module in modules.items()
        ]
        return [*handles, Interception(modules.values())]

    def measure_by_hand(
        self, q: Any, k: Any, name: str, mask: Any = None, is_causal: bool = False, scale: float | None = None
    ) -> None:
        """Implement `Monitor.attention`."""
        found = self._by_hand.get(name)
        if torch.compiler.is_compiling():
            if found is not None:
                found.see(q, k, mask, is_causal, scale, 0.0)
            return
        if not isinstance(q, torch.Tensor) or not isinstance(k, torch.Tensor) or not isinstance(name, str):
            raise TypeError(
                f"attention: expected two tensors and a name, got {type(q).__name__}, {type(k).__name__} and {name!r}"
            )
        if not self.binder.measures_now() or is_a_mere_shape(q) or _native.backward_is_running():
            return
        if not q.is_nested and not k.is_nested:
            check_shapes(local_part(q), local_part(k), local_part(mask))
        if found is None:
            if is_capturing():
                self.binder.skipping.leave_out([Site(name, kind) for kind in KINDS], InsideCapture())
                return
            with self.binder.store.lock:
                if any(entry.site == Site(name, KINDS[0]) for entry in self.binder.store.entries):
                    raise ValueError(f"attention: expected a name that no watched attention has, got {name!r}")
                found = self._by_hand[name] = Attention(name, None, self, local_part(q).device)
        found.see(q, k, mask, is_causal, scale, 0.0)

    def turn_on(self, device: torch.device) -> torch.Tensor:
        """Return the turn, which chooses rows: int64 [1], the same tensor for as long as the monitor lives."""
        if device not in self._turns:
            with torch.inference_mode(False):
                self._turns[device] = torch.full((1,), self._turn, device=device)
            mark_static_address(self._turns[device])
        return self._turns[device]

    def begin_step(self) -> None:
        """A measured step begins; it is not the first one."""
        self._turn += 7919  # a prime: neighbouring steps look at rows that lie apart
        for turn in self._turns.values():
            turn.fill_(self._turn)
