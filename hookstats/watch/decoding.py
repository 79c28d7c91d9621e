"""Copied blocks of state to numbers: where every site was when they were copied, and a Snapshot of it."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from hookstats import _native
from hookstats.numbers.fields import FIELDS, Bins, Counts, Site, histogram_shape, total
from hookstats.numbers.site_stats import SiteStats
from hookstats.numbers.snapshot import Snapshot
from hookstats.watch.memory import Place, Store

Blocks: TypeAlias = dict[tuple[torch.device, int], Counts]  # copies of blocks, by device and number


class Row(NamedTuple):
    """What is needed to find a site in blocks that were copied."""

    site: Site
    places: tuple[Place, ...]
    keep_channels: bool
    channel_dim: int | None
    hidden_if_silent: bool
    reading: int | None  # of a parameter


class Map:
    """Where all sites were at one time: what is needed to read blocks, or totals, that were copied then."""

    def __init__(self, store: Store, totals_only: bool = False) -> None:
        self._rows = [
            Row(
                e.site,
                tuple(place.totals() for place in e.places) if totals_only else tuple(e.places),
                e.keep_channels and not totals_only,
                e.channel_dim if e.keep_channels else None,
                e.hidden_if_silent,
                e.reading if e.is_parameter else None,
            )
            for e in store.entries
        ]
        self._bins = store.histogram

    def snapshot(
        self,
        blocks: Blocks,
        step: int,
        scalars: dict[str, float],
        grad_scale: float | None,
        overflowed: bool | None,
    ) -> Snapshot:
        """The copied blocks as numbers; the arrays are kept, not copied."""
        sites: dict[Site, SiteStats] = {}
        fired: dict[Site, tuple[int, int]] = {}  # device, number in the order of execution there
        # Parameters are measured together: all of one reading have the number of the first.
        together: dict[tuple[str, int, int], int] = {}
        devices = list(dict.fromkeys(place.device for row in self._rows for place in row.places))
        for row in self._rows:
            parts = [_Part(place, blocks, self._bins) for place in row.places]
            parts = [part for part in parts[:-1] if part.calls] + parts[-1:]
            calls = sum(part.calls for part in parts)
            if row.hidden_if_silent and not calls:
                continue
            whole = parts[0] if len(parts) == 1 else _merged(parts)
            keep_channels = row.keep_channels and whole.moments.shape[1] == row.places[-1].channels
            scale = grad_scale if grad_scale is not None and row.site.tensor.startswith("grad_") else 1.0
            dim = row.channel_dim if keep_channels == row.keep_channels else None
            sites[row.site] = SiteStats(whole.moments, calls, whole.bins, keep_channels, self._bins, scale, dim)
            if calls:
                device, first = min((devices.index(part.device), part.first) for part in parts if part.calls)
                if row.reading is not None:
                    first = together.setdefault((row.site.tensor, device, row.reading), first)
                fired[row.site] = (device, first)
        return Snapshot(step, sites, sorted(fired, key=fired.__getitem__), scalars, grad_scale, overflowed)


class _Part:
    """One place's share of a site, from the copies."""

    def __init__(self, place: Place, blocks: Blocks, bins: Bins | None) -> None:
        memory = blocks[place.device, place.block][place.offset : place.offset + place.size]
        fields = len(FIELDS) * place.channels
        self.device = place.device
        self.calls, self.first = memory[fields : fields + _native.COUNTERS].tolist()
        self.moments = memory[:fields].view(np.float64).reshape(len(FIELDS), place.channels)
        counts = memory[fields + _native.COUNTERS :]
        self.bins = counts.reshape(histogram_shape(bins, place.channels)) if place.bins else None


def _merged(parts: list[_Part]) -> _Part:
    """All parts in the last one: channel by channel where all have the same ones, else as totals."""
    whole = parts[-1]
    if len({part.moments.shape for part in parts}) > 1:
        for part in parts:
            part.moments = total(part.moments)[:, None]
            if part.bins is not None and part.bins.ndim == 2:
                part.bins = part.bins.sum(0, keepdims=True)
    side_by_side = np.stack([part.moments for part in parts], axis=-1)
    starts = np.arange(0, side_by_side[0].size, len(parts))
    whole.moments = total(side_by_side.reshape(len(FIELDS), -1), starts)
    if whole.bins is not None:
        whole.bins = np.sum([part.bins for part in parts if part.bins is not None], axis=0)
    return whole
