"""make gpu-first and make gpu-bench where no GPU is: their parts, and what is kept when one fails or time ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_figures, peers, prebuilt, report, steps
from tests.conftest import ROOT
from tests.ranks import until

GPU = {"name": "NVIDIA Test", "multiprocessors": 2, "l2_mib": 1.0, "driver": "1.0"}
MACHINE = {"gpu": GPU, "date": "2026-01-01", "commit": "abc", "torch": "2.11.0", "hookstats": {"cuda": "13.0"}}
# Stands for python, in each part: says that it was run, and leaves a figure.
PYTHON = """#!/bin/sh
echo "$*" >> "$RAN"; echo "$TORCH_CUDA_ARCH_LIST $HOOKSTATS_CUDA" >> "$RAN.built"
for last; do :; done
case "$*" in *describe*) echo "$DESCRIBED"; exit;; esac
case "$*" in *gpu_figures*) echo '{"part": "figures", "figure": {"name": "'"$3"'"}}' >> "$last";; esac
case "$*" in *"$FAILING"*) echo /a/path; echo went wrong; exit 3;; esac
case "$*" in *"$CRASHING"*) kill -ABRT $$;; esac
case "$*" in *"$HANGING"*) sleep 600 & echo $! > "$RAN.child"; wait;; esac
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a GPU, a python and a compute-sanitizer that only pretend; what was built before does not fit."""
    for name, text in (("python", PYTHON), ("compute-sanitizer", '#!/bin/sh\necho "$@" >> "$RAN"\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(gpu, "LOGS", tmp_path / "logs")  # this test may be part of a call whose logs are being written
    monkeypatch.setattr(gpu, "REHEARSED", False)
    monkeypatch.setattr(gpu.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    environment = {"RESULTS": str(tmp_path / "out"), "RAN": str(tmp_path / "ran"), "DESCRIBED": json.dumps(MACHINE)}
    environment |= {"FAILING": "prebuilt load", "CRASHING": "nothing does", "HANGING": "nothing does"}
    for name, value in (environment | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}).items():
        monkeypatch.setenv(name, value)
    return tmp_path


def record(folder: Path, what: str = "first") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"gpu-{what}.json").read_text())
    return found


FIRST = ["doctor", "memcheck", "step", "where", "floor", "closing", "tests of a GPU alone", "kernel tests"]
FIRST += ["racecheck", "synccheck", "initcheck"]


def test_what_is_worth_most_comes_first(machine: Path) -> None:
    assert gpu.main("first") == 0
    ran = (machine / "ran").read_text().splitlines()
    assert ran[:2] == ["-m benchmarks.prebuilt load", "setup.py build_ext --inplace"]
    assert (machine / "ran.built").read_text().splitlines()[1] == "8.6 1"  # for this GPU alone
    tools = [line.split()[1] for line in ran if line.startswith("--tool")]
    assert tools == ["memcheck", "racecheck", "synccheck", "initcheck"]
    found = record(machine / "out")
    assert [part["name"] for part in found["parts"]] == ["load", "build", *FIRST]
    assert {key: found[key] for key in MACHINE} == MACHINE


def test_what_was_built_before_is_not_built_anew(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILING", "nothing does")
    assert gpu.main("first") == 0
    assert [part["name"] for part in record(machine / "out")["parts"]] == ["load", *FIRST]


def test_a_part_that_hangs_crashes_or_is_wrong_ends_no_other_one(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILING", "gpu_figures step")
    monkeypatch.setenv("CRASHING", "gpu_figures where")
    monkeypatch.setenv("HANGING", "gpu_figures floor")
    child = machine / "ran.child"

    class ImpatientPopen(subprocess.Popen[bytes]):
        """A process whose timeout is over as soon as the hanging part has begun to hang."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout is not None and "floor" in self.args:  # type: ignore[operator]
                until(lambda: child.exists() and child.read_text().endswith("\n"))
                raise subprocess.TimeoutExpired(self.args, timeout)
            return super().wait(timeout)

    monkeypatch.setattr(gpu.subprocess, "Popen", ImpatientPopen)
    assert gpu.main("first") == 1
    found = record(machine / "out")
    status = {part["name"]: part["status"] for part in found["parts"]}
    assert {name: each for name, each in status.items() if each != 0} == {
        "step": 3,
        "where": -6,
        "floor": "stopped after 0 s",
    }
    assert list(status) == ["load", *FIRST]
    assert sorted(figure["name"] for figure in found["figures"]) == ["closing", "floor", "step", "where"]
    assert next(part for part in found["parts"] if part["name"] == "step")["said"] == ["went wrong"]
    until(lambda: has_ended(int(child.read_text())))


def test_every_part_of_the_figures_is_in_one_of_the_calls(machine: Path) -> None:
    assert gpu.main("bench") == 0
    assert gpu.main("first") == 0
    names = [figure["name"] for what in ("first", "bench") for figure in record(machine / "out", what)["figures"]]
    assert sorted(names) == sorted(gpu_figures.PARTS)


def test_without_a_build_nothing_else_is_run(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "python").write_text("#!/bin/sh\necho $* >> $RAN; echo /a/path; echo went wrong; exit 3\n")
    assert gpu.main("bench") == 1
    assert len((machine / "ran").read_text().splitlines()) == 2
    lines = [json.loads(line) for line in (machine / "out" / "gpu-bench.jsonl").read_text().splitlines()]
    assert lines[-1] == {"log": "build", "lines": ["/a/path", "went wrong"]}


def test_glue_that_does_not_load_leaves_the_kernels_to_be_told_of(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PYTHON.replace("*describe*)", '*describe*) [ -n "$HOOKSTATS_GLUE" ] || exit 1;')
    (machine / "python").write_text(text + 'echo "$HOOKSTATS_GLUE" >> "$RAN.glue"\n')
    monkeypatch.setenv("HOOKSTATS_GLUE", "")
    assert gpu.main("bench") == 0
    assert record(machine / "out", "bench")["gpu"] == GPU
    assert (machine / "ran.glue").read_text().split() == ["none"] * len(gpu.bench_parts(gpu.Session("bench", 1)))


def test_when_time_ends_what_was_found_is_there_and_the_rest_is_named(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpu.main("bench", "5") == 1
    found = record(machine / "out", "bench")
    assert found["parts"] == []
    assert [each.split(":")[0] for each in found["not_run"]] == ["load", "build"]


def test_what_was_built_from_other_sources_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package, folder = tmp_path / "hookstats", tmp_path / "prebuilt"
    (package / "_glue" / "torch2_11").mkdir(parents=True)
    (tmp_path / "csrc").mkdir()
    for name in ("_kernels.so", "_ops.so", "_built.json", "_glue/torch2_11/_C.so"):
        (package / name).write_text(name)
    for name in ("setup.py", "csrc/ops.h"):
        (tmp_path / name).write_text(name)
    for name, value in {"ROOT": tmp_path, "FOLDER": folder, "PACKAGE": package, "TRIAL": "print('tried')"}.items():
        monkeypatch.setattr(prebuilt, name, value)
    assert prebuilt.load() == 1  # nothing was built before
    assert prebuilt.pack() == 0
    for path in package.rglob("*.so"):
        path.unlink()
    assert prebuilt.load() == 0
    assert (package / "_glue" / "torch2_11" / "_C.so").read_text() == "_glue/torch2_11/_C.so"
    monkeypatch.setattr(prebuilt, "TRIAL", "raise SystemExit(9)")
    assert prebuilt.load() == 9
    (tmp_path / "csrc" / "ops.h").write_text("other")
    assert prebuilt.load() == 1
    assert "built from others" in capsys.readouterr().out


def test_the_glue_asks_for_nothing_that_only_a_torch_with_cuda_has() -> None:
    glue = list((ROOT / "hookstats" / "_glue").glob("*/_C*.so"))
    if not glue:
        pytest.skip("no glue was built")
    said = subprocess.run(["readelf", "-d", *glue], capture_output=True, text=True, check=True).stdout
    needed = [line for line in said.splitlines() if "NEEDED" in line]
    assert any("libtorch_cpu.so" in line for line in needed)
    assert not any("cuda" in line for line in needed)


def beside_little(folder: Path) -> dict[str, str]:
    """The environment of a pytest whose workers need not import torch: what outcomes.py asks of it is in the folder."""
    (folder / "torch.py").write_text("class cuda:\n    is_initialized = staticmethod(lambda: False)\n")
    paths = os.pathsep.join([str(folder), str(ROOT)])
    environment = os.environ | {"OUTCOMES": str(folder / "lines"), "PYTHONPATH": paths}
    environment.pop("PYTEST_XDIST_WORKER", None)
    return environment


def test_a_worker_whose_gpu_failed_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import os, torch\n"
        "def failed(): raise RuntimeError('CUDA error: an illegal memory access was encountered')\n"
        "def test_1():\n"
        "    torch.cuda.is_initialized, torch.cuda.synchronize = (lambda: True), failed\n"
        "    print(os.getpid(), file=open('first', 'w')); assert 1 == 2\n"
        "def test_2(): assert str(os.getpid()) not in open('first').read()\n"
        "def test_3(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.outcomes", "-p", "no:cacheprovider", "-n", "1"]
    subprocess.run(command, cwd=tmp_path, env=beside_little(tmp_path), capture_output=True)
    found = gpu.summary([json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()])["tests"]
    assert (found["passed"], found["failed"], found["without_outcome"]) == (2, 1, [])


def has_ended(pid: int) -> bool:
    """Also if it is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


SUITE = """
import os, pytest, time
def test_passes(): pass
def test_fails(): assert 1 == 2
@pytest.mark.skip(reason="not now")
def test_skipped(): pass
@pytest.fixture
def broken(): raise ValueError("no")
def test_without_its_fixture(broken): pass
@pytest.fixture
def harness(): pass
def test_of_the_harness(harness): pass
@pytest.mark.parametrize("backend", ["cuda_on_cpu", "gpu"])
def test_kernel(backend): pass
def test_that_never_ends():
    open("hangs", "w").close()
    time.sleep(600)
def test_after_it(): pass
"""
OUTCOMES = {"passed": 2, "failed": 3, "skipped": 1}  # until then


@pytest.mark.parametrize("processes", [(), ("-n", "1")], ids=["alone", "with xdist"])
def test_the_outcome_of_each_test_is_written_when_it_is_known(tmp_path: Path, processes: tuple[str, ...]) -> None:
    (tmp_path / "test_some.py").write_text(SUITE)
    (tmp_path / "test_broken.py").write_text("import a_package_that_is_missing")
    lines = tmp_path / "lines"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.outcomes", "-p", "no:cacheprovider", *processes]
    command += ["--continue-on-collection-errors"]
    running = subprocess.Popen(
        command, cwd=tmp_path, env=beside_little(tmp_path), stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        until((tmp_path / "hangs").exists)
        until(lambda: lines.read_text().count('"outcome"') == sum(OUTCOMES.values()))
    finally:
        os.killpg(running.pid, 9)
        running.wait()
    read = [json.loads(line) for line in lines.read_text().splitlines()]
    found = gpu.summary(read)["tests"]
    assert {key: found[key] for key in ("collected", *OUTCOMES)} == {"collected": 7, **OUTCOMES}
    assert found["without_outcome"] == ["test_some.py::test_after_it", "test_some.py::test_that_never_ends"]
    failed = ["test_broken.py", "test_some.py::test_fails", "test_some.py::test_without_its_fixture"]
    assert found["which_failed"] == failed
    assert any("assert 1 == 2" in line.get("said", "") for line in read)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts as they run where no GPU is, on few cases, with nothing compiled."""
    monkeypatch.setattr(gpu_figures, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_figures, "AGAINST_FLOOR", gpu_figures.AGAINST_FLOOR[:6])
    monkeypatch.setattr(gpu_figures, "COMPARED", gpu_figures.COMPARED[:2])
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


@pytest.mark.usefixtures("small")
def test_the_parts_make_the_tables_of_the_page(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []

    def write(part: str, figure: dict[str, Any]) -> None:
        lines.append(json.loads(json.dumps({"part": part, "figure": figure})))

    for part in ("first use", "kernels", "peers eager", "totals", "many", "contenders"):
        gpu_figures.PARTS[part](write)
    page = "\n".join(report.gpu_page(tmp_path / "gpu.json", MACHINE | gpu.summary(lines)))
    for title in ("moments, norms, counts", "by other means", "or their gradients", "beside the ways of others"):
        assert title in page
    for case in gpu_figures.AGAINST_FLOOR:
        assert f"| {case.name} | " in page
    for name in (peers.OURS, "Python hooks, torch operators", "hookstats, off-step"):
        assert f"| {name} | " in page
    assert "- totals, sites: 1, channels: 150000: " in page


@pytest.mark.usefixtures("small")
def test_where_a_step_goes_stands_beside_the_bare_one() -> None:
    lines: list[dict[str, Any]] = []
    gpu_figures.PARTS["where"](lambda part, figure: lines.append({"part": part, "figure": figure}))
    figures = gpu.summary(lines)["where"]
    assert [figure["name"] for figure in figures][::3] == [
        "bare",
        "+ histogram per tensor, gradients of parameters (default)",
        "bare, again",
    ]
    launches = {figure["name"]: figure["launches"] for figure in figures}
    assert launches["bare"] == 0
    page = report.where_lines(figures)
    assert page[2].startswith("|  | bare | totals | ")
    for kind in ("step", "hookstats", "others", "idle", "launches"):
        assert any(line.startswith(f"| {kind} | ") for line in page)


def test_of_a_figure_that_is_written_in_each_round_the_last_is_kept() -> None:
    turns = [{"part": "training", "figure": {"group": "a", "name": name, "rounds": n}} for n in (1, 2) for name in "bc"]
    other = {"part": "training", "figure": {"group": "z", "name": "b", "rounds": 1}}
    found = gpu.summary([*turns, other])["training"]
    assert found == [turns[2]["figure"], turns[3]["figure"], other["figure"]]


def nothing(x: torch.Tensor, state: torch.Tensor) -> None:
    pass


def random_ones_alone(x: torch.Tensor, state: torch.Tensor) -> None:
    if x.shape == (3, 1001):
        peers.nine_by_operators(x, state)


@pytest.mark.parametrize(
    ("wrong", "error"), [(nothing, AssertionError), (random_ones_alone, RuntimeError)], ids=["statistics", "tensors"]
)
def test_a_peer_that_does_not_measure_what_hookstats_does_is_refused(
    wrong: Callable[..., Any], error: type[Exception]
) -> None:
    ours = steps.Trainer(steps.TINY, "cpu", {"tensors": steps.OF_OUTPUTS})
    modules = {site.name for site in ours.monitor.sites}
    peers.Peer(steps.TINY, "cpu", modules, peers.nine_by_operators).check(ours)
    with pytest.raises(error, match=r"not close|expected count and not finite \["):
        peers.Peer(steps.TINY, "cpu", modules, wrong).check(ours)
