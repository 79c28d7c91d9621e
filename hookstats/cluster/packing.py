"""Packing: a rank's step as numbers that are folded over ranks, and back into a step. Pure numpy.

The parts of all ranks have one shape, each rank's own at its place among zeros, so they are folded element by element,
states as those of the channels of a site are (Chan, Golub & LeVeque 1979). A scalar is a state of one value.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hookstats.cluster.exchange import Fold, Numbers, largest, total
from hookstats.cluster.union import Local, Union
from hookstats.numbers.fields import FIELDS, Array, Counts, Site, Skipped, fold_channels, histogram_shape
from hookstats.numbers.frame import AT_END, OCCASIONS, OF_OPTIMIZER, Sites, StepFrame, block_of
from hookstats.numbers.kinds import is_of_kind, kind_of
from hookstats.numbers.ranks import SAME_DATA, Spread

COUNT, MEAN, M2, MIN, MAX = (FIELDS.index(name) for name in ("count", "mean", "m2", "min", "max"))
CALLS, FIRED, SHOWN, SKIPPED, GIVEN_UP = range(5)  # rows of counts
ORDER, SKIPPED_BY, HIGH, LOW = range(4)  # rows of extremes; the last two are of hashes: 0 apart where all are equal
CHANGED = 2  # row of what is compared: how many ranks hold something else than in the step before
SPREAD = ("rms", "abs_max", "mean", "nonfinite")  # of which the ranks' extremes are told
_LOWEST = np.iinfo(np.int64).min  # neutral among extremes
# In place of a hash. UNUSED: of a gradient that no optimizer has taken, which need not be reduced.
SILENT, UNUSED = 1, 2
NEVER = 4  # in place of a phase
_MOST_CALLS = 1023  # that are told apart in a moment
_OF_STEP = 3  # scalars that every step has: its time, whether it overflowed, which rows were read


class Packed(NamedTuple):
    """A step, or a part of one, as numbers."""

    states: Array  # [fields, channels], and behind these each scalar
    bins: Counts  # [1, counters]
    counts: Counts  # [5, sites]
    compared: Counts  # [3, sites that are compared]: hashes, phases, 0 where peers hold the same; CHANGED
    extremes: Counts  # [4, sites]: -(rank << 32 | place), -rank; a hash of what shows the data, and that times -1
    samples: Counts  # [1 + ids, ranks]: how many ids, and these
    spread: Array  # [2, 2 * SPREAD, sites]: of each of SPREAD -min, max; the ranks that have these, -1: none


class Held(NamedTuple):
    """Hashes of what a rank holds that others may hold, too, ``[Union.compared]``."""

    peers: Counts  # the lowest rank of those that are to hold the same; -1: this rank has no such site
    hashes: Counts  # of states; 0: this rank has no such site, SILENT: nothing came
    moments: Counts  # when they were measured among all steps, and how many tensors it were


def fold_states(parts: Array) -> Array:
    """Fold states, ``[members, fields, channels]``."""
    members, fields, channels = parts.shape
    side_by_side = parts.transpose(1, 2, 0).reshape(fields, -1)
    result = fold_channels(side_by_side, np.arange(channels) * members) if channels else parts[0]
    result[MEAN : MAX + 1, result[COUNT] == 0] = 0  # as a rank has them that measured nothing
    np.copyto(result[MEAN], result[MAX], where=result[MIN] == result[MAX])  # of equal values exactly these
    return result


def _fold_spread(parts: Array) -> Array:
    best = parts[:, :1].argmax(0, keepdims=True)  # of several that have it the lowest rank
    result: Array = np.take_along_axis(parts, best, 0)[0]
    return result


FOLDS: tuple[Fold, ...] = (fold_states, total, total, total, largest, total, _fold_spread)  # of Packed


class Packer:
    """The steps of a rank, packed and unpacked under one union."""

    def __init__(self, union: Union, rank: int, apart: dict[Site, None]) -> None:
        """apart: sites of which ranks have held other values, in this step or before; `unpack` adds to it."""
        self.union = union
        self.apart = apart
        self._rank = rank
        self._part: tuple[Local, _Part] | None = None
        self._whole: tuple[list[Site], Counts, Sites] | None = None

    def pack(self, frame: StepFrame, local: Local) -> tuple[Packed, Held]:
        """Return this rank's part, and what others may hold, too. local: of the frame."""
        if self._part is None or self._part[0] is not local:
            self._part = local, _Part(self.union, frame.sites, local, self._rank)
        return self._part[1].pack(frame)

    def unpack(self, packed: Packed, own: StepFrame) -> StepFrame:
        """Return the whole. packed: of all ranks. own: the same step of this rank."""
        union = self.union
        self.apart |= dict.fromkeys(site for site in union.alternatives if packed.compared[0, union.compared[site]])
        kept, sites = self._select_sites([site for site in union.alternatives if site not in self.apart])
        states, scalars = np.split(packed.states, [union.channel_begin[-1]], axis=1)
        is_narrow, begin = union.whole.channels == 1, union.channel_begin
        wide = [states[:, begin[i] : begin[i + 1]] for i in np.flatnonzero(~is_narrow).tolist()]
        narrow = np.ascontiguousarray(states[:, begin[:-1][is_narrow]].T)
        counts = packed.counts[:, kept]
        has_fired = counts[FIRED] > 0
        fired = np.flatnonzero(has_fired)
        (time, overflowed, _, *means), (*_, rows) = scalars[MEAN].tolist(), scalars[MAX, :_OF_STEP].tolist()
        frame = StepFrame(
            sites,
            [narrow.view(np.int64).reshape(-1), block_of(wide), packed.bins[0]],
            np.maximum(counts[CALLS], has_fired),
            fired[np.argsort(-packed.extremes[ORDER, kept][fired], kind="stable")],
            sites.scales(own.grad_scale),
            own.step,
            time,
            {name: mean for name, mean, n in zip(union.scalars, means, scalars[COUNT, _OF_STEP:], strict=True) if n},
            own.earlier_scalars,
            dict(own.sample_ids),
            own.grad_scale,
            overflowed > 0 if scalars[COUNT, 1] else None,
            self._merge_skipped(packed, own),
            rows=int(rows),
            hidden=counts[SHOWN] == 0,
        )
        high, low = packed.extremes[HIGH:]
        is_same = (packed.counts[FIRED] == len(union.ranks)) & (high > _LOWEST) & (high == -low)
        if len(union.ranks) > 1 and is_same.any():
            frame.scalars[SAME_DATA] = 1.0
        given = [column[1 : 1 + column[0]] for column in packed.samples.T if column[0] > 0]
        if given:
            frame.sample_ids[own.step] = np.concatenate(given)
        if union.spread:
            values, ranks = packed.spread[:, :, kept]
            values = np.where(ranks < 0, np.nan, values).reshape(len(SPREAD), 2, -1)
            whose = ranks.astype(np.int64).reshape(values.shape)
            found = zip(SPREAD, values, whose, strict=True)
            frame.spread = {name: Spread(-least, by, most, of) for name, (least, most), (by, of) in found}
        return frame

    def _select_sites(self, once: list[Site]) -> tuple[Counts, Sites]:
        """Return the rows that are merged, and their sites.

        once: alternatives that are the same on all ranks, of which the first stands for all.
        """
        if self._whole is None or self._whole[0] != once:
            of, names = self.union.whole, list(self.union.whole.names)
            is_kept = np.ones(len(names), bool)
            for site in once:
                first, *others = self.union.alternatives[site]
                names[first], is_kept[others] = site, False
            kept = np.flatnonzero(is_kept)
            named = Sites(names, of.keeps, of.dims, of.group_sizes, of.bins, of.places)
            self._whole = once, kept, named.select(kept)
        return self._whole[1:]

    def _merge_skipped(self, packed: Packed, own: StepFrame) -> dict[Site, Skipped]:
        result, by = {}, packed.extremes[SKIPPED_BY]
        for i in np.flatnonzero(by > _LOWEST).tolist():
            site, times = self.union.sites[i], int(packed.counts[SKIPPED, i])
            reason = own.skipped[site].reason if site in own.skipped else f"rank {-by[i]} has the reason"
            result[site] = Skipped(reason, None if packed.counts[GIVEN_UP, i] else times)
        return result


class _Part:
    """The part of a rank in the steps of the same sites."""

    def __init__(self, union: Union, sites: Sites, local: Local, rank: int) -> None:
        self._union = union
        self._rank = rank
        table, places = local.table.rows, local.places
        # Arrays of as many elements as there are sites.
        self._row = np.array([union.place[row.site] for row in table], np.int64)
        rows = list(zip(table, places, strict=True))
        self._counts = np.array([place.is_counted and union.is_counted(row, rank) for row, place in rows], bool)
        self._leads = self._counts & np.array([place.is_leading for place in places], bool)
        is_narrow = union.whole.channels[self._row] == 1
        first = np.where(is_narrow, 0, np.array([place.offset for place in places], np.int64))
        self._begin = union.channel_begin[self._row] + first
        self._narrow = np.flatnonzero(self._counts & is_narrow)
        self._wide = np.flatnonzero(self._counts & ~is_narrow).tolist()
        per_channel = union.bins is not None and union.bins.per_channel
        each = histogram_shape(union.bins, 1)[-1] if per_channel else 0  # counters of a channel
        self._bin_begin = (union.whole.histogram_begin[self._row] + first * each).tolist()
        self._with_bins = np.flatnonzero(
            self._counts & (sites.counters > 0) & (union.whole.counters[self._row] > 0)
        ).tolist()
        self._is_folded = per_channel & is_narrow
        # What is compared: which sites, as what, among how many ranks, of which this is the lowest.
        compared = [(i, row.compared_as) for i, row in enumerate(table) if row.compared_as is not None]
        peers = [places[i].peers or union.holders.get(site, (rank,)) for i, site in compared]
        self._compared = np.array([i for i, _ in compared], np.int64)
        self._as = np.array([union.compared[site] for _, site in compared], np.int64)
        self._lowest = np.array([min(each) for each in peers], np.int64)
        self._weights = np.where(self._lowest == rank, 1 - np.array([len(each) for each in peers], np.int64), 1)
        kinds = [kind_of(site.tensor) for _, site in compared]
        tensors = [row.site.tensor for row in table]
        self._is_output = np.array([is_of_kind(tensor, "output") for tensor in tensors], bool)
        is_input = np.array([is_of_kind(tensor, "input") for tensor in tensors], bool)
        self._is_input = is_input & np.array([row.site.name == "" for row in table], bool)
        self._is_reduced = np.array([kind.is_gradient and kind.is_replicated for kind in kinds], bool)

    def pack(self, frame: StepFrame) -> tuple[Packed, Held]:
        """frame: of these sites."""
        union, row, calls, order = self._union, self._row, frame.calls, frame.order
        sites, ranks = len(union.sites), len(union.ranks)
        time = frame.time if self._rank == union.ranks[0] else None
        scalars = [time, frame.overflowed, frame.rows, *(frame.scalars.get(name) for name in union.scalars)]
        packed = Packed(
            np.zeros((len(FIELDS), int(union.channel_begin[-1]) + len(scalars))),
            np.zeros((1, int(union.whole.counters.sum())), np.int64),
            np.zeros((5, sites), np.int64),
            np.zeros((3, len(union.compared)), np.int64),
            np.full((1 + LOW, sites), _LOWEST),
            np.zeros((1 + union.samples, ranks if union.samples else 0), np.int64),
            np.stack([np.full((2 * len(SPREAD), sites * union.spread), each) for each in (-np.inf, -1.0)]),
        )
        packed.states[:, self._begin[self._narrow]] = frame.wholes[:, self._narrow]
        for i in self._wide:
            state, begin = frame.state(i), int(self._begin[i])
            packed.states[:, begin : begin + state.shape[1]] = state
        for i in self._with_bins:
            histogram: Any = frame.histogram(i)
            counters = (histogram.sum(0) if self._is_folded[i] else histogram).reshape(-1)
            packed.bins[0, self._bin_begin[i] : self._bin_begin[i] + counters.size] = counters
        for i, value in enumerate(scalars, start=int(union.channel_begin[-1])):
            if value is not None:
                packed.states[[COUNT, MEAN, MIN, MAX], i] = 1, value, value, value
        packed.counts[CALLS, row] = calls * self._leads
        packed.counts[FIRED, row] = (calls > 0) & self._counts
        packed.counts[SHOWN, row] = True if frame.hidden is None else (calls > 0) | ~frame.hidden
        in_their_order = np.flatnonzero(self._counts[order])
        packed.extremes[ORDER, row[order[in_their_order]]] = -(self._rank << 32 | in_their_order)
        shown = self._find_data(frame)
        packed.extremes[HIGH:, row[shown]] = np.multiply.outer([1, -1], _hash(frame.wholes[:, shown]) >> 1)
        for site, skipped in frame.skipped.items():
            i = union.place[site]
            packed.counts[[SKIPPED, GIVEN_UP], i] = skipped.times or 0, skipped.times is None
            packed.extremes[SKIPPED_BY, i] = -self._rank
        ids = frame.sample_ids.get(frame.step)
        if union.samples and ids is not None:
            packed.samples[: 1 + len(ids), union.ranks.index(self._rank)] = [len(ids), *ids.tolist()]
        if union.spread:
            self._put_spread(packed.spread, frame)
        return packed, self._hold(packed.compared, frame)

    def _find_data(self, frame: StepFrame) -> Counts:
        """The sites that show which data a rank has: what enters the model, its last output; none that is constant."""
        order = frame.order[self._counts[frame.order]]
        chosen = np.append(order[self._is_input[order]], order[self._is_output[order]][-1:])
        low, high = frame.wholes[MIN, chosen], frame.wholes[MAX, chosen]
        result: Counts = chosen[low < high]
        return result

    def _put_spread(self, spread: Array, frame: StepFrame) -> None:
        """Put in this rank's statistics of the sites that have fired, each as both of its extremes."""
        totals, has_fired = frame.totals, frame.calls > 0
        nonfinite = totals.nans + totals.posinfs + totals.neginfs
        for n, name in enumerate(SPREAD):
            value = (nonfinite if name == "nonfinite" else getattr(totals, name))[has_fired]
            rank = np.where(np.isnan(value), -1, self._rank)
            for extreme, told in ((2 * n, -value), (2 * n + 1, value)):
                spread[:, extreme, self._row[has_fired]] = np.where(rank < 0, -np.inf, told), rank

    def _hold(self, compared: Counts, frame: StepFrame) -> Held:
        """Return hashes of totals and calls, and put them in, so that those of ranks that hold the same add up to 0."""
        held = Held(np.full(compared.shape[1], -1), *np.zeros_like(compared[:2]))
        calls, readings = frame.calls[self._compared], np.zeros(len(self._compared), np.int64)
        hashes = _mix(_hash(frame.wholes[:, self._compared]) + _mix(calls))
        hashes[(hashes >= 0) & (hashes <= UNUSED)] = UNUSED + 1
        if frame.readings is not None:
            readings = frame.readings[self._compared]
        phases = np.where(calls > 0, readings % OCCASIONS, NEVER)
        hashes[self._is_reduced & (phases == AT_END)] = UNUSED
        hashes[calls == 0] = SILENT
        moments = readings // OF_OPTIMIZER * (_MOST_CALLS + 1) + np.minimum(calls, _MOST_CALLS)
        held.peers[self._as], held.hashes[self._as] = self._lowest, hashes
        held.moments[self._as] = moments * OCCASIONS + readings % OCCASIONS
        # Mixed with the peers' number, or what two groups hold the other way round would add up to 0, too.
        compared[:2, self._as] = self._weights * np.stack([_mix(hashes + _mix(self._lowest)), phases])
        return held


def _hash(wholes: Array) -> Counts:
    """Return a number that stands for each state, ``[fields, n]``."""
    words = np.ascontiguousarray(wholes).view(np.int64)
    result: Counts = _mix(words + _mix(np.arange(len(FIELDS)))[:, None]).sum(0)
    return result


def _mix(words: Numbers) -> Counts:
    """Mix int64 words: every bit changes about half of the bits of the result (splitmix64's finalizer)."""
    bits = words.view(np.uint64)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: Counts = (bits ^ (bits >> np.uint64(31))).view(np.int64)
    return result
