"""Runs for tests of the page: Snapshots of a model of blocks, with faults that were put in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hookstats.numbers.fields import ExponentBins, Site
from hookstats.numbers.snapshot import Snapshot
from hookstats.report.record import Recorded
from hookstats.report.writing import PageContents
from tests.frames import Measured, frame_of

LEAVES = ("norm1", "attention.qkv", "attention.out", "norm2", "mlp.up", "mlp.act", "mlp.down")
_COUNT = 4096.0  # values of a channel


def contents(recorded: Recorded, second: Recorded | None = None) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the contents of a run's page: what becomes JSON, and bytes by name."""
    return PageContents(recorded, second).render_all()


def sites_of(blocks: int, leaves: Sequence[str] = LEAVES) -> list[Site]:
    names = ["embedding", *(f"layers.{i}.{leaf}" for i in range(blocks) for leaf in leaves), "head"]
    return [*(Site(name, "output") for name in names), *(Site(name, "grad_output") for name in reversed(names))]


def state_of(rng: np.random.Generator, scale: float, channels: int, outlier: tuple[int, float] | None) -> np.ndarray:
    """``[fields, channels]`` as of normal values."""
    std = scale * np.exp(0.2 * rng.normal(size=channels))
    if outlier is not None and channels > 1:
        std[outlier[0]] *= outlier[1]
    mean = 0.1 * scale * rng.normal(size=channels)
    count = np.full(channels, _COUNT)
    top = 3.6 * std
    zero = np.zeros(channels)
    return np.stack(
        [
            count,
            mean,
            count * std**2,
            mean - top,
            mean + top,
            count * 0.8 * std,
            np.round(0.01 * count),
            zero,
            zero,
            zero,
        ]
    )


def counts_of(state: np.ndarray) -> np.ndarray:
    """512 bins by exponent: all zeros, and other values as of a normal of the first channel's spread."""
    counts = np.zeros(512)
    counts[0] = state[6].sum()
    edges = 2.0 ** (np.arange(256) - 127)
    total, spread = state[0, 0], np.sqrt(state[2, 0] / state[0, 0])
    below = np.array([math.erf(min(edge / spread, 9.0) / math.sqrt(2)) for edge in edges])
    share = np.diff(below, append=1.0)
    counts[:256] += total * share / 2
    counts[256:] += total * share / 2
    return counts.round().astype(np.int64)


def run(
    sites: Sequence[Site], steps: int, channels: int = 16, every: int = 1, detail_every: int = 1, seed: int = 0
) -> list[Snapshot]:
    """A loss that falls, a spike at two thirds, an outlier channel that grows in the middle of the depth."""
    rng = np.random.default_rng(seed)
    spike, snapshots = 2 * steps // 3, []
    names = list(dict.fromkeys(site.name for site in sites))
    for t in range(steps):
        measured = []
        for site in sites:
            depth = names.index(site.name) / len(names)
            is_gradient = site.tensor.startswith("grad_")
            scale = (1e-4 * 10 ** (-2 * (1 - depth)) if is_gradient else 1 + 2 * depth) * np.exp(0.05 * rng.normal())
            scale *= 1 + 0.5 * np.exp(-t / max(steps / 10, 1))
            if spike <= t < spike + max(steps // 25, 1):
                scale *= 8 if is_gradient else 2.5
            grown = (3, 1 + 60 * t / steps) if 0.4 < depth < 0.7 and "mlp" in site.name and not is_gradient else None
            state = state_of(rng, float(scale), channels if t % detail_every == 0 else 1, grown)
            if is_gradient and t == spike and depth < 0.2:
                state[7] = 5
            counts = counts_of(state) if t % detail_every == 0 else None
            measured.append(Measured(site, state, counts, keeps=channels > 1))
        loss = 2.2 + 8 * np.exp(-5 * t / steps) + 0.05 * rng.normal() + (4 if spike <= t < spike + steps // 40 else 0)
        scalars = {"loss": float(loss), "lr": 3e-4}
        snapshots.append(Snapshot(frame_of(measured, ExponentBins(), step=t * every, scalars=scalars)))
    return snapshots
