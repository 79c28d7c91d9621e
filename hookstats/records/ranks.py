"""The same step of several ranks as one Snapshot: as if one process had measured all that they measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from hookstats.numbers.blocks import Read, merged
from hookstats.numbers.columns import Columns
from hookstats.numbers.fields import FIELDS, Array, Counts, Site, Skipped, fold_channels, unscale
from hookstats.numbers.kinds import kind_of
from hookstats.numbers.ranks import StepRanks
from hookstats.numbers.snapshot import Snapshot


def merged_snapshot(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Counts, extremes and histograms exactly, moments to rounding. ``calls`` are those of all ranks together.

    Sites that some ranks alone have are there as well; the order is that of the first rank, then of the next. Channels
    are kept where all ranks have the same ones, else there are totals. A scalar is the mean over the ranks.

    How tensors lay on the ranks is not known here. What is measured of parameters (values, gradients, updates, states
    of optimizers), and the same on all ranks, are replicas: counted once. Others are shards of one tensor, by whatever
    dimension: they have totals.
    """
    first = snapshots[0]
    skipped: dict[Site, Skipped] = {}
    for snapshot in snapshots:
        for site, here in snapshot.skipped.items():
            before = skipped.get(site, Skipped(here.reason, 0))
            given_up = before.times is None or here.times is None
            skipped[site] = Skipped(before.reason, None if given_up else (before.times or 0) + (here.times or 0))
    numbers = sorted({number for snapshot in snapshots for number in snapshot.earlier_scalars})
    earlier = {n: _scalars([each.earlier_scalars.get(n, {}) for each in snapshots]) for n in numbers}
    scales = {snapshot.grad_scale for snapshot in snapshots}
    present = tuple(sorted({rank for snapshot in snapshots for rank in snapshot.ranks}))
    overflowed = [snapshot.overflowed for snapshot in snapshots if snapshot.overflowed is not None]
    return Snapshot(
        first.step,
        _columns([snapshot.columns for snapshot in snapshots]),
        _scalars([snapshot.scalars for snapshot in snapshots]),
        first.grad_scale if len(scales) == 1 else None,
        any(overflowed) if overflowed else None,
        skipped,
        StepRanks(present, len(present)),
        earlier_scalars=earlier,
        sample_ids=_sample_ids(snapshots),
    )


def _scalars(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each scalar, the mean over the ranks that have it."""
    names = dict.fromkeys(name for scalars in ranks for name in scalars)
    return {name: mean([scalars[name] for scalars in ranks if name in scalars]) for name in names}


def _sample_ids(snapshots: Sequence[Snapshot]) -> dict[int, Counts]:
    """By step, one rank's after the other's."""
    steps = sorted({step for snapshot in snapshots for step in snapshot.sample_ids})
    none = np.empty(0, np.int64)
    return {step: np.concatenate([each.sample_ids.get(step, none) for each in snapshots]) for step in steps}


def mean(values: list[float]) -> float:
    """Of equal ones, that number."""
    if len(set(values)) == 1:
        return values[0]
    total = math.fsum(values) if all(map(math.isfinite, values)) else float(np.sum(values))
    return total / len(values)


class _Together:
    """Each site of several ranks, in the order of the first rank, then of the next."""

    sites: list[Site]
    where: list[list[tuple[Columns, int]]]
    """Of each site: the ranks whose numbers make it, and its place among theirs."""
    calls: Counts
    order: Counts
    """Places of the sites that were measured."""
    is_cut: list[bool]
    """Whether ranks have parts of one parameter."""

    def __init__(self, parts: list[Columns]) -> None:
        self.sites = list(dict.fromkeys(site for part in parts for site in part.sites))
        place = {site: i for i, site in enumerate(self.sites)}
        where: list[list[tuple[Columns, int]]] = [[] for _ in self.sites]
        self.calls = np.zeros(len(self.sites), np.int64)
        fired: dict[int, None] = {}
        for part in parts:
            at = [place[site] for site in part.sites]
            self.calls[at] += part.calls
            fired |= dict.fromkeys(at[i] for i in part.order.tolist())
            for i, new in enumerate(at):
                where[new].append((part, i))
        self.order = np.array(list(fired), np.int64)
        # Silent ones may be narrow.
        self.where = [[(part, i) for part, i in here if part.calls[i]] or here for here in where]
        self.is_cut = [False] * len(self.sites)
        for i, here in enumerate(self.where):
            if len(here) > 1 and kind_of(self.sites[i].tensor).is_replicated:
                self._tell_parts_from_replicas(i, here)

    def _tell_parts_from_replicas(self, i: int, here: list[tuple[Columns, int]]) -> None:
        first, *others = (part.wholes[:, at] for part, at in here)
        self.is_cut[i] = not all(np.array_equal(first, other, equal_nan=True) for other in others)
        self.where[i] = here if self.is_cut[i] else here[:1]
        self.calls[i] = max(part.calls[at] for part, at in here)


def _columns(parts: list[Columns]) -> Columns:
    together = _Together(parts)
    where = together.where
    dims = [{part.dims[i] for part, i in here} - {None} for here in where]
    groups = [{part.group_sizes[i] for part, i in here} for here in where]
    shapes = [[(int(part.shapes[0, i]), int(part.shapes[1, i])) for part, i in here] for here in where]
    scales = [{float(part.scales[i]) for part, i in here} for here in where]
    is_alike = [
        len({width for width, _ in each}) == 1 and not cut for each, cut in zip(shapes, together.is_cut, strict=True)
    ]
    bins = parts[0].bins if all(part.bins == parts[0].bins for part in parts) else None

    def in_one_scale(site: int, part: Columns, i: int, state: Array) -> Array:
        return state if len(scales[site]) == 1 else unscale(state, float(part.scales[i]))

    @lru_cache(maxsize=1)  # its state, then its histogram
    def read(site: int) -> Read:
        has_histograms = bins is not None and len(scales[site]) == 1 and all(counters for _, counters in shapes[site])
        each = [
            Read(in_one_scale(site, part, i, part.state(i)), part.histogram(i) if has_histograms else None)
            for part, i in where[site]
        ]
        return merged(each) if len(each) > 1 else each[0]

    def wholes() -> Array:
        states = [in_one_scale(site, part, i, part.wholes[:, i]) for site, here in enumerate(where) for part, i in here]
        starts = np.cumsum([0, *(len(here) for here in where)])[:-1]
        return fold_channels(np.stack(states, axis=1), starts) if states else np.empty((len(FIELDS), 0))

    return Columns(
        together.sites,
        together.calls,
        together.order,
        np.array([each.copy().pop() if len(each) == 1 else 1.0 for each in scales], np.float64),
        [is_alike[n] and all(bool(part.keeps[i]) for part, i in here) for n, here in enumerate(where)],
        [each.pop() if len(each) == 1 and alike else None for each, alike in zip(dims, is_alike, strict=True)],
        bins,
        lambda i: read(i).moments,
        lambda i: read(i).histogram,
        wholes,
        group_sizes=[each.pop() if len(each) == 1 else None for each in groups],
    )
