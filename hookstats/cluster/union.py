"""Tables of the sites that a rank has to merge, and their union over all ranks. Pure numpy.

All ranks that hold equal models have equal tables, whatever their own parts are: a table crosses the network once, and
only where one has changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

import numpy as np

from hookstats.numbers.fields import FIELDS, Bins, Counts, Site, bins_from_json, bins_to_json, histogram_shape
from hookstats.numbers.frame import Sites, StepFrame
from hookstats.numbers.kinds import kind_of

# Who counts, of the ranks that have a row: "each" (what they hold differs), "first" (all hold the same: the lowest of
# them), or those whose number here, the lowest rank of the mesh on which a tensor lies, is the lowest of all.
Owners: TypeAlias = str | int

SPREAD = ("rms", "abs_max", "mean", "nonfinite")  # of which the ranks' extremes are told
_NAMED = 5  # sites that a note names
_MOST_IDS = 8 << 20  # bytes of the ids of samples of all ranks


class TableRow(NamedTuple):
    """A site as it is in the whole, when all ranks' parts are put together."""

    site: Site
    channels: int  # 1 where there are totals alone
    counters: int  # of its histogram; 0 without one
    keep_channels: bool
    channel_dim: int | None
    owners: Owners
    apart_of: str = ""  # the tensor that this is one rank's of, where it is not known whether others hold the same
    group_size: int | None = None
    is_known: bool = True  # of a parameter, whether it is known which ranks hold the same of it
    has_folded: bool = False  # has measured tensors as totals alone

    @property
    def is_narrow(self) -> bool:
        """True for totals alone, and where no tensor has told its width yet."""
        return self.channels == 1 and not self.keep_channels

    @property
    def compared_as(self) -> Site | None:
        """The name under which ranks' states are compared; None: they are not."""
        if self.apart_of:
            return Site(self.site.name, self.apart_of)
        kind = kind_of(self.site.tensor)
        return self.site if kind.is_replicated and not kind.is_update and "[" not in self.site.tensor else None


class Share(NamedTuple):
    """A rank's own part of a site."""

    offset: int = 0  # its first channel, in the whole
    counts: bool = True  # False: another rank of the same mesh holds the same, and counts
    leads: bool = True  # False: of the ranks that hold parts of one tensor, another one counts the calls
    # The ranks, this one among them, that hold the same of it, or, of what is kept apart, may do so. (): not known.
    peers: tuple[int, ...] = ()


class Placed(NamedTuple):
    """The place of a site of this rank in the whole."""

    channels: int  # of the whole
    owners: Owners
    share: Share
    site: Site | None = None  # under which it is merged, if not its own: apart from other ranks' tensors


class OwnSite(NamedTuple):
    """A site as this rank has it."""

    site: Site
    channels: int  # of its state
    keep_channels: bool
    channel_dim: int | None

    @property
    def is_parameter(self) -> bool:
        """True where data parallel ranks hold the same."""
        return kind_of(self.site.tensor).is_replicated


Placing: TypeAlias = Callable[[OwnSite], Placed]


def whole(own: OwnSite) -> Placed:
    """The placing of plain tensors: each rank has all channels; parameters are the same on all ranks."""
    return Placed(own.channels, "first" if own.is_parameter else "each", Share())


class Table(NamedTuple):
    """The sites that a rank has to merge, and all else that ranks must have alike."""

    rows: tuple[TableRow, ...]
    bins: Bins | None
    scalars: tuple[str, ...] = ()  # names
    unmeasured: tuple[Site, ...] = ()  # sites without a row, of which tensors were left out
    budget: int = 1 << 28  # bytes that the whole may take on each rank
    spread: bool = False  # whether the ranks' extremes are wanted
    samples: int = 0  # how many ids of samples came with a step so far, at most

    def to_text(self) -> bytes:
        """Return JSON, the same for equal tables."""
        bins = None if self.bins is None else bins_to_json(self.bins)
        return json.dumps((self.rows, bins, *self[2:]), separators=(",", ":")).encode()

    @classmethod
    def from_text(cls, text: bytes) -> Table:
        """Read what `to_text` gave, of a rank of the same job."""
        rows, bins, scalars, unmeasured, *others = json.loads(text)
        return cls(
            tuple(TableRow(Site(*site), *row) for site, *row in rows),
            None if bins is None else bins_from_json(bins),
            tuple(scalars),
            tuple(Site(*each) for each in unmeasured),
            *others,
        )


def checksum_of(text: bytes) -> int:
    """Return 64 bits that stand for a text."""
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little", signed=True)


def counters_of(bins: Bins | None, channels: int) -> int:
    """Return the number of counters of a site's histogram."""
    return int(np.prod(histogram_shape(bins, channels)))


class Local(NamedTuple):
    """The table of steps of the same sites, with this rank's own shares."""

    table: Table
    text: bytes  # of the table
    checksum: int  # of the text
    shares: list[Share]  # one for each row


class Tables:
    """The tables of a rank's steps: made anew only where something has changed.

    A scalar, or a site without state of which something was left out, stays in them when it was there once, and the
    most ids of samples, and that a site without channels has measured something.
    """

    def __init__(self, budget: int, spread: bool) -> None:
        """budget, spread: see Table."""
        self._budget = budget
        self._spread = spread
        self._scalars: dict[str, None] = {}
        self._left_out: dict[Site, None] = {}
        self._folded: set[Site] = set()
        self._latest: tuple[Sites | None, bytes] = None, b""  # what was added to these last
        self._samples = 0
        self._known: dict[Sites, tuple[Placing, tuple[int, int], Local]] = {}

    def local(self, frame: StepFrame, placing: Placing = whole) -> Local:
        """Return the table of a step. placing: another object where anything about it has changed.

        ValueError where a share does not lie in its whole.
        """
        self._scalars |= dict.fromkeys(frame.scalars)
        self._left_out |= dict.fromkeys(frame.skipped)
        self._samples = max(self._samples, len(frame.sample_ids.get(frame.step, ())))
        of = frame.sites
        folded = np.flatnonzero((frame.calls > 0) & ~of.keeps & (of.channels == 1))
        if (of, folded.tobytes()) != self._latest:
            self._latest = of, folded.tobytes()
            self._folded.update(of[i] for i in folded.tolist())
        seen = len(self._scalars) + len(self._left_out) + len(self._folded), self._samples
        known = self._known.get(frame.sites)
        if known is None or known[:2] != (placing, seen):
            known = self._known[frame.sites] = (placing, seen, self._make(frame.sites, placing))
            for sites in list(self._known)[:-2]:  # of whole states, and of totals
                del self._known[sites]
        return known[2]

    def _make(self, of: Sites, placing: Placing) -> Local:
        own = [OwnSite(*each) for each in zip(of.names, of.channels.tolist(), of.keeps.tolist(), of.dims, strict=True)]
        placed = [_placed(each, placing) for each in own]
        rows = tuple(
            TableRow(
                place.site or each.site,
                place.channels,
                counters_of(of.bins, place.channels) if counters else 0,
                each.keep_channels,
                each.channel_dim,
                place.owners,
                each.site.tensor if place.site is not None and place.share.peers else "",
                group_size,
                bool(place.share.peers) or not each.is_parameter,
                each.channels == 1 and not each.keep_channels and each.site in self._folded,
            )
            for each, place, counters, group_size in zip(own, placed, of.counters.tolist(), of.group_sizes, strict=True)
        )
        names = {row.site for row in rows}
        unmeasured = tuple(site for site in self._left_out if site not in names)
        table = Table(rows, of.bins, tuple(self._scalars), unmeasured, self._budget, self._spread, self._samples)
        text = table.to_text()
        return Local(table, text, checksum_of(text), [place.share for place in placed])


def _placed(own: OwnSite, placing: Placing) -> Placed:
    place, channels = placing(own), own.channels
    if channels == 1 and not own.keep_channels:  # totals of the share are a part of those of the whole
        return place._replace(channels=1, share=place.share._replace(offset=0))
    if not 0 <= place.share.offset <= place.channels - channels:
        offset = place.share.offset
        raise ValueError(f"{own.site}: expected {channels} channels from {offset} to lie in {place.channels}")
    return place


class Union:
    """The tables of all ranks as one, alike on all.

    ``rows``: of all sites, in the order of the first table, then what others add. ``sites``: theirs, then those without
    a row of which something was left out. ``unlike``: sites of which ranks have other channels, merged as totals.
    ``notes``: messages for the user about it.
    """

    def __init__(self, texts: Sequence[bytes], ranks: Sequence[int]) -> None:
        """texts: of each rank's table. ranks: theirs, ascending."""
        self.ranks = tuple(ranks)
        first = dict(zip(reversed(texts), reversed(ranks), strict=True))
        tables = sorted(((rank, Table.from_text(text)) for text, rank in first.items()), key=lambda pair: pair[0])
        self.notes: list[str] = []
        bins, *others = {table.bins for _, table in tables}
        self.bins: Bins | None = None if others else bins
        if others:
            self.notes.append("no histograms are merged, because not all ranks have the same bins")
        self.scalars = tuple(dict.fromkeys(name for _, table in tables for name in table.scalars))
        self.spread = all(table.spread for _, table in tables)
        self.samples = max(table.samples for _, table in tables)
        self._budget = min(table.budget for _, table in tables)
        self.unlike: list[Site] = []  # whose ranks have other channels
        same: dict[Site, list[tuple[int, TableRow]]] = {}
        for rank, table in tables:
            for row in table.rows:
                same.setdefault(row.site, []).append((rank, row))
        self._owners = {site: _owner(each) for site, each in same.items()}
        self.rows = tuple(self._merged([row for _, row in each]) for each in same.values())
        if self.unlike:
            self.notes.append(f"not all ranks have the same channels of {named(self.unlike)}: merged as totals")
        unmeasured = dict.fromkeys(site for _, table in tables for site in table.unmeasured if site not in same)
        self.sites = (*same, *unmeasured)
        self._fit()
        self.place = {site: i for i, site in enumerate(self.sites)}
        # As what ranks' states are compared, and where that stands; of which it is to be learned who holds the same.
        compared = [(row.compared_as, row.is_known) for _, table in tables for row in table.rows]
        self.compared = {site: i for i, site in enumerate(dict.fromkeys(site for site, _ in compared if site))}
        self.unknown = list(dict.fromkeys(site for site, is_known in compared if site and not is_known))

    def _merged(self, rows: list[TableRow]) -> TableRow:
        """Return a row of the whole. A rank that has not seen its channels yet does not count."""
        first = rows[0]
        if len(rows) == 1 and (self.bins is not None or not first.counters):
            return first
        wide = [row for row in rows if not row.is_narrow] or rows
        dims = {row.channel_dim for row in wide} - {None}
        group_sizes = {row.group_size for row in rows}
        has_histogram = self.bins is not None and all(row.counters for row in rows)
        merged = first._replace(
            channels=wide[0].channels,
            counters=counters_of(self.bins, wide[0].channels) if has_histogram else 0,
            keep_channels=all(row.keep_channels for row in wide),
            channel_dim=next(iter(dims)) if len(dims) == 1 else None,
            group_size=first.group_size if len(group_sizes) == 1 else None,
        )
        is_unlike = len(dims) > 1 or len({row.channels for row in wide}) > 1
        if is_unlike:
            self.unlike.append(first.site)
        return _total(merged, self.bins) if is_unlike or any(row.has_folded for row in rows) else merged

    def _fit(self) -> None:
        """Leave out what would take more than the budget."""
        if self.bytes > self._budget and any(row.channels > 1 for row in self.rows):
            self._leave_out("channels of all ranks", [_total(row, self.bins) for row in self.rows], "merged as totals")
        if 8 * self.samples * len(self.ranks) > _MOST_IDS:
            self.notes.append(f"{self.samples * len(self.ranks)} sample_ids of a step are too many: not merged")
            self.samples = 0
        if self.bytes > self._budget and any(row.counters for row in self.rows):
            self._leave_out("histograms of all sites", [row._replace(counters=0) for row in self.rows], "not merged")

    def _leave_out(self, what: str, rows: list[TableRow], how: str) -> None:
        self.notes.append(f"{what} would take {self.bytes} bytes, {self._budget} at most: {how}")
        self.rows = tuple(rows)

    @property
    def bytes(self) -> int:
        """The size of what is merged."""
        states = sum(len(FIELDS) * row.channels + row.counters for row in self.rows)
        return 8 * (states + (7 + 4 * len(SPREAD) * self.spread) * len(self.sites))

    @cached_property
    def channel_begin(self) -> Counts:
        """``[rows + 1]``: where the channels of each row begin, and end."""
        return np.cumsum([0, *(row.channels for row in self.rows)], dtype=np.int64)

    @cached_property
    def bin_begin(self) -> Counts:
        """``[rows + 1]``: the same of the counters of its histogram."""
        return np.cumsum([0, *(row.counters for row in self.rows)], dtype=np.int64)

    @cached_property
    def alternatives(self) -> dict[Site, list[int]]:
        """Sites of which it is not known whether ranks hold the same: the rows that keep them apart."""
        found: dict[Site, list[int]] = {}
        for i, row in enumerate(self.rows):
            if row.apart_of:
                found.setdefault(Site(row.site.name, row.apart_of), []).append(i)
        return {site: rows for site, rows in found.items() if site not in self._owners}

    def kept(self, once: Sequence[Site]) -> Counts:
        """Return the rows that are merged. once: alternatives that are the same: the first one stands for all."""
        left_out = {i for site in once for i in self.alternatives[site][1:]}
        return np.array([i for i in range(len(self.rows)) if i not in left_out], np.int64)

    def counts(self, row: TableRow, rank: int) -> bool:
        """Return True if a rank whose table has this row counts."""
        lowest, owners = self._owners[row.site]
        return row.owners == owners and (owners != "first" or lowest == rank)

    def whole(self, once: Sequence[Site]) -> Sites:
        """Return the sites of the whole: a block of states, and one of all rows' histograms. once: see `kept`."""
        rows, kept = list(self.rows), self.kept(once)
        for site in once:
            first = self.alternatives[site][0]
            rows[first] = rows[first]._replace(site=site)
        rows = [rows[i] for i in kept.tolist()]
        widths = np.diff(self.channel_begin)[kept]
        states, zeros = len(FIELDS) * widths, np.zeros(len(kept), np.int64)
        bins = zeros + 1, self.bin_begin[kept], np.diff(self.bin_begin)[kept]
        return Sites(
            [row.site for row in rows],
            [row.keep_channels for row in rows],
            [row.channel_dim for row in rows],
            [row.group_size for row in rows],
            self.bins,
            np.stack([zeros, np.cumsum(states) - states, widths, *bins]),
        )


def _total(row: TableRow, bins: Bins | None) -> TableRow:
    if row.is_narrow:
        return row
    counters = counters_of(bins, 1) if row.counters else 0
    return row._replace(channels=1, counters=counters, keep_channels=False, channel_dim=None)


def _owner(rows: list[tuple[int, TableRow]]) -> tuple[int, Owners]:
    """Return the lowest rank that has a site, and who counts of it.

    The first rank's word holds where ranks do not agree, so that nothing is counted twice.
    """
    rank, row = rows[0]
    if isinstance(row.owners, str):
        return rank, row.owners
    return rank, min(row.owners for _, row in rows if isinstance(row.owners, int))


def named(sites: Sequence[Site]) -> str:
    """Return the first of them, and how many more there are."""
    more = f" and {len(sites) - _NAMED} more" if len(sites) > _NAMED else ""
    return ", ".join(map(str, sites[:_NAMED])) + more
