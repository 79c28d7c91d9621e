"""Packing: a rank's step as numbers that all ranks add up, and back into a step. Pure numpy.

Sums and extremes alone, element by element, in two rounds: the first gives each channel's mean over all ranks, the
second the second moments about it (Chan, Golub & LeVeque 1979), so that no digit is lost however far the ranks' means
lie apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hookstats.cluster.union import SPREAD, Local, Share, Union
from hookstats.numbers.fields import (
    FIELDS,
    Array,
    Counts,
    Site,
    Skipped,
    histogram_shape,
    in_order,
)
from hookstats.numbers.frame import AT_END, OCCASIONS, OF_OPTIMIZER, Sites, StepFrame, wholes_of
from hookstats.numbers.kinds import kind_of
from hookstats.numbers.ranks import Spread

Numbers: TypeAlias = NDArray[Any]
_SUMS = tuple(name for name in FIELDS if name not in ("m2", "min", "max"))
OPERATIONS = (np.add, np.add, np.maximum)  # by which float64, whole numbers and extremes are exchanged
_LOWEST = np.iinfo(np.int64).min  # neutral among extremes
# In place of a hash. UNUSED: of a gradient that no optimizer has taken, which need not be reduced.
SILENT, UNUSED = 1, 2
NEVER = 4  # in place of a phase
_MOST_CALLS = 1023  # that are told apart in a moment
_OF_STEP = ("time", "overflowed", "rows")  # scalars that every step has
_FEW = 1 << 13  # numbers of a site that are moved one by one, by index, together with those of other sites
CALLS, FIRED, SHOWN, SKIPPED, GIVEN_UP = range(5)  # rows of counts of sites
ORDER, SKIPPED_BY = range(2)  # rows of extremes of sites
COUNT, MEAN, M2, MIN, MAX = (FIELDS.index(name) for name in ("count", "mean", "m2", "min", "max"))


class Held(NamedTuple):
    """Hashes of what a rank holds that others may hold, too; arrays are over `Union.compared`."""

    peers: Mapping[Site, tuple[int, ...]]  # the ranks that are to hold the same, this one among them, where known
    hashes: Counts  # of states; 0: this rank has no such site, SILENT: nothing came
    phases: Counts  # when in a step they were measured, see StepFrame.readings; NEVER: nothing came
    moments: Counts  # the same among all steps, and how many tensors it were


class First:
    """The numbers of the first round, in sections ``[rows, elements]``: sums, whole numbers, extremes."""

    def __init__(self, union: Union, arrays: Iterable[Numbers] = ()) -> None:
        """arrays: one for each of OPERATIONS, of all ranks; none: those of a rank that has nothing."""
        channels, sites, scalars = int(union.channel_begin[-1]), len(union.sites), len(_OF_STEP) + len(union.scalars)
        shapes: tuple[dict[str, tuple[int, int]], ...] = (
            {
                "moments": (len(_SUMS), channels),  # of the mean, with the count
                "scalars": (2, scalars),  # sum, and number
            },
            {
                "bins": (1, int(union.bin_begin[-1])),
                "sites": (5, sites),
                "compared": (2, len(union.compared)),  # hashes, phases; 0 where peers hold the same
            },
            {
                "moments": (2, channels),  # -min, max
                "sites": (2, sites),  # -(rank << 32 | place), -rank
                "scalars": (2, scalars),  # -min, max
                "spread": (2 * len(SPREAD) * union.spread, sites),  # of each of SPREAD -min, max
                "samples": (1 + union.samples, len(union.ranks) if union.samples else 0),  # how many ids, and these
            },
        )
        sizes = [sum(rows * width for rows, width in each.values()) for each in shapes]
        neutral = map(np.full, sizes, (0.0, 0, _LOWEST))
        self.arrays: list[Numbers] = list(arrays) or list(neutral)
        self.sums, self.counts, self.extremes = map(_sections, self.arrays, shapes)

    @property
    def mean(self) -> Array:
        """``[channels]``, of all ranks. Of equal values it is exactly these."""
        count, total = (self.sums["moments"][_SUMS.index(name)] for name in ("count", "mean"))
        with np.errstate(over="ignore", invalid="ignore"):  # float64 data beyond 1e154: infinite or NaN, as documented
            mean = total / np.maximum(count, 1.0)
        least, most = self.extremes["moments"]
        result: Array = np.where((count > 0) & (least == ~most), in_order(most, np.float64), mean)
        return result


def _sections(memory: Numbers, shapes: dict[str, tuple[int, int]]) -> dict[str, Numbers]:
    ends = np.cumsum([rows * width for rows, width in shapes.values()]).tolist()
    return {
        name: memory[end - rows * width : end].reshape(rows, width)
        for (name, (rows, width)), end in zip(shapes.items(), ends, strict=True)
    }


class Packer:
    """The steps of a rank, packed and unpacked under one union."""

    def __init__(self, union: Union, rank: int, apart: dict[Site, None]) -> None:
        """apart: sites of which ranks have held other values, in this step or before; `unpack` adds to it."""
        self.union = union
        self.apart = apart
        self._rank = rank
        self._part: tuple[Local, Part] | None = None
        self._wholes: dict[tuple[Site, ...], _Whole] = {}

    def part(self, frame: StepFrame, local: Local) -> Part:
        """Return this rank's part of the steps of these sites. local: of the frame."""
        if self._part is None or self._part[0] is not local:
            self._part = local, Part(self.union, frame.sites, local, self._rank)
        return self._part[1]

    def unpack(self, first: First, second: Numbers, ranks: Numbers, own: StepFrame) -> StepFrame:
        """Return the whole. second, ranks: as `Part.second` has them, of all ranks. own: the same step of this rank."""
        union = self.union
        for site in union.alternatives:
            if first.counts["compared"][0, union.compared[site]]:
                self.apart[site] = None
        once = tuple(site for site in union.alternatives if site not in self.apart)
        if once not in self._wholes:
            self._wholes = {once: _Whole(union, once)}
        return self._wholes[once].unpack(first, second, ranks, own)


class Part:
    """The part of a rank in the steps of the same sites."""

    def __init__(self, union: Union, sites: Sites, local: Local, rank: int) -> None:
        self._union = union
        self._rank = rank
        table, shares = local.table, local.shares
        # Arrays of as many elements as there are sites.
        self._place = np.array([union.place[row.site] for row in table.rows], np.int64)
        rows = [union.rows[i] for i in self._place.tolist()]
        self._counts = np.array(
            [share.counts and union.counts(row, rank) for row, share in zip(table.rows, shares, strict=True)], bool
        )
        self._leads = self._counts & np.array([share.leads for share in shares], bool)
        is_total = np.array([row.channels == 1 for row in rows], bool)
        channels, bins = sites.channels, sites.counters
        first = np.where(is_total, 0, np.array([share.offset for share in shares], np.int64))
        self._begin = union.channel_begin[self._place] + first
        self._has_bins = (bins > 0) & (np.diff(union.bin_begin)[self._place] > 0)
        self._per_channel = union.bins is not None and union.bins.per_channel
        each = histogram_shape(union.bins, 1)[-1]  # counters of a channel, or of the site
        self._bin_begin = union.bin_begin[self._place] + (first * each if self._per_channel else 0)
        is_fold = is_total & (channels > 1)  # together with the others' totals
        self._folds = np.flatnonzero(is_fold).tolist()
        here = np.flatnonzero(self._counts & ~is_fold)
        to = int(union.channel_begin[-1]), sites.block[here], sites.begin[here], self._begin[here], channels[here]
        self._moments = _Moves(len(FIELDS), *to)
        here = np.flatnonzero(self._counts & self._has_bins & ~(is_fold & self._per_channel))
        lies = sites.histogram_block[here], sites.histogram_begin[here]
        self._histograms = _Moves(1, int(union.bin_begin[-1]), *lies, self._bin_begin[here], bins[here])
        compared = [(i, site) for i, row in enumerate(table.rows) if (site := row.compared_as) is not None]
        self._compared = _Compared(union, sites, compared, shares, rank)

    def first(self, frame: StepFrame, learned: Mapping[Site, tuple[int, ...]]) -> tuple[First, Array, Held]:
        """Return the numbers of the first round; ``[fields, channels]`` for the second; hashes of what others may hold.

        frame: of these sites. learned: of sites of which it was not known, the ranks that held the same so far.
        """
        union, flat = self._union, First(self._union)
        columns = np.zeros((len(FIELDS), int(union.channel_begin[-1])))
        bins, counts = flat.counts["bins"], flat.counts["sites"]
        self._moments.gather(frame.memory, columns)
        self._histograms.gather(frame.memory, bins)
        calls, order, place = frame.calls, frame.order, self._place
        self._put_folded(columns, bins, frame)
        counts[CALLS, place] = calls * self._leads
        counts[FIRED, place] = (calls > 0) & self._counts
        counts[SHOWN, place] = True if frame.hidden is None else (calls > 0) | ~frame.hidden
        self._put_moments(flat, columns)
        in_their_order = np.flatnonzero(self._counts[order])
        flat.extremes["sites"][ORDER, place[order[in_their_order]]] = -(self._rank << 32 | in_their_order)
        for site, skipped in frame.skipped.items():
            i = union.place[site]
            counts[SKIPPED, i], counts[GIVEN_UP, i] = skipped.times or 0, skipped.times is None
            flat.extremes["sites"][SKIPPED_BY, i] = -self._rank
        time = frame.time if self._rank == union.ranks[0] else None
        scalars = [frame.scalars.get(name) for name in union.scalars]
        for i, value in enumerate([time, frame.overflowed, frame.rows, *scalars]):
            if value is not None:
                flat.sums["scalars"][:, i] = value, 1
                both = np.array([value, value], np.float64)
                flat.extremes["scalars"][:, i] = in_order(both, np.int64) ^ np.array([-1, 0])
        if union.spread:
            self._put_spread(flat.extremes["spread"], frame)
        ids = frame.sample_ids.get(frame.step)
        if union.samples and ids is not None:
            column = flat.extremes["samples"][:, union.ranks.index(self._rank)]
            column[0], column[1 : 1 + len(ids)] = len(ids), ids
        held = self._compared.hold(frame, learned)
        known = [(union.compared[site], min(peers), len(peers)) for site, peers in held.peers.items()]
        if known:
            # Peers' weights add up to 0. A hash is mixed with the peers' number, or what two groups hold the other way
            # round would add up to 0, too.
            places, first, count = np.array(known, np.int64).T
            hashes, weights = _mix(held.hashes[places] + _mix(first)), np.where(first == self._rank, 1 - count, 1)
            flat.counts["compared"][:, places] = weights * np.array([hashes, held.phases[places]])
        return flat, columns, held

    def second(self, own: tuple[First, Array, Held], first: First) -> tuple[Array, Counts]:
        """Return the numbers of the second round: ``[channels]`` to be added up; and who has the ranks' extremes.

        own: what `first` gave. first: of all ranks.
        """
        mine, columns, _ = own
        with np.errstate(over="ignore", invalid="ignore"):
            apart = columns[COUNT] * (columns[MEAN] - first.mean) ** 2
        spread = mine.extremes["spread"]
        is_mine = (spread == first.extremes["spread"]) & (spread > _LOWEST)
        return columns[M2] + np.where(columns[COUNT] > 0, apart, 0.0), np.where(is_mine, -self._rank, _LOWEST)

    def _put_moments(self, flat: First, columns: Array) -> None:
        for row, name in zip(flat.sums["moments"], _SUMS, strict=True):
            row[:] = columns[FIELDS.index(name)]
        with np.errstate(over="ignore", invalid="ignore"):
            flat.sums["moments"][_SUMS.index("mean")] *= columns[COUNT]
        extremes = in_order(columns[[MIN, MAX]], np.int64)
        has_values = columns[COUNT] > 0
        flat.extremes["moments"][:, has_values] = (extremes ^ np.array([[-1], [0]]))[:, has_values]

    def _put_folded(self, columns: Array, bins: Counts, frame: StepFrame) -> None:
        """Put in the totals of sites of several channels that all ranks merge as totals."""
        others = [i for i in self._folds if self._counts[i]]
        columns[:, self._begin[others]] = wholes_of([frame.state(i) for i in others])
        for i in others if self._per_channel else ():
            histogram = frame.histogram(i)
            if self._has_bins[i] and histogram is not None:
                counters = int(self._bin_begin[i])
                bins[0, counters : counters + histogram.shape[1]] = histogram.sum(0)

    def _put_spread(self, spread: Counts, frame: StepFrame) -> None:
        """Put in this rank's statistics of the sites that have fired, each as both of its extremes."""
        totals, has_fired = frame.totals, frame.calls > 0
        place = self._place[has_fired]
        for n, name in enumerate(SPREAD):
            values = totals.nans + totals.posinfs + totals.neginfs if name == "nonfinite" else getattr(totals, name)
            known = values[has_fired]
            value = in_order(np.ascontiguousarray(known, np.float64), np.int64)
            for row, told in ((2 * n, ~value), (2 * n + 1, value)):
                spread[row, place] = np.where(np.isnan(known), _LOWEST, told)


class _Compared:
    """The states of a rank that others may hold, too, as hashes: channels, calls, and all of a state but its bins."""

    def __init__(
        self, union: Union, sites: Sites, rows: Sequence[tuple[int, Site]], shares: Sequence[Share], rank: int
    ) -> None:
        """rows: numbers of sites, and as what they are compared."""
        self._rank = rank
        self._rows = np.array([i for i, _ in rows], np.int64)
        self._known = {site: shares[i].peers for i, site in rows if shares[i].peers}
        self._to = np.array([union.compared[site] for _, site in rows], np.int64)
        kinds = [kind_of(site.tensor) for _, site in rows]
        self._is_reduced = np.array([kind.is_gradient and kind.is_replicated for kind in kinds], bool)
        block, offset, self._channels = sites.places[:3, self._rows]
        self._begin = np.cumsum(self._channels) - self._channels
        self._moves = _Moves(len(FIELDS), int(self._channels.sum()), block, offset, self._begin, self._channels)
        self._place = np.arange(self._channels.sum()) - np.repeat(self._begin, self._channels)
        self._sites = list(union.compared)

    def hold(self, frame: StepFrame, learned: Mapping[Site, tuple[int, ...]]) -> Held:
        """learned: of sites of which it was not known, the ranks that have held the same of it so far."""
        peers = self._known | {self._sites[i]: learned[self._sites[i]] for i in self._to if self._sites[i] in learned}
        held = Held(peers, *(np.zeros(len(self._sites), np.int64) for _ in range(3)))
        if self._rows.size:
            hashes, readings = self._hashes(frame), np.zeros(len(self._rows), np.int64)
            if frame.readings is not None:
                readings = frame.readings[self._rows]
            phases = readings % OCCASIONS
            hashes[self._is_reduced & (phases == AT_END) & (hashes != SILENT)] = UNUSED
            held.hashes[self._to] = hashes
            held.phases[self._to] = np.where(hashes == SILENT, NEVER, phases)
            calls = np.minimum(frame.calls[self._rows], _MOST_CALLS)
            held.moments[self._to] = (readings // OF_OPTIMIZER * (_MOST_CALLS + 1) + calls) * 4 + phases
        return held

    def _hashes(self, frame: StepFrame) -> Counts:
        """``[rows]``; never 0, and SILENT of what was silent."""
        section = np.zeros((len(FIELDS), int(self._channels.sum())))
        self._moves.gather(frame.memory, section)
        calls = frame.calls[self._rows]
        fields = np.arange(len(FIELDS))[:, None]
        words = _mix(section.view(np.int64) + _mix(self._place * len(FIELDS) + fields)).sum(0)
        found = _mix(np.add.reduceat(words, self._begin) + _mix(calls) + self._channels)
        found[(found >= 0) & (found <= UNUSED)] = UNUSED + 1
        result: Counts = np.where(calls > 0, found, SILENT)
        return result


def _mix(words: Counts) -> Counts:
    """Mix int64 words: every bit changes about half of the bits of the result (splitmix64's finalizer)."""
    bits = words.view(np.uint64)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: Counts = (bits ^ (bits >> np.uint64(31))).view(np.int64)
    return result


class _Whole:
    """Merged steps of the same sites."""

    def __init__(self, union: Union, once: tuple[Site, ...]) -> None:
        """once: sites of which the ranks' states are the same."""
        self._union = union
        self._sites = sites = union.whole(once)
        self._kept = kept = union.kept(once)
        begin = union.channel_begin
        self._moments = _Moves(len(FIELDS), int(begin[-1]), sites.block, sites.begin, begin[kept], sites.channels)

    def unpack(self, first: First, second: Array, ranks: Counts, own: StepFrame) -> StepFrame:
        union, sites = self._union, self._sites
        block = np.zeros(len(FIELDS) * int(sites.channels.sum()), np.int64)
        self._moments.scatter(_columns(first, second), [block])
        counts = first.counts["sites"][:, self._kept]
        order = -first.extremes["sites"][ORDER, self._kept]
        has_fired = counts[FIRED] > 0
        fired = np.flatnonzero(has_fired)
        time, overflowed, _, *scalars = _means(first)
        most = in_order(first.extremes["scalars"][1], np.float64)
        frame = StepFrame(
            sites,
            [block, first.counts["bins"].reshape(-1)],
            np.maximum(counts[CALLS], has_fired),
            fired[np.argsort(order[fired], kind="stable")],
            sites.scales(own.grad_scale),
            own.step,
            own.time if time is None else time,
            {name: value for name, value in zip(union.scalars, scalars, strict=True) if value is not None},
            own.earlier_scalars,
            dict(own.sample_ids),
            own.grad_scale,
            None if overflowed is None else overflowed > 0,
            self._skipped(first, own),
            rows=int(most[_OF_STEP.index("rows")]),
            hidden=counts[SHOWN] == 0,
        )
        samples = first.extremes["samples"].T
        if (given := samples[samples[:, 0] > 0]).size if samples.size else False:
            frame.sample_ids[own.step] = np.concatenate([column[1 : 1 + column[0]] for column in given])
        if union.spread:
            frame.spread = _spreads(first.extremes["spread"][:, self._kept], ranks[:, self._kept])
        return frame

    def _skipped(self, first: First, own: StepFrame) -> dict[Site, Skipped]:
        result = {}
        by = first.extremes["sites"][SKIPPED_BY]
        for i in np.flatnonzero(by > _LOWEST).tolist():
            site, times = self._union.sites[i], int(first.counts["sites"][SKIPPED, i])
            here = own.skipped.get(site)
            reason = here.reason if here else f"rank {-by[i]} has the reason"
            result[site] = Skipped(reason, None if first.counts["sites"][GIVEN_UP, i] else times)
        return result


def _columns(first: First, second: Array) -> Array:
    """``[fields, channels]``."""
    columns = np.empty((len(FIELDS), len(second)))
    for row, name in zip(first.sums["moments"], _SUMS, strict=True):
        columns[FIELDS.index(name)] = row
    columns[MEAN], columns[M2] = first.mean, second
    least, most = first.extremes["moments"]
    is_empty = columns[COUNT] == 0
    columns[MIN], columns[MAX] = in_order(~least, np.float64), in_order(most.copy(), np.float64)
    columns[np.ix_([MEAN, M2, MIN, MAX], is_empty)] = 0  # as a rank has them that measured nothing
    return columns


def _means(first: First) -> list[float | None]:
    """Return means over the ranks that have a scalar; of equal ones, that number."""
    (sums, numbers), (least, most) = first.sums["scalars"], first.extremes["scalars"]
    with np.errstate(invalid="ignore"):
        return [
            None if not number else float(in_order(np.array([high]), np.float64)[0]) if ~low == high else total / number
            for total, number, low, high in zip(
                sums.tolist(), numbers.tolist(), least.tolist(), most.tolist(), strict=True
            )
        ]


def _spreads(extremes: Counts, ranks: Counts) -> dict[str, Spread]:
    found = {}
    for n, name in enumerate(SPREAD):
        told: list[Any] = []
        for row, flip in ((2 * n, -1), (2 * n + 1, 0)):
            is_known = extremes[row] > _LOWEST
            values = in_order(extremes[row] ^ flip, np.float64)
            told += [np.where(is_known, values, np.nan), np.where(is_known, -ranks[row], -1)]
        found[name] = Spread(*told)
    return found


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

    def gather(self, blocks: Sequence[Counts], section: Numbers) -> None:
        """Move from the blocks to the section."""
        flat = section.view(np.int64).reshape(-1)
        for number, inside, outside in self._indices:
            flat[outside] = blocks[number].take(inside)
        for number, here, there in self._slices:
            section.view(np.int64)[:, there] = blocks[number][here].reshape(self._height, -1)

    def scatter(self, section: Numbers, blocks: Sequence[Any]) -> None:
        """Move from the section to the blocks."""
        flat = section.view(np.int64).reshape(-1)
        for number, inside, outside in self._indices:
            blocks[number][inside] = flat.take(outside)
        for number, here, there in self._slices:
            blocks[number][here].reshape(self._height, -1)[...] = section.view(np.int64)[:, there]
