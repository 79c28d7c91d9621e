"""All default rules over one measured step of 30 and 1,000 sites: what the writer of a record does beside training.

pytest benchmarks/bench_rules.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hookstats import ExponentBins, Site
from hookstats.numbers.fields import EXPONENT_BINS
from hookstats.numbers.frame import Sites, StepFrame, block_of
from hookstats.rules import Judge
from hookstats.rules.step import SiteIds, Step

KINDS = ("output", "grad_output", "param_grad", "param_sample", "update_sample")  # as attach measures them
VALUES = 256  # of a channel


def state(channels: int, values: Any) -> tuple[Any, Any]:
    """A site's fields and histogram."""
    count = np.full(channels, float(VALUES))
    nothing = np.zeros(channels)
    m2 = VALUES * values.var(0)
    fields = [count, values.mean(0), m2, values.min(0), values.max(0), np.abs(values).sum(0), *[nothing] * 4]
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).ravel() >> 23
    return np.stack(fields), np.bincount(bits.astype(np.int64), minlength=EXPONENT_BINS)


def steps(channels: int, count: int) -> Any:
    """Steps of a model with blocks of residual layers, all of one content, each to be read anew."""
    generator = np.random.default_rng(0)
    names, states = [], []
    for i in range(count):
        kind = KINDS[i % len(KINDS)]
        module = f"layers.{i // 50}.linear.{i // len(KINDS)}"
        names.append(Site(module if kind.endswith("output") else f"{module}.weight", kind))
        scale = 1e-3 if kind == "update_sample" else 1.0
        states.append(state(channels, scale * generator.standard_normal((VALUES, channels))))
    keeps, dims, widths = [channels > 1] * count, [-1] * count, [channels] * count
    sites = Sites.side_by_side(names, keeps, dims, None, ExponentBins(), widths, [EXPONENT_BINS] * count)
    block, ones, order = block_of(*zip(*states, strict=True)), np.ones(count, np.int64), np.arange(count)
    step = 0
    while True:
        loss = 4 - 0.01 * step + 0.1 * float(generator.standard_normal())
        yield StepFrame(sites, [block], ones, order, np.ones(count), step, scalars={"loss": loss})
        step += 1


@pytest.mark.parametrize(("sites", "channels"), [(30, 1), (30, 64), (1000, 1), (1000, 64)])
@pytest.mark.benchmark(group="all default rules, a step with histograms")
def bench_rules(benchmark: Any, sites: int, channels: int) -> None:
    coming = steps(channels, sites)
    judge = Judge()
    found = [finding for _ in range(150) for finding in judge.judge(next(coming))]  # windows are full
    assert found == []
    benchmark.pedantic(judge.judge, setup=lambda: ((next(coming),), {}), rounds=100)


@pytest.mark.parametrize(("sites", "channels"), [(30, 1), (30, 64), (1000, 1), (1000, 64)])
@pytest.mark.benchmark(group="of this, to read the state: sites and totals")
def bench_reading(benchmark: Any, sites: int, channels: int) -> None:
    coming, known = steps(channels, sites), SiteIds()
    benchmark.pedantic(lambda step: Step(step, known).totals, setup=lambda: ((next(coming),), {}), rounds=100)
