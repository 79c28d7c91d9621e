"""Steps of ranks that are made of tensors, and what becomes of them when they are merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

import hookstats
from hookstats import Site
from hookstats.cluster.packing import First, Packer
from hookstats.cluster.union import Placed, Placing, Share, Tables, Union, whole
from hookstats.numbers.blocks import Drained, Layout, Part, Row
from hookstats.numbers.fields import Bins, histogram_shape

BUDGET = 1 << 28
NO_PEERS: Mapping[Site, tuple[int, ...]] = {}


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


def shard(channels: int, offset: int, owners: str | int = "each", counts: bool = True) -> Placed:
    """Of channels that lie side by side on a mesh; calls are those of the first."""
    return Placed(channels, owners, Share(offset, counts, offset == 0))


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
        self.local = [
            Tables(budget, spread).local(step, placing)
            for step, placing in zip(steps, placings or [whole] * len(steps), strict=True)
        ]
        self.union = Union([each.text for each in self.local], range(len(self.steps)))
        self.packers = [Packer(self.union, rank, {}) for rank in range(len(steps))]

    def merged(self, rank: int = 0, learned: Mapping[Site, tuple[int, ...]] = NO_PEERS) -> Drained:
        """As this rank has it, by what `Merging` exchanges."""
        parts = [
            packer.part(step, local) for packer, step, local in zip(self.packers, self.steps, self.local, strict=True)
        ]
        own = [part.first(step, learned) for part, step in zip(parts, self.steps, strict=True)]
        with np.errstate(invalid="ignore"):  # a scalar that is infinite
            sums = np.sum([each.all_sums for each, *_ in own], 0)
        extremes = np.max([each.all_extremes for each, *_ in own], 0)
        self.first = First(self.packers[rank].shape, sums, extremes)
        seconds = [part.second(each, self.first) for part, each in zip(parts, own, strict=True)]
        second, ranks = np.sum([each for each, _ in seconds], 0), np.max([each for _, each in seconds], 0)
        return self.packers[rank].unpack(self.first, second, ranks, self.steps[rank])


def job_of(sites: Sequence[Mapping[Site, Here]], bins: Bins | None = None, **how: Any) -> Job:
    return Job([drained(each, bins) for each in sites], [placing_of(each) for each in sites], **how)
