"""Kernels on the CPU, side by side in one run: make bench. (On a GPU: make gpu.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.contenders import MANY, Case, check, contenders, many_contenders
from hookstats import ExponentBins, measure

CASES = [
    Case("rows 64 MB", (16384, 1024), torch.float32, 1),
    Case("rows 32 MB bf16", (16384, 1024), torch.bfloat16, 1),
    Case("NCHW 98 MB", (32, 256, 56, 56), torch.float32, 1),
    Case("channels_last 98 MB", (32, 256, 56, 56), torch.float32, 1, channels_last=True),
    Case("rows 32 KB", (32, 256), torch.float32, 1),
    Case("rows 64 MB, ReLU", (16384, 1024), torch.float32, 1, values="relu"),
    Case("rows 64 MB, constant", (16384, 1024), torch.float32, 1, values="constant"),
    Case("rows 64 MB, all exponents", (16384, 1024), torch.float32, 1, values="wide"),
    Case("rows 64 MB, 1 % NaN", (16384, 1024), torch.float32, 1, values="nan"),
]
NAMES = list(contenders(CASES[0], "cpu"))
SLOW = ("eager operators", "octaves alone, bucketize + bincount")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def bench_statistics(benchmark: Any, case: Case, name: str) -> None:
    if case.values != "normal" and not name.startswith(("hookstats", "x.sum", "torch.histc")):
        pytest.skip("the same for any values")
    if case.values == "normal":
        check(case, "cpu")
    benchmark.group = case.name
    x = case.tensor("cpu")
    run = contenders(case, "cpu")[name]
    run(x)  # compiles, allocates
    benchmark.extra_info["bytes"] = case.bytes
    benchmark.pedantic(run, args=(x,), rounds=5 if name in SLOW else 30, warmup_rounds=2)


@pytest.mark.parametrize("name", list(many_contenders("64 tensors, 256 KB fp32", "cpu")))
@pytest.mark.parametrize("case", list(MANY)[:2])
def bench_many_tensors(benchmark: Any, case: str, name: str) -> None:
    benchmark.group = case
    shapes, dtype = MANY[case]
    tensors = [torch.randn(shape, dtype=dtype) for shape in shapes]
    run = many_contenders(case, "cpu")[name]
    run(tensors)
    benchmark.extra_info["bytes"] = sum(x.nbytes for x in tensors)
    benchmark.pedantic(run, args=(tensors,), rounds=5 if name == "eager operators" else 30, warmup_rounds=2)


@pytest.mark.parametrize("histogram", [None, ExponentBins()], ids=["moments", "histogram"])
def bench_measure(benchmark: Any, histogram: ExponentBins | None) -> None:
    benchmark.group = "measure() of 32 KB: state, kernel, numbers on the host"
    x = torch.randn(32, 256)
    benchmark(lambda: measure(x, histogram=histogram).total.rms)
