"""Profile of a training step on a GPU, by torch's profiler: our kernels, the model's own, and idle time.

A part of gpu.py. What is watched may cost more than its kernels: the model's own find less in the cache, the clock
falls, or the GPU waits for the host. So each kind of kernel stands beside that of the bare step.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.llama import Shape
from benchmarks.steps import ATTACHED, DEFAULT, NEVER, Trainer

STEPS = 3  # profiled
RUNS = {"kernel", "gpu_memcpy", "gpu_memset"}  # a trace's categories of what runs on a GPU
KINDS = {  # by a part of a kernel's name; the first that fits
    "hookstats": ("hookstats",),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma"),
    "attention": ("flash", "fmha", "sdpa"),
    "optimizer": ("multi_tensor",),
    "copies": ("Memcpy", "Memset"),
    "others": ("",),
}


def events_of(trainer: Trainer, device: str) -> list[dict[str, Any]]:
    """Return a trace's device events in order, with name, ts and dur in us. On a CPU: its operators."""
    with profile(activities=[ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU]) as profiled:
        trainer.steps(STEPS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        found = json.loads(path.read_text())["traceEvents"]
    of_device = RUNS if device == "cuda" else {"cpu_op"}
    return sorted((each for each in found if each.get("cat") in of_device), key=lambda each: each["ts"])


def shares(events: list[dict[str, Any]]) -> dict[str, float]:
    """ms of a step by kind of kernel, `idle` between the first and the last while none ran, and our launches."""
    found = dict.fromkeys((*KINDS, "idle"), 0.0)
    until, launches = events[0]["ts"], 0
    for each in events:
        kind = next(kind for kind, parts in KINDS.items() if any(part in each["name"] for part in parts))
        launches += kind == "hookstats"
        found[kind] += each["dur"] / 1e3 / STEPS
        found["idle"] += max(0.0, each["ts"] - until) / 1e3 / STEPS
        until = max(until, each["ts"] + each["dur"])
    return {**found, "launches": launches / STEPS}


@contextmanager
def clocks() -> Iterator[dict[str, float]]:
    """The GPU's clock and power while it runs, medians; nothing where they cannot be read."""
    found: dict[str, float] = {}
    try:
        import pynvml  # type: ignore[import-not-found, unused-ignore]

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:
        yield found
        return
    seen: dict[str, list[float]] = defaultdict(list)
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.01):
            seen["MHz"].append(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
            seen["watts"].append(pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
    found |= {name: median(each) for name, each in seen.items()}


def where_figures(shape: Shape, device: str, write: Callable[[dict[str, Any]], None]) -> None:
    """One contender after the other, each alone in memory: the bare step stands first and, as a check, last."""
    for name in ("bare", "totals", "+ histogram per tensor", DEFAULT, "off-step", "paused", "bare, again"):
        attached = ATTACHED.get(name.removesuffix(", again"), ATTACHED[DEFAULT])
        trainer = Trainer(shape, device, attached)
        trainer.every = NEVER if name in ("off-step", "paused") else 1
        with nullcontext() if name == "paused" else trainer.resumed():
            trainer.steps(4)
            with clocks() as clock:
                began = time.perf_counter()
                trainer.steps(6)
                figure = {"name": name, "step": 1e3 * (time.perf_counter() - began) / 6}
            write({**figure, **shares(events_of(trainer, device)), **clock})
        del trainer
        if device == "cuda":
            torch.cuda.empty_cache()
