"""The same step of several processes as one: as if one process had measured all that they measured. Pure numpy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hookstats.numbers.fields import FIELDS, Array, Counts, Site, Skipped, fold_channels, histogram_shape, unscale
from hookstats.numbers.frame import LazyBlocks, Sites, StepFrame, block_of, merge_states
from hookstats.numbers.kinds import kind_of
from hookstats.numbers.ranks import StepRanks
from hookstats.numbers.snapshot import Snapshot


def merge(frames: Sequence[StepFrame]) -> StepFrame:
    """Counts, extremes and histograms exactly, moments to rounding. ``calls`` are those of all frames together.

    Sites that some frames alone have are there as well; the order is that of the first frame, then of the next.
    Channels are kept where all have the same ones, else there are totals. A scalar is the mean over the frames.

    How tensors lay on the ranks is not known here. What is measured of parameters (values, gradients, updates, states
    of optimizers), and the same in all frames, are replicas: counted once. Others are shards of one tensor, by whatever
    dimension: they have totals.
    """
    first = frames[0]
    numbers = sorted({number for frame in frames for number in frame.earlier_scalars})
    scales = {frame.grad_scale for frame in frames}
    present = tuple(sorted({rank for frame in frames for rank in frame.ranks.present}))
    overflowed = [frame.overflowed for frame in frames if frame.overflowed is not None]
    return replace(
        _sites(frames),
        step=first.step,
        time=first.time,
        scalars=_means([frame.scalars for frame in frames]),
        earlier_scalars={n: _means([frame.earlier_scalars.get(n, {}) for frame in frames]) for n in numbers},
        sample_ids=_sample_ids(frames),
        grad_scale=first.grad_scale if len(scales) == 1 else None,
        overflowed=any(overflowed) if overflowed else None,
        skipped=_merge_skipped(frames),
        ranks=StepRanks(present, len(present)),
        rows=max(frame.rows for frame in frames),
    )


def _means(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each scalar over the ranks that have it."""
    names = dict.fromkeys(name for scalars in ranks for name in scalars)
    return {name: mean([scalars[name] for scalars in ranks if name in scalars]) for name in names}


def mean(values: list[float]) -> float:
    """Return the mean; of equal numbers, that number."""
    if len(set(values)) == 1:
        return values[0]
    total = math.fsum(values) if all(map(math.isfinite, values)) else float(np.sum(values))
    return total / len(values)


def _sample_ids(frames: Sequence[StepFrame]) -> dict[int, Counts]:
    """Return the sample ids by step, one rank's after the other's."""
    steps = sorted({step for frame in frames for step in frame.sample_ids})
    none = np.empty(0, np.int64)
    return {step: np.concatenate([each.sample_ids.get(step, none) for each in frames]) for step in steps}


def _merge_skipped(frames: Sequence[StepFrame]) -> dict[Site, Skipped]:
    skipped: dict[Site, Skipped] = {}
    for frame in frames:
        for site, here in frame.skipped.items():
            before = skipped.get(site, Skipped(here.reason, 0))
            given_up = before.times is None or here.times is None
            skipped[site] = Skipped(before.reason, None if given_up else (before.times or 0) + (here.times or 0))
    return skipped


def align(runs: Iterable[Iterable[Snapshot]]) -> Iterator[list[Snapshot | None]]:
    """Yield what each run has of each step, None where one has not got it; a step of each is held at a time."""
    rest = [iter(run) for run in runs]
    now = [next(each, None) for each in rest]
    while left := [each.step for each in now if each is not None]:
        least = min(left)
        found = [each if each is not None and each.step == least else None for each in now]
        yield found
        now = [each if mine is None else next(of, None) for each, mine, of in zip(now, found, rest, strict=True)]


class _FrameParts:
    """The frames that have a site, each with its place there, those in which it was silent left out."""

    def __init__(self, site: Site, where: list[tuple[StepFrame, int]]) -> None:
        self.calls = sum(int(frame.calls[i]) for frame, i in where)
        self.where = [(frame, i) for frame, i in where if frame.calls[i]] or where  # a silent one may be narrow
        self.is_cut = False  # frames have parts of one parameter
        if len(self.where) > 1 and kind_of(site.tensor).is_replicated:
            first, *others = (frame.wholes[:, i] for frame, i in self.where)
            self.calls = max(int(frame.calls[i]) for frame, i in self.where)
            self.is_cut = not all(np.array_equal(first, other, equal_nan=True) for other in others)
            self.where = self.where if self.is_cut else self.where[:1]
        scales = {float(frame.scales[i]) for frame, i in self.where}
        self.scale = scales.pop() if len(scales) == 1 else None  # None: each part is divided before it is merged
        widths = {int(frame.sites.channels[i]) for frame, i in self.where}
        self.is_alike = len(widths) == 1 and not self.is_cut
        self.channels = max(widths) if len(widths) == 1 else 1
        self.keeps = self.is_alike and all(bool(frame.sites.keeps[i]) for frame, i in self.where)
        dims = {frame.sites.dims[i] for frame, i in self.where} - {None}
        self.dim = dims.pop() if len(dims) == 1 and self.is_alike else None
        group_sizes = {frame.sites.group_sizes[i] for frame, i in self.where}
        self.group_size = group_sizes.pop() if len(group_sizes) == 1 else None
        self.has_histogram = self.scale is not None and all(frame.sites.counters[i] for frame, i in self.where)

    def whole(self) -> list[Array]:
        """The totals of each, ``[fields]``."""
        return [self._unscale_state(frame, i, frame.wholes[:, i]) for frame, i in self.where]

    def block(self, has_bins: bool) -> Counts:
        """The memory of all together."""
        states = [self._unscale_state(frame, i, frame.state(i)) for frame, i in self.where]
        has_histogram = has_bins and self.has_histogram
        histograms = [frame.histogram(i) if has_histogram else None for frame, i in self.where]
        state, counts = merge_states(states, histograms) if len(states) > 1 else (states[0], histograms[0])
        return block_of([state], [counts])

    def _unscale_state(self, frame: StepFrame, i: int, state: Array) -> Array:
        return state if self.scale is not None else unscale(state, float(frame.scales[i]))


def _sites(frames: Sequence[StepFrame]) -> StepFrame:
    """The numbers of all frames; the states of a site are merged when they are read."""
    found: dict[Site, list[tuple[StepFrame, int]]] = {}
    for frame in frames:
        for i, site in enumerate(frame.sites):
            found.setdefault(site, []).append((frame, i))
    place = {site: n for n, site in enumerate(found)}
    fired = dict.fromkeys(place[frame.sites[i]] for frame in frames for i in frame.order.tolist())
    parts = [_FrameParts(site, where) for site, where in found.items()]
    bins = frames[0].bins if all(frame.bins == frames[0].bins for frame in frames) else None
    n, channels = len(parts), np.array([each.channels for each in parts], np.int64)
    shapes = [histogram_shape(bins if each.has_histogram else None, each.channels) for each in parts]
    counters = [int(np.prod(shape)) for shape in shapes]
    zeros, own = np.zeros(n, np.int64), np.arange(n)
    sites = Sites(
        found,
        [each.keeps for each in parts],
        [each.dim for each in parts],
        [each.group_size for each in parts],
        bins,
        np.stack([own, zeros, channels, own, len(FIELDS) * channels, np.array(counters, np.int64)]),
    )
    wholes = [each.whole() for each in parts]
    starts = np.cumsum([0, *map(len, wholes)])[:-1]
    states = [whole for each in wholes for whole in each]
    return StepFrame(
        sites,
        LazyBlocks(n, lambda i: parts[i].block(bins is not None)),
        np.array([each.calls for each in parts], np.int64),
        np.array(list(fired), np.int64),
        np.array([1.0 if each.scale is None else each.scale for each in parts], np.float64),
        frames[0].step,
        known_wholes=fold_channels(np.stack(states, axis=1), starts) if states else np.empty((len(FIELDS), 0)),
    )
