"""Time and bytes of a store, and the time to read one site of a long run: make bench.

The steps are made of random numbers, so that nothing compresses better than what training measures.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hookstats
from hookstats.numbers.fields import Bins, ExponentBins, Site, histogram_shape
from hookstats.numbers.frame import Sites, StepFrame
from hookstats.records.store import Store


def sites_of(sites: int, channels: int, bins: Bins | None = None) -> Sites:
    names = [Site(f"layers.{n // 2}.mlp", "grad_output" if n % 2 else "output") for n in range(sites)]
    keeps, dims = [channels > 1] * sites, [-1 if channels > 1 else None] * sites
    counters = [int(np.prod(histogram_shape(bins, channels)))] * sites
    return Sites.side_by_side(names, keeps, dims, None, bins, [channels] * sites, counters)


def step_of(sites: Sites, step: int, draw: np.random.Generator) -> StepFrame:
    """Make a step of 65,536 normal values a channel: extremes are float32, all else fills its 52 bits."""
    n = len(sites)
    frame = StepFrame(
        sites,
        [np.zeros(sites.sizes[0], np.int64)],
        np.ones(n, np.int64),
        np.arange(n),
        np.ones(n),
        step,
        1.7e9 + 1.3 * step,
        {"loss": 1.0},
    )
    for number in range(n):
        state, histogram = frame.state(number), frame.histogram(number)
        state[:] = draw.normal(size=state.shape)
        state[0] = 65536
        state[3:5] = state[3:5].astype(np.float32) + np.array([[-4], [4]])
        state[6:] = draw.integers(0, 3, state.shape[1])
        if histogram is not None:
            counts = draw.poisson(30000 * np.exp(-(((np.arange(histogram.size) % 256 - 120) / 6) ** 2)))
            histogram[...] = counts.reshape(histogram.shape)
    return frame


CASES: dict[str, tuple[int, int, Bins | None, int]] = {  # sites, channels, histogram, steps
    "1,000 sites, totals": (1000, 1, None, 400),
    "1,000 sites, totals and the default histogram": (1000, 1, ExponentBins(), 40),
    "200 sites of 4,096 channels": (200, 4096, None, 4),
}


@pytest.mark.parametrize("case", CASES)
def bench_store(benchmark: Any, tmp_path: Path, case: str) -> None:
    """add() with its share of commit(), by step; how many rows a second are merged; bytes on disk."""
    sites, channels, bins, count = CASES[case]
    where, draw = sites_of(sites, channels, bins), np.random.default_rng(0)
    steps = [step_of(where, step, draw) for step in range(count)]
    store = Store(tmp_path / "rank=0")
    store.begin(0, {})
    longest = 0.0

    def fill() -> None:
        nonlocal longest
        for step in steps:
            begin = time.perf_counter()
            store.add(step)
            longest = max(longest, time.perf_counter() - begin)
            if step.step % 100 == 99:
                store.commit(step.step)
        store.finish(0)

    benchmark.pedantic(fill, rounds=1)
    taken = benchmark.stats.stats.min if benchmark.stats else float("nan")
    begin = time.perf_counter()
    while store.merge():
        pass
    merging = time.perf_counter() - begin
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.parquet"))
    benchmark.extra_info.update(
        ms_per_step=1e3 * taken / count,
        longest_add_ms=1e3 * longest,
        kb_per_step=size / count / 1e3,
        merge_s=merging,
    )


def bench_one_site(benchmark: Any, tmp_path: Path) -> None:
    """One of 1,000 sites over 2,000 steps, from the directory to an Arrow table of two statistics."""
    where, draw = sites_of(1000, 1), np.random.default_rng(0)
    several = [step_of(where, 0, draw) for _ in range(16)]
    store = Store(tmp_path / "rank=0")
    store.begin(0, {})
    for step in range(2000):
        each = several[step % len(several)]
        each.step, each.time = step, 1.7e9 + 1.3 * step
        store.add(each)
        if step % 100 == 99:
            store.commit(step)
    store.finish(0)
    while store.merge():
        pass

    def read() -> None:
        site = Site("layers.321.mlp", "output")
        assert len(hookstats.load(tmp_path, sites=site, statistics=["rms", "abs_max"]).totals) == 2000

    benchmark(read)
