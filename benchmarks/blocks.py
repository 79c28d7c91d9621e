"""Cost of counting some blocks, beside the histogram by exponent: python -m benchmarks.blocks

One tensor at a time, folded into a state, one CPU thread, in turns; us for a tensor, the median of the rounds.
"""

from __future__ import annotations

import statistics
import time

import torch

from hookstats import ExponentBins, Site
from hookstats.watch.memory import SiteState, StateStore, accumulate

ROUNDS = 25
BINS = {
    "moments": None,
    "histogram": ExponentBins(),
    "block=32": ExponentBins(block=32),
    "block=16": ExponentBins(block=16),
    "block=32, block_dim=0": ExponentBins(block=32, block_dim=0),
}
SHAPES = ((32, 1024), (256, 1024), (1024, 1024))


def state_for(x: torch.Tensor, bins: ExponentBins | None) -> SiteState:
    store = StateStore(bins, 0, strict=True)
    store.reserve(x.device, store.site_bytes(x.shape[-1]) // 8)
    state = store.add(Site("", "tensor"), x.device, x.shape[-1], x.dim() - 1, True).state
    store.flags.value = True
    return state


def measured(x: torch.Tensor) -> dict[str, float]:
    states = {name: state_for(x, bins) for name, bins in BINS.items()}
    times: dict[str, list[float]] = {name: [] for name in states}
    for _ in range(ROUNDS):
        for name, state in states.items():
            start = time.perf_counter()
            accumulate(x, state)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) * 1e6 for name, each in times.items()}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| tensor | " + " | ".join(BINS) + " |")
    print("|---" * (len(BINS) + 1) + "|")
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for shape in SHAPES:
            found = measured(torch.randn(shape).to(dtype))
            cells = [
                f"{us:.0f}" if name in ("moments", "histogram") else f"{us:.0f} ({us / found['histogram']:.2f}x)"
                for name, us in found.items()
            ]
            of = str(dtype).removeprefix("torch.")
            print(f"| {of} {shape[0]} x {shape[1]} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
