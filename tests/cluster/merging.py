"""Trainings of ranks whose steps of one site are merged, each of which says of which rank and step it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hookstats import Site
from hookstats.cluster.merging import Merging
from hookstats.cluster.union import Tables
from hookstats.numbers.frame import StepFrame
from tests.cluster.steps import BUDGET, Here, measured
from tests.frames import snapshot_of

ALL = (0, 1, 2)
A = Site("a", "output")


def merging_of(world: int, timeout: float = 600.0, spread: bool = False) -> Merging:
    return Merging(range(world), Tables(BUDGET, spread), timeout)


def step_of(number: int, rank: int, site: Site = A, **fields: Any) -> StepFrame:
    """Make a step of one site, whose only value identifies its rank and step."""
    values = torch.full((1, 1), 1000.0 * rank + number, dtype=torch.float64)
    return measured({site: Here(values)}, step=number, **fields)


def submit(merging: Merging, numbers: Iterable[int], **fields: Any) -> list[StepFrame]:
    """A training that measures these steps, and waits for none."""
    for number in numbers:
        merging.submit(step_of(number, dist.get_rank(), **fields))
    return merging.take_arrived()


def train(merging: Merging, numbers: Iterable[int], **fields: Any) -> list[StepFrame]:
    """A training that measures these steps, and in the end waits for all of them."""
    return submit(merging, numbers, **fields) + merging.wait(60)


def ranks_of(done: list[StepFrame]) -> list[tuple[int, ...]]:
    """Each with the numbers of its own step: those of other steps or ranks are not among them."""
    for each in done:
        for stats in snapshot_of(each).values():
            if stats.calls:
                assert stats.total.count == len(each.ranks.present)
                want = each.step + 1000.0 * np.mean(each.ranks.present)
                assert abs(stats.total.mean - want) < 1e-9, (each.step, each.ranks)
    return [each.ranks.present for each in done]
