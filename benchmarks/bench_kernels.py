"""Kernels on the CPU, side by side in one run: make bench. (On a GPU: make gpu.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.contenders import Case, check, contenders
from hookstats import ExponentBins, measure

CASES = [
    Case("rows 64 MB", (16384, 1024), torch.float32, 1),
    Case("rows 32 MB bf16", (16384, 1024), torch.bfloat16, 1),
    Case("NCHW 98 MB", (32, 256, 56, 56), torch.float32, 1),
    Case("channels_last 98 MB", (32, 256, 56, 56), torch.float32, 1, channels_last=True),
    Case("rows 32 KB", (32, 256), torch.float32, 1),
]
NAMES = list(contenders(CASES[-1], "cpu"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def bench_statistics(benchmark: Any, case: Case, name: str) -> None:
    check(case, "cpu")
    benchmark.group = case.name
    x = case.tensor("cpu")
    run = contenders(case, "cpu")[name]
    run(x)  # compiles, allocates
    benchmark.extra_info["bytes"] = case.bytes
    benchmark.pedantic(run, args=(x,), rounds=5 if name == "eager operators" else 30, warmup_rounds=2)


@pytest.mark.parametrize("histogram", [None, ExponentBins()], ids=["moments", "histogram"])
def bench_measure(benchmark: Any, histogram: ExponentBins | None) -> None:
    benchmark.group = "measure() of 32 KB: state, kernel, numbers on the host"
    x = torch.randn(32, 256)
    benchmark(lambda: measure(x, histogram=histogram).total.rms)
