"""Everything that needs an NVIDIA GPU, in one command: make gpu. No network; about 10 minutes at most.

Builds for the GPU at hand, runs all tests with the GPU backend, compute-sanitizer on a selection of kernel tests, and
the benchmarks; writes one JSON with hardware, versions, commit and every figure to benchmarks/results/. Ends with a
non-zero status if anything failed, and says what it could not run. Needs torch >= 2.11 with CUDA, nvcc, a C++ compiler,
ninja, pybind11, pytest, setuptools.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SECONDS = 570
SANITIZED = "gpu and (every_layout or merge or flag or empty or two_runs) and not float16 and not float64"


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
        self.steps.append({"name": name, "status": status, "seconds": seconds, "last_lines": lines[-15:]})
        print("\n".join(lines[-(3 if status == 0 else 60) :]), f"-- status {status}, {seconds} s", sep="\n", flush=True)
        return status == 0

    def sanitize(self, tool: str) -> None:
        program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        if not Path(program).exists():
            self.not_run.append(f"{tool}: compute-sanitizer was not found")
            return
        tests = [sys.executable, "-m", "pytest", "-q", "-x", "tests/test_kernels.py", "-k", SANITIZED]
        command = [program, "--tool", tool, "--error-exitcode", "99", *tests]
        # Freed memory goes back to the driver at once, so that an access past a tensor's end is seen.
        self.run(tool, command, most=110, needed=30, environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


def milliseconds(run: Any, tensors: list[Any], rounds: int) -> float:
    """Median device time of one call: events around it, caches flushed, buffers rotated."""
    import torch

    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for x in tensors:
        run(x)
    times = []
    for i in range(rounds):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run(tensors[i % len(tensors)])
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return float(median(times))


def kernel_figures() -> list[dict[str, Any]]:
    """Every contender on every case, side by side."""
    import torch

    from benchmarks.contenders import Case, check, contenders

    cases = [
        Case("rows 512 KB bf16", (256, 1024), torch.bfloat16, 1),
        Case("rows 32 MB bf16", (4096, 4096), torch.bfloat16, 1),
        Case("rows 512 MB bf16", (65536, 4096), torch.bfloat16, 1),
        Case("rows 512 MB fp32", (32768, 4096), torch.float32, 1),
        Case("NCHW 196 MB fp32", (64, 256, 56, 56), torch.float32, 1),
        Case("channels_last 196 MB fp32", (64, 256, 56, 56), torch.float32, 1, channels_last=True),
    ]
    figures = []
    for case in cases:
        check(case, "cuda")
        tensors = [case.tensor("cuda") for _ in range(3)]
        for name, run in contenders(case, "cuda").items():
            ms = milliseconds(run, tensors, rounds=5 if name == "eager operators" else 20)
            figures.append({"case": case.name, "name": name, "median_ms": ms, "gb_per_s": case.bytes / ms / 1e6})
            print(f"{case.name:26} {name:34} {ms:9.4f} ms {case.bytes / ms / 1e6:8.0f} GB/s", flush=True)
        del tensors
    return figures


def main() -> int:
    try:
        import torch
    except ImportError:
        print("make gpu: torch >= 2.11 with CUDA is needed, and no torch was found")
        return 1
    if not torch.cuda.is_available():
        print(f"make gpu: an NVIDIA GPU is needed, and torch {torch.__version__} sees none here; nothing was run")
        return 1
    if sys.argv[1:] == ["--figures"]:  # in a process of its own, after the build
        sys.path.insert(0, str(ROOT))
        (ROOT / "build" / "gpu-figures.json").write_text(json.dumps(kernel_figures()))
        return 0

    session = Session()
    major, minor = torch.cuda.get_device_capability()
    architecture = {"TORCH_CUDA_ARCH_LIST": f"{major}.{minor}", "HOOKSTATS_CUDA": "1"}
    python = sys.executable
    built = session.run("build", [python, "setup.py", "build_ext", "--inplace"], 240, environment=architecture)
    figures: list[dict[str, Any]] = []
    if built:
        (ROOT / "build" / "gpu-figures.json").unlink(missing_ok=True)
        if session.run("benchmarks", [python, "benchmarks/gpu.py", "--figures"], 120):
            figures = json.loads((ROOT / "build" / "gpu-figures.json").read_text())
        session.run("tests", [python, "-m", "pytest", "-q", "tests"], 300)
        session.sanitize("memcheck")
        session.sanitize("racecheck")
        session.run("demo", [python, "-m", "hookstats.demo", "--output", "build/demo"], 60)

    sys.path.insert(0, str(ROOT))
    record: dict[str, Any] = {"steps": session.steps, "not_run": session.not_run, "figures": figures}
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
