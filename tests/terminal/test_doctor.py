"""hookstats doctor, on machines that lack something: what it says, the command that fixes it, the exit status."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hookstats import doctor
from hookstats.__main__ import main
from tests.conftest import ROOT

PACKAGE = ROOT / "hookstats"


Told = dict[str, tuple[str, str]]


def told_by(printed: str) -> Told:
    """Return each check's state and text."""
    lines = re.findall(r"^(ok|-|fix) +(\S+(?: \d+)?)  +(.*)$", printed, re.MULTILINE)
    return {what: (state, found) for state, what, found in lines}


def run(folder: Path = ROOT, **environment: str) -> tuple[int, Told, str]:
    """Status; of each thing its state and what was found; everything."""
    before = {name: value for name, value in os.environ.items() if name != "HOOKSTATS_GLUE"}
    done = subprocess.run(
        [sys.executable, "-m", "hookstats", "doctor"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=before | environment,
        timeout=300,
    )
    assert done.stderr == "", done.stderr
    return done.returncode, told_by(done.stdout), done.stdout


def without(tmp_path: Path, *modules: str) -> str:
    """A PYTHONPATH on which these modules cannot be found."""
    hidden = f"""
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *more: None if name.split(".")[0] in {modules!r} else find(name, *more)
"""
    (tmp_path / "sitecustomize.py").write_text(hidden)
    return str(tmp_path)


def copied(tmp_path: Path) -> Path:
    """A folder with the Python files of the package, without the extension."""
    ignored = shutil.ignore_patterns("_glue", "*.so", "_built.json", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "hookstats", ignore=ignored)
    return tmp_path


def test_where_nothing_is_missing_it_says_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    told = told_by(capsys.readouterr().out)
    assert told["torch"][0] == "ok"
    assert told["torch"][1].startswith(torch.__version__)
    assert told["extension"][0] == "ok"
    assert f"built for torch {torch.__version__.split('+')[0]}" in told["extension"][1]
    assert set(doctor.EXTRAS) <= set(told)


def test_without_nvcc_nothing_needs_it_where_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH", "PATH"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr(doctor, "_TOOLKIT", str(tmp_path / "toolkit"))
    nothing = fake_torch(is_available=lambda: False)
    gpu, nvcc = doctor._describe_gpu(nothing, True)
    assert (gpu.state, nvcc.state, nvcc.what, nvcc.command) == ("-", "-", "nvcc", "")
    for place in ("CUDA_HOME/bin", "PATH", "toolkit/bin"):  # where setup.py looks, too
        path = tmp_path / place / "nvcc"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
        path.chmod(0o755)
        assert doctor._describe_gpu(nothing, True)[1] == doctor.Line("ok", "nvcc", f"12.8 {path}")
        path.unlink()


def fake_torch(**cuda: Any) -> Any:
    devices = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_name": lambda number: "NVIDIA H100",
        "get_device_capability": lambda number: (9, 0),
    }
    return SimpleNamespace(version=SimpleNamespace(cuda="13.0"), cuda=SimpleNamespace(**devices | cuda))


def test_a_gpu_without_kernels_is_fixed_by_a_build_and_that_needs_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    import hookstats._native as native

    built = native.build_info() | {"architectures": []}
    monkeypatch.setattr(native, "build_info", lambda: built)
    monkeypatch.setattr(doctor, "_find_nvcc", lambda: None)
    gpu, nvcc = doctor._describe_gpu(fake_torch(), True)
    assert (gpu.state, gpu.what) == ("fix", "GPU 0")
    assert gpu.command.startswith(f"TORCH_CUDA_ARCH_LIST=9.0 {sys.executable} -m pip install --no-build-isolation")
    assert (nvcc.state, nvcc.what) == ("fix", "nvcc")
    built["architectures"] = ["8.0", "9.0"]
    gpu, nvcc = doctor._describe_gpu(fake_torch(), True)
    assert (gpu.state, nvcc.state) == ("ok", "-")
    old = fake_torch(get_device_capability=lambda number: (7, 5))
    assert "kernels need 8.0" in doctor._describe_gpu(old, True)[0].found


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((9, 0), ["9.0"], True),
        ((8, 6), ["8.0"], True),
        ((8, 0), ["8.6"], False),
        ((10, 0), ["9.0"], False),
        ((10, 0), ["9.0+PTX"], True),
        ((9, 0), [], False),
    ],
)
def test_code_runs_on_its_own_generation_and_ptx_on_later_ones(
    capability: tuple[int, int], built: list[str], runs: bool
) -> None:
    assert doctor._runs_on(capability, built) == runs


def test_without_pyarrow_it_says_what_needs_it_and_how_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor.find_spec
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name in ("pyarrow", "rich") else found(name))
    lines = {line.what: line for line in doctor.lines()}
    assert lines["record"].state == lines["terminal"].state == "-"
    assert lines["record"].found.startswith("pyarrow is missing: record, load, show")
    assert lines["record"].command == f"{sys.executable} -m pip install 'hookstats[record]'"
    assert lines["extension"].state == "ok"


def test_its_commands_are_for_the_python_that_runs_it_wherever_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    python = "/home/me/my 'own' env/bin/python3.11"
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "import_module", lambda name: SimpleNamespace()[name])  # whatever is imported is broken
    commands = [line.command for line in doctor.lines() if line.command]
    assert len(commands) == 1 + len(doctor.EXTRAS)
    assert all(
        shlex.split(each)[:4] == [python, "-m", "pip", "install"] for each in [*commands, doctor._build().command]
    )


def test_commands_without_pyarrow_say_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "run" / "rank=0").mkdir(parents=True)
    code = f"""
from hookstats.__main__ import main
print([main([name, {str(tmp_path / "run")!r}]) for name in ("show", "watch", "recover")])
"""
    hidden = os.environ | {"PYTHONPATH": without(tmp_path, "pyarrow")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=hidden)
    assert done.stdout == "[2, 2, 2]\n", done.stderr
    assert len(done.stderr.splitlines()) == 3
    assert all("pip install 'hookstats[record]'" in line for line in done.stderr.splitlines())


def test_a_build_for_another_torch_is_fixed_by_a_build(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    glue = folder / "hookstats" / "_glue" / "torch2_1"
    glue.mkdir(parents=True)
    (glue / f"_C{EXTENSION_SUFFIXES[0]}").touch()
    for name in ("_kernels.so", "_ops.so", "_built.json"):
        shutil.copy2(ROOT / "hookstats" / name, folder / "hookstats")
    status, told, printed = run(folder)
    assert status == 1
    assert told["extension"][0] == "fix"
    assert "only for torch 2.1: hookstats measures the same without it, but more slowly" in told["extension"][1]
    assert f"$ {sys.executable} -m pip install --no-build-isolation --force-reinstall --no-deps ." in printed
    assert set(doctor.EXTRAS) <= set(told)


@pytest.mark.parametrize("written", ["OPERATORS", "joint_sums("])
def test_an_extension_that_is_older_than_the_python_files_says_so(tmp_path: Path, written: str) -> None:
    folder = copied(tmp_path)
    shutil.copy2(ROOT / "hookstats" / "_kernels.so", folder / "hookstats")
    library = (ROOT / "hookstats" / "_ops.so").read_bytes()
    (folder / "hookstats" / "_ops.so").write_bytes(library.replace(written.encode(), written.swapcase().encode()))
    status, told, printed = run(folder)
    assert (status, told["extension"][0]) == (1, "fix")
    assert f"_ops.so is older than the Python files beside it, without {written.strip('(')}" in told["extension"][1]
    assert f"$ {sys.executable} -m pip install --no-build-isolation --force-reinstall --no-deps ." in printed


def test_a_package_that_is_not_built_and_one_without_torch_are_fixed(tmp_path: Path) -> None:
    status, told, _ = run(copied(tmp_path / "a"))
    assert (status, told["extension"][0]) == (1, "fix")
    assert "hookstats is not built" in told["extension"][1]
    status, told, printed = run(PYTHONPATH=without(tmp_path, "torch"))
    assert (status, told["torch"][0]) == (1, "fix")
    assert f"$ {sys.executable} -m pip install 'torch>=2.11'" in printed
    assert "extension" not in told


def test_every_extra_that_a_user_chooses_is_looked_at() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    extras = dict(re.findall(r"^(\w+) = \[(.*)", section, re.MULTILINE))
    for_work_on_it = {"demo", "test", "bench", "docs", "dev", "release", "sass"}
    assert set(extras) - for_work_on_it == set(doctor.EXTRAS)
    for extra, (module, _) in doctor.EXTRAS.items():
        assert f'"{module}' in extras[extra]
