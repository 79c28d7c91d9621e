"""Fits the states of hooks to the tensors that they meet: the device, the channels' dimension, and their number."""

from __future__ import annotations

import torch

from hookstats import _native
from hookstats._warn import WarnOnce
from hookstats.modules.evidence import UNKNOWN, Ran, Seen, channel_dim_by_evidence, seen_of, widths_of
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
            self.fit_seen(hook, seen_of(tensor), tensor.device)

    def fit_seen(self, hook: Hook, seen: Seen, device: torch.device) -> bool:
        """Whether anything has changed."""
        spec = hook.spec
        place = spec.place
        dim = self._channel_dim(spec, seen, place.channels)
        width = (seen.sizes[dim] if seen.sizes else 1) if spec.keep_channels else None
        if width == UNKNOWN:
            width = None
        if is_capturing() and any(entry.place_at(device, width or 1) is None for entry in spec.entries.values()):
            raise Captured
        if width is not None and spec.bound and not spec.guessed and width != place.channels:
            if spec.moved:
                some, *_ = spec.sites.values()
                self._warn_once(
                    "width",
                    f"{some} had {place.channels} channels and now has {width}: they are folded into one, here and at "
                    "other sites whose width changes",
                )
                spec.keep_channels, width = False, None
            spec.moved = True
        spec.met, spec.guessed = True, False
        self._ran.note(seen.sizes, dim)
        return self._settle(hook, len(seen.sizes), dim, width, device)

    def _settle(self, hook: Hook, ndim: int, dim: int, width: int | None, device: torch.device) -> bool:
        """Gives the hook states of this width; None: totals alone. Whether they are others than before."""
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
            return False
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
        return True

    def _channel_dim(self, spec: SiteSpec, seen: Seen, width: int) -> int:
        """Counted from 0."""
        ndim = len(seen.sizes)
        if ndim == 0:
            return 0
        known = spec.channels.dim
        if known is not None:
            if not -ndim <= known < ndim:
                raise IndexError(f"channel_dim={known} is out of range for an output of shape {seen.sizes}")
            return known % ndim
        found = None if spec.guessed else spec.dims.get(ndim)
        if found is not None and (not spec.keep_channels or seen.sizes[found] == width):
            return found
        return channel_dim_by_evidence(seen, widths_of(None if spec.module is None else spec.module()), self._ran)

    def fit_by_type(self, hook: Hook, ndim: int) -> None:
        """For what cannot be looked at, such as a nested tensor."""
        spec = hook.spec
        if spec.channels.dim is not None and spec.bound and not spec.met:
            width = spec.place.channels if spec.keep_channels else None
            self._settle(hook, ndim, spec.channels.dim, width, spec.place.device)

    def guess(self, hook: Hook, met: SiteSpec, seen: Seen, is_later: bool) -> None:
        """Gives what one hook met to another at the same path of a module like it."""
        spec, dim = hook.spec, met.dims.get(len(seen.sizes))
        if dim is None or spec.met or (spec.guessed and not is_later):
            return  # it knows better, or a graph may have run with an earlier guess
        spec.guessed = True
        width = spec.channels.width or (seen.sizes[dim] if seen.sizes else 1)
        keeps = spec.keep_channels and met.keep_channels
        self._settle(hook, len(seen.sizes), dim, width if keeps else None, spec.place.device)
