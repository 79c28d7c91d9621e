"""Everything that needs an NVIDIA GPU, in two calls: make gpu-first, make gpu-bench. LIMIT=SECONDS for each, 560.

gpu-first takes what no other machine tells: a sanitizer over a case of each kernel, a training step, the costs that
decide, then all tests. gpu-bench takes all other figures. Parts come in the order of what they are worth; each is a
process group of its own with a limit of its own, and none ends another. No network. A test's outcome and a figure are a
line in gpu-first.jsonl or gpu-bench.jsonl as soon as they are there, and after each part the record, one JSON with
hardware, versions, commit and all of it, is written anew.

    RESULTS=FOLDER    where lines and record go; else build/gpu
    COMMIT=HASH       of what, where there is no git
    GPU=harness       a rehearsal where there is no GPU: the kernels on a CPU, small models
    PLANT=PART:hang   a fault in that part of the rehearsal; or crash, wrong

Needs torch >= 2.11 with CUDA, nvcc, a C++ compiler, ninja, pybind11, pytest, setuptools; pytest-xdist and
pytest-timeout are used where they are. What `make gpu-prebuilt` made is loaded where it fits.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LOGS = ROOT / "build"
REHEARSED = os.environ.get("GPU") == "harness"
DESCRIBE = "import json; from benchmarks.environment import describe; print(json.dumps(describe()))"
# A case or two of each way of reading, for one dtype.
SANITIZED = [
    f"tests/{test}"
    for test in (
        "kernels/test_kernels.py::test_every_layout_dtype_and_histogram_matches_float64",
        "kernels/test_kernels.py::test_storage_offsets",
        "kernels/test_kernels.py::test_more_linear_bins_than_shared_memory_holds",
        "kernels/test_unaligned.py::test_slices_of_rows_of_any_width",
        "kernels/test_unaligned.py::test_what_is_not_finite_in_planes",
        "kernels/test_rows.py::test_every_mask_matches_float64_on_the_rows_that_count",
        "kernels/test_many.py::test_all_shapes_of_parameters_together_match_float64",
        "kernels/test_many.py::test_tensors_of_several_dtypes_and_what_is_not_finite",
        "watch/test_tiers.py::test_many_sites_of_all_widths_at_once",
        "kernels/test_samples.py::test_more_tensors_than_one_launch_takes",
        "kernels/test_samples.py::test_memory_order_whatever_the_strides",
        "kernels/test_softmax_rows.py::test_rows_are_read_where_they_lie",
        "kernels/test_blocks.py::test_every_layout",
        "kernels/test_merging.py::test_merge_folds_channels_into_one",
    )
]
OF_ONE_DTYPE = "not torch.float16 and not torch.float32 and not torch.float64 and not float8 and not per_tensor"


@dataclass(frozen=True)
class Part:
    """A command, and the most seconds that it may take."""

    name: str
    command: list[str]
    most: float
    environment: dict[str, str] = field(default_factory=dict)


class Session:
    """The parts of one call, inside its time."""

    def __init__(self, what: str, limit: float) -> None:
        self.began = time.monotonic()
        self.what = what
        self.limit = limit
        self.folder = Path(os.environ.get("RESULTS") or LOGS / "gpu")
        for each in (self.folder, LOGS):
            each.mkdir(parents=True, exist_ok=True)
        self.lines = self.folder / f"gpu-{what}.jsonl"
        self.lines.write_text("")
        self.described: dict[str, Any] = {}  # where and with what; known once it is built

    def left(self) -> float:
        return self.limit - (time.monotonic() - self.began)

    def write(self, **line: Any) -> None:
        with self.lines.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def run(self, part: Part) -> bool:
        """Runs a part, and ends it and all that it has started when its time is over; True if it succeeded."""
        limit = min(part.most, self.left())
        if limit < 10:
            self.write(not_run=f"{part.name}: {max(limit, 0):.0f} s were left")
            return False
        print(f"== {part.name}: {' '.join(part.command)}", flush=True)
        log = LOGS / f"gpu-{part.name.replace(' ', '-').replace(',', '')}.log"
        began = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                part.command,
                cwd=ROOT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | part.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status: int | str = process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                status = f"stopped after {time.monotonic() - began:.0f} s"
        lines = log.read_text(errors="replace").splitlines()
        seconds = round(time.monotonic() - began, 1)
        said = [line for line in lines[-3:] if "/" not in line]  # no paths: they are of one machine
        self.write(part_ended={"name": part.name, "status": status, "seconds": seconds, "said": said})
        if status != 0:
            self.write(log=part.name, lines=lines[-100:])
        shown = lines[-(3 if status == 0 else 60) :]
        print(f"-- {part.name}", *shown, f"-- status {status}, {seconds} s", sep="\n", flush=True)
        self.record()
        return status == 0

    def record(self) -> dict[str, Any]:
        """All lines as one JSON."""
        found = summary([json.loads(line) for line in self.lines.read_text().splitlines()])
        (self.folder / f"gpu-{self.what}.json").write_text(json.dumps(self.described | found, indent=1) + "\n")
        return found


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The parts, what was not run, the figures by part, and what came of the tests."""
    found: dict[str, Any] = {
        "parts": [line["part_ended"] for line in lines if "part_ended" in line],
        "not_run": [line["not_run"] for line in lines if "not_run" in line],
    }
    latest: dict[tuple[str, ...], dict[str, Any]] = {}  # of what is timed in turns, a figure is written in each round
    for line in lines:
        if "figure" in line:
            where = (line["part"], *(str(line["figure"].get(key)) for key in ("group", "case", "name")))
            latest[where] = line["figure"]
    for (part, *_), figure in latest.items():
        found.setdefault(part, []).append(figure)
    wanted = {test for line in lines for test in line.get("tests", ())}
    if wanted:
        outcomes: dict[str, str] = {}
        for line in lines:
            if "test" in line and outcomes.get(line["test"]) != "failed":
                outcomes[line["test"]] = line["outcome"]
        kinds = {kind: sum(each == kind for each in outcomes.values()) for kind in ("passed", "failed", "skipped")}
        failed = sorted(test for test, outcome in outcomes.items() if outcome == "failed")
        missing = sorted(wanted - outcomes.keys())
        found["tests"] = {"collected": len(wanted), **kinds, "without_outcome": missing, "which_failed": failed}
    return found


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def build(session: Session, capability: str) -> bool:
    """The extension: what was built before, or one for this GPU alone; then what describes the machine."""
    cuda = {"HOOKSTATS_CUDA": "0"} if REHEARSED else {"HOOKSTATS_CUDA": "1", "TORCH_CUDA_ARCH_LIST": capability}
    compiled = Part("build", python("setup.py", "build_ext", "--inplace"), 270, cuda)
    if not (session.run(Part("load", python("-m", "benchmarks.prebuilt", "load"), 60)) or session.run(compiled)):
        return False
    for glue in ({}, {"HOOKSTATS_GLUE": "none"}):  # what measures without glue tells of the kernels, too
        os.environ.update(glue)
        try:
            said = subprocess.run(python("-c", DESCRIBE), cwd=ROOT, capture_output=True, text=True, timeout=60)
            session.described = json.loads(said.stdout.splitlines()[-1])
            break
        except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
            session.write(log="describe", lines=[repr(error)])
    session.record()
    return True


def tests(session: Session, name: str, most: float, processes: int, *arguments: str) -> Part:
    """A run of tests, whose outcomes are lines of the session."""
    command = python("-m", "pytest", "-q", "-p", "benchmarks.outcomes", "--durations", "8")
    command += ["--continue-on-collection-errors"]  # of packages that are missing there
    if find_spec("xdist"):
        command += ["-n", str(min(processes, os.cpu_count() or 1))]
    if find_spec("pytest_timeout"):
        command += ["--timeout", "90", "--timeout-method", "thread"]
    if not find_spec("transformers"):
        command += ["--ignore", "tests/watch/test_transformers.py"]
    return Part(name, [*command, *arguments], most, {"OUTCOMES": str(session.lines)})


def sanitized(tool: str, most: float) -> Part:
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [] if REHEARSED else [program, "--tool", tool, "--error-exitcode", "99"]
    backend = "cuda_on_cpu" if REHEARSED else "gpu"
    command += python("-m", "pytest", "-q", *SANITIZED, "-k", f"{backend} and {OF_ONE_DTYPE}")
    # Freed memory goes back to the driver at once, so that an access past a tensor's end is seen.
    return Part(tool, command, most, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


def figures(session: Session, part: str, most: float) -> Part:
    return Part(part, python("-m", "benchmarks.gpu_figures", part, str(session.lines)), most)


def first_parts(session: Session) -> list[Part]:
    """List the most valuable parts first."""
    of_gpu, others = ["-m", "gpu", "tests/gpu"], ["-m", "not gpu", "-k", "gpu", "tests/kernels", "tests/watch"]
    if REHEARSED:
        of_gpu, others = ["tests/cuda_on_cpu"], ["-k", "cuda_on_cpu", "tests/kernels/test_many.py"]
    return [
        Part("doctor", python("-m", "hookstats", "doctor"), 30),
        sanitized("memcheck", 75),
        figures(session, "step", 100),
        figures(session, "where", 100),
        figures(session, "floor", 45),
        figures(session, "closing", 30),
        tests(session, "tests of a GPU alone", 120, 1, *of_gpu),  # some of them look at its memory
        tests(session, "kernel tests", 120, 8, *others),
        sanitized("racecheck", 150),  # 149 tests took 13 s under memcheck on an H200, and 59 here
        *(sanitized(tool, 70) for tool in ("synccheck", "initcheck")),
    ]


def bench_parts(session: Session) -> list[Part]:
    limits = {"peers compiled": 150, "training": 150, "kernels": 120, "peers eager": 110, "contenders": 120}
    limits |= {"many": 40, "softmax": 40, "totals": 20, "first use": 30}
    return [figures(session, part, most) for part, most in limits.items()]


PARTS = {"first": first_parts, "bench": bench_parts}


def main(what: str, limit: str = "560") -> int:
    capability = "harness"
    if not REHEARSED:
        try:
            import torch
        except ImportError:
            print(f"make gpu-{what}: torch >= 2.11 with CUDA is needed, and no torch was found")
            return 1
        if not torch.cuda.is_available():
            print(f"make gpu-{what}: an NVIDIA GPU is needed, and torch {torch.__version__} sees none; nothing was run")
            return 1
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
    session = Session(what, float(limit))
    if build(session, capability):
        for part in PARTS[what](session):
            session.run(part)
    found = session.record()
    print(f"written: {session.lines.name} and gpu-{what}.json")
    if "tests" in found:
        print({key: value for key, value in found["tests"].items() if isinstance(value, int)})
        print("failed:", *found["tests"]["which_failed"], "without outcome:", *found["tests"]["without_outcome"][:50])
    for missing in found["not_run"]:
        print(f"not run: {missing}")
    failed = [part["name"] for part in found["parts"] if part["status"] != 0]
    if "build" in (part["name"] for part in found["parts"]) and "build" not in failed:
        failed.remove("load")  # was built instead
    print(f"failed: {', '.join(failed)}" if failed else "nothing that ran has failed")
    return 1 if failed or found["not_run"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
