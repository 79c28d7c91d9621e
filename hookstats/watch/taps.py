"""Tensors inside a forward that no module returns, measured as if one did."""

from __future__ import annotations

import torch

from hookstats.modules.channels import ChannelAxis
from hookstats.numbers.fields import Site
from hookstats.watch.arguments import refuse_device
from hookstats.watch.binding import SiteBinder
from hookstats.watch.flags import is_capturing
from hookstats.watch.hooks import SiteHook, SiteSpec
from hookstats.watch.memory import local_part
from hookstats.watch.skipping import InsideCapture
from hookstats.watch.wrappers import is_a_mere_shape


class Taps:
    """A hook for each name, made when its first tensor comes."""

    def __init__(self, binder: SiteBinder, keep_channels: bool) -> None:
        self._binder = binder
        self._store = binder.store
        self._keep_channels = keep_channels
        self._hooks: dict[str, SiteHook] = {}

    def tap(self, tensor: torch.Tensor, name: str, channel_dim: int | None) -> torch.Tensor:
        """Implement `Monitor.tap`."""
        if torch.compiler.is_compiling():
            hook = self._hooks.get(name)
            if hook is not None:
                hook(None, (), tensor)
            return tensor
        if not isinstance(tensor, torch.Tensor) or not isinstance(name, str):
            raise TypeError(f"tap: expected a tensor and a name, got {type(tensor).__name__} and {name!r}")
        if channel_dim is not None and (not isinstance(channel_dim, int) or isinstance(channel_dim, bool)):
            raise TypeError(f"tap: channel_dim: expected a dimension or None, got {channel_dim!r}")
        hook = self._hooks.get(name)
        if hook is None and self._binder.measures_now() and not is_a_mere_shape(tensor):
            with self._store.lock:
                hook = self._hooks.get(name) or self._make_hook(tensor, name, channel_dim)
        if hook is not None:
            hook(None, (), tensor)
        return tensor

    def _make_hook(self, tensor: torch.Tensor, name: str, channel_dim: int | None) -> SiteHook | None:
        if is_capturing():
            self._binder.skipping.leave_out([Site(name, "output"), Site(name, "grad_output")], InsideCapture())
            return None
        if any(entry.site.name == name for entry in self._store.entries):
            raise ValueError(f"tap: expected a name that no watched module has, got {name!r}")
        spec = SiteSpec(name, "", ChannelAxis(channel_dim, None), self._keep_channels, ("output", "grad_output"))
        try:
            refuse_device(tensor.device)
            self._hooks[name] = self._binder.late_hook(spec, local_part(tensor).device, SiteHook)
        except Exception as error:  # no memory for its state, say
            if self._store.strict:
                raise
            self._binder.warn_once(("tap", name), f"not measured: {name!r}: {error}")
        return self._hooks.get(name)
