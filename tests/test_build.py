"""Tests of setup.py's targets, and that it compiles nothing twice: with an nvcc and an nvidia-smi that only pretend."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hookstats import _native
from tests.conftest import ROOT

NVCC = """#!/bin/sh
if [ "$1" = --list-gpu-arch ]; then echo compute_80 compute_86 compute_90 compute_100 compute_120; exit; fi
while [ $# -gt 0 ]; do
  case "$1" in
    -c) source="$2";; -o) object="$2";; -MF) dependencies="$2";;
    -gencode) targets="$targets $2";; -Werror) strict="$2";;
  esac
  shift
done
echo "$source" >> "$RUNS"
echo "$object: $source $HEADER" > "$dependencies"
echo "$targets" > "$object"
echo "ptxas info    : Compiling entry function 'a_kernel' for 'sm_90'" >&2
echo "    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads" >&2
echo "ptxas info    : Used 40 registers, used 1 barriers" >&2
[ -z "$WARNING" ] && exit
echo "$source(7): warning #20054-D: $WARNING" >&2
[ "$strict" != all-warnings ]
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs before all others on PATH, with an nvcc in it; nothing is asked for."""
    program(tmp_path / "nvcc", NVCC)
    gpus(tmp_path)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    for name in ("HOOKSTATS_CUDA", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def gpus(machine: Path, *capabilities: str) -> None:
    said = "\\n".join(capabilities)
    program(machine / "nvidia-smi", f"#!/bin/sh\n[ \"$1\" = --query-gpu=compute_cap ] && printf '{said}\\n'\n")


@pytest.fixture(scope="module")
def setup() -> dict[str, Any]:
    """Return the names that setup.py defines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("PATH", os.environ["PATH"])  # setup.py adds to it
        patch.setattr("sys.argv", ["setup.py", "--version"])
        return runpy.run_path("setup.py")


@pytest.fixture
def architectures(setup: dict[str, Any], machine: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    def of_this_machine(**asked: str) -> list[str]:
        with monkeypatch.context() as patch:
            for name, value in asked.items():
                patch.setenv(name, value)
            found: list[str] = setup["architectures"](setup["find_nvcc"]())
            return found

    return of_this_machine


def test_the_gpus_of_this_machine_are_built_for(machine: Path, architectures: Callable[..., list[str]]) -> None:
    gpus(machine, "9.0", "8.6", "9.0")
    assert architectures() == ["8.6", "9.0+PTX"]
    gpus(machine, "10.0", "8.0", "7.5")  # the kernels need 8.0
    assert architectures() == ["8.0", "10.0+PTX"]


def test_without_a_gpu_no_kernels_are_built_unless_they_are_asked_for(
    machine: Path, architectures: Callable[..., list[str]]
) -> None:
    assert architectures() == []
    (machine / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed: 12.0 or so'; exit 9\n")
    assert architectures() == []
    assert architectures(HOOKSTATS_CUDA="1") == ["8.0", "9.0", "10.0", "12.0+PTX"]
    assert architectures(TORCH_CUDA_ARCH_LIST="8.6;9.0+PTX") == ["8.6", "9.0+PTX"]


def test_what_is_asked_for_is_built_whatever_gpu_is_here(
    machine: Path, architectures: Callable[..., list[str]]
) -> None:
    gpus(machine, "8.6")
    assert architectures(HOOKSTATS_CUDA="1") == ["8.0", "9.0", "10.0", "12.0+PTX"]
    assert architectures(HOOKSTATS_CUDA="1", TORCH_CUDA_ARCH_LIST="9.0") == ["9.0"]


def test_a_gpu_that_nvcc_does_not_know_gets_ptx(machine: Path, architectures: Callable[..., list[str]]) -> None:
    gpus(machine, "8.6", "13.1")
    assert architectures() == ["8.0", "9.0", "10.0", "12.0+PTX"]


@pytest.mark.parametrize("asked", ["9", "sm_90", "9.0+CUBIN"])
def test_wrong_architectures_are_refused(
    setup: dict[str, Any], architectures: Callable[..., list[str]], asked: str
) -> None:
    with pytest.raises(SystemExit, match=r"expected entries such as 9.0 or 10.0\+PTX, got '"):
        setup["gencode"](architectures(TORCH_CUDA_ARCH_LIST=asked)[0])


@pytest.mark.parametrize(("release", "is_known"), [("12.0", False), ("11.8", False), ("12.1", True), ("13.0", True)])
def test_a_toolkit_that_cannot_compile_the_kernels_is_refused_with_what_to_do(
    setup: dict[str, Any], machine: Path, release: str, is_known: bool
) -> None:
    nvcc = machine / "nvcc"
    program(nvcc, f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.140'\n")
    if is_known:
        assert setup["check_toolkit"](str(nvcc)) == release
    else:
        with pytest.raises(
            SystemExit, match=rf"expected nvcc of CUDA 12\.1 or newer.*got .*/nvcc of CUDA {release}: name"
        ):
            setup["check_toolkit"](str(nvcc))


@pytest.mark.usefixtures("machine")
def test_a_missing_nvcc_is_an_error_only_when_cuda_was_asked_for(
    setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda *args, **options: None)
    assert setup["find_nvcc"]() is None
    monkeypatch.setenv("HOOKSTATS_CUDA", "1")
    with pytest.raises(SystemExit, match="HOOKSTATS_CUDA=1, but no nvcc was found"):
        setup["find_nvcc"]()


def test_no_cuda_object_is_compiled_twice(
    setup: dict[str, Any], machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, header, into = machine / "runs", machine / "header.h", machine / "objects"
    header.touch()
    monkeypatch.setenv("RUNS", str(runs))
    monkeypatch.setenv("HEADER", str(header))
    monkeypatch.chdir(ROOT)
    sources = sorted(Path("csrc/cuda").glob("*.cu"))
    names = [source.stem for source in sources]

    def compiled(*targets: str) -> int:
        """Count the files that nvcc is run on."""
        runs.write_text("")
        objects, kernels = setup["compile_kernels"](sources, into, "nvcc", list(targets))
        assert objects == [str(into / f"{name}.cu.o") for name in names]
        assert kernels == len(names) * [
            {"kernel": "a_kernel", "gpu": "sm_90", "stack": 16, "spilled": 4, "registers": 40}
        ]
        return len(runs.read_text().splitlines())

    assert compiled("9.0") == len(names)
    assert compiled("9.0") == 0
    assert compiled("8.0", "9.0+PTX") == len(names)
    assert "arch=compute_90,code=compute_90" in (into / "many.cu.o").read_text()
    later = max(path.stat().st_mtime for path in into.iterdir()) + 1  # a clock of files has steps of milliseconds
    os.utime(header, (later, later))
    assert compiled("8.0", "9.0+PTX") == len(names)


def test_a_warning_of_nvcc_stops_the_build_and_is_shown(
    setup: dict[str, Any], machine: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RUNS", str(machine / "runs"))
    monkeypatch.setenv("HEADER", "")
    monkeypatch.setenv("WARNING", "dynamic initialization is not supported")
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match="ninja failed on the kernels"):
        setup["compile_kernels"]([Path("csrc/cuda/many.cu")], machine / "objects", "nvcc", ["9.0"])
    assert "csrc/cuda/many.cu(7): warning #20054-D: dynamic initialization" in capfd.readouterr().out


def without_torch(*words: str) -> subprocess.CompletedProcess[str]:
    """setup.py, where torch cannot be imported."""
    code = f"import sys, runpy; sys.modules['torch'] = None; sys.argv[1:] = {list(words)!r}; runpy.run_path('setup.py')"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


def test_a_build_without_torch_is_refused_in_one_line(tmp_path: Path) -> None:
    done = without_torch("build_ext", "--build-lib", str(tmp_path))
    assert done.returncode == 1
    assert "torch was not found while building" in done.stderr
    assert "pip install --no-build-isolation ." in done.stderr
    assert "Traceback" not in done.stderr


def test_an_sdist_is_made_without_torch_and_holds_sources_alone(tmp_path: Path) -> None:
    done = without_torch("-q", "egg_info", "--egg-base", str(tmp_path), "sdist", "--dist-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (made,) = tmp_path.glob("hookstats-*.tar.gz")
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {path.relative_to(ROOT) for folder in ("csrc", "hookstats") for path in (ROOT / folder).rglob("*.*")}
    built = {path for path in needed if path.suffix in (".so", ".pyc") or path.name == "_built.json"}
    assert {str(path) for path in needed - built} <= names
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "tests/conftest.py", "hookstats/py.typed"} <= names
    assert not {str(path) for path in built} & names


def test_the_kernels_need_nothing_of_torch_and_the_operators_its_c_functions_and_nobody_a_library_of_cuda() -> None:
    def needed(library: Path) -> set[str]:
        said = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
        return set(re.findall(r"\(NEEDED\).*\[(.*)\]", said))

    system = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2"}
    system |= {"libdl.so.2", "librt.so.1", "libpthread.so.0"}
    assert needed(_native.LIBRARY.with_name("_kernels.so")) <= system
    assert needed(_native.LIBRARY) <= system | {"libtorch_cpu.so", "_kernels.so"}
    said = subprocess.run(
        ["nm", "-D", "--undefined-only", str(_native.LIBRARY)], capture_output=True, check=True
    ).stdout
    assert not re.findall(rb"_ZN?K?(?:2at|3c10|5torch)\w*", said)
    glues = _native.glues_in(_native.LIBRARY.parent)
    assert ".".join(torch.__version__.split(".")[:2]) in glues
    for path in glues.values():
        torchs = {"libc10.so", "libtorch.so", "libtorch_cpu.so", "libtorch_python.so"}
        assert needed(path) <= system | torchs | {"_ops.so"}, path
