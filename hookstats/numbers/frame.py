"""StepFrame: one measured step, the form in which everybody has it. Pure numpy; what is not asked for is not computed.

A step is a list of sites, blocks of memory in which their states lie, and what was given with the step. The blocks are
those that were copied from the device, or read from a recording, or made by a merge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, overload

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
    Skipped,
    Stats,
    bins_from_json,
    bins_to_json,
    fold_channels,
    histogram_shape,
    kernel_block,
    unscale,
)
from hookstats.numbers.kinds import has_rows, kind_of
from hookstats.numbers.ranks import ALONE, Drift, Spread, StepRanks
from hookstats.numbers.site_stats import SiteStats

# When a parameter was measured: as the step ended, as an optimizer stepped, or when somebody asked for gradients. It is
# a reading modulo OCCASIONS; over OF_OPTIMIZER, that is the number of steps that optimizers of the model had begun.
AT_END, AT_OPTIMIZER, BEFORE_CLIPPING = 1, 2, 3
OCCASIONS = 4
OF_OPTIMIZER = 1 << 24
COUNTERS = 2  # between the moments of a state and its histogram: calls, and when the first of them came, on its device
_CHUNK = 1 << 16  # channels whose states are put together at once: 5 MB
_SELECTIONS = 4  # of sites, that are kept
Mask = NDArray[np.bool_]


class Sites(Sequence[Site]):
    """Sites, and where the state of each lies: one object for all steps in which they lie alike.

    ``names`` ``[n]``. ``keeps`` ``[n]``: whether channels are kept apart, ``dims``: along which dimension (None: it is
    not known), ``group_sizes``: how many of them belong together (None: nothing says so). ``bins``: of the histograms.

    Places, int64 ``[n]``, in units of 8 bytes: ``block`` and ``begin`` of the moments, float64 ``[fields, channels]``;
    ``channels``; ``histogram_block`` and ``histogram_begin`` of the histogram, and ``counters``, its size, or 0.
    """

    def __init__(
        self,
        names: Iterable[Site],
        keeps: Sequence[bool] | Mask,
        dims: Sequence[int | None],
        group_sizes: Sequence[int | None] | None,
        bins: Bins | None,
        places: Counts,
    ) -> None:
        """places: ``[6, n]``, in the order above."""
        self.names = tuple(names)
        self.keeps = np.asarray(keeps, bool)
        self.dims = tuple(dims)
        self.group_sizes = (None,) * len(self.names) if group_sizes is None else tuple(group_sizes)
        self.bins = bins
        self.places = np.asarray(places, np.int64).reshape(6, len(self.names))
        self.block, self.begin, self.channels, self.histogram_block, self.histogram_begin, self.counters = self.places
        self._selections: dict[bytes, Sites] = {}

    @classmethod
    def side_by_side(
        cls,
        names: Iterable[Site],
        keeps: Sequence[bool] | Mask,
        dims: Sequence[int | None],
        group_sizes: Sequence[int | None] | None,
        bins: Bins | None,
        channels: Sequence[int] | Counts,
        counters: Sequence[int] | Counts,
    ) -> Sites:
        """Return those whose states lie one after another in one block, each behind it its histogram."""
        widths, counts = np.asarray(channels, np.int64), np.asarray(counters, np.int64)
        sizes = len(FIELDS) * widths + counts
        begin, zeros = np.cumsum(sizes) - sizes, np.zeros(len(sizes), np.int64)
        places = np.stack([zeros, begin, widths, zeros, begin + len(FIELDS) * widths, counts])
        return cls(names, keeps, dims, group_sizes, bins, places)

    @overload
    def __getitem__(self, i: int) -> Site: ...

    @overload
    def __getitem__(self, i: slice) -> Sequence[Site]: ...

    def __getitem__(self, i: int | slice) -> Site | Sequence[Site]:
        return self.names[i]

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.names)

    @cached_property
    def place(self) -> dict[Site, int]:
        """The number of each site."""
        return {site: i for i, site in enumerate(self.names)}

    @cached_property
    def is_scaled(self) -> Mask:
        """``[n]``: whether it is a gradient that a GradScaler's scale is still in."""
        kinds = [kind_of(site.tensor) for site in self.names]
        return np.array([kind.is_gradient and not kind.is_replicated for kind in kinds], bool)

    def scales(self, grad_scale: float | None) -> Array:
        """``[n]``: by which the values of each site are divided."""
        return np.where(self.is_scaled, 1.0 if grad_scale is None else grad_scale, 1.0)

    @cached_property
    def sizes(self) -> list[int]:
        """Return how much of each block holds sites."""
        ends = np.zeros(1 + max(self.block.max(initial=-1), self.histogram_block.max(initial=-1)), np.int64)
        np.maximum.at(ends, self.block, self.begin + len(FIELDS) * self.channels)
        np.maximum.at(ends, self.histogram_block, (self.histogram_begin + self.counters) * (self.counters > 0))
        return ends.tolist()  # type: ignore[no-any-return]

    @cached_property
    def group_counts(self) -> Counts:
        """``[n]``: how many groups of channels each site has; 0 where nothing says that channels belong together."""
        sizes = np.array([size or 0 for size in self.group_sizes], np.int64)
        divides = (sizes > 0) & (self.widths % np.maximum(sizes, 1) == 0)
        return np.where(divides, self.widths // np.maximum(sizes, 1), 0)

    @cached_property
    def widths(self) -> Counts:
        """``[n]``: how many channels are kept apart; 0 where none are, or were not sent in this step."""
        return np.where(self.keeps, self.channels, 0)

    def select(self, chosen: Counts) -> Sites:
        """Return those at these places; the same object for the same choice, most of the time."""
        key = chosen.tobytes()
        if key not in self._selections:
            at = chosen.tolist()
            if len(self._selections) == _SELECTIONS:
                del self._selections[next(iter(self._selections))]
            self._selections[key] = Sites(
                [self.names[i] for i in at],
                self.keeps[chosen],
                [self.dims[i] for i in at],
                [self.group_sizes[i] for i in at],
                self.bins,
                self.places[:, chosen],
            )
        return self._selections[key]

    @cached_property
    def of_one_channel(self) -> list[tuple[int, Counts, Counts]]:
        """Return for each block with sites of one channel its number, these sites, and where their states lie."""
        single = self.channels == 1
        blocks = np.unique(self.block[single]).tolist()
        chosen = [(number, np.flatnonzero(single & (self.block == number))) for number in blocks]
        return [(number, here, self.begin[here] + np.arange(len(FIELDS))[:, None]) for number, here in chosen]

    @cached_property
    def of_more_channels(self) -> Counts:
        return np.flatnonzero(self.channels > 1)

    def to_json(self) -> dict[str, Any]:
        """Return it in JSON's types."""
        return {
            "names": [list(site) for site in self.names],
            "keeps": self.keeps.tolist(),
            "dims": list(self.dims),
            "group_sizes": list(self.group_sizes),
            "bins": None if self.bins is None else bins_to_json(self.bins),
            "places": self.places.tolist(),
        }

    @classmethod
    def from_json(cls, d: Mapping[str, Any]) -> Sites:
        """Read what `to_json` gave. ValueError, KeyError or TypeError for anything else."""
        bins = None if d["bins"] is None else bins_from_json(d["bins"])
        names = [Site(*each) for each in d["names"]]
        if not all(isinstance(part, str) for site in names for part in site):
            raise ValueError(f"expected names and tensors, got {names}")
        keeps, dims, group_sizes = (list(d[key]) for key in ("keeps", "dims", "group_sizes"))
        places = np.array(d["places"])
        if (places.dtype.kind != "i" and places.size) or places.shape != (6, len(names)) or places.min(initial=0) < 0:
            raise ValueError(f"expected six places of {len(names)} sites, got {places}")
        if not len(keeps) == len(dims) == len(group_sizes) == len(names):
            raise ValueError(f"expected as many of each as {len(names)} sites, got {keeps}, {dims}, {group_sizes}")
        if not all(dim is None or isinstance(dim, int) for dim in dims):
            raise ValueError(f"expected channel dimensions, got {dims}")
        if not all(size is None or (isinstance(size, int) and size > 0) for size in group_sizes):
            raise ValueError(f"expected numbers of channels that belong together, got {group_sizes}")
        made = cls(names, keeps, dims, group_sizes, bins, places)
        for channels, counters in np.unique(made.places[[2, 5]], axis=1).T.tolist():
            if channels < 1 or counters not in (0, int(np.prod(histogram_shape(bins, channels)))):
                raise ValueError(f"expected the bins of {bins} for {channels} channels, got {counters}")
        return made


class LazyBlocks(Sequence[Counts]):
    """Blocks that are made, or read, when they are asked for."""

    def __init__(self, count: int, make: Callable[[int], Counts]) -> None:
        """make: the i-th block, of int64."""
        self._made: list[Counts | None] = [None] * count
        self._make = make

    def __len__(self) -> int:
        return len(self._made)

    def __getitem__(self, i: Any) -> Any:
        found = self._made[i]
        if found is None:
            found = self._made[i] = self._make(i)
        return found


@dataclass(eq=False)
class StepFrame:
    """A measured step.

    ``sites``: n of them. ``memory``: the blocks in which they lie, int64. ``calls`` ``[n]``: tensors folded in, 0 where
    a site was silent. ``order`` ``[fired]``: the places of those that fired, in order of execution. ``scales`` ``[n]``:
    by which values are divided when they are finished.

    ``time``: of the closing of the step, in seconds since the epoch. ``earlier_scalars``, ``sample_ids``: of the steps
    closed since the measured one before, by their number, ascending; the ids of this one are among the latter.
    ``spread``: over the ranks, over ``sites``. The others are as in Snapshot.

    ``rows``: of activations and their gradients, which of so many rows was read; 1: all were.

    ``hidden`` ``[n]``: the sites of which nothing is said where they were silent; `drop_hidden` is without them.
    ``readings`` ``[n]``: of a parameter, with which others it was measured, and when (AT_END). Both only until ranks
    are merged.
    """

    sites: Sites
    memory: Sequence[Counts]
    calls: Counts
    order: Counts
    scales: Array
    step: int
    time: float = 0.0
    scalars: dict[str, float] = field(default_factory=dict)
    earlier_scalars: dict[int, dict[str, float]] = field(default_factory=dict)
    sample_ids: dict[int, Counts] = field(default_factory=dict)
    grad_scale: float | None = None
    overflowed: bool | None = None
    skipped: dict[Site, Skipped] = field(default_factory=dict)
    ranks: StepRanks = ALONE
    spread: dict[str, Spread] = field(default_factory=dict)
    drifts: tuple[Drift, ...] = ()
    rows: int = 1
    hidden: Mask | None = None
    readings: Counts | None = None
    known_wholes: Array | None = None
    """``wholes``, where they are known without the states."""

    def __post_init__(self) -> None:
        self._stats: dict[int, SiteStats] = {}

    @classmethod
    def from_stats(cls, stats: Mapping[Site, SiteStats], order: Iterable[Site], step: int, **given: Any) -> StepFrame:
        """Return a step of finished statistics. given: as the attributes."""
        listed = list(stats.values())
        histograms = [each._histogram for each in listed]
        sites = Sites.side_by_side(
            stats,
            [each._per_channel for each in listed],
            [each.channel_dim for each in listed],
            [each.group_size for each in listed],
            next((each._bins for each in listed if each._histogram is not None), None),
            [each._measured.shape[1] for each in listed],
            [0 if counts is None else counts.size for counts in histograms],
        )
        made = cls(
            sites,
            [block_of([each._measured for each in listed], histograms)],
            np.array([each.calls for each in listed], np.int64),
            np.array([sites.place[site] for site in order], np.int64),
            np.array([each._scale for each in listed], np.float64),
            step,
            **given,
        )
        made._stats = dict(enumerate(listed))
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Pickled and copied with the memory of its own sites alone."""
        n = range(len(self.sites))
        of, histograms = self.sites, [self.histogram(i) for i in n]
        kept = of.keeps, of.dims, of.group_sizes, of.bins
        sites = Sites.side_by_side(of.names, *kept, of.channels, of.counters)
        memory = [block_of([self.state(i) for i in n], histograms)]
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**fields, "sites": sites, "memory": memory, "_stats": {}}

    def __len__(self) -> int:
        return len(self.sites)

    @property
    def bins(self) -> Bins | None:
        return self.sites.bins

    def state(self, i: int) -> Array:
        """Return the state of the i-th site, as it was measured, ``[fields, channels]``."""
        sites = self.sites
        begin, channels = int(sites.begin[i]), int(sites.channels[i])
        values: Counts = self.memory[sites.block[i]][begin : begin + len(FIELDS) * channels]
        return values.view(np.float64).reshape(len(FIELDS), channels)

    def histogram(self, i: int) -> Counts | None:
        """Return the histogram of the i-th site, as in the state, of `bins`; None without one."""
        sites, size = self.sites, int(self.sites.counters[i])
        if not size:
            return None
        begin = int(sites.histogram_begin[i])
        counts: Counts = self.memory[sites.histogram_block[i]][begin : begin + size]
        return counts.reshape(histogram_shape(sites.bins, int(sites.channels[i])))

    def stats(self, i: int) -> SiteStats:
        """Return the statistics of the i-th site, always the same object."""
        if i not in self._stats:
            of = self.sites
            rows = self.rows if has_rows(*of.names[i]) else 1
            kept = bool(of.keeps[i]), of.bins, float(self.scales[i]), of.dims[i], of.group_sizes[i], rows
            self._stats[i] = SiteStats(self.state(i), int(self.calls[i]), self.histogram(i), *kept)
        return self._stats[i]

    @cached_property
    def wholes(self) -> Array:
        """``[fields, n]``: the states of all channels of each site together, as they were measured."""
        if self.known_wholes is not None:
            return self.known_wholes
        sites = self.sites
        result = np.empty((len(FIELDS), len(sites)))
        for number, here, at in sites.of_one_channel:  # at once: most, where totals alone came
            result[:, here] = self.memory[number][at].view(np.float64)
        if len(sites.of_more_channels):
            result[:, sites.of_more_channels] = wholes_of([self.state(i) for i in sites.of_more_channels.tolist()])
        return result

    @cached_property
    def totals(self) -> Stats[Array]:
        """Totals of sites, arrays ``[n]``, without the scaler's scale; of silent ones NaN, or 0 for counts."""
        return Stats(unscale(self.wholes, self.scales))

    @cached_property
    def channels(self) -> Stats[Array]:
        """All channels that are kept, side by side ``[sum of widths]``, without the scaler's scale."""
        chosen = np.flatnonzero(self.sites.keeps)
        states = [np.empty((len(FIELDS), 0)), *(self.state(i) for i in chosen.tolist())]
        scales = np.repeat(self.scales[chosen], self.sites.widths[chosen])
        return Stats(unscale(np.concatenate(states, axis=1), scales))

    @cached_property
    def groups(self) -> Stats[Array]:
        """All groups of channels, side by side ``[sum of group_counts]``, without the scaler's scale."""
        chosen = np.flatnonzero(self.sites.group_counts)
        counts = self.sites.group_counts[chosen]
        sizes = np.repeat(self.sites.widths[chosen] // counts, counts)
        states = [np.empty((len(FIELDS), 0)), *(self.state(i) for i in chosen.tolist())]
        merged = fold_channels(np.concatenate(states, axis=1), np.cumsum(sizes) - sizes)
        return Stats(unscale(merged, np.repeat(self.scales[chosen], counts)))

    def exponents(self, chosen: Iterable[int] | None = None) -> tuple[Counts, Counts]:
        """Histograms by exponent of whole tensors: the places in ``sites`` that have one ``[k]``, counts ``[k, 512]``.

        chosen: of these places; None: of all.
        As in the state, ``sign << 8 | exponent``, of the values as they were measured: with the scaler's scale. Empty
        where histograms are of another kind, or were not sent.
        """
        is_whole = isinstance(self.bins, ExponentBins) and not self.bins.per_channel
        return self._counts(chosen if is_whole else (), 0, EXPONENT_BINS)

    def block_counts(self, chosen: Iterable[int] | None = None) -> tuple[Counts, Counts]:
        """Counts of blocks (`BlockExponents`), of the places in ``sites`` that have some ``[k]``: ``[k, 576]``.

        chosen: of these places; None: of all. As in the state, of the values as they were measured. Empty without
        ``ExponentBins(block=...)``, or where histograms were not sent.
        """
        has_blocks = kernel_block(self.bins) != 0
        return self._counts(chosen if has_blocks else (), EXPONENT_BINS, BLOCK_BINS)

    def _counts(self, chosen: Iterable[int] | None, first: int, size: int) -> tuple[Counts, Counts]:
        sites, places = self.sites, np.arange(len(self)) if chosen is None else np.array(list(chosen), np.int64)
        places = places[sites.counters[places] > 0]
        counts, blocks = np.empty((len(places), size), np.int64), sites.histogram_block[places]
        for number in np.unique(blocks).tolist():
            here = blocks == number
            at = sites.histogram_begin[places[here]] + first
            counts[here] = self.memory[number][at[:, None] + np.arange(size)]
        return places, counts

    def compact(self) -> StepFrame:
        """The totals alone, without the scaler's scale."""
        n, wholes = len(self), unscale(self.wholes, self.scales)
        sites = Sites.side_by_side(self.sites.names, [False] * n, [None] * n, None, None, [1] * n, [0] * n)
        memory = [np.ascontiguousarray(wholes.T).view(np.int64).reshape(-1)]
        return replace(self, sites=sites, memory=memory, scales=np.ones(n), known_wholes=None)

    def select(self, chosen: Counts) -> StepFrame:
        """Some of the sites, by their places, ascending; their memory is not copied."""
        new = np.full(len(self), -1)
        new[chosen] = np.arange(len(chosen))
        order = new[self.order]
        return replace(
            self,
            sites=self.sites.select(chosen),
            calls=self.calls[chosen],
            order=order[order >= 0],
            scales=self.scales[chosen],
            spread={name: Spread(*(each[chosen] for each in spread)) for name, spread in self.spread.items()},
            hidden=None if self.hidden is None else self.hidden[chosen],
            readings=None if self.readings is None else self.readings[chosen],
            known_wholes=None if self.known_wholes is None else self.known_wholes[:, chosen],
        )

    def drop_hidden(self) -> StepFrame:
        """Return the frame without the sites of which nothing is said."""
        if self.hidden is None:
            return self
        shown = (self.calls > 0) | ~self.hidden
        return self if shown.all() else self.select(np.flatnonzero(shown))


def block_of(states: Sequence[Array], histograms: Sequence[Counts | None] = ()) -> Counts:
    """The memory of sites that lie side by side: each one's state, and its histogram behind it."""
    words = [np.empty(0, np.int64)]
    for state, counts in zip_longest(states, histograms):
        if state is not None:
            words.append(np.ascontiguousarray(state).view(np.int64).reshape(-1))
        if counts is not None:
            words.append(counts.reshape(-1))
    return np.concatenate(words)


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


def merge_states(states: Sequence[Array], histograms: Sequence[Counts | None]) -> tuple[Array, Counts | None]:
    """Merge the states of a site: channel by channel where all have the same ones, else as totals.

    histograms: of each; None: without. They are added where all have one.
    """
    counts = [each for each in histograms if each is not None]
    if len({state.shape for state in states}) > 1:
        states = [fold_channels(state)[:, None] for state in states]
        counts = [each.sum(0, keepdims=True) if each.ndim == 2 else each for each in counts]
    side_by_side = np.stack(states, axis=-1)
    starts = np.arange(0, side_by_side[0].size, len(states))
    moments = fold_channels(side_by_side.reshape(len(FIELDS), -1), starts)
    return moments, np.sum(counts, axis=0) if len(counts) == len(states) else None
