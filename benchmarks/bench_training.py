"""Time that hookstats adds to a training step of a small Llama: make bench. (Of a large one on a GPU: make gpu.)"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.steps import MODES, SMALL, training_figures


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: threads that wait for each other take many times as long where another process needs a core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("compiled", [False, True], ids=MODES)
def bench_training(benchmark: Any, compiled: bool) -> None:
    benchmark.group = f"training step, {MODES[compiled]}"
    found = benchmark.pedantic(training_figures, args=(SMALL, "cpu", compiled, 40))
    benchmark.extra_info.update(contenders=found, threads=1)
