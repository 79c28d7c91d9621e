"""Everything that needs an NVIDIA GPU, in one command: make gpu. No network; about 10 minutes at most.

Builds for the GPU at hand, runs all tests with the GPU backend, compute-sanitizer on a selection of kernel tests, and
the benchmarks; writes one JSON with hardware, versions, commit and every figure to benchmarks/results/. Ends with a
non-zero status if anything failed, and says what it could not run. Needs torch >= 2.11 with CUDA, nvcc, a C++ compiler,
ninja, pybind11, pytest, setuptools.
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
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SECONDS = int(os.environ.get("SECONDS", "570"))
SANITIZED = (
    "gpu and ((every_layout and bfloat16) or merge or flag or empty or two_runs or offset "
    "or many_parts or many_sites) and not torch.float16 and not torch.float64 and not float8"
)
SANITIZED_FILES = ["tests/test_kernels.py", "tests/test_rows.py", "tests/test_tiers.py"]


class Session:
    """The steps of one call, inside its time."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.steps: list[dict[str, Any]] = []
        self.not_run: list[str] = []

    def left(self) -> float:
        return SECONDS - (time.monotonic() - self.started)

    def run(
        self, name: str, command: list[str], most: float, needed: float = 10, environment: dict[str, str] | None = None
    ) -> bool:
        """Runs a command for at most `most` seconds; True if it succeeded."""
        limit = min(most, self.left())
        if limit < needed:
            self.not_run.append(f"{name}: no time was left")
            return False
        print(f"== {name}: {' '.join(command)}", flush=True)
        began = time.monotonic()
        log = ROOT / "build" / f"gpu-{name.replace(' ', '-')}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("w") as file:
            try:
                status: int | str = subprocess.run(
                    command,
                    cwd=ROOT,
                    env=os.environ | (environment or {}),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=limit,
                ).returncode
            except subprocess.TimeoutExpired:
                status = f"stopped after {limit:.0f} s"
        lines = log.read_text(errors="replace").splitlines()
        seconds = round(time.monotonic() - began, 1)
        said = [line for line in lines[-3:] if "/" not in line]  # no paths: they are of one machine
        self.steps.append({"name": name, "status": status, "seconds": seconds, "said": said})
        print("\n".join(lines[-(3 if status == 0 else 60) :]), f"-- status {status}, {seconds} s", sep="\n", flush=True)
        return status == 0

    def sanitize(self, tool: str) -> None:
        program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        if not Path(program).exists():
            self.not_run.append(f"{tool}: compute-sanitizer was not found")
            return
        tests = [sys.executable, "-m", "pytest", "-q", "-x", *SANITIZED_FILES, "-k", SANITIZED]
        command = [program, "--tool", tool, "--error-exitcode", "99", *tests]
        # Freed memory goes back to the driver at once, so that an access past a tensor's end is seen.
        self.run(tool, command, most=70, needed=30, environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


def microseconds(run: Callable[[Any], Any], tensors: list[Any], calls: int, rounds: int = 7) -> tuple[float, str]:
    """Median device time of one call, and how it was taken.

    The calls go round the tensors, which together are several times the cache, inside one CUDA graph, so that launches
    do not wait for the host; what cannot be captured is timed call by call.
    """
    import torch

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


def taken_to(option: str) -> Path:
    return ROOT / "build" / f"gpu{option.removeprefix('-')}.json"


def floor_reader() -> Callable[[Any], None]:
    """benchmarks/floor.cu: a kernel that reads a tensor and does nothing else."""
    import torch

    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    library = ROOT / "build" / "floor.so"
    major, minor = torch.cuda.get_device_capability()
    arch = f"arch=compute_{major}{minor},code=sm_{major}{minor}"
    source = str(ROOT / "benchmarks" / "floor.cu")
    subprocess.run(
        [nvcc, "-O3", "-gencode", arch, "-Xcompiler", "-fPIC", "-shared", "-o", str(library), source], check=True
    )
    read = ctypes.CDLL(str(library)).read_floor
    read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    out = torch.zeros(1, dtype=torch.int32, device="cuda")

    def run(x: Any) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        error = read(x.data_ptr(), x.numel() * x.element_size() // 16 * 16, out.data_ptr(), stream)
        if error:
            raise RuntimeError(f"read_floor: CUDA error {error}")

    return run


def kernel_figures() -> list[dict[str, Any]]:
    """Every contender on every case, side by side."""
    import torch

    from benchmarks.contenders import Case, check, contenders
    from hookstats import _native

    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    compared = [  # with everything
        Case("rows 1 MB bf16", (512, 1024), bf16, 1),
        Case("rows 32 MB bf16", (4096, 4096), bf16, 1),
        Case("rows 512 MB bf16", (65536, 4096), bf16, 1),
        Case("rows 512 MB fp32", (32768, 4096), fp32, 1),
        Case("NCHW 196 MB fp32", (64, 256, 56, 56), fp32, 1),
    ]
    ours = [  # with the floor only
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
        Case("NCHW 98 MB bf16, 7 x 7", (512, 2048, 7, 7), bf16, 1),
        Case("channels_last 196 MB fp32", (64, 256, 56, 56), fp32, 1, channels_last=True),
        Case("rows 512 MB bf16, 64 channels", (1 << 22, 64), bf16, 1),
        Case("rows 96 MB bf16, 3 channels", (1 << 24, 3), bf16, 1),
        Case("rows 156 MB bf16, 10007 channels", (8192, 10007), bf16, 1),
        Case("rows 512 MB bf16, ReLU", (65536, 4096), bf16, 1, values="relu"),
        Case("rows 512 MB bf16, constant", (65536, 4096), bf16, 1, values="constant"),
        Case("rows 512 MB bf16, one hot bin", (65536, 4096), bf16, 1, values="hot"),
        Case("rows 512 MB bf16, 1 % NaN", (65536, 4096), bf16, 1, values="nan"),
        Case("rows 512 MB fp32, mean 1e4", (32768, 4096), fp32, 1, values="mean"),
    ]
    _native.reserve_scratch(torch.device("cuda", torch.cuda.current_device()))
    floor = floor_reader()
    figures = []
    for case in compared + ours:
        full = case in compared
        if full:
            torch.compiler.reset()  # or the compiler gives up after a few shapes
            check(case, "cuda")
        first = case.tensor("cuda")
        tensors = [first] + [first.clone() for _ in range(max(2, min(63, (512 << 20) // case.bytes)))]
        runs: dict[str, Callable[[Any], Any]] = {"read floor": floor}
        runs |= {name: run for name, run in contenders(case, "cuda").items() if full or name.startswith("hookstats")}
        lowest = 0.0
        for name, run in runs.items():
            slow = not name.startswith(("hookstats", "read"))
            us, how = microseconds(run, tensors, 4 if slow else max(8, len(tensors)), 3 if slow else 7)
            lowest = lowest or us
            figures.append(
                {
                    "case": case.name,
                    "bytes": case.bytes,
                    "name": name,
                    "median_us": us,
                    "gb_per_s": case.bytes / us / 1e3,
                    "times_floor": us / lowest,
                    "how": how,
                }
            )
            print(f"{case.name:34} {name:36} {us:10.2f} us {us / lowest:8.3f} x floor", flush=True)
        del first, tensors, runs
    return figures + many_figures(floor)


def many_figures(floor: Callable[[Any], None]) -> list[dict[str, Any]]:
    """Many tensors at once; the floor reads one buffer of as many bytes."""
    import torch

    from benchmarks.contenders import MANY, many_contenders

    figures = []
    for case, (shapes, dtype) in MANY.items():
        size = sum(math.prod(shape) for shape in shapes) * dtype.itemsize
        copies = max(2, min(64, (512 << 20) // size))
        lists = [[torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes] for _ in range(copies)]
        whole = [torch.randn(size // dtype.itemsize, device="cuda", dtype=dtype) for _ in range(copies)]
        lowest, how = microseconds(floor, whole, max(8, copies))
        rows = [("read floor", lowest, how)]
        for name, run in many_contenders(case, "cuda").items():
            rows.append((name, *microseconds(run, lists, 2 if name == "eager operators" else max(8, copies))))
        for name, us, how in rows:
            figures.append(
                {
                    "case": case,
                    "bytes": size,
                    "name": name,
                    "median_us": us,
                    "gb_per_s": size / us / 1e3,
                    "times_floor": us / lowest,
                    "how": how,
                }
            )
            print(f"{case:34} {name:36} {us:10.2f} us {us / lowest:8.3f} x floor", flush=True)
        del lists, whole
    return figures


def training_figures() -> list[dict[str, Any]]:
    """A training step of a model of 1 G parameters, bare and watched."""
    from benchmarks.steps import LARGE, MODES
    from benchmarks.steps import training_figures as figures_of

    figures = []
    for compiled, mode in enumerate(MODES):
        for figure in figures_of(LARGE, "cuda", bool(compiled), 7):
            figures.append({"group": f"training step, {mode}", **figure})
            print(f"{mode:16} {figure['name']:36} {figure['median_ms']:8.2f} ms {figure['added_ms']:+8.3f}", flush=True)
    return figures


# Each in a process of its own, after the build.
FIGURES = {"--figures": kernel_figures, "--training": training_figures}


def main() -> int:
    try:
        import torch
    except ImportError:
        print("make gpu: torch >= 2.11 with CUDA is needed, and no torch was found")
        return 1
    if not torch.cuda.is_available():
        print(f"make gpu: an NVIDIA GPU is needed, and torch {torch.__version__} sees none here; nothing was run")
        return 1
    if len(sys.argv) > 1:
        sys.path.insert(0, str(ROOT))
        taken_to(sys.argv[1]).write_text(json.dumps(FIGURES[sys.argv[1]]()))
        return 0

    session = Session()
    major, minor = torch.cuda.get_device_capability()
    architecture = {"TORCH_CUDA_ARCH_LIST": f"{major}.{minor}", "HOOKSTATS_CUDA": "1"}
    python = sys.executable
    built = session.run("build", [python, "setup.py", "build_ext", "--inplace"], 240, environment=architecture)
    figures: dict[str, list[dict[str, Any]]] = {option: [] for option in FIGURES}
    if built:
        for option, name in (("--figures", "benchmarks"), ("--training", "training")):
            taken_to(option).unlink(missing_ok=True)
            if session.run(name, [python, "benchmarks/gpu.py", option], 150):
                figures[option] = json.loads(taken_to(option).read_text())
        session.sanitize("memcheck")
        session.sanitize("racecheck")
        options = ["--durations", "8", *(["-n", "8"] if find_spec("xdist") else [])]
        options += ["--timeout", "60"] if find_spec("pytest_timeout") else []
        chosen = ["-k", "not cuda_on_cpu and not harness"]  # those run on any machine
        name = "tests"
        if not find_spec("transformers"):
            name = "tests without transformers"
            options += ["--ignore", "tests/test_transformers.py"]
        session.run(name, [python, "-m", "pytest", "-q", *options, *chosen, "tests"], 240)
        session.sanitize("synccheck")
        session.sanitize("initcheck")
        session.run("demo", [python, "-m", "hookstats.demo", "--output", "build/demo"], 60)

    sys.path.insert(0, str(ROOT))
    record: dict[str, Any] = {"steps": session.steps, "not_run": session.not_run}
    record |= {option.removeprefix("--"): taken for option, taken in figures.items()}
    if built:
        from benchmarks.environment import describe

        record = describe() | record
        name = record["gpu"]["name"].lower().replace(" ", "-")
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"gpu-{name}-{record['date']}-{record['commit']}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"written: {path.relative_to(ROOT)}")
    failed = [step["name"] for step in session.steps if step["status"] != 0]
    for missing in session.not_run:
        print(f"not run: {missing}")
    print(f"failed: {', '.join(failed)}" if failed else "nothing that ran has failed")
    return 1 if failed or session.not_run else 0


if __name__ == "__main__":
    sys.exit(main())
