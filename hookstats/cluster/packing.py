"""A rank's steps as `Merging` takes them: into the arrays that are merged, and back into a step. Pure numpy."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from hookstats.cluster import flat as at
from hookstats.cluster.agreement import Agreement, some
from hookstats.cluster.flat import MERGES, SPREAD, Flat, Merge, Section
from hookstats.cluster.table import Placing, ShardRange, Table, Tables, whole
from hookstats.numbers.blocks import COUNTERS, Drained, Layout, Read
from hookstats.numbers.columns import wholes_of
from hookstats.numbers.fields import FIELDS, Array, Counts, Site, Skipped, fold_channels, histogram_shape
from hookstats.numbers.ranks import Spread

_FEW = 1 << 13  # numbers of a site that are moved one by one, by index, together with those of other sites
_PACKERS = 4  # agreements: of whole states, and of totals, each before and after a change
_WHOLES = 2  # layouts that are kept: others where a rank had totals alone of other sites


class LocalStep(NamedTuple):
    """A step of this rank."""

    drained: Drained
    placing: Placing = whole  # as `Tables.table_of` has it


class StepPacking:
    """The steps of a rank, one after another; one thread alone uses it.

    ``notes``: messages for the user about how ranks differ and what was left out for it, the oldest first.
    """

    merges: Sequence[Merge] = MERGES

    def __init__(self, rank: int, tables: Tables, ranks: Sequence[int] = ()) -> None:
        """ranks: all, ascending; none: ids of samples are not merged."""
        self.notes: deque[str] = deque()
        self._rank = rank
        self._ranks = ranks
        self._tables = tables
        self._apart: dict[Site, None] = {}  # of which ranks have held other values, since this rank attached
        self._packers: dict[tuple[tuple[int, bytes], ...], Packer] = {}

    def table(self, step: LocalStep) -> tuple[int, bytes]:
        """What this rank has, and its checksum before it."""
        table, _ = self._tables.table_of(*step)
        return table.checksum, table.text

    def nbytes(self, step: LocalStep) -> int:
        """Of the state that it holds."""
        return sum(block.nbytes for block in step.drained.blocks)

    def scale(self, step: LocalStep) -> float | None:
        """The grad_scale."""
        return step.drained.grad_scale

    def pack(self, step: LocalStep, tables: Sequence[tuple[int, bytes]]) -> list[Section]:
        """tables: each with the lowest rank that has it, in the order of these. ValueError where one is none."""
        return list(self._packer(tables).pack(step.drained, *self._tables.table_of(*step)))

    def unpack(self, sections: Sequence[Section], step: LocalStep, tables: Sequence[tuple[int, bytes]]) -> LocalStep:
        """A step made of what came of all ranks' sections; step: this rank's own."""
        packer, before = self._packer(tables), len(self._apart)
        drained = packer.unpack(Flat(*sections), step.drained)
        self._tell_of(list(self._apart)[before:], packer.agreement, drained.step)
        return step._replace(drained=drained)

    def _tell_of(self, sites: Sequence[Site], agreement: Agreement, number: int) -> None:
        """Of what is kept apart from now on."""
        if not sites:
            return
        rows = agreement.alternatives[sites[0]]
        names = " and ".join(str(agreement.rows[i].site) for i in rows[:2])
        self.notes.append(
            f"the ranks hold different values of {some(sites)} at step {number}, and how these plain tensors lie is "
            f"not known. They are kept apart from this step on: {sites[0]} as {names}. Say how they are placed: "
            "placements={glob: Shard(-1)} for a part of the channels, Shard(0) or Shard(-2) for a part of the rows, "
            "one for each dimension of a DeviceMesh that is process_group="
        )

    def _packer(self, tables: Sequence[tuple[int, bytes]]) -> Packer:
        key = tuple(tables)
        if key not in self._packers:
            agreement = Agreement([(rank, Table.from_text(text)) for rank, text in tables], self._ranks)
            self.notes.extend(agreement.notes)
            for old in list(self._packers)[: 1 - _PACKERS]:
                del self._packers[old]
            self._packers[key] = Packer(agreement, self._rank, self._apart)
        return self._packers[key]


class Packer:
    """The steps of a rank, packed and unpacked under one agreement."""

    def __init__(self, agreement: Agreement, rank: int, apart: dict[Site, None] | None = None) -> None:
        """apart: sites of which ranks have held other values, in this step or before; `unpack` adds to it."""
        self._apart = {} if apart is None else apart
        self.agreement = agreement
        self._rank = rank
        self._shares: dict[tuple[Layout, Table], _Share] = {}
        self._wholes: dict[tuple[tuple[int, ...], tuple[Site, ...]], _Whole] = {}

    def pack(self, drained: Drained, table: Table, shards: Sequence[ShardRange]) -> Flat:
        """What this rank contributes; table and shards: of `Tables.table_of`, the table one of the agreement's."""
        key = drained.layout, table
        if key not in self._shares:
            self._shares = {key: _Share(self.agreement, drained.layout, table, shards, self._rank, self._apart)}
        return self._shares[key].pack(drained)

    def unpack(self, flat: Flat, own: Drained) -> Drained:
        """The whole; own: of this rank, the same step, which knows why tensors were left out here."""
        rows = len(self.agreement.rows)
        folded = tuple(np.flatnonzero(flat.counts[at.FOLDED, :rows]).tolist())
        for site, alike in self.agreement.alternatives.items():
            if flat.counts[at.APART, alike].any() or len(set(flat.counts[at.CONTENT, alike].tolist())) > 1:
                self._apart[site] = None
        key = folded, tuple(site for site in self.agreement.alternatives if site not in self._apart)
        if key not in self._wholes:
            if len(self._wholes) == _WHOLES:
                self._wholes.clear()
            self._wholes[key] = _Whole(self.agreement, *key)
        return self._wholes[key].unpack(flat, own)


class _Share:
    """What a rank contributes to the steps of one layout."""

    def __init__(
        self,
        agreement: Agreement,
        layout: Layout,
        table: Table,
        shards: Sequence[ShardRange],
        rank: int,
        apart: dict[Site, None],
    ) -> None:
        """table: one of the agreement's, of this layout; with shards, of `Tables.table_of`. apart: see Packer."""
        self._apart = apart
        self._agreement = agreement
        self._rank = rank
        # Arrays of as many elements as the layout has rows.
        parts = [row.parts[-1] for row in layout.rows]
        self._place = np.array([agreement.place[row.site] for row in table.rows], np.int64)
        rows = [agreement.rows[i] for i in self._place.tolist()]
        self._counts = np.array(
            [shard.counts and agreement.counts(row, rank) for row, shard in zip(table.rows, shards, strict=True)], bool
        )
        self._leads = self._counts & np.array([shard.leads for shard in shards], bool)
        self._unknown = [
            (i, Site(row.site.name, row.apart_of), shard.group)
            for i, (row, shard) in enumerate(zip(table.rows, shards, strict=True))
            if shard.group is not None and self._counts[i]
        ]
        is_total = np.array([row.channels == 1 for row in rows], bool)
        shape = np.array([(part.block, part.offset, part.channels, part.bins) for part in parts], np.int64)
        block, offset, channels, bins = shape.reshape(-1, 4).T
        self._width = np.where(is_total, 1, channels)
        first = np.where(is_total, 0, np.array([shard.offset for shard in shards], np.int64))
        self._begin = agreement.channel_begin[self._place] + first
        self._has_bins = (bins > 0) & (np.diff(agreement.bin_begin)[self._place] > 0)
        self._per_channel = agreement.bins is not None and agreement.bins.per_channel
        each = histogram_shape(agreement.bins, 1)[-1]  # counters of a channel, or of the site
        self._bin_begin = agreement.bin_begin[self._place] + (first * each if self._per_channel else 0)
        is_fold = is_total & (channels > 1)  # together with the others' totals
        self._folds = np.flatnonzero(is_fold).tolist()
        self._is_narrow = ~is_total & np.array([row.is_narrow for row in table.rows], bool)
        here = np.flatnonzero(self._counts & ~is_fold)
        to = int(agreement.channel_begin[-1]), block[here], offset[here], self._begin[here], channels[here]
        self._moments = _Moves(len(FIELDS), *to)
        here = np.flatnonzero(self._counts & self._has_bins & ~(is_fold & self._per_channel))
        offset = offset + len(FIELDS) * channels + COUNTERS
        to = int(agreement.bin_begin[-1]), block[here], offset[here], self._bin_begin[here], bins[here]
        self._histograms = _Moves(1, *to)

    def pack(self, drained: Drained) -> Flat:
        """drained: of this layout."""
        agreement, flat = self._agreement, self._agreement.neutral()
        self._moments.gather(drained.blocks, flat.columns)
        self._histograms.gather(drained.blocks, flat.bins)
        calls, order, shown, _ = drained.by_row
        place, counts = self._place, flat.counts
        counts[at.FOLDED, place] = self._is_narrow & self._counts & (calls > 0)
        self._put_others(flat, drained)
        counts[at.CALLS, place] = calls * self._leads
        counts[at.FIRED, place] = (calls > 0) & self._counts
        counts[at.SHOWN, place[shown]] = 1
        for i, site, group in self._unknown:
            if site in self._apart:
                counts[at.APART, place[i]] = 1
            elif calls[i]:
                counts[at.CONTENT, place[i]] = _content(drained.read(i), int(calls[i]), group)
        in_order = np.flatnonzero(self._counts[order])
        flat.lowest[at.ORDER, place[order[in_order]]] = self._rank << 32 | in_order
        for site, skipped in drained.skipped.items():
            i = agreement.place[site]
            counts[at.SKIPPED, i], counts[at.GIVEN_UP, i] = skipped.times or 0, skipped.times is None
            flat.lowest[at.SKIPPED_BY, i] = self._rank
        time = drained.time if self._rank == agreement.first_rank else None
        of_step = (time, drained.grad_scale, drained.overflowed)
        for i, value in enumerate([*of_step, *(drained.scalars.get(name) for name in agreement.scalars)]):
            if value is not None:
                flat.scalars[:, i] = value, 1, value, value
        if agreement.spread:
            self._put_spread(flat, drained)
        ids = drained.sample_ids.get(drained.step)
        if flat.samples.size and ids is not None:
            column = flat.samples[:, agreement.ranks.index(self._rank)]
            column[0], column[1 : 1 + len(ids)] = len(ids), ids
        return flat

    def _put_others(self, flat: Flat, drained: Drained) -> None:
        """What must be put together first: channels that all ranks merge as totals, what moved in this step."""
        moved = drained.by_row.moved
        others = [i for i in dict.fromkeys([*self._folds, *moved]) if self._counts[i]]
        reads = [drained.read(i) for i in others]
        totals = wholes_of([read.moments for read in reads])
        for n, (i, read) in enumerate(zip(others, reads, strict=True)):
            width = int(self._width[i])
            begin, counters = int(self._begin[i]), int(self._bin_begin[i])
            fits = read.moments.shape[1] == width
            flat.columns[:, begin : begin + width] = 0
            flat.columns[:, begin : begin + (width if fits else 1)] = read.moments if fits else totals[:, n : n + 1]
            flat.counts[at.FOLDED, self._place[i]] |= not fits and self._agreement.rows[self._place[i]].channels > 1
            if self._has_bins[i] and read.histogram is not None:
                histogram = read.histogram
                if self._per_channel:
                    flat.bins[0, counters : counters + width * histogram.shape[1]] = 0
                    histogram = histogram if fits else histogram.sum(0)
                flat.bins[0, counters : counters + histogram.size] = histogram.reshape(-1)

    def _put_spread(self, flat: Flat, drained: Drained) -> None:
        """Tells this rank's statistics of the sites that have fired, each as both of its extremes."""
        totals, shown = drained.columns.totals, drained.by_row.shown
        has_fired = drained.columns.calls > 0
        place = self._place[shown[has_fired]]
        for n, name in enumerate(SPREAD):
            values = totals.nans + totals.posinfs + totals.neginfs if name == "nonfinite" else getattr(totals, name)
            known = values[has_fired]
            rank = np.where(np.isnan(known), np.nan, self._rank)
            flat.spread[4 * n : 4 * n + 4, place] = known, rank, known, rank


class _Whole:
    """What has been merged, as steps of one layout."""

    def __init__(self, agreement: Agreement, folded: tuple[int, ...], once: tuple[Site, ...]) -> None:
        """folded: rows of which some rank had totals alone. once: sites of which the ranks' states are the same."""
        self._agreement = agreement
        self._layout = layout = agreement.layout(folded, once)
        self._kept = kept = agreement.kept(once)
        self._folded = [n for n, i in enumerate(kept.tolist()) if i in folded]
        parts = np.array([row.parts[0] for row in layout.rows], np.int64).reshape(-1, 4)
        block, offset, channels, bins = parts.T
        self._counters = offset + len(FIELDS) * channels
        here = np.flatnonzero(~np.isin(kept, folded))
        begin = agreement.channel_begin
        to = block[here], offset[here], begin[kept[here]], channels[here]
        self._moments = _Moves(len(FIELDS), int(begin[-1]), *to)
        offset, begin = self._counters + COUNTERS, agreement.bin_begin
        self._bins = _Moves(1, int(begin[-1]), block[here], offset[here], begin[kept[here]], bins[here])

    def unpack(self, flat: Flat, own: Drained) -> Drained:
        agreement, layout = self._agreement, self._layout
        block = np.zeros(layout.sizes[0], np.int64)
        self._moments.scatter(flat.columns, [block])
        self._bins.scatter(flat.bins, [block])
        for n in self._folded:
            self._put_total(flat, block, n)
        n = len(layout.rows)
        counts, lowest = flat.counts[:, self._kept], flat.lowest[:, self._kept]
        has_fired = counts[at.FIRED] > 0
        fired = np.argsort(lowest[at.ORDER], kind="stable")[: has_fired.sum()]
        block[self._counters] = np.maximum(counts[at.CALLS], has_fired)
        block[self._counters[fired] + 1] = np.arange(1, len(fired) + 1)
        time, scale, overflowed, *scalars = _means(flat.scalars)
        drained = Drained(
            layout,
            [block],
            own.step,
            own.time if time is None else time,
            {name: value for name, value in zip(agreement.scalars, scalars, strict=True) if value is not None},
            scale,
            None if overflowed is None else overflowed > 0,
            counts[at.SHOWN] == 0,
            np.arange(n),
        )
        drained.earlier_scalars = own.earlier_scalars
        drained.sample_ids = dict(own.sample_ids)
        if flat.samples.any():
            each = [column[1 : 1 + column[0]] for column in flat.samples.T]
            drained.sample_ids[own.step] = np.concatenate(each)
        drained.skipped = self._skipped(flat, own)
        if agreement.spread:
            drained.spread = _spreads(flat.spread[:, self._kept[drained.by_row.shown]])
        return drained

    def _put_total(self, flat: Flat, block: Counts, n: int) -> None:
        part, agreement, i = self._layout.rows[n].parts[0], self._agreement, int(self._kept[n])
        begin, end = agreement.channel_begin[i : i + 2]
        moments = block[part.offset : part.offset + len(FIELDS)]
        moments[:] = fold_channels(flat.columns[:, begin:end]).view(np.int64)
        if part.bins:
            begin, end = agreement.bin_begin[i : i + 2]
            behind = part.offset + part.size
            block[behind - part.bins : behind] = flat.bins[0, begin:end].reshape(-1, part.bins).sum(0)

    def _skipped(self, flat: Flat, own: Drained) -> dict[Site, Skipped]:
        result = {}
        for i in np.flatnonzero(flat.lowest[at.SKIPPED_BY] != at.NONE).tolist():
            site, times = self._agreement.sites[i], int(flat.counts[at.SKIPPED, i])
            here = own.skipped.get(site)
            reason = here.reason if here else f"rank {flat.lowest[at.SKIPPED_BY, i]} has the reason"
            result[site] = Skipped(reason, None if flat.counts[at.GIVEN_UP, i] else times)
        return result


class _Moves:
    """Moves numbers of sites between blocks, where those of a site lie by themselves, ``[height, width]``, and a
    section, where they lie beside those of all others. A few calls of numpy, however many sites there are.
    """

    def __init__(self, height: int, length: int, block: Counts, offset: Counts, begin: Counts, width: Counts) -> None:
        """``[sites]``: in which block, and where in it; from which element of the section, and how many of them.

        length: elements of the section, ``[height, length]``.
        """
        self._height = height
        self._indices: list[tuple[int, Counts, Counts]] = []  # block, where in it, where in the section
        is_small = height * width < _FEW
        for number in np.unique(block).tolist():
            here = np.flatnonzero(is_small & (block == number))
            widths = width[here]
            along = np.arange(widths.sum()) - np.repeat(np.cumsum(widths) - widths, widths)
            rows = np.arange(height)[:, None]
            inside = np.repeat(offset[here], widths) + along + rows * np.repeat(widths, widths)
            self._indices.append((number, inside, np.repeat(begin[here], widths) + along + rows * length))
        self._slices = [
            (number, slice(at, at + height * n), slice(to, to + n))
            for number, at, to, n in np.stack([block, offset, begin, width], 1)[~is_small].tolist()
        ]

    def gather(self, blocks: Sequence[Counts], section: Section) -> None:
        """From the blocks."""
        flat = section.view(np.int64).reshape(-1)
        for number, inside, outside in self._indices:
            flat[outside] = blocks[number].take(inside)
        for number, here, there in self._slices:
            section.view(np.int64)[:, there] = blocks[number][here].reshape(self._height, -1)

    def scatter(self, section: Section, blocks: Sequence[Any]) -> None:
        """To the blocks."""
        flat = section.view(np.int64).reshape(-1)
        for number, inside, outside in self._indices:
            blocks[number][inside] = flat.take(outside)
        for number, here, there in self._slices:
            blocks[number][here].reshape(self._height, -1)[...] = section.view(np.int64)[:, there]


def _content(read: Read, calls: int, group: int) -> int:
    """64 bits that stand for a rank's state. The group is among them, so that sums over ranks that are equal are made
    of equal states in each group: those that two groups have the other way round are not the same.
    """
    here = blake2b(np.array([calls, group, *read.moments.shape], np.int64).tobytes(), digest_size=8)
    here.update(read.moments.tobytes())
    if read.histogram is not None:
        here.update(read.histogram.tobytes())
    return int.from_bytes(here.digest(), "big", signed=True)


def _means(scalars: Array) -> list[float | None]:
    """Over the ranks that have them; of equal ones, that number."""
    with np.errstate(invalid="ignore"):
        return [
            None if not number else least if least == largest else float(sums / number)
            for sums, number, least, largest in scalars.T.tolist()
        ]


def _spreads(rows: Array) -> dict[str, Spread]:
    def of(least: Array, least_rank: Array, largest: Array, largest_rank: Array) -> Spread:
        ranks = (np.nan_to_num(each, nan=-1).astype(np.int64) for each in (least_rank, largest_rank))
        return Spread(least, next(ranks), largest, next(ranks))

    return {name: of(*rows[4 * n : 4 * n + 4]) for n, name in enumerate(SPREAD)}
