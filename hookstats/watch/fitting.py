"""Fits the states of hooks to the tensors that they meet: the device, the channels' dimension, and their number."""

from __future__ import annotations

import torch

from hookstats import _native
from hookstats._warn import WarnOnce
from hookstats.modules.evidence import Ran, find_channel_dim_by_evidence, find_widths
from hookstats.watch.flags import is_capturing
from hookstats.watch.hooks import SiteHook, SiteSpec
from hookstats.watch.ignoring import Ignoring
from hookstats.watch.memory import StateStore
from hookstats.watch.skipping import InsideCapture


class Fitting:
    """Moves the states of a monitor's hooks. Remembers what has run, which is evidence of where channels lie."""

    def __init__(self, store: StateStore, ignoring: Ignoring, warn_once: WarnOnce) -> None:
        self._store = store
        self._ignoring = ignoring
        self._warn_once = warn_once
        self._ran = Ran()

    def fit(self, hook: SiteHook, tensor: torch.Tensor) -> None:
        """Moves the hook's states to the device and width of a tensor, one thread after the other."""
        if tensor.dtype not in _native.DTYPES:
            raise TypeError(f"expected a tensor of one of {', '.join(map(str, _native.DTYPES))}, got {tensor.dtype}")
        if tensor.layout != torch.strided:
            raise TypeError(f"expected a dense strided tensor, got layout {tensor.layout}")
        with self._store.lock:
            self._fit(hook, tensor)

    def _fit(self, hook: SiteHook, tensor: torch.Tensor) -> None:
        spec, device = hook.spec, tensor.device
        channels = spec.place.channels
        dim = self._channel_dim(spec, tensor, channels)
        width = (tensor.shape[dim] if tensor.dim() else 1) if spec.keep_channels else None
        is_first = not spec.dims
        is_turned = spec.dims.get(tensor.dim(), dim) != dim
        if width is not None and not is_first and (width != channels or is_turned):
            some, *entries = spec.entries.values()
            self._warn_once(
                "width",
                f"{some.site} had {channels} channels and now has {width}: in steps with both, its channels are folded "
                "into one, here and at other sites whose width changes",
            )
            if any(entry.left for entry in (some, *entries)):
                spec.keep_channels, width = False, None
        if is_first:
            for entry in spec.entries.values():
                entry.is_container = False
        self._settle(hook, tensor.dim(), dim, width, device, is_first)
        self._ran.note(tuple(tensor.shape), dim)

    def _settle(
        self, hook: SiteHook, ndim: int, dim: int, width: int | None, device: torch.device, is_first: bool
    ) -> None:
        """Gives the hook states of this width; None: totals alone."""
        spec = hook.spec
        place = spec.place
        is_turned = width is not None and spec.dims.get(ndim, dim) != dim
        stays = (device, width or 1) == (place.device, place.channels) and not is_turned
        if is_capturing() and not stays:
            raise InsideCapture
        make_room = self._store.make_room if is_first else self._store.make_room_to_move
        if not stays and width is not None and not make_room(device, width, len(spec.entries)):
            self._warn_once(
                "budget",
                f"per-channel state of {spec.name!r} and later sites would not fit into memory_budget="
                f"{self._store.memory_budget} bytes: they keep totals only",
            )
            spec.keep_channels, width = False, None
            stays = (device, 1) == (place.device, place.channels)
        if not stays and not self._store.make_room(device, width or 1, len(spec.entries)):
            raise MemoryError(self._store.explain_no_room(1, len(spec.entries)))
        before = spec.channel_dim
        spec.dims[ndim] = dim
        if stays and not is_first and spec.channel_dim == before:
            return
        for entry in spec.entries.values():
            entry.keep_channels, entry.channel_dim = width is not None, spec.shown_dim
            if stays:
                entry.state = entry.state._replace(channel_dim=spec.channel_dim)
            else:
                self._store.move(entry, device, width or 1, spec.channel_dim, is_first, is_turned)
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
        widths = find_widths(None if spec.module is None else spec.module())
        return find_channel_dim_by_evidence(tensor, widths, self._ran)
