"""Time that a recording adds to `Monitor.step`, and to training beside its writer: make bench."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from benchmarks.interleaved import figures, interleaved, seconds
from benchmarks.steps import PERIOD, SMALL, Trainer
from hookstats import ExponentBins
from hookstats.numbers.fields import Bins


class Wide(nn.Module):
    """Its output is small to compute and has many channels: what is measured is the closing of the step."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


CASES: dict[str, tuple[int, int, Bins | None, bool]] = {  # sites, channels, histogram, whether channels are kept
    "1,000 sites, totals": (1000, 1, None, False),
    "1,000 sites, totals and the default histogram": (1000, 1, ExponentBins(), False),
    "200 sites of 4,096 channels": (200, 4096, ExponentBins(), True),
}


class Run:
    """A chain of modules that is watched, and a step of it."""

    def __init__(self, case: tuple[int, int, Bins | None, bool], directory: Path | None) -> None:
        sites, channels, histogram, keeps = case
        self.model = nn.Sequential(*(Wide(channels) for _ in range(sites)))
        self.x = torch.randn(1, channels)
        sinks = () if directory is None else [hookstats.record(directory)]
        self.monitor = hookstats.attach(
            self.model,
            tensors="output",
            every=1,
            histogram=histogram,
            channels=hookstats.Channels(keeps, dim=-1),
            options=hookstats.Options(memory_budget=1 << 30),
            sinks=sinks,
        )

    def step(self) -> float:
        """The seconds that `Monitor.step` takes."""
        with torch.no_grad():
            self.model(self.x)
        return seconds(self.monitor.step)


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="hookstats-"))
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("name", CASES)
def bench_step(benchmark: Any, name: str, directory: Path) -> None:
    benchmark.group = f"Monitor.step, {name}"
    bare, recorded = Run(CASES[name], None), Run(CASES[name], directory / "run")

    def measured() -> list[dict[str, Any]]:
        for run in (bare, recorded):
            for _ in range(3):
                run.step()
        rounds = 12 if CASES[name][1] > 1 else 60

        def spaced() -> float:
            time.sleep(0.3 if CASES[name][1] > 1 else 0.02)  # so that the writer keeps up
            return recorded.step()

        return figures(
            interleaved({"without a record": bare.step, "with a record": spaced}, rounds), "without a record"
        )

    found = benchmark.pedantic(measured)
    bare.monitor.detach()
    recorded.monitor.detach()
    run = hookstats.load(directory / "run")
    kept = sum(path.stat().st_size for path in (directory / "run").rglob("*.parquet"))
    benchmark.extra_info.update(contenders=found, steps=len(run), bytes_a_step=kept / len(run))


def bench_training_beside_the_writer(benchmark: Any, directory: Path) -> None:
    """Every tenth step is measured, eager, one thread; the writer has the other core."""
    benchmark.group = "training step of a small Llama, every=10"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    watched = Trainer(SMALL, "cpu", {})
    recorded = Trainer(SMALL, "cpu", {"sinks": [hookstats.record(directory / "run")]})

    def measured() -> list[dict[str, Any]]:
        ways = {"watched": watched, "watched and recorded": recorded}
        for trainer in ways.values():
            trainer.timed(PERIOD)
        turns = {name: lambda trainer=trainer: trainer.timed(PERIOD) for name, trainer in ways.items()}
        return figures(interleaved(turns, 12), "watched")

    found = benchmark.pedantic(measured)
    for trainer in (watched, recorded):
        assert trainer.monitor is not None
        trainer.monitor.detach()
    torch.set_num_threads(threads)
    benchmark.extra_info.update(contenders=found, threads=1)
