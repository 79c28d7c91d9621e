"""Routers of mixtures of experts: how sure they are, and how many tokens each expert gets, at measured steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hookstats import _native
from hookstats.language.feeding import Fed
from hookstats.language.finding import Router
from hookstats.language.rows import MOST_TOP_K, operator, select_counted
from hookstats.modules import order
from hookstats.modules.channels import ChannelAxis
from hookstats.modules.containers import walk
from hookstats.numbers.fields import Site
from hookstats.watch.binding import SiteBinder
from hookstats.watch.flags import is_capturing
from hookstats.watch.guards import Rows
from hookstats.watch.hooks import SiteSpec
from hookstats.watch.ignoring import rows_on
from hookstats.watch.memory import local_part
from hookstats.watch.skipping import InsideCapture
from hookstats.watch.wrappers import is_a_mere_shape

KINDS = ("router.entropy", "router.margin", "router.load")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _has_margin(experts: int, top_k: int) -> bool:
    """Return whether there is a logit after those of the chosen experts, and the kernel finds it."""
    return 0 < top_k < experts and top_k <= MOST_TOP_K


def _compute(
    logits: torch.Tensor | None,
    chosen: torch.Tensor | None,
    row_index: torch.Tensor | None,
    kept: torch.Tensor | None,
    experts: int,
    top_k: int,
) -> list[torch.Tensor]:
    """Return entropies, margins where there are some, the load, and at last 1: 0 where it has failed in a graph."""
    with torch.no_grad():
        found: list[torch.Tensor] = []
        if logits is not None:
            margin_of = top_k if _has_margin(experts, top_k) else 0
            numbers = _native.softmax_rows(logits.detach(), margin_of)
            found = [numbers[2, ..., None].clone(), *([numbers[5, ..., None].clone()] if margin_of else [])]
            if chosen is None:
                chosen = logits.detach().topk(top_k, dim=-1).indices if top_k else None
        if chosen is not None:
            chosen = chosen.reshape(-1, chosen.shape[-1]).long()
            left = select_counted(len(chosen), row_index, kept)
            is_one = (chosen >= 0) & (chosen < experts)  # others say that a token was dropped
            if left is not None:
                is_one &= left[:, None]
            load = torch.zeros(experts, dtype=torch.float32, device=chosen.device)
            load.scatter_add_(0, chosen.clamp(0, experts - 1).reshape(-1), is_one.float().reshape(-1))
            found.append(load[None])
        return [*found, torch.ones(1, dtype=torch.int32, device=found[0].device)]


def _infer_shapes(
    logits: torch.Tensor | None, chosen: torch.Tensor | None, row_index: object, kept: object, experts: int, top_k: int
) -> list[torch.Tensor]:
    some = logits if logits is not None else chosen
    assert some is not None
    found: list[torch.Tensor] = []
    if logits is not None:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        numbers = 1 + _has_margin(experts, top_k)
        found = [logits.new_empty((*logits.shape[:-1], 1), dtype=dtype) for _ in range(numbers)]
    if chosen is not None or top_k:
        found.append(some.new_empty((1, experts), dtype=torch.float32))
    return [*found, some.new_empty((1,), dtype=torch.int32)]


_operator = operator(
    "router_rows(Tensor? logits, Tensor? chosen, Tensor? row_index, Tensor? kept, int experts, int top_k) -> Tensor[]",
    _compute,
    _infer_shapes,
)


def _count_all(numbers: torch.Tensor, there: torch.Tensor) -> Rows:
    """Return the numbers of all rows of ``[..., 1]`` or ``[1, ...]``, and how many count: none where `there` is 0."""
    shape = numbers.shape[:-1]
    return torch.arange(shape.numel(), dtype=torch.int32, device=numbers.device).reshape(shape), there * shape.numel()


class RouterSites(Fed):
    """The sites of a router: from its logits, and the experts that tokens go to."""

    def __init__(
        self,
        name: str,
        module: nn.Module | None,
        experts: int,
        top_k: int,
        of: Routers,
        device: torch.device,
    ) -> None:
        """top_k: experts that a token goes to; 0: nobody says. of: those of its monitor."""
        self.experts = experts
        self.top_k = top_k
        keeps = of.keeps and of.binder.store.make_room(device, experts, len(KINDS))  # else the load is a total
        specs = [SiteSpec(name, "", ChannelAxis(-1, None), False, (kind, None), module) for kind in KINDS[:2]]
        specs.append(SiteSpec(name, "", ChannelAxis(-1, experts), keeps, (KINDS[2], None), module))
        super().__init__(of.binder, specs, device)
        self.entropy, self.margin, self.load = self.hooks

    def see(self, logits: torch.Tensor | None, chosen: torch.Tensor | None) -> None:
        """logits ``[..., experts]``, chosen ``[..., top_k]``: or None. Can be traced."""
        some = chosen if logits is None else logits
        if some is None:
            return
        if torch.compiler.is_compiling():
            if type(some) is torch.Tensor:
                self._feed(logits, chosen, some.device)
        else:
            self.carefully(self._see, logits, chosen, some.device)

    def _see(self, logits: torch.Tensor | None, chosen: torch.Tensor | None, device: torch.device) -> None:
        logits, chosen = local_part(logits), local_part(chosen)
        if not any(is_a_mere_shape(each) for each in (logits, chosen) if each is not None):
            self._feed(logits, chosen, device)

    def _feed(self, logits: torch.Tensor | None, chosen: torch.Tensor | None, device: torch.device) -> None:
        rows, row = rows_on(device, self.monitor), None
        compute: Callable[..., list[torch.Tensor]] = _operator if torch.compiler.is_compiling() else _compute
        *found, there = compute(logits, chosen, *(rows or (None, None)), self.experts, self.top_k)
        if torch.compiler.is_compiling():
            rows = _count_all(found[0], there) if rows is None else (rows[0], rows[1] * there)
            row = _count_all(found[-1], there)
        if logits is not None:
            self.entropy.feed(found[0], rows)
            if _has_margin(self.experts, self.top_k):
                self.margin.feed(found[1], rows)
        if chosen is not None or self.top_k:
            self.load.feed(found[-1], row)


class _Logits(order.ModuleHook):
    """Hook on a gate inside of a router, whose output is the router's logits."""

    def __init__(self, watching: WatchedRouter) -> None:
        self.watching = watching

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        self.watching.logits = output if isinstance(output, torch.Tensor) else None


class WatchedRouter(order.ModuleHook):
    """Measures a router when its forward ends."""

    def __init__(self, sites: RouterSites) -> None:
        self.sites = sites
        self.logits: torch.Tensor | None = None  # of the gate inside it, until the router's own forward ends

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        logits, self.logits = self.logits, None
        if self.sites.is_wanted():
            self.sites.see(*self._read(output, logits))

    def _read(self, output: Any, logits: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The logits, the last floating tensor with a column for each expert; and the experts that were chosen."""
        chosen = None
        for _, tensor in walk(output):
            if tensor.dim() < 2:
                continue
            if tensor.is_floating_point():
                is_of_experts = tensor.shape[-1] == self.sites.experts and tensor.dtype in _native.DTYPES
                logits = tensor if is_of_experts else logits
            elif tensor.dtype in (torch.int64, torch.int32) and tensor.shape[-1] == self.sites.top_k:
                chosen = tensor
        return logits, chosen


class Routers:
    """The routers of a model that a monitor watches, and those that it is given by hand."""

    def __init__(self, binder: SiteBinder, keeps: bool) -> None:
        """keeps: whether experts are kept apart."""
        self.binder = binder
        self.keeps = keeps
        self._by_hand: dict[str, RouterSites] = {}

    def watch(self, found: Mapping[str, Router], devices: Mapping[str, torch.device]) -> list[Any]:
        """Hangs hooks on them; returns what takes them off again."""
        handles: list[Any] = []
        for name, router in found.items():
            sites = RouterSites(name, router.module, router.experts, router.top_k or 0, self, devices[name])
            watched = WatchedRouter(sites)
            handles.append(order.register(router.module, watched))
            if router.gate is not router.module:
                handles.append(order.register(router.gate, _Logits(watched)))
        return handles

    def measure_by_hand(
        self, name: str, logits: Any, chosen: Any, experts: int | None = None, top_k: int | None = None
    ) -> None:
        """Implement `Monitor.router`."""
        found = self._by_hand.get(name)
        if torch.compiler.is_compiling():
            if found is not None and found.is_wanted() and (logits is None or logits.shape[-1] == found.experts):
                found.see(logits, chosen)
            return
        check_types(name, logits, chosen, experts, top_k)
        some = chosen if logits is None else logits
        if not self.binder.measures_now() or is_a_mere_shape(some) or _native.backward_is_running():
            return
        experts, top_k = check_shapes(local_part(logits), local_part(chosen), experts, top_k)
        if found is None:
            if is_capturing():
                self.binder.skipping.leave_out([Site(name, kind) for kind in KINDS], InsideCapture())
                return
            with self.binder.store.lock:
                if any(entry.site == Site(name, KINDS[2]) for entry in self.binder.store.entries):
                    raise ValueError(f"router: expected a name that no watched router has, got {name!r}")
                found = self._by_hand[name] = RouterSites(name, None, experts, top_k, self, local_part(some).device)
        if (found.experts, found.top_k) != (experts, top_k):
            raise ValueError(
                f"router: expected {found.experts} experts and top {found.top_k} of {name!r} as before, got {experts} "
                f"and {top_k}"
            )
        found.see(logits, chosen)


def check_types(name: Any, logits: Any, chosen: Any, experts: Any, top_k: Any) -> None:
    """TypeError for what is no name, no tensors, no numbers."""
    if not isinstance(name, str):
        raise TypeError(f"router: expected a name, got {name!r}")
    for which, each in (("logits", logits), ("chosen", chosen)):
        if each is not None and not isinstance(each, torch.Tensor):
            raise TypeError(f"router: {which}: expected a tensor, got {type(each).__name__}")
    if logits is None and chosen is None:
        raise TypeError("router: expected logits, chosen or both, got neither")
    for which, number in (("experts", experts), ("top_k", top_k)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            raise TypeError(f"router: {which}: expected an int, got {number!r}")


def check_shapes(
    logits: torch.Tensor | None, chosen: torch.Tensor | None, experts: int | None, top_k: int | None
) -> tuple[int, int]:
    """Return how many experts there are, and to how many a token goes (0: unknown); raises as `Monitor.router`."""
    if logits is not None:
        if logits.dtype not in _native.DTYPES or logits.dim() < 1:
            raise TypeError(
                f"router: logits: expected floating [..., experts], got {logits.dtype} of shape {tuple(logits.shape)}"
            )
        experts = logits.shape[-1] if experts is None else experts
        if experts != logits.shape[-1]:
            raise ValueError(f"router: logits: expected {experts} experts, got {tuple(logits.shape)}")
    if chosen is not None:
        if chosen.dtype not in _INTEGERS or chosen.dim() < 1:
            raise TypeError(
                f"router: chosen: expected integers [..., top_k], got {chosen.dtype} of shape {tuple(chosen.shape)}"
            )
        top_k = chosen.shape[-1] if top_k is None else top_k
        if top_k != chosen.shape[-1]:
            raise ValueError(f"router: chosen: expected {top_k} experts of each token, got {tuple(chosen.shape)}")
    if logits is not None and chosen is not None:
        if logits.shape[:-1] != chosen.shape[:-1]:
            raise ValueError(
                f"router: expected logits and chosen of the same tokens, got {tuple(logits.shape)} and "
                f"{tuple(chosen.shape)}"
            )
        if logits.device != chosen.device:
            raise ValueError(
                f"router: expected logits and chosen on one device, got {logits.device} and {chosen.device}"
            )
    if experts is None:
        raise ValueError("router: expected experts=, because chosen does not tell how many there are")
    if not 0 <= (top_k or 0) <= experts:
        raise ValueError(f"router: top_k: expected at most the {experts} experts, got {top_k}")
    return experts, top_k or 0
