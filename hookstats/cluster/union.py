"""Tables of the sites that a rank has to merge, and their union over all ranks. Pure numpy.

All ranks that hold equal models have equal tables, whatever their own parts are: a table crosses the network once, and
only where one has changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hookstats.numbers.fields import FIELDS, Bins, Counts, Site, bins_from_json, bins_to_json, histogram_shape
from hookstats.numbers.frame import Mask, Sites, StepFrame
from hookstats.numbers.kinds import kind_of

# Who counts, of the ranks that have a row: "each" (what they hold differs), "first" (all hold the same: the lowest of
# them), or those whose number here, the lowest rank of the mesh on which a tensor lies, is the lowest of all.
Owners: TypeAlias = str | int

_MOST_IDS = 8 << 20  # bytes of the ids of samples of all ranks
_BESIDES = 40  # numbers of a site beside its state, at most


class Place(NamedTuple):
    """The place of a rank's part of a site in the whole."""

    channels: int  # of the whole
    owners: Owners
    offset: int = 0  # of its first channel
    is_counted: bool = True  # False: another rank of the same mesh holds the same, and counts
    is_leading: bool = True  # False: of the ranks that hold parts of one tensor, another one counts the calls
    # The ranks, this one among them, that hold the same of it, or, of what is kept apart, may do so. (): not known.
    peers: tuple[int, ...] = ()
    site: Site | None = None  # under which it is merged, if not its own: apart from other ranks' tensors


class TableRow(NamedTuple):
    """A site as it is in the whole, when all ranks' parts are put together."""

    site: Site
    channels: int  # 1 where there are totals alone
    has_bins: bool
    has_channels: bool
    channel_dim: int | None
    group_size: int | None = None
    owners: Owners = "each"
    apart_of: str = ""  # the tensor that this is one rank's of, where it is not known whether others hold the same
    is_to_learn: bool = False  # of a parameter, whether it is not known which ranks hold the same of it
    has_folded: bool = False  # has measured tensors as totals alone

    @property
    def is_parameter(self) -> bool:
        """True where data parallel ranks hold the same."""
        return kind_of(self.site.tensor).is_replicated

    @property
    def is_narrow(self) -> bool:
        """True for totals alone, and where no tensor has told its width yet."""
        return self.channels == 1 and not self.has_channels

    @property
    def compared_as(self) -> Site | None:
        """The name under which ranks' states are compared; None: they are not."""
        if self.apart_of:
            return Site(self.site.name, self.apart_of)
        kind = kind_of(self.site.tensor)
        return self.site if kind.is_replicated and not kind.is_update and "[" not in self.site.tensor else None


Placing: TypeAlias = Callable[[TableRow], Place]  # of a site as this rank has it


def whole(own: TableRow) -> Place:
    """The placing of plain tensors: each rank has all channels; parameters are the same on all ranks."""
    return Place(own.channels, "first" if own.is_parameter else "each")


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


def compute_checksum(text: bytes) -> int:
    """Return 64 bits that stand for a text."""
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little", signed=True)


class Local(NamedTuple):
    """The table of steps of the same sites, with this rank's own places."""

    table: Table
    text: bytes  # of the table
    places: list[Place]  # one for each row


class Tables:
    """The tables of a rank's steps: made anew only where something has changed.

    A scalar, or a site without state of which something was left out, stays in them when it was there once, and the
    most ids of samples, and that a site without channels has measured something.
    """

    def __init__(self, budget: int, spread: bool) -> None:
        """budget, spread: see Table."""
        self._settings = budget, spread
        self._scalars: dict[str, None] = {}
        self._left_out: dict[Site, None] = {}
        self._samples = 0
        self._known: dict[Sites, tuple[tuple[Any, ...], Mask, Local]] = {}  # what each was made of

    def local(self, frame: StepFrame, placing: Placing = whole) -> Local:
        """Return the table of a step. placing: another object where anything about it has changed.

        ValueError where a part does not lie in its whole.
        """
        self._scalars |= dict.fromkeys(frame.scalars)
        self._left_out |= dict.fromkeys(frame.skipped)
        self._samples = max(self._samples, len(frame.sample_ids.get(frame.step, ())))
        of = frame.sites
        folded = (frame.calls > 0) & ~of.keeps & (of.channels == 1)
        if of in self._known:
            folded |= self._known[of][1]
        seen = placing, len(self._scalars), len(self._left_out), self._samples, folded.tobytes()
        if of not in self._known or self._known[of][0] != seen:
            self._known[of] = seen, folded, self._make(of, placing, folded)
            for sites in list(self._known)[:-2]:  # of whole states, and of totals
                del self._known[sites]
        return self._known[of][2]

    def _make(self, of: Sites, placing: Placing, folded: Mask) -> Local:
        rows, places = [], []
        columns = of.names, of.channels.tolist(), (of.counters > 0).tolist(), of.keeps.tolist(), of.dims, of.group_sizes
        for each, has_folded in zip(zip(*columns, strict=True), folded.tolist(), strict=True):
            own = TableRow(*each)
            place = placing(own)
            is_unknown = own.compared_as is not None and place.site is None and not place.peers
            has_totals = own.is_narrow or place.channels == 1 < own.channels
            if has_totals:  # which are a part of those of the whole
                own, place = _make_total(own), place._replace(channels=1, offset=0)
            if not 0 <= place.offset <= place.channels - own.channels:
                part = f"{own.channels} channels from {place.offset}"
                raise ValueError(f"{own.site}: expected {part} to lie in {place.channels}")
            places.append(place)
            rows.append(
                own._replace(
                    site=place.site or own.site,
                    channels=place.channels,
                    owners=place.owners,
                    apart_of=own.site.tensor if place.site is not None and place.peers else "",
                    is_to_learn=is_unknown,
                    has_folded=has_folded,
                )
            )
        names = {row.site for row in rows}
        unmeasured = tuple(site for site in self._left_out if site not in names)
        table = Table(tuple(rows), of.bins, tuple(self._scalars), unmeasured, *self._settings, self._samples)
        return Local(table, table.to_text(), places)


class Union:
    """The tables of all ranks as one, alike on all.

    ``rows``: of all sites, in the order of the first table, then what others add. ``sites``: theirs, then those without
    a row of which something was left out. ``compared``: as what ranks' states are compared, and where that stands;
    ``holders``: those of which it is to be learned who holds the same, and who may do so. ``alternatives``: sites of
    which it is not known whether ranks hold the same, with the rows that keep them apart. ``unlike``: sites of which
    ranks have other channels. ``whole``: sites that the rows lie as: totals in the first block, channels in the second,
    histograms in the third; ``channel_begin`` where the channels of each begin side by side. ``notes``: messages for
    the user.
    """

    def __init__(self, texts: Sequence[bytes], ranks: Sequence[int]) -> None:
        """texts: of each rank's table. ranks: theirs, ascending."""
        self.ranks = tuple(ranks)
        tables = {text: Table.from_text(text) for text in dict.fromkeys(texts)}
        self.notes: list[str] = []
        bins = {table.bins for table in tables.values()}
        self.bins: Bins | None = bins.pop() if len(bins) == 1 else None
        if bins:
            self.notes.append("no histograms are merged, because not all ranks have the same bins")
        self.scalars = tuple(dict.fromkeys(name for table in tables.values() for name in table.scalars))
        self.spread = all(table.spread for table in tables.values())
        self.samples = max(table.samples for table in tables.values())
        same: dict[Site, list[TableRow]] = {}
        first: dict[Site, int] = {}  # the lowest rank that has it
        self.compared: dict[Site, int] = {}
        for text, table in tables.items():
            lowest = self.ranks[texts.index(text)]
            for row in table.rows:
                same.setdefault(row.site, []).append(row)
                first.setdefault(row.site, lowest)
                if row.compared_as:
                    self.compared.setdefault(row.compared_as, len(self.compared))
        self._owners = {site: (first[site], _find_owners(rows)) for site, rows in same.items()}
        merged = [_merge_rows(rows, self.bins) for rows in same.values()]
        self.rows = tuple(row for row, _ in merged)
        self.unlike = [row.site for row, is_unlike in merged if is_unlike]
        if self.unlike:
            self.notes.append(f"not all ranks have the same channels of {some(self.unlike, 5)}: merged as totals")
        unmeasured = dict.fromkeys(site for table in tables.values() for site in table.unmeasured if site not in same)
        self.sites = (*same, *unmeasured)
        self.place = {site: i for i, site in enumerate(self.sites)}
        self._fit(min(table.budget for table in tables.values()))
        channels, counters = self._count_sizes(self.rows)
        self.channel_begin = np.cumsum([0, *channels])
        sizes, is_wide = len(FIELDS) * channels, (channels > 1).astype(np.int64)
        begin = np.where(is_wide, np.cumsum(sizes * is_wide), np.cumsum(sizes * (1 - is_wide))) - sizes
        places = is_wide, begin, channels, np.full_like(channels, 2), np.cumsum(counters) - counters, counters
        self.whole = Sites(
            [row.site for row in self.rows],
            [row.has_channels for row in self.rows],
            [row.channel_dim for row in self.rows],
            [row.group_size for row in self.rows],
            self.bins,
            np.stack(places),
        )
        unknown = {text: [row.site for row in table.rows if row.is_to_learn] for text, table in tables.items()}
        self.holders: dict[Site, list[int]] = {}
        for rank, text in zip(ranks, texts, strict=True):
            for site in unknown[text]:
                self.holders.setdefault(site, []).append(rank)
        self.alternatives: dict[Site, list[int]] = {}
        for i, row in enumerate(self.rows):
            if row.apart_of and Site(row.site.name, row.apart_of) not in same:
                self.alternatives.setdefault(Site(row.site.name, row.apart_of), []).append(i)

    def _count_sizes(self, rows: Sequence[TableRow]) -> tuple[Counts, Counts]:
        """Return how many channels and counters each has."""
        channels = [row.channels for row in rows]
        counters = [int(np.prod(histogram_shape(self.bins if row.has_bins else None, row.channels))) for row in rows]
        return np.array(channels, np.int64), np.array(counters, np.int64)

    def _fit(self, budget: int) -> None:
        """Leave out what would take more than the budget."""
        if self.bytes > budget and any(row.channels > 1 for row in self.rows):
            self.notes.append(
                f"channels of all ranks would take {self.bytes} bytes, {budget} at most: merged as totals"
            )
            self.rows = tuple(_make_total(row) for row in self.rows)
        if 8 * self.samples * len(self.ranks) > _MOST_IDS:
            self.notes.append(f"{self.samples * len(self.ranks)} sample_ids of a step are too many: not merged")
            self.samples = 0
        if self.bytes > budget and any(row.has_bins for row in self.rows):
            self.notes.append(f"histograms of all sites would take {self.bytes} bytes, {budget} at most: not merged")
            self.rows = tuple(row._replace(has_bins=False) for row in self.rows)

    @property
    def bytes(self) -> int:
        """The size of what is merged, at most."""
        channels, counters = self._count_sizes(self.rows)
        return 8 * int(len(FIELDS) * channels.sum() + counters.sum() + _BESIDES * len(self.sites))

    def is_counted(self, row: TableRow, rank: int) -> bool:
        """Return True if a rank whose table has this row counts."""
        lowest, owners = self._owners[row.site]
        return row.owners == owners and (owners != "first" or lowest == rank)


def _merge_rows(rows: list[TableRow], bins: Bins | None) -> tuple[TableRow, bool]:
    """Return a row of the whole, and whether ranks have other channels. Who has not seen its own does not count."""
    wide = [row for row in rows if not row.is_narrow] or rows
    dims = {row.channel_dim for row in wide} - {None}
    group_sizes = {row.group_size for row in rows}
    merged = rows[0]._replace(
        channels=wide[0].channels,
        has_bins=bins is not None and all(row.has_bins for row in rows),
        has_channels=all(row.has_channels for row in wide),
        channel_dim=dims.pop() if len(dims) == 1 else None,
        group_size=group_sizes.pop() if len(group_sizes) == 1 else None,
    )
    is_unlike = bool(dims) or len({row.channels for row in wide}) > 1
    return _make_total(merged) if is_unlike or any(row.has_folded for row in rows) else merged, is_unlike


def _make_total(row: TableRow) -> TableRow:
    return row if row.is_narrow else row._replace(channels=1, has_channels=False, channel_dim=None)


def _find_owners(rows: list[TableRow]) -> Owners:
    """Return who counts. The first rank's word holds where ranks do not agree, so that nothing is counted twice."""
    first = rows[0].owners
    return first if isinstance(first, str) else min(row.owners for row in rows if isinstance(row.owners, int))


def some(items: Sequence[Any], most: int = 8) -> str:
    """Return the first of them, and how many more there are."""
    return ", ".join(map(str, items[:most])) + (f" and {len(items) - most} more" if len(items) > most else "")
