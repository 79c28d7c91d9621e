"""Steps of ranks that are made of tensors, and what becomes of them when they are merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

import hookstats
from hookstats import Site
from hookstats.cluster.agreement import Agreement
from hookstats.cluster.flat import MERGES, Flat, merge
from hookstats.cluster.packing import Packer
from hookstats.cluster.table import Placed, Placing, ShardRange, Table, Tables, whole
from hookstats.numbers.blocks import Drained, Layout, Part, Row
from hookstats.numbers.fields import Bins, histogram_shape

BUDGET = 1 << 28


class Here(NamedTuple):
    """What a rank measures of a site in a step, and how it lies in the whole."""

    values: torch.Tensor | None = None  # [channels, values]; None: the site is silent
    channels: int = 1  # of a silent one
    keeps: bool = True
    is_parameter: bool = False
    dim: int | None = 0
    placed: Placed | None = None


def drained(sites: Mapping[Site, Here], bins: Bins | None = None, **step: Any) -> Drained:
    """Of one rank; the sites run in this order. step: what differs from a plain one."""
    rows, words, offset = [], [np.zeros(0, np.int64)], 0
    for number, (site, here) in enumerate(sites.items()):
        width = here.channels if here.values is None else len(here.values) if here.keeps else 1
        bins_here = int(np.prod(histogram_shape(bins, width)))
        part = Part(0, offset, width, bins_here)
        offset += part.size
        rows.append(Row(site, (part,), here.keeps, here.dim if here.keeps else None, here.is_parameter))
        if here.values is None:
            words.append(np.zeros(part.size, np.int64))
            continue
        stats = hookstats.measure(here.values, channel_dim=0, histogram=bins, channels=here.keeps)
        counts = np.zeros(0, np.int64) if stats._histogram is None else stats._histogram.ravel()
        words += [stats._measured.view(np.int64).ravel(), np.array([1, number + 1]), counts]
    told = {"step": 3, "time": 1.5, "scalars": {}, "grad_scale": None, "overflowed": None} | step
    n = len(rows)
    skipped, sample_ids = told.pop("skipped", {}), told.pop("sample_ids", {})
    block = np.concatenate(words)
    made = Drained(Layout([0], rows, bins), [block], **told, hidden=np.zeros(n, bool), readings=np.zeros(n, np.int64))
    made.skipped, made.sample_ids = skipped, sample_ids
    return made


def placing_of(sites: Mapping[Site, Here]) -> Placing:
    return lambda row: sites[row.site].placed or whole(row)


def shard(channels: int, offset: int, replicas: str | int = "each", counts: bool = True) -> Placed:
    """Of channels that lie side by side on a mesh; calls are those of the first."""
    return Placed(channels, replicas, ShardRange(offset, counts, offset == 0))


class Job:
    """The ranks of a job, each with its step, which agree."""

    def __init__(
        self,
        steps: Sequence[Drained],
        placings: Sequence[Placing] | None = None,
        budget: int = BUDGET,
        spread: bool = False,
    ) -> None:
        self.steps = list(steps)
        self._made = [
            Tables(budget, spread).table_of(step, placing)
            for step, placing in zip(steps, placings or [whole] * len(steps), strict=True)
        ]
        distinct: dict[int, tuple[int, Table]] = {}
        for rank, (table, _) in enumerate(self._made):
            distinct.setdefault(table.checksum, (rank, Table.from_text(table.text)))
        self.agreement = Agreement(list(distinct.values()), range(len(self.steps)))
        self.packers = [Packer(self.agreement, rank) for rank in range(len(steps))]

    def flats(self) -> list[Flat]:
        packed = zip(self.packers, self.steps, self._made, strict=True)
        return [packer.pack(step, *made) for packer, step, made in packed]

    def merged(self, by: Callable[[Sequence[Flat]], Flat] = merge, rank: int = 0) -> Drained:
        """As this rank has it."""
        return self.packers[rank].unpack(by(self.flats()), self.steps[rank])


def job_of(sites: Sequence[Mapping[Site, Here]], bins: Bins | None = None, **how: Any) -> Job:
    return Job([drained(each, bins) for each in sites], [placing_of(each) for each in sites], **how)


def tree(fan: int) -> Callable[[Sequence[Flat]], Flat]:
    """Merges groups of this many, then the groups; each member of a group some of the elements."""

    def group(flats: Sequence[Flat]) -> Flat:
        merged = []
        for of, parts in zip(MERGES, zip(*flats, strict=True), strict=True):
            cuts = [len(parts[0][0]) * i // len(flats) for i in range(len(flats) + 1)]
            slices = [of([part[:, a:b] for part in parts]) for a, b in pairwise(cuts)]
            merged.append(np.concatenate(slices, axis=1))
        return Flat(*merged)

    def of(flats: Sequence[Flat]) -> Flat:
        while len(flats) > 1:
            flats = [group(flats[i : i + fan]) for i in range(0, len(flats), fan)]
        return flats[0]

    return of
