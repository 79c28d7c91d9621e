"""Everything that needs an NVIDIA GPU, in two calls of less than nine minutes: make gpu-test, make gpu-bench.

Each builds for the GPU at hand alone, then takes its steps, those that tell most first, the suite beside the
sanitizers. No network. Every test's outcome and every figure is a line in gpu-test.jsonl or gpu-bench.jsonl as soon as
it is there, and after each step the record, one JSON with hardware, versions, commit and all of it, is written anew:
when time ends, nothing that was found is lost. Ends with a non-zero status if anything failed, and says what it could
not run.

    SECONDS=530       how long a call may take
    RESULTS=FOLDER    where lines and record go; else build/ and benchmarks/results/

Needs torch >= 2.11 with CUDA, nvcc, a C++ compiler, ninja, pybind11, pytest, setuptools; pytest-xdist and
pytest-timeout are used where they are.
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
from typing import IO, Any

ROOT = Path(__file__).parent.parent
LOGS = ROOT / "build"
SANITIZED = (
    "gpu and (((every_layout and bfloat16) or merge or flag or empty or two_runs or offset "
    "or many_parts or many_sites or where_they_lie or masked) "
    "and not torch.float16 and not torch.float64 and not float8 "
    # A case or two of each way of reading that these do not take.
    "or all_shapes_of_parameters and per_channel and bfloat16 "
    "or several_dtypes_are_read or a_view_has_the_checksum "
    "or slices_of_rows_of_any_width and bfloat16 or what_is_not_finite_in_planes and bfloat16 "
    "or several_launches_add_up "
    "or counts_add_up_over_tensors)"
)
SANITIZED_FILES = [
    "tests/kernels/test_many.py",
    "tests/kernels/test_checksums.py",
    "tests/kernels/test_unaligned.py",
    "tests/kernels/test_float8.py",
    "tests/kernels/test_blocks.py",
    "tests/kernels/test_kernels.py",
    "tests/kernels/test_merging.py",
    "tests/kernels/test_rows.py",
    "tests/watch/test_tiers.py",
    "tests/kernels/test_softmax_rows.py",
]
TOOLS = ["memcheck", "racecheck", "synccheck", "initcheck"]


@dataclass
class Step:
    """A command while it runs."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    output: IO[bytes]
    until: float
    began: float = field(default_factory=time.monotonic)


class Session:
    """The steps of one call, inside its time."""

    def __init__(self, what: str) -> None:
        self.began = time.monotonic()
        self.what = what
        self.seconds = float(os.environ.get("SECONDS", "530"))
        results = os.environ.get("RESULTS")
        LOGS.mkdir(exist_ok=True)
        self.lines = Path(results or LOGS) / f"gpu-{what}.jsonl"
        self.records = Path(results or ROOT / "benchmarks" / "results")
        for folder in (self.lines.parent, self.records):
            folder.mkdir(parents=True, exist_ok=True)
        self.lines.write_text("")
        self.environment: dict[str, Any] = {}  # where and with what; known once it is built

    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.began)

    def write(self, **line: Any) -> None:
        with self.lines.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def start(
        self, name: str, command: list[str], most: float, needed: float = 10, environment: dict[str, str] | None = None
    ) -> Step | None:
        """Starts a command that may take `most` seconds, in a process group of its own."""
        limit = min(most, self.left())
        if limit < needed:
            self.write(not_run=f"{name}: {max(limit, 0):.0f} s were left")
            return None
        print(f"== {name}: {' '.join(command)}", flush=True)
        log = LOGS / f"gpu-{name.replace(' ', '-').replace(',', '')}.log"
        output = log.open("wb")
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | (environment or {}),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return Step(name, process, log, output, time.monotonic() + limit)

    def finish(self, step: Step | None) -> bool:
        """Waits for a command, and ends it when its time is over; True if it succeeded."""
        if step is None:
            return False
        try:
            status: int | str = step.process.wait(max(step.until - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            os.killpg(step.process.pid, signal.SIGKILL)  # what it has started, too
            step.process.wait()
            status = f"stopped after {time.monotonic() - step.began:.0f} s"
        step.output.close()
        lines = step.log.read_text(errors="replace").splitlines()
        seconds = round(time.monotonic() - step.began, 1)
        said = [line for line in lines[-3:] if "/" not in line]  # no paths: they are of one machine
        self.write(step={"name": step.name, "status": status, "seconds": seconds, "said": said})
        if status != 0:
            self.write(log=step.name, lines=lines[-100:])
        shown = lines[-(3 if status == 0 else 60) :]
        print(f"-- {step.name}", *shown, f"-- status {status}, {seconds} s", sep="\n", flush=True)
        self.record()
        return status == 0

    def run(self, name: str, command: list[str], most: float, **options: Any) -> bool:
        return self.finish(self.start(name, command, most, **options))

    def record(self) -> dict[str, Any]:
        """All lines as one JSON, written where it can be found."""
        found = summary([json.loads(line) for line in self.lines.read_text().splitlines()])
        if self.environment:
            gpu = self.environment["gpu"]["name"].lower().replace(" ", "-")
            kind = "gpu" if self.what == "bench" else "gputest"
            name = f"{kind}-{gpu}-{self.environment['date']}-{self.environment['commit']}.json"
            (self.records / name).write_text(json.dumps(self.environment | found, indent=1) + "\n")
        return found


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The steps, what was not run, the figures by part, and what came of the tests."""
    found: dict[str, Any] = {
        "steps": [line["step"] for line in lines if "step" in line],
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


def build(session: Session, capability: str) -> bool:
    """The extension for this GPU alone; then what describes the machine."""
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    if not session.run("build", command, 270, environment={"TORCH_CUDA_ARCH_LIST": capability, "HOOKSTATS_CUDA": "1"}):
        return False
    sys.path.insert(0, str(ROOT))
    from benchmarks.environment import describe

    session.environment = describe()
    session.record()
    return True


def pytest(processes: int, *arguments: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.outcomes", "--durations", "8"]
    command += ["--continue-on-collection-errors"]  # of packages that are missing there
    if find_spec("xdist"):
        command += ["-n", str(min(processes, os.cpu_count() or 1))]
    if find_spec("pytest_timeout"):
        command += ["--timeout", "90"]
    if not find_spec("transformers"):
        command += ["--ignore", "tests/watch/test_transformers.py"]
    return [*command, *arguments]


def sanitize(session: Session, tool: str) -> None:
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        session.write(not_run=f"{tool}: compute-sanitizer was not found")
        return
    tests = [sys.executable, "-m", "pytest", "-q", "-x", *SANITIZED_FILES, "-k", SANITIZED]
    command = [program, "--tool", tool, "--error-exitcode", "99", *tests]
    # Freed memory goes back to the driver at once, so that an access past a tensor's end is seen.
    session.run(tool, command, most=70, needed=30, environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


def take_tests(session: Session) -> None:
    """What only a GPU can show; every kernel test on it; then everything else, beside the sanitizers."""
    outcomes = {"OUTCOMES": str(session.lines)}
    first = ["tests/gpu/test_streams.py", "tests/gpu/test_cuda_graphs.py", "tests/gpu/test_scratch.py"]
    session.run("tests of a GPU alone", pytest(4, "-m", "gpu", *first, "tests"), 150, environment=outcomes)
    kernels = pytest(8, "-m", "not gpu", "-k", "gpu", "tests")
    session.run("kernel tests", kernels, 120, environment=outcomes)
    others = pytest(10, "-m", "not gpu", "-k", "not gpu", "tests")
    beside = session.start("all other tests", others, session.seconds, environment=outcomes)
    for tool in TOOLS:
        sanitize(session, tool)
    session.run("demo", [sys.executable, "-m", "hookstats.demo", "--output", "build/demo"], 60)
    session.finish(beside)


def take_figures(session: Session) -> None:
    """Each part in a process of its own; those that issues wait for first."""
    parts = [("first use", 30), ("kernels", 120), ("peers eager", 110)]
    parts += [
        ("peers compiled", 150),
        ("totals", 20),
        ("many", 40),
        ("softmax", 40),
        ("contenders", 120),
        ("training", 150),
    ]
    for part, most in parts:
        command = [sys.executable, "-m", "benchmarks.gpu_figures", part, str(session.lines)]
        session.run(part, command, most)


def main(what: str) -> int:
    try:
        import torch
    except ImportError:
        print(f"make gpu-{what}: torch >= 2.11 with CUDA is needed, and no torch was found")
        return 1
    if not torch.cuda.is_available():
        print(f"make gpu-{what}: an NVIDIA GPU is needed, and torch {torch.__version__} sees none; nothing was run")
        return 1
    session = Session(what)
    major, minor = torch.cuda.get_device_capability()
    if build(session, f"{major}.{minor}"):
        (take_tests if what == "test" else take_figures)(session)
    found = session.record()
    print(f"written: {session.lines.name} and, once it was built, a record in {session.records.name}/")
    if "tests" in found:
        print({key: value for key, value in found["tests"].items() if isinstance(value, int)})
        print("failed:", *found["tests"]["which_failed"], "without outcome:", *found["tests"]["without_outcome"][:50])
    for missing in found["not_run"]:
        print(f"not run: {missing}")
    failed = [step["name"] for step in found["steps"] if step["status"] != 0]
    print(f"failed: {', '.join(failed)}" if failed else "nothing that ran has failed")
    return 1 if failed or found["not_run"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
