"""Columns: one measured step as arrays over its sites. Pure numpy; what is not asked for is not finished."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookstats.numbers.fields import (
    BLOCK_BINS,
    EXPONENT_BINS,
    FIELDS,
    Array,
    Bins,
    Counts,
    ExponentBins,
    Site,
    Stats,
    fold_channels,
    kernel_block,
    unscale,
)
from hookstats.numbers.site_stats import SiteStats

_CHUNK = 1 << 16  # channels whose states are put together at once: 5 MB


class Columns:
    """All sites of a step, in the order of their making.

    ``sites``: n of them. ``calls`` ``[n]``: tensors folded in, 0 where a site was silent. ``order`` ``[fired]``: the
    places in ``sites`` of those that fired, in order of execution. ``scales`` ``[n]``: by which values are divided when
    they are finished. ``keeps`` ``[n]``: whether channels are kept apart, ``dims``: along which dimension, and
    ``group_sizes``: how many of them belong together.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        calls: Counts,
        order: Counts,
        scales: Array,
        keeps: Sequence[bool] | NDArray[np.bool_],
        dims: Sequence[int | None],
        bins: Bins | None,
        state: Callable[[int], Array],
        histogram: Callable[[int], Counts | None],
        wholes: Callable[[], Array] | None = None,
        shapes: Counts | None = None,
        group_sizes: Sequence[int | None] | None = None,
    ) -> None:
        """state: of a site, as it was measured, ``[fields, channels]``; histogram: of a site, of these bins, or None.

        wholes: all channels of each site together, as measured, ``[fields, n]``; None: from the states. shapes: as the
        property has them; None: from the states and histograms.
        """
        self.sites = list(sites)
        self.calls = calls
        self.order = order
        self.scales = scales
        self.keeps = np.asarray(keeps, bool)
        self.dims = list(dims)
        self.group_sizes = [None] * len(self.sites) if group_sizes is None else list(group_sizes)
        self.bins = bins
        self.state = state
        self.histogram = histogram
        self._make_wholes = wholes
        self._shapes = shapes
        self._stats: dict[int, SiteStats] = {}

    @classmethod
    def from_stats(cls, sites: Mapping[Site, SiteStats], order: Iterable[Site]) -> Columns:
        """Those of finished statistics."""
        listed = list(sites.values())
        place = {site: i for i, site in enumerate(sites)}
        columns = cls(
            list(sites),
            np.array([stats.calls for stats in listed], np.int64),
            np.array([place[site] for site in order], np.int64),
            np.array([stats._scale for stats in listed], np.float64),
            [stats._per_channel for stats in listed],
            [stats.channel_dim for stats in listed],
            next((stats._bins for stats in listed if stats._histogram is not None), None),
            lambda i: listed[i]._measured,
            lambda i: listed[i]._histogram,
            group_sizes=[stats.group_size for stats in listed],
        )
        columns._stats = dict(enumerate(listed))
        return columns

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and copied as finished statistics: what reads them from a step's memory stays in its process."""
        sites = {site: self.stats(i) for i, site in enumerate(self.sites)}
        return Columns.from_stats, (sites, [self.sites[i] for i in self.order.tolist()])

    def __len__(self) -> int:
        return len(self.sites)

    @cached_property
    def place(self) -> dict[Site, int]:
        """Of each site, in ``sites``."""
        return {site: i for i, site in enumerate(self.sites)}

    def stats(self, i: int) -> SiteStats:
        """Of the i-th site, always the same object."""
        if i not in self._stats:
            kept = bool(self.keeps[i]), self.bins, float(self.scales[i]), self.dims[i], self.group_sizes[i]
            self._stats[i] = SiteStats(self.state(i), int(self.calls[i]), self.histogram(i), *kept)
        return self._stats[i]

    @cached_property
    def wholes(self) -> Array:
        """``[fields, n]``: the states of all channels of each site together, as they were measured."""
        if self._make_wholes is not None:
            return self._make_wholes()
        return wholes_of([self.state(i) for i in range(len(self))])

    @cached_property
    def shapes(self) -> Counts:
        """``[2, n]``: of each site, how many channels its state has, and how many counters its histogram, or 0."""
        if self._shapes is not None:
            return self._shapes
        histograms = [self.histogram(i) for i in range(len(self))]
        channels = [self.state(i).shape[1] for i in range(len(self))]
        return np.array([channels, [0 if counts is None else counts.size for counts in histograms]], np.int64)

    @cached_property
    def totals(self) -> Stats[Array]:
        """Of each site, arrays ``[n]``, without the scaler's scale; NaN, or 0 where it is a count, of silent ones."""
        return Stats(unscale(self.wholes, self.scales))

    @cached_property
    def widths(self) -> Counts:
        """``[n]``: how many channels are kept apart; 0 where none are, or were not sent in this step."""
        return np.array([self.state(i).shape[1] if keeps else 0 for i, keeps in enumerate(self.keeps)], np.int64)

    @cached_property
    def channels(self) -> Stats[Array]:
        """All channels that are kept, side by side ``[sum of widths]``, without the scaler's scale."""
        chosen = np.flatnonzero(self.keeps)
        states = [np.empty((len(FIELDS), 0)), *(self.state(i) for i in chosen.tolist())]
        return Stats(unscale(np.concatenate(states, axis=1), np.repeat(self.scales[chosen], self.widths[chosen])))

    @cached_property
    def group_counts(self) -> Counts:
        """``[n]``: how many groups of channels each site has; 0 where nothing says that channels belong together."""
        sizes = np.array([size or 0 for size in self.group_sizes], np.int64)
        divides = (sizes > 0) & (self.widths % np.maximum(sizes, 1) == 0)
        return np.where(divides, self.widths // np.maximum(sizes, 1), 0)

    @cached_property
    def groups(self) -> Stats[Array]:
        """All groups of channels, side by side ``[sum of group_counts]``, without the scaler's scale."""
        chosen = np.flatnonzero(self.group_counts)
        counts = self.group_counts[chosen]
        sizes = np.repeat(self.widths[chosen] // counts, counts)
        states = [np.empty((len(FIELDS), 0)), *(self.state(i) for i in chosen.tolist())]
        merged = fold_channels(np.concatenate(states, axis=1), np.cumsum(sizes) - sizes)
        return Stats(unscale(merged, np.repeat(self.scales[chosen], counts)))

    def exponents(self, chosen: Iterable[int] | None = None) -> tuple[Counts, Counts]:
        """Histograms by exponent of whole tensors: the places in ``sites`` that have one ``[k]``, counts ``[k, 512]``.

        chosen: of these places; None: of all.
        As in the state, ``sign << 8 | exponent``, of the values as they were measured: with the scaler's scale. Empty
        where histograms are of another kind, or were not sent.
        """
        if not isinstance(self.bins, ExponentBins) or self.bins.per_channel:
            return np.empty(0, np.int64), np.empty((0, EXPONENT_BINS), np.int64)
        places = range(len(self)) if chosen is None else chosen
        found = [(i, counts[:EXPONENT_BINS]) for i in places if (counts := self.histogram(i)) is not None]
        counts = np.stack([counts for _, counts in found]) if found else np.empty((0, EXPONENT_BINS), np.int64)
        return np.array([i for i, _ in found], np.int64), counts

    def blocks(self, chosen: Iterable[int] | None = None) -> tuple[Counts, Counts]:
        """Counts of blocks (`BlockExponents`), of the places in ``sites`` that have some ``[k]``: ``[k, 576]``.

        chosen: of these places; None: of all. As in the state, of the values as they were measured. Empty without
        ``ExponentBins(block=...)``, or where histograms were not sent.
        """
        places: Iterable[int] = () if kernel_block(self.bins) == 0 else range(len(self)) if chosen is None else chosen
        found = [(i, counts[EXPONENT_BINS:]) for i in places if (counts := self.histogram(i)) is not None]
        counts = np.stack([counts for _, counts in found]) if found else np.empty((0, BLOCK_BINS), np.int64)
        return np.array([i for i, _ in found], np.int64), counts

    def compact(self) -> Columns:
        """The totals alone, without the scaler's scale."""
        wholes = unscale(self.wholes, self.scales)
        none = [None] * len(self)
        return Columns(
            self.sites,
            self.calls,
            self.order,
            np.ones(len(self)),
            [False] * len(self),
            none,
            None,
            lambda i: wholes[:, i : i + 1].copy(),
            none.__getitem__,
            lambda: wholes,
        )

    def select(self, chosen: Sequence[int]) -> Columns:
        """Some of the sites, ascending; nothing is copied."""
        new = {old: i for i, old in enumerate(chosen)}
        return Columns(
            [self.sites[i] for i in chosen],
            self.calls[list(chosen)],
            np.array([new[i] for i in self.order.tolist() if i in new], np.int64),
            self.scales[list(chosen)],
            [self.keeps[i] for i in chosen],
            [self.dims[i] for i in chosen],
            self.bins,
            lambda i: self.state(chosen[i]),
            lambda i: self.histogram(chosen[i]),
            group_sizes=[self.group_sizes[i] for i in chosen],
        )


def wholes_of(states: Sequence[Array]) -> Array:
    """``[fields, sites]``: all channels of each state together."""
    result = np.empty((len(FIELDS), len(states)))
    begin, width = 0, 0
    for end, state in enumerate(states, start=1):
        width += state.shape[1]
        if width >= _CHUNK or end == len(states):
            widths = np.array([state.shape[1] for state in states[begin:end]], np.int64)
            result[:, begin:end] = fold_channels(np.concatenate(states[begin:end], axis=1), np.cumsum(widths) - widths)
            begin, width = end, 0
    return result
