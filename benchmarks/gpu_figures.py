"""One part of the GPU's figures: python -m benchmarks.gpu_figures PART FILE adds a line of JSON for each to the file.

gpu.py runs the parts one after the other. Where there is no GPU, a part goes the same way through small tensors, so
that it can be tried; what it measures there says nothing.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.contenders import MANY, Case, Measured, check, contenders, many_contenders
from hookstats import _native
from hookstats.numbers.fields import FIELDS

ROOT = Path(__file__).parent.parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Write = Callable[[str, dict[str, Any]], None]  # the part that a figure belongs to, and the figure

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
FIRST = [  # what a training step has most of
    Case("rows 1 MB bf16", (512, 1024), bf16, 1),
    Case("rows 32 MB bf16", (4096, 4096), bf16, 1),
    Case("rows 128 MB bf16", (16384, 4096), bf16, 1),
    Case("rows 512 MB bf16", (65536, 4096), bf16, 1),
    Case("rows 512 MB fp32", (32768, 4096), fp32, 1),
    Case("NCHW 196 MB fp32", (64, 256, 56, 56), fp32, 1),
    Case("rows 156 MB bf16, 10007 channels", (8192, 10007), bf16, 1),
    Case("whole 512 MB bf16", (1, 65536 * 4096), bf16, 0),
]
COMPARED = [  # with everything
    Case("rows 1 MB bf16", (512, 1024), bf16, 1),
    Case("rows 32 MB bf16", (4096, 4096), bf16, 1),
    Case("rows 512 MB bf16", (65536, 4096), bf16, 1),
    Case("rows 512 MB fp32", (32768, 4096), fp32, 1),
    Case("NCHW 196 MB fp32", (64, 256, 56, 56), fp32, 1),
]
AGAINST_FLOOR = [  # those that have a goal first
    *COMPARED,
    Case("rows 128 MB e4m3fn", (32768, 4096), torch.float8_e4m3fn, 1),
    Case("rows 128 MB e5m2", (32768, 4096), torch.float8_e5m2, 1),
    Case("NCHW 98 MB bf16, 7 x 7", (512, 2048, 7, 7), bf16, 1),
    Case("rows 96 MB bf16, 3 channels", (1 << 24, 3), bf16, 1),
    Case("rows 156 MB bf16, 10007 channels", (8192, 10007), bf16, 1),
    Case("rows 512 MB bf16, a drift", (65536, 4096), bf16, 1, values="drift"),
    Case("rows 512 MB bf16, 1 % NaN", (65536, 4096), bf16, 1, values="nan"),
    Case("rows 512 MB bf16, one hot bin", (65536, 4096), bf16, 1, values="hot"),
    Case("rows 64 KB bf16", (32, 1024), bf16, 1),
    Case("rows 256 KB bf16", (128, 1024), bf16, 1),
    Case("rows 4 MB bf16", (1024, 2048), bf16, 1),
    Case("rows 8 MB bf16", (1024, 4096), bf16, 1),
    Case("rows 128 MB bf16", (16384, 4096), bf16, 1),
    Case("rows 1 GB bf16", (131072, 4096), bf16, 1),
    Case("rows 512 MB fp16", (65536, 4096), fp16, 1),
    Case("rows 32 MB fp32", (2048, 4096), fp32, 1),
    Case("rows 256 MB fp64", (8192, 4096), torch.float64, 1),
    Case("rows 32 MB e4m3fn", (8192, 4096), torch.float8_e4m3fn, 1),
    Case("whole 512 MB bf16", (1, 65536 * 4096), bf16, 0),
    Case("NCHW 196 MB bf16", (128, 256, 56, 56), bf16, 1),
    Case("channels_last 196 MB fp32", (64, 256, 56, 56), fp32, 1, channels_last=True),
    Case("rows 512 MB bf16, 64 channels", (1 << 22, 64), bf16, 1),
    Case("rows 512 MB bf16, ReLU", (65536, 4096), bf16, 1, values="relu"),
    Case("rows 512 MB bf16, constant", (65536, 4096), bf16, 1, values="constant"),
    Case("rows 512 MB fp32, mean 1e4", (32768, 4096), fp32, 1, values="mean"),
]


def shrunk(case: Case) -> Case:
    """For where there is no GPU."""
    most = 1 << 14
    first, *others = case.shape
    kept = [min(size, most) for size in others]
    return case._replace(shape=(max(1, min(first, most // math.prod(kept))), *kept))


def here(cases: list[Case]) -> list[Case]:
    return cases if DEVICE == "cuda" else [shrunk(case) for case in cases]


def microseconds(run: Callable[[Any], Any], tensors: list[Any], calls: int, rounds: int = 7) -> tuple[float, str]:
    """Median device time of one call, and how it was taken.

    The calls go round the tensors, which together are several times the cache, inside one CUDA graph, so that launches
    do not wait for the host; what cannot be captured is timed call by call.
    """

    def timed(play: Callable[[], None], count: int) -> float:
        times = []
        for _ in range(rounds):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            play()
            end.record()
            torch.cuda.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / count)
        return float(median(times))

    for x in tensors[:2]:
        run(x)  # compiles, allocates
    if DEVICE == "cpu":
        began = time.perf_counter()
        run(tensors[0])
        return 1e6 * (time.perf_counter() - began), "one call on a CPU"
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for i in range(calls):
                run(tensors[i % len(tensors)])
        graph.replay()
        torch.cuda.synchronize()
    except Exception:
        torch.cuda.synchronize()
        return timed(lambda: run(tensors[0]), 1), "events around one call"
    return timed(graph.replay, calls), f"CUDA graph of {calls} calls"


def floor_reader() -> Callable[[Any], Any]:
    """benchmarks/floor.cu: a kernel that reads a tensor and does nothing else."""
    if DEVICE == "cpu":
        return lambda x: x.float().sum()
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    major, minor = torch.cuda.get_device_capability()
    source, library = ROOT / "benchmarks" / "floor.cu", ROOT / "build" / f"floor-{major}{minor}.so"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        command = [nvcc, "-O3", "-gencode", f"arch=compute_{major}{minor},code=sm_{major}{minor}", "-shared"]
        subprocess.run([*command, "-Xcompiler", "-fPIC", "-o", str(library), str(source)], check=True)
    read = ctypes.CDLL(str(library)).read_floor
    read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    out = torch.zeros(1, dtype=torch.int32, device="cuda")

    def run(x: Any) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        error = read(x.data_ptr(), x.numel() * x.element_size() // 16 * 16, out.data_ptr(), stream)
        if error:
            raise RuntimeError(f"read_floor: CUDA error {error}")

    return run


def reserve() -> None:
    _native.reserve_scratch(torch.zeros(1, device=DEVICE).device)


def side_by_side(case: str, size: int, rows: list[tuple[str, float, str]], write: Write, part: str = "figures") -> None:
    """rows: name, microseconds and how they were taken; the first is the floor."""
    lowest = rows[0][1]
    for name, us, how in rows:
        figure = {"case": case, "bytes": size, "name": name, "median_us": us, "gb_per_s": size / us / 1e3}
        write(part, {**figure, "times_floor": us / lowest, "how": how})
        print(f"{case:34} {name:36} {us:10.2f} us {us / lowest:8.3f} x floor", flush=True)


def case_figures(cases: list[Case], everything: bool, write: Write) -> None:
    reserve()
    floor = floor_reader()
    for case in here(cases):
        torch.compiler.reset()  # or the compiler gives up after a few shapes
        if case in COMPARED or case in FIRST:  # the operators know no NaN, and no edges beyond float16
            check(case, DEVICE)
        first = case.tensor(DEVICE)
        tensors = [first] + [first.clone() for _ in range(max(2, min(63, (512 << 20) // case.bytes)))]
        runs: dict[str, Callable[[Any], Any]] = {"read floor": floor}
        for name, run in contenders(case, DEVICE).items():
            if everything or name.startswith("hookstats"):
                runs[name] = run
        rows: list[tuple[str, float, str]] = []
        for name, run in runs.items():
            slow = not name.startswith(("hookstats", "read"))
            us, how = microseconds(run, tensors, 4 if slow else max(8, len(tensors)), 3 if slow else 7)
            rows.append((name, us, how))
        side_by_side(case.name, case.bytes, rows, write)
        del first, tensors, runs


def step_figures(write: Write) -> None:
    """A training step of a model of 1 G parameters on 4 x 4,096 tokens, eager, bare and watched."""
    from benchmarks.steps import DEFAULT, LARGE, TINY
    from benchmarks.steps import training_figures as figures_of

    shape = LARGE._replace(length=4096) if DEVICE == "cuda" else TINY._replace(width=64)
    chosen = ["bare", "totals", "+ histogram per tensor", DEFAULT]
    for figure in figures_of(shape, DEVICE, False, 7, chosen, lambda figure: write("step", figure)):
        write("step", figure)
        print(f"{figure['name']:60} {figure['median_ms']:8.2f} ms {figure['added_ms']:+8.3f}", flush=True)


def where_step_goes(write: Write) -> None:
    """The same steps by what runs on the GPU."""
    from benchmarks.steps import LARGE, TINY
    from benchmarks.where import where_figures

    shape = LARGE._replace(length=4096) if DEVICE == "cuda" else TINY

    def shown(figure: dict[str, Any]) -> None:
        write("where", figure)
        print(
            {key: round(value, 2) if isinstance(value, float) else value for key, value in figure.items()}, flush=True
        )

    where_figures(shape, DEVICE, shown)


def closing_figures(write: Write) -> None:
    """Time how long closing a step with 150 MB of state holds the training thread, beside the loss's own wait."""
    import hookstats

    layers, width = (120, 1024) if DEVICE == "cuda" else (2, 64)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).to(DEVICE)
    options = hookstats.Options(memory_budget=1 << 30)
    bins = hookstats.ExponentBins(per_channel=True)
    of_outputs = ("output", "grad_output")
    monitor = hookstats.attach(model, tensors=of_outputs, histogram=bins, every=2, options=options)
    times: dict[str, list[float]] = {}
    x = torch.randn(512, width, device=DEVICE)
    for step in range(24):
        loss = model(x).square().mean()
        loss.backward()
        kind = "a step that is measured" if step % 2 == 0 else "the step after it, which takes the copy"
        began = time.perf_counter()
        monitor.step(loss=loss)
        closed = time.perf_counter()
        loss.item()
        for name, took in ((f"step(), {kind}", closed - began), (f"loss.item(), {kind}", time.perf_counter() - closed)):
            times.setdefault(name, []).append(1e3 * took)
            if step > 5:
                write("closing", {"name": name, "median_ms": median(times[name][2:]), "bytes": monitor.state_bytes})
    for name, each in times.items():
        print(f"{name:64} {median(each[2:]):8.3f} ms, {monitor.state_bytes / 1e6:.0f} MB of state", flush=True)
    monitor.detach()


def many_figures(write: Write) -> None:
    """Many tensors at once; the floor reads one buffer of as many bytes."""
    reserve()
    floor = floor_reader()
    for case, (shapes, dtype) in MANY.items() if DEVICE == "cuda" else list(MANY.items())[:1]:
        size = sum(math.prod(shape) for shape in shapes) * dtype.itemsize
        copies = max(2, min(64, (512 << 20) // size))
        lists = [[torch.randn(shape, device=DEVICE, dtype=dtype) for shape in shapes] for _ in range(copies)]
        whole = [torch.randn(size // dtype.itemsize, device=DEVICE, dtype=dtype) for _ in range(copies)]
        rows = [("read floor", *microseconds(floor, whole, max(8, copies)))]
        for name, run in many_contenders(case, DEVICE).items():
            rows.append((name, *microseconds(run, lists, 2 if name == "eager operators" else max(8, copies))))
        side_by_side(case, size, rows, write)
        del lists, whole


def totals_figures(write: Write) -> None:
    """Time the totals of all sites, which close a step whose channels and histograms stay on the device."""
    for sites, channels in ((200, 4096), (1, 150_000)):
        moments = [torch.rand(len(FIELDS), channels, dtype=torch.float64, device=DEVICE) for _ in range(sites)]
        counters = [torch.zeros(_native.COUNTERS, dtype=torch.int64, device=DEVICE) for _ in range(sites)]
        us, how = microseconds(_native.Totals(moments, counters).take, [[]], 20)  # no block is cleared
        write("totals", {"name": f"totals, sites: {sites}, channels: {channels}", "us": us, "how": how})
        print(f"totals of {sites} sites of {channels} channels: {us:.2f} us ({how})", flush=True)


def softmax_figures(write: Write) -> None:
    """The softmax of rows, beside a mere read of the logits and torch's operators."""
    from benchmarks.bench_softmax import CASES, CONTENDERS

    floor = floor_reader()
    for case, (shape, dtype) in CASES.items():
        shape = shape if DEVICE == "cuda" else (2, *shape[1:])
        size = math.prod(shape) * dtype.itemsize
        copies = max(2, min(63, (512 << 20) // size)) if DEVICE == "cuda" else 2
        logits = [torch.randn(shape, device=DEVICE).mul_(3).to(dtype) for _ in range(copies)]
        rows = [("read floor", *microseconds(floor, logits, max(8, copies)))]
        for name, run in CONTENDERS.items():
            rows.append((name, *microseconds(run, logits, 4 if name == "torch's operators" else max(8, copies))))
        side_by_side(case, size, rows, write, part="softmax")
        del logits


def first_use(write: Write) -> None:
    """Time the one-time waits of attach on a device: the CUDA runtime's load, compiling PTX where nothing else fits,
    a kernel of each file."""
    torch.zeros(1, device=DEVICE)
    for name in ("first", "second"):
        began = time.perf_counter()
        reserve()
        ms = 1e3 * (time.perf_counter() - began)
        write("first_use", {"name": f"{name} reserve_scratch", "ms": ms})
        print(f"{name} reserve_scratch (trial launch): {ms:.2f} ms")


def training_figures(write: Write) -> None:
    """A training step of a model of 1 G parameters, bare and watched."""
    from benchmarks.steps import LARGE, MODES, TINY
    from benchmarks.steps import training_figures as figures_of

    for compiled, mode in enumerate(MODES):
        for figure in figures_of(LARGE if DEVICE == "cuda" else TINY, DEVICE, bool(compiled), 7):
            write("training", {"group": f"training step, {mode}", **figure})
            print(f"{mode:16} {figure['name']:36} {figure['median_ms']:8.2f} ms {figure['added_ms']:+8.3f}", flush=True)


def peer_figures(compiled: bool) -> Callable[[Write], None]:
    def write_figures(write: Write) -> None:
        from benchmarks.peers import peer_figures as figures_of
        from benchmarks.steps import LARGE, TINY

        figures_of(LARGE if DEVICE == "cuda" else TINY, DEVICE, compiled, 7, write)

    return write_figures


PARTS: dict[str, Callable[[Write], None]] = {
    "step": step_figures,
    "where": where_step_goes,
    "floor": lambda write: case_figures(FIRST, False, write),
    "closing": closing_figures,
    "first use": first_use,
    "kernels": lambda write: case_figures(AGAINST_FLOOR, False, write),
    "peers eager": peer_figures(False),
    "peers compiled": peer_figures(True),
    "totals": totals_figures,
    "many": many_figures,
    "softmax": softmax_figures,
    "contenders": lambda write: case_figures(COMPARED, True, write),
    "training": training_figures,
}


def planted(part: str) -> None:
    """The fault that a rehearsal puts into a part: PLANT=PART:KIND."""
    fault = dict(each.split(":") for each in os.environ.get("PLANT", "").split(",") if each).get(part)
    if fault == "hang":
        time.sleep(3600)
    if fault == "crash":
        os.abort()
    if fault == "wrong":
        right = Measured.__call__

        def wrong(measured: Measured, *given: Any) -> None:
            right(measured, *given)
            measured.moments[1] += 1

        setattr(Measured, "__call__", wrong)  # noqa: B010


def main(part: str, path: str) -> None:
    planted(part)
    with Path(path).open("a", buffering=1) as file:

        def write(kind: str, figure: dict[str, Any]) -> None:
            file.write(json.dumps({"part": kind, "figure": figure}) + "\n")

        PARTS[part](write)


if __name__ == "__main__":
    main(*sys.argv[1:])
