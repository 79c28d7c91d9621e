"""Cost of comparing replicas: checksums beside a sum and beside SHA-1 of a copy; and a whole check.

pytest benchmarks/bench_replicas.py; on a machine with a GPU also there.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hookstats
from benchmarks.interleaved import figures, interleaved, seconds
from hookstats.cluster.contents import checksums

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
# A parameter, its gradient and Adam's two moments, 4 bytes each, of a model with 1e9 parameters.
BILLION = 16e9
CASES: dict[str, Callable[[], list[torch.Tensor]]] = {
    "one tensor, 256 MB fp32": lambda: [torch.randn(64 << 20)],
    "one tensor, 256 MB bf16": lambda: [torch.randn(128 << 20, dtype=torch.bfloat16)],
    "512 tensors, 256 MB fp32": lambda: [torch.randn(128 << 10) for _ in range(512)],
    "512 tensors, 4 MB fp32": lambda: [torch.randn(2 << 10) for _ in range(512)],
}


def sums(tensors: list[torch.Tensor]) -> float:
    return float(torch.stack([x.sum() for x in tensors]).sum())


def sha1(tensors: list[torch.Tensor]) -> list[bytes]:
    """Hashes each parameter as Megatron-LM's check_param_hashes_across_dp_replicas does."""
    return [hashlib.sha1(x.cpu().contiguous().view(torch.uint8).numpy().data).digest() for x in tensors]


CONTENDERS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "x.sum()": sums,
    "hookstats checksums": checksums,
    "SHA-1 of a copy on the host": sha1,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def bench_checksums(benchmark: Any, case: str, device: str) -> None:
    """Until the numbers are on the host."""

    def timed(run: Callable[[list[torch.Tensor]], Any]) -> Callable[[], float]:
        return lambda: seconds(lambda: run(tensors))

    benchmark.group = f"{case}, {device}"
    tensors = [x.to(device) for x in CASES[case]()]
    size = sum(x.nbytes for x in tensors)
    contenders = {name: timed(run) for name, run in CONTENDERS.items()}
    for run in contenders.values():
        run()
    times = benchmark.pedantic(interleaved, args=(contenders, 15))
    found = figures(times, "x.sum()")
    for each in found:
        each["GB_per_s"] = size / each["min_ms"] / 1e6
        each["estimated_ms_for_1e9_parameters"] = each["min_ms"] * BILLION / size
    benchmark.extra_info.update(bytes=size, contenders=found)


@pytest.mark.parametrize("device", DEVICES)
def bench_check_replicas(benchmark: Any, device: str) -> None:
    """The host's part: 24 layers of 12 small parameters each, their gradients and AdamW's state, one rank."""
    benchmark.group = "check_replicas, 1,440 small tensors"
    model = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32) for _ in range(24))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 2, 16, device=device)).sum().backward()
    optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        benchmark.pedantic(lambda: hookstats.check_replicas(model, optimizer=optimizer), rounds=30, warmup_rounds=2)
        dist.destroy_process_group()
