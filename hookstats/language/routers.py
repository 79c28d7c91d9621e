"""Routers of mixtures of experts: how sure they are, and how many tokens each expert gets, at measured steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hookstats import _native
from hookstats.language.finding import Router
from hookstats.language.rows import MOST_TOP_K, counted_rows, never_raising
from hookstats.modules import order
from hookstats.modules.channels import ChannelAxis
from hookstats.modules.containers import walk
from hookstats.watch.binding import SiteBinder
from hookstats.watch.graphs import feed_in_graph, shared_in_graph
from hookstats.watch.hooks import FedHook, SiteSpec
from hookstats.watch.ignoring import rows_on
from hookstats.watch.memory import local_part
from hookstats.watch.wrappers import is_a_mere_shape

KINDS = ("router.entropy", "router.margin", "router.load")


def _compute(
    logits: torch.Tensor | None,
    chosen: torch.Tensor | None,
    row_index: torch.Tensor | None,
    kept: torch.Tensor | None,
    experts: int,
    top_k: int,
) -> list[torch.Tensor]:
    with torch.no_grad():
        found: list[torch.Tensor] = []
        if logits is not None:
            margin_of = top_k if top_k <= MOST_TOP_K and top_k < experts else 0
            numbers = _native.softmax_rows(logits.detach(), margin_of)
            found = [numbers[2, ..., None].clone(), *([numbers[5, ..., None].clone()] if margin_of else [])]
            if chosen is None:
                chosen = logits.detach().topk(top_k, dim=-1).indices if top_k else None
        if chosen is not None:
            chosen = chosen.reshape(-1, chosen.shape[-1]).long()
            left = counted_rows(len(chosen), row_index, kept)
            is_one = (chosen >= 0) & (chosen < experts)  # others say that a token was dropped
            if left is not None:
                is_one &= left[:, None]
            load = torch.zeros(experts, dtype=torch.float32, device=chosen.device)
            load.scatter_add_(0, chosen.clamp(0, experts - 1).reshape(-1), is_one.float().reshape(-1))
            found.append(load[None])
        return found


def _shapes(
    logits: torch.Tensor | None, chosen: torch.Tensor | None, row_index: object, kept: object, experts: int, top_k: int
) -> list[torch.Tensor]:
    some = logits if logits is not None else chosen
    assert some is not None
    found: list[torch.Tensor] = []
    if logits is not None:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        numbers = 2 if top_k and top_k <= MOST_TOP_K and top_k < experts else 1
        found = [logits.new_empty((*logits.shape[:-1], 1), dtype=dtype) for _ in range(numbers)]
    if chosen is not None or top_k:
        found.append(some.new_empty((1, experts), dtype=torch.float32))
    return found


_operator = _native.operator(
    "router_rows(Tensor? logits, Tensor? chosen, Tensor? row_index, Tensor? kept, int experts, int top_k) -> Tensor[]",
    never_raising(_compute, _shapes),
    shapes=_shapes,
)


class _Logits(order.ModuleHook):
    """On a gate inside of a router, whose output is the router's logits."""

    def __init__(self, watching: WatchedRouter) -> None:
        self.watching = watching

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        self.watching.logits = output if isinstance(output, torch.Tensor) else None


class WatchedRouter(order.ModuleHook):
    """Measures a router when its forward ends, from its logits and the experts that it chose."""

    def __init__(self, name: str, router: Router, binder: SiteBinder, keeps: bool, device: torch.device) -> None:
        self.binder = binder
        self.monitor = binder.monitor
        self.experts = router.experts
        self.top_k = router.top_k or 0
        self.logits: torch.Tensor | None = None  # of the gate inside it, until the router's own forward ends
        specs = [SiteSpec(name, "", ChannelAxis(-1, None), False, (kind, None), router.module) for kind in KINDS[:2]]
        specs.append(SiteSpec(name, "", ChannelAxis(-1, router.experts), keeps, (KINDS[2], None), router.module))
        self.entropy, self.margin, self.load = (binder.late_hook(spec, device, FedHook) for spec in specs)

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        logits, self.logits = self.logits, None
        if torch.compiler.is_compiling():
            if shared_in_graph(self.load) is not None:
                self._feed_in_graph(output, logits)
        elif self.binder.measures_now() and not order.recomputing() and not torch._C._is_tracing():
            try:
                with self.binder.span_of_a_hook():
                    self._feed(output, logits)
            except Exception as error:
                entries = [e for hook in (self.entropy, self.margin, self.load) for e in hook.spec.entries.values()]
                self.binder.leave_out(entries, f"{type(error).__name__}: {error}")

    def _feed(self, output: Any, logits: torch.Tensor | None) -> None:
        logits, chosen = self._read(output, logits)
        logits, chosen = local_part(logits), local_part(chosen)
        some = chosen if logits is None else logits
        if some is None or is_a_mere_shape(some):
            return
        rows = rows_on(some.device, self.monitor)
        row_index, kept = rows or (None, None)
        found = _compute(logits, chosen, row_index, kept, self.experts, self.top_k)
        for hook, numbers in self._sites(logits, chosen, found):
            self.binder.feed(hook, numbers, None if hook is self.load else rows)

    def _feed_in_graph(self, output: Any, logits: torch.Tensor | None) -> None:
        logits, chosen = self._read(output, logits)
        some = chosen if logits is None else logits
        if some is None or type(some) is not torch.Tensor:
            return
        rows = rows_on(some.device, self.monitor)
        row_index, kept = rows or (None, None)
        found = _operator(logits, chosen, row_index, kept, self.experts, self.top_k)
        for hook, numbers in self._sites(logits, chosen, found):
            feed_in_graph(numbers, hook, None if hook is self.load else rows)

    def _read(self, output: Any, logits: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The logits, the last floating tensor with a column for each expert; and the experts that were chosen."""
        chosen = None
        for _, tensor in walk(output):
            if tensor.dim() < 2:
                continue
            if tensor.is_floating_point():
                is_of_experts = tensor.shape[-1] == self.experts and tensor.dtype in _native.DTYPES
                logits = tensor if is_of_experts else logits
            elif tensor.dtype in (torch.int64, torch.int32) and tensor.shape[-1] == self.top_k:
                chosen = tensor
        return logits, chosen

    def _sites(
        self, logits: torch.Tensor | None, chosen: torch.Tensor | None, found: list[torch.Tensor]
    ) -> list[tuple[FedHook, torch.Tensor]]:
        """Which site each of the operator's results is for."""
        hooks = [] if logits is None else [self.entropy]
        if logits is not None and self.top_k and self.top_k <= MOST_TOP_K and self.top_k < self.experts:
            hooks.append(self.margin)
        if chosen is not None or self.top_k:
            hooks.append(self.load)
        return list(zip(hooks, found, strict=True))


def watch_routers(
    found: Mapping[str, Router], binder: SiteBinder, keeps: bool, devices: Mapping[str, torch.device]
) -> list[Any]:
    """Hangs hooks on them; returns what takes them off again. keeps: whether experts are kept apart."""
    handles: list[Any] = []
    for name, router in found.items():
        watched = WatchedRouter(name, router, binder, keeps, devices[name])
        handles.append(order.register(router.module, watched))
        if router.gate is not router.module:
            handles.append(order.register(router.gate, _Logits(watched)))
    return handles
