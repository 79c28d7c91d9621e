"""The shared part of attention and routers: sites of numbers that are computed while a module runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hookstats import _native
from hookstats.watch.binding import SiteBinder
from hookstats.watch.graphs import is_measured
from hookstats.watch.hooks import FedHook, SiteSpec


class Fed:
    """The sites of one module, or of what is given by hand under one name."""

    def __init__(
        self,
        binder: SiteBinder,
        specs: Iterable[SiteSpec],
        device: torch.device,
        make: type[FedHook] = FedHook,
    ) -> None:
        self.monitor = binder.monitor
        self._binder = binder
        self.hooks = tuple(binder.late_hook(spec, device, make) for spec in specs)

    def is_wanted(self) -> bool:
        """Return whether what runs now is measured. Can be traced."""
        if torch.compiler.is_compiling():
            return is_measured(self.hooks[0])
        if not self._binder.measures_now() or _native.backward_is_running() or torch._C._is_tracing():
            return False
        return torch._guards.TracingContext.try_get() is None

    def carefully(self, see: Callable[..., None], *what: Any) -> None:
        """Leave a site out if it cannot be measured, instead of raising."""
        try:
            with self._binder.span_of_a_hook():
                see(*what)
        except Exception as error:
            entries = [entry for hook in self.hooks for entry in hook.spec.entries.values()]
            self._binder.leave_out(entries, error)
