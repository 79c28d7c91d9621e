"""Fits the states of hooks to the tensors that they meet: the device, the channels' dimension, and their number."""

from __future__ import annotations

import torch

from hookstats import _native
from hookstats._warn import WarnOnce
from hookstats.modules.evidence import Ran, channel_dim_by_evidence, seen_of, widths_of
from hookstats.watch.flags import is_capturing
from hookstats.watch.hooks import Hook, SiteSpec
from hookstats.watch.ignoring import Ignoring
from hookstats.watch.memory import Store
from hookstats.watch.skipping import Captured


class Fitting:
    """Moves the states of a monitor's hooks. Remembers what has run, which is evidence of where channels lie."""

    def __init__(self, store: Store, ignoring: Ignoring, warn_once: WarnOnce) -> None:
        self._store = store
        self._ignoring = ignoring
        self._warn_once = warn_once
        self._ran = Ran()

    def fit(self, hook: Hook, tensor: torch.Tensor) -> None:
        """Moves the hook's states to the device and width of a tensor, one thread after the other."""
        if tensor.dtype not in _native.DTYPES:
            raise TypeError(f"expected a tensor of one of {', '.join(map(str, _native.DTYPES))}, got {tensor.dtype}")
        if tensor.layout != torch.strided:
            raise TypeError(f"expected a dense strided tensor, got layout {tensor.layout}")
        with self._store.lock:
            self._fit(hook, tensor)

    def _fit(self, hook: Hook, tensor: torch.Tensor) -> None:
        spec, device = hook.spec, tensor.device
        place = spec.place
        dim = self._channel_dim(spec, tensor, place.channels)
        width = (tensor.shape[dim] if tensor.dim() else 1) if spec.keep_channels else None
        if is_capturing() and any(entry.place_at(device, width or 1) is None for entry in spec.entries.values()):
            raise Captured
        if width is not None and spec.bound and width != place.channels:
            if spec.moved:
                some, *_ = spec.sites.values()
                self._warn_once(
                    "width",
                    f"{some} had {place.channels} channels and now has {width}: they are folded into one, here and at "
                    "other sites whose width changes",
                )
                spec.keep_channels, width = False, None
            spec.moved = True
        if not spec.dims:  # the first tensor that it meets
            for entry in spec.entries.values():
                entry.is_container = False
        self._ran.note(tuple(tensor.shape), dim)
        self._settle(hook, tensor.dim(), dim, width, device)

    def _settle(self, hook: Hook, ndim: int, dim: int, width: int | None, device: torch.device) -> None:
        """Gives the hook states of this width; None: totals alone."""
        spec = hook.spec
        place = spec.place
        stays = spec.bound and (device, width or 1) == (place.device, place.channels)
        new = sum(entry.place_at(device, width or 1) is None for entry in spec.entries.values())
        if not stays and width is not None and not self._store.make_room(device, width, new):
            self._warn_once(
                "budget",
                f"per-channel state of {spec.name!r} and later sites would not fit into memory_budget="
                f"{self._store.memory_budget} bytes: they keep totals only",
            )
            spec.keep_channels, width = False, None
            stays = spec.bound and (device, 1) == (place.device, place.channels)
        before = spec.channel_dim
        spec.dims[ndim] = dim
        if stays and spec.channel_dim == before:
            return
        spec.bound = True
        for entry in spec.entries.values():
            entry.keep_channels, entry.channel_dim = width is not None, spec.shown_dim
            if stays:
                entry.state = entry.state._replace(channel_dim=spec.channel_dim)
            else:
                self._store.place(entry, device, width or 1, spec.channel_dim)
        hook.bind_sites()
        if device != place.device:
            self._ignoring.refresh()

    def _channel_dim(self, spec: SiteSpec, tensor: torch.Tensor, width: int) -> int:
        """Counted from 0."""
        ndim = tensor.dim()
        if ndim == 0:
            return 0
        known = spec.channels.dim
        if known is not None:
            if not -ndim <= known < ndim:
                raise IndexError(f"channel_dim={known} is out of range for an output of shape {tuple(tensor.shape)}")
            return known % ndim
        found = spec.dims.get(ndim)
        if found is not None and (not spec.keep_channels or tensor.shape[found] == width):
            return found
        widths = widths_of(None if spec.module is None else spec.module())
        return channel_dim_by_evidence(seen_of(tensor), widths, self._ran)
