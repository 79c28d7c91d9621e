"""A step of 1,000 sites merged over ranks of this machine, which have its cores to share: from submit to arrival."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from hookstats.cluster.exchange import Exchange
from hookstats.cluster.merging import Merging
from hookstats.cluster.union import Tables
from hookstats.numbers.fields import Bins, ExponentBins, Site, histogram_shape
from hookstats.numbers.frame import Sites, StepFrame
from tests.ranks import run

RANKS, SITES, ROUNDS = (4, 16), 1000, 30
CASES: dict[str, Bins | None] = {"totals": None, "totals and the default histogram": ExponentBins()}


def sites_of(bins: Bins | None) -> Sites:
    names = [Site(f"layers.{n // 2}.mlp", "grad_output" if n % 2 else "output") for n in range(SITES)]
    counters = [int(np.prod(histogram_shape(bins, 1)))] * SITES
    return Sites.side_by_side(names, [False] * SITES, [None] * SITES, None, bins, [1] * SITES, counters)


def step_of(sites: Sites, step: int) -> StepFrame:
    frame = StepFrame(
        sites,
        [np.full(sites.sizes[0], 7, np.int64)],
        np.ones(SITES, np.int64),
        np.arange(SITES),
        np.ones(SITES),
        step,
        scalars={"loss": 1.0},
    )
    for number in range(SITES):
        frame.state(number)[:, 0] = [100, step, 5, -3, 3, 1, 0, 0, 0, 0]
    return frame


def merges(rank: int, world: int, bins: Bins | None) -> dict[str, float]:
    where = sites_of(bins)
    merging, moved, reduce = Merging(range(world), Tables(1 << 28, False), 600.0), [0], Exchange.reduce

    def counted(self: Any, arrays: Any, folds: Any) -> Any:
        moved[0] += sum(each.nbytes for each in arrays)
        return reduce(self, arrays, folds)

    Exchange.reduce = counted  # type: ignore[method-assign]
    times: list[float] = []
    submits: list[float] = []
    before = 0.0
    for step in range(ROUNDS + 1):
        made = step_of(where, step)
        dist.barrier()
        if step == 1:
            before, moved[0] = time.process_time(), 0
        begin = time.perf_counter()
        merging.submit(made)
        submits.append(time.perf_counter() - begin)
        (done,) = merging.wait(60)
        times.append(time.perf_counter() - begin)
        assert len(done.ranks.present) == world
    processor = time.process_time() - before
    merging.close()
    return {
        "first_ms": 1e3 * times[0],
        "median_ms": 1e3 * median(times[1:]),
        "min_ms": 1e3 * min(times[1:]),
        "longest_submit_us": 1e6 * max(submits),
        "processor_ms": 1e3 * processor / ROUNDS,
        "MB_a_step": moved[0] / ROUNDS / 1e6,
    }


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", CASES)
def bench_merge(benchmark: Any, case: str, ranks: int) -> None:
    """Tells the figures of the slowest rank. processor_ms: with what makes the steps of this benchmark. MB_a_step: what
    a rank brings to all-reduces."""
    benchmark.group = f"a merge of {SITES:,} sites over {ranks} ranks"
    told = benchmark.pedantic(run, args=(merges, ranks, CASES[case]), kwargs={"timeout": 120})
    benchmark.extra_info.update({name: max(each[name] for each in told) for name in told[0]})
