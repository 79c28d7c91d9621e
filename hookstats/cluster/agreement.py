"""What the ranks make of their tables: one order of all sites, and where each lies in what is merged. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hookstats.cluster import flat
from hookstats.cluster.flat import Flat
from hookstats.cluster.table import Replicas, Table, TableRow, counters_of
from hookstats.numbers import blocks
from hookstats.numbers.blocks import COUNTERS, Layout, Part
from hookstats.numbers.fields import FIELDS, Bins, Counts, Site

_NAMED = 5  # sites that a note names
_MOST_IDS = 8 << 20  # bytes of the ids of samples of all ranks


class _Owner(NamedTuple):
    """Who counts of a site; see Replicas."""

    rank: int  # the lowest that has it
    replicas: Replicas


class Agreement:
    """What all ranks make alike of the same tables.

    ``rows``: of all sites, in the order of the first table, then what others add. ``sites``: theirs, then those without
    a row of which something was left out. ``unlike``: sites of which ranks have other channels, merged as totals.
    ``notes``: messages for the user about it.
    """

    def __init__(self, tables: Sequence[tuple[int, Table]], ranks: Sequence[int] = ()) -> None:
        """tables: each with the lowest rank that has it, in the order of these. ranks: all, ascending."""
        self.first_rank = tables[0][0]
        self.ranks = tuple(ranks)
        self.samples = max(table.samples for _, table in tables)
        self.notes: list[str] = []
        bins, *others = {table.bins for _, table in tables}
        self.bins: Bins | None = None if others else bins
        if others:
            self.notes.append("no histograms are merged, because not all ranks have the same bins")
        self.scalars = tuple(dict.fromkeys(name for _, table in tables for name in table.scalars))
        self.spread = all(table.spread for _, table in tables)
        self.budget = min(table.budget for _, table in tables)
        self.unlike: list[Site] = []  # whose ranks have other channels
        same: dict[Site, list[tuple[int, TableRow]]] = {}
        for rank, table in tables:
            for row in table.rows:
                same.setdefault(row.site, []).append((rank, row))
        self._owners = {site: _owner(each) for site, each in same.items()}
        self.rows = tuple(self._merged([row for _, row in each]) for each in same.values())
        if self.unlike:
            self.notes.append(f"not all ranks have the same channels of {some(self.unlike)}: merged as totals")
        unmeasured = dict.fromkeys(site for _, table in tables for site in table.unmeasured if site not in same)
        self.sites = (*same, *unmeasured)
        self._fit()
        self.place = {site: i for i, site in enumerate(self.sites)}

    def _merged(self, rows: list[TableRow]) -> TableRow:
        """A row of the whole. What a rank says that has not seen its channels yet does not concern the others."""
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
            is_parameter=any(row.is_parameter for row in rows),
            group_size=first.group_size if len(group_sizes) == 1 else None,
        )
        if len(dims) < 2 and len({row.channels for row in wide}) == 1:
            return merged
        self.unlike.append(first.site)
        return _total(merged, self.bins)

    def _fit(self) -> None:
        """Leaves out what would take more than the budget."""
        size, wide = self.bytes, any(row.channels > 1 for row in self.rows)
        if size > self.budget and wide:
            self.rows = tuple(_total(row, self.bins) for row in self.rows)
            self.notes.append(f"channels of all ranks would take {size} bytes, {self.budget} at most: merged as totals")
        if 8 * self.samples * len(self.ranks) > _MOST_IDS:
            self.notes.append(f"{self.samples * len(self.ranks)} sample_ids of a step are too many: not merged")
            self.samples = 0
        size, has_histograms = self.bytes, any(row.counters for row in self.rows)
        if size > self.budget and has_histograms:
            self.rows = tuple(row._replace(counters=0) for row in self.rows)
            self.notes.append(f"histograms of all sites would take {size} bytes, {self.budget} at most: not merged")

    @property
    def bytes(self) -> int:
        """The size of what is merged."""
        states = sum(len(FIELDS) * row.channels + row.counters for row in self.rows)
        return 8 * (states + flat.PER_SITE[self.spread] * len(self.sites))

    def neutral(self) -> Flat:
        """What a rank without anything contributes."""
        scalars = len(flat.OF_STEP) + len(self.scalars)
        channels, counters = int(self.channel_begin[-1]), int(self.bin_begin[-1])
        samples = self.samples, len(self.ranks) if self.samples else 0
        return flat.neutral(channels, counters, len(self.sites), scalars, self.spread, samples)

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
        """The rows of what has been merged. once: alternatives that are the same: the first one stands for all."""
        left_out = {i for site in once for i in self.alternatives[site][1:]}
        return np.array([i for i in range(len(self.rows)) if i not in left_out], np.int64)

    def counts(self, row: TableRow, rank: int) -> bool:
        """Whether a rank whose table has this row counts."""
        owner = self._owners[row.site]
        return row.replicas == owner.replicas and (owner.replicas != "first" or owner.rank == rank)

    def layout(self, folded: Sequence[int], once: Sequence[Site]) -> Layout:
        """The layout of the whole, in one block. folded: rows that are totals in it. once: see `kept`."""
        rows = list(self.rows)
        for i in folded:
            rows[i] = _total(rows[i], self.bins)
        for site in once:
            first = self.alternatives[site][0]
            rows[first] = rows[first]._replace(site=site)
        return _layout([rows[i] for i in self.kept(once).tolist()], self.bins)


def _layout(rows: Sequence[TableRow], bins: Bins | None) -> Layout:
    """The layout of one block in which the rows lie one behind another."""
    sizes = [len(FIELDS) * row.channels + COUNTERS + row.counters for row in rows]
    ends = np.cumsum(sizes).tolist() if rows else []
    return Layout(
        [0],
        [
            blocks.Row(
                row.site,
                (Part(0, end - size, row.channels, row.counters),),
                row.keep_channels,
                row.channel_dim,
                row.is_parameter,
                row.group_size,
            )
            for row, size, end in zip(rows, sizes, ends, strict=True)
        ],
        bins,
    )


def _total(row: TableRow, bins: Bins | None) -> TableRow:
    if row.is_narrow:
        return row
    counters = counters_of(bins, 1) if row.counters else 0
    return row._replace(channels=1, counters=counters, keep_channels=False, channel_dim=None)


def _owner(rows: list[tuple[int, TableRow]]) -> _Owner:
    """The first rank's word holds where ranks do not agree on who counts, so that nothing is counted twice."""
    rank, row = rows[0]
    if isinstance(row.replicas, str):
        return _Owner(rank, row.replicas)
    return _Owner(rank, min(row.replicas for _, row in rows if isinstance(row.replicas, int)))


def some(sites: Sequence[Site]) -> str:
    """The first of them, and how many more."""
    more = f" and {len(sites) - _NAMED} more" if len(sites) > _NAMED else ""
    return ", ".join(map(str, sites[:_NAMED])) + more
