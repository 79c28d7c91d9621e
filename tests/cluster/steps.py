"""Steps of ranks that are made of tensors, and what becomes of them when they are merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

import hookstats
from hookstats import Site
from hookstats.cluster.packing import FOLDS, Packed, Packer
from hookstats.cluster.union import Place, Placing, Tables, Union, whole
from hookstats.numbers.fields import FIELDS, Bins, histogram_shape
from hookstats.numbers.frame import StepFrame
from tests.frames import Measured, frame_of

BUDGET = 1 << 28


class Here(NamedTuple):
    """Measurements of a site by one rank in a step, and their place in the whole."""

    values: torch.Tensor | None = None  # [channels, values]; None: the site is silent
    channels: int = 1  # of a silent one
    keeps: bool = True
    dim: int | None = 0
    placed: Place | None = None
    group_size: int | None = None
    has_bins: bool = True


def measured(sites: Mapping[Site, Here], bins: Bins | None = None, **step: Any) -> StepFrame:
    """Make a step measured by one rank; the sites run in this order. step: fields that differ from a plain step's."""
    made = []
    for site, here in sites.items():
        dim = here.dim if here.keeps else None
        if here.values is None:
            shape = histogram_shape(bins, here.channels)
            counts = None if bins is None else np.zeros(shape, np.int64)
            made.append(Measured(site, np.zeros((len(FIELDS), here.channels)), counts, 0, here.keeps, dim))
            continue
        stats = hookstats.measure(
            here.values, channel_dim=0, histogram=bins if here.has_bins else None, channels=here.keeps
        )
        made.append(Measured(site, stats._measured, stats._histogram, 1, here.keeps, dim, here.group_size))
    return frame_of(made, bins, **{"step": 3, "time": 1.5, **step})


def placing_of(sites: Mapping[Site, Here]) -> Placing:
    return lambda own: sites[own.site].placed or whole(own)


def shard(channels: int, offset: int, owners: str | int = "each", counts: bool = True) -> Place:
    """Make a shard of channels that lie side by side on a mesh; calls are those of the first."""
    return Place(channels, owners, offset, counts, offset == 0)


class Job:
    """The ranks of a job, each with its step, which agree."""

    def __init__(
        self,
        steps: Sequence[StepFrame],
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

    def merged(self, rank: int = 0) -> StepFrame:
        """Return the step as this rank receives it from `Merging`."""
        parts = zip(self.packers, self.steps, self.local, strict=True)
        packed = [packer.pack(step, local)[0] for packer, step, local in parts]
        folded = [fold(np.stack(each)) for fold, each in zip(FOLDS, zip(*packed, strict=True), strict=True)]
        return self.packers[rank].unpack(Packed(*folded), self.steps[rank])


def job_of(sites: Sequence[Mapping[Site, Here]], bins: Bins | None = None, **how: Any) -> Job:
    return Job([measured(each, bins) for each in sites], [placing_of(each) for each in sites], **how)
