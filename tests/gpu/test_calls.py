"""make gpu-test and make gpu-bench where no GPU is: the steps they take, and that nothing is lost when time ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_figures, peers, report
from tests.conftest import ROOT
from tests.ranks import until

GPU = {"name": "NVIDIA Test", "multiprocessors": 2, "l2_mib": 1.0, "driver": "1.0"}
MACHINE = {"gpu": GPU, "date": "2026-01-01", "commit": "abc", "torch": "2.11.0", "hookstats": {"cuda": "13.0"}}
# Stands for python, in each step: says that it was run, and leaves a figure.
PYTHON = """#!/bin/sh
echo "$*" >> "$RAN"; echo "$TORCH_CUDA_ARCH_LIST $HOOKSTATS_CUDA" >> "$RAN.built"
for last; do :; done
case "$*" in *gpu_figures*) echo '{"part": "figures", "figure": {"name": "'"$3"'"}}' >> "$last";; esac
case "$*" in *"$FAILING"*) echo /a/path; echo went wrong; exit 3;; esac
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a GPU, a python and a compute-sanitizer that only pretend."""
    for name, text in (("python", PYTHON), ("compute-sanitizer", '#!/bin/sh\necho "$@" >> "$RAN"\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(gpu, "LOGS", tmp_path / "logs")  # this test may be part of a call whose logs are being written
    monkeypatch.setattr(gpu.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    monkeypatch.setattr("benchmarks.environment.describe", lambda: MACHINE)
    environment = {"RESULTS": str(tmp_path / "out"), "RAN": str(tmp_path / "ran"), "FAILING": "nothing does"}
    for name, value in (environment | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}).items():
        monkeypatch.setenv(name, value)
    return tmp_path


def record(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("gpu*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_the_tests_are_taken_in_the_order_of_what_they_tell(machine: Path) -> None:
    assert gpu.main("test") == 0
    ran = (machine / "ran").read_text().splitlines()
    assert ran[0] == "setup.py build_ext --inplace"
    assert (machine / "ran.built").read_text().splitlines()[0] == "8.6 1"  # for this GPU alone
    assert "-m gpu tests/gpu/test_streams.py tests/gpu/test_cuda_graphs.py tests" in ran[1]
    assert "-m not gpu -k gpu" in ran[2]
    tools = [line.split()[1] for line in ran if line.startswith("--tool")]
    assert tools == ["memcheck", "racecheck", "synccheck", "initcheck"]
    steps = record(machine / "out")["steps"]
    beside = ["memcheck", "racecheck", "synccheck", "initcheck", "demo", "all other tests"]
    assert [step["name"] for step in steps] == ["build", "tests of a GPU alone", "kernel tests", *beside]
    assert {step["status"] for step in steps} == {0}


def test_every_part_of_the_figures_is_taken_and_one_that_fails_stops_no_other(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpu.main("bench") == 0
    monkeypatch.setenv("FAILING", "peers compiled")
    assert gpu.main("bench") == 1
    found = record(machine / "out")
    parts = list(gpu_figures.PARTS)
    assert sorted(figure["name"] for figure in found["figures"]) == sorted(parts)
    assert [step["name"] for step in found["steps"]] == ["build", *parts]
    failed = [step for step in found["steps"] if step["status"] != 0]
    assert [(step["name"], step["status"], step["said"]) for step in failed] == [("peers compiled", 3, ["went wrong"])]
    assert {key: found[key] for key in MACHINE} == MACHINE


def test_without_a_build_nothing_else_is_run(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILING", "setup.py")
    assert gpu.main("bench") == 1
    assert len((machine / "ran").read_text().splitlines()) == 1
    lines = [json.loads(line) for line in (machine / "out" / "gpu-bench.jsonl").read_text().splitlines()]
    assert lines[1] == {"log": "build", "lines": ["/a/path", "went wrong"]}


def test_when_time_ends_what_was_found_is_there_and_nothing_runs_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "LOGS", tmp_path / "logs")
    monkeypatch.setenv("RESULTS", str(tmp_path))
    monkeypatch.setenv("SECONDS", "600")
    session = gpu.Session("bench")
    session.environment = MACHINE
    child = tmp_path / "child"
    figure = json.dumps({"part": "figures", "figure": {}})
    program = f"sleep 600 & echo $! > {child}; echo '{figure}' >> {session.lines}; wait"
    slow = session.start("slow", ["sh", "-c", program], 600)
    assert slow is not None
    until(session.lines.read_text)
    slow.until = time.monotonic()
    assert not session.finish(slow)
    found = record(tmp_path)
    assert found["figures"] == [{}]
    assert found["steps"][0]["status"].startswith("stopped after ")
    session.began -= 600
    assert not session.run("too late", ["true"], 60)
    assert [each.split(":")[0] for each in session.record()["not_run"]] == ["too late"]
    until(lambda: has_ended(int(child.read_text())))


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
    environment = os.environ | {"OUTCOMES": str(lines), "PYTHONPATH": str(ROOT)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    running = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
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
    assert "captured steps count: 20 replays, 5 of them measured" in page
    assert "- totals, sites: 1, channels: 150000: " in page
    assert "FAILED" not in page


def test_of_a_figure_that_is_written_in_each_round_the_last_is_kept() -> None:
    turns = [{"part": "training", "figure": {"group": "a", "name": name, "rounds": n}} for n in (1, 2) for name in "bc"]
    other = {"part": "training", "figure": {"group": "z", "name": "b", "rounds": 1}}
    found = gpu.summary([*turns, other])["training"]
    assert found == [turns[2]["figure"], turns[3]["figure"], other["figure"]]


def test_a_check_that_fails_says_so_and_what_it_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> str:
        raise RuntimeError("expected 1 call, got 2")

    assert peers.said(check) == "FAILED: RuntimeError: expected 1 call, got 2"


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
    ours = peers.Trainer(peers.TINY, "cpu", {"tensors": peers.OF_OUTPUTS})
    assert ours.monitor is not None
    modules = {site.name for site in ours.monitor.sites}
    peers.Peer(peers.TINY, "cpu", modules, peers.nine_by_operators).check(ours)
    with pytest.raises(error, match=r"not close|expected count and not finite \["):
        peers.Peer(peers.TINY, "cpu", modules, wrong).check(ours)
