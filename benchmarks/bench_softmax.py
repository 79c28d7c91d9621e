"""The softmax of rows in numbers, beside torch's operators on the same logits: pytest benchmarks/bench_softmax.py.

Each says how long it takes beside `torch.logsumexp`, which gives one of the numbers; the operators, which give all of
them, are also compiled. On a machine with a GPU also there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.interleaved import figures, interleaved, seconds
from hookstats import softmax_rows

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
CASES = {
    "router [65536, 64] fp32": ((65536, 64), torch.float32),
    "attention [8, 64, 4096] fp32": ((8, 64, 4096), torch.float32),
    "attention [8, 64, 4096] bf16": ((8, 64, 4096), torch.bfloat16),
    "vocabulary [128, 50257] fp32": ((128, 50257), torch.float32),
    "vocabulary [128, 50257] bf16": ((128, 50257), torch.bfloat16),
}


def by_operators(logits: torch.Tensor) -> torch.Tensor:
    """All numbers but the margin, float32 [5, ...], as whoever writes them in torch does."""
    x = logits.float()
    log_p = torch.log_softmax(x, -1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1)
    return torch.stack([x.amax(-1), torch.logsumexp(x, -1), entropy, p.amax(-1), p[..., 0]])


CONTENDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "torch.logsumexp": lambda x: torch.logsumexp(x, -1),
    "hookstats.softmax_rows": softmax_rows,
    "hookstats.softmax_rows, top_k=2": lambda x: softmax_rows(x, top_k=2),
    "hookstats.softmax_rows, top_k=8": lambda x: softmax_rows(x, top_k=8),
    "torch's operators": by_operators,
    "torch's operators, compiled": torch.compile(by_operators),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def bench_softmax_rows(benchmark: Any, case: str, device: str) -> None:
    shape, dtype = CASES[case]
    logits = torch.randn(shape, device=device).mul_(3).to(dtype)
    found = torch.stack(softmax_rows(logits)[:5])
    torch.testing.assert_close(found, by_operators(logits), rtol=1e-4, atol=1e-4)

    def timed(run: Callable[[torch.Tensor], Any]) -> Callable[[], float]:
        def until_done() -> None:
            run(logits)
            if device == "cuda":
                torch.cuda.synchronize()

        until_done()  # compiles, allocates
        return lambda: seconds(until_done)

    contenders = {name: timed(run) for name, run in CONTENDERS.items()}
    times = benchmark.pedantic(interleaved, args=(contenders, 15))
    benchmark.group = f"{case}, {device}"
    benchmark.extra_info.update(bytes=logits.nbytes, contenders=figures(times, "torch.logsumexp"))
    base = min(times["torch.logsumexp"])
    for name, mine in times.items():
        print(f"{case:32} {name:34} {1e3 * min(mine):8.2f} ms  {min(mine) / base:5.2f}")
