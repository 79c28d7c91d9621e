"""All default rules over one measured step of 30 and 1,000 sites: what the writer of a record does beside training.

pytest benchmarks/bench_rules.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hookstats import ExponentBins, Site
from hookstats.numbers.blocks import COUNTERS, Drained, Layout, Part, Row
from hookstats.numbers.fields import EXPONENT_BINS, FIELDS
from hookstats.rules import Judge
from hookstats.rules.step import Sites, Step

KINDS = ("output", "grad_output", "param_grad", "param_sample", "update_sample")  # as attach measures them
VALUES = 256  # of a channel


def state(channels: int, values: Any) -> Any:
    """A site's part of a block: its fields, counters and histogram."""
    count = np.full(channels, float(VALUES))
    nothing = np.zeros(channels)
    m2 = VALUES * values.var(0)
    fields = [count, values.mean(0), m2, values.min(0), values.max(0), np.abs(values).sum(0), *[nothing] * 4]
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).ravel() >> 23
    histogram = np.bincount(bits.astype(np.int64), minlength=EXPONENT_BINS)
    return np.concatenate([np.stack(fields).ravel().view(np.int64), np.zeros(COUNTERS, np.int64), histogram])


def steps(channels: int, sites: int) -> Any:
    """Drained steps of a model with blocks of residual layers, all of one content, each to be read anew."""
    generator = np.random.default_rng(0)
    size = len(FIELDS) * channels + COUNTERS + EXPONENT_BINS
    rows, parts = [], []
    for i in range(sites):
        kind = KINDS[i % len(KINDS)]
        module = f"layers.{i // 50}.linear.{i // len(KINDS)}"
        site = Site(module if kind.endswith("output") else f"{module}.weight", kind)
        part = Part(0, i * size, channels, EXPONENT_BINS)
        rows.append(Row(site, (part,), channels > 1, -1, kind.startswith("param")))
        scale = 1e-3 if kind == "update_sample" else 1.0
        parts.append(state(channels, scale * generator.standard_normal((VALUES, channels))))
        parts[-1][len(FIELDS) * channels : len(FIELDS) * channels + COUNTERS] = (1, i)  # called once, in this order
    layout, block = Layout([0], rows, ExponentBins()), np.concatenate(parts)
    step = 0
    while True:
        hidden, readings = np.zeros(sites, bool), np.zeros(sites, np.int64)
        loss = 4 - 0.01 * step + 0.1 * float(generator.standard_normal())
        yield Drained(layout, [block], step, 0.0, {"loss": loss}, None, None, hidden, readings)
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
    coming, known = steps(channels, sites), Sites()
    benchmark.pedantic(lambda step: Step(step, known).totals, setup=lambda: ((next(coming),), {}), rounds=100)
