"""Builds hookstats._C: torch's own extension build for the C++, our own nvcc step for csrc/cuda/*.cu.

With nvcc (in CUDA_HOME, on PATH, or in /usr/local/cuda) the CUDA kernels are built in, also beside a CPU-only torch and
without a GPU; the CUDA runtime is linked statically. Without nvcc the extension is CPU-only. HOOKSTATS_CUDA=0 leaves
the kernels out, HOOKSTATS_CUDA=1 makes a missing nvcc an error. TORCH_CUDA_ARCH_LIST ("8.0 9.0 10.0+PTX") chooses the
GPUs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from setuptools import setup

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError:
    sys.exit(
        "hookstats: torch was not found while building. Install torch >= 2.11 first, then run "
        "pip install --no-build-isolation . (hookstats is built against the torch that will load it)"
    )

ROOT = Path(__file__).parent
DEFAULT_ARCHITECTURES = ["8.0", "9.0", "10.0"]
CXX_FLAGS = ["-O3", "-g0", "-fopenmp", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-psabi"]
# Both hold for IEEE arithmetic: they give up errno and floating-point traps, no value.
KERNEL_FLAGS = ["-fno-math-errno", "-fno-trapping-math"]


def find_nvcc() -> str | None:
    """The nvcc to build with; None for a CPU-only build."""
    wanted = os.environ.get("HOOKSTATS_CUDA", "")
    if wanted == "0":
        return None
    homes = [str(Path(home, "bin")) for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    places = [*homes, os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    nvcc = shutil.which("nvcc", path=os.pathsep.join(places))
    if nvcc is None and wanted == "1":
        sys.exit("hookstats: HOOKSTATS_CUDA=1, but no nvcc was found in CUDA_HOME, on PATH or in /usr/local/cuda")
    return nvcc


def cudart_folder(nvcc: str) -> str:
    """Where libcudart_static.a lies in nvcc's own toolkit."""
    said = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
    home = Path(top.group(1)) if top else Path(nvcc).resolve().parent.parent
    for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
        if (home / folder / "libcudart_static.a").exists():
            return str((home / folder).resolve())
    sys.exit(f"hookstats: {nvcc} was found, but no libcudart_static.a in its toolkit {home.resolve()}")


def architectures(nvcc: str) -> list[str]:
    """For example ["8.0", "9.0", "10.0+PTX"]: what was asked for, else those of the default that nvcc knows."""
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if asked:
        return asked
    said = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout.split()
    known = [each for each in DEFAULT_ARCHITECTURES if f"compute_{each.replace('.', '')}" in said]
    if not known:
        sys.exit(
            f"hookstats: {nvcc} knows none of {DEFAULT_ARCHITECTURES}: set TORCH_CUDA_ARCH_LIST, or HOOKSTATS_CUDA=0"
        )
    return [*known[:-1], known[-1] + "+PTX"]


def gencode(architecture: str) -> list[str]:
    number, plus, suffix = architecture.partition("+")
    if not re.fullmatch(r"\d+\.\d+[af]?", number) or (plus and suffix != "PTX"):
        sys.exit(f"hookstats: TORCH_CUDA_ARCH_LIST: expected entries such as 9.0 or 10.0+PTX, got {architecture!r}")
    compute = number.replace(".", "")
    flags = ["-gencode", f"arch=compute_{compute},code=sm_{compute}"]
    if plus:
        flags += ["-gencode", f"arch=compute_{compute},code=compute_{compute}"]
    return flags


def compile_cuda(nvcc: str, source: Path, into: Path, targets: list[str]) -> tuple[str, list[dict[str, Any]]]:
    """Compiles one .cu file, which includes no torch header; the object's path, and what each kernel takes."""
    into.mkdir(parents=True, exist_ok=True)
    target = into / (source.stem + ".cuda.o")
    command = [nvcc, "-std=c++17", "-O3", "--expt-relaxed-constexpr", "--threads", "0", "-Xcompiler", "-fPIC,-Wall"]
    for architecture in targets:
        command += gencode(architecture)
    command += ["-Xptxas", "-v", "-c", str(source), "-o", str(target)]
    print(" ".join(command), flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout + done.stderr)
        sys.exit(f"hookstats: nvcc failed on {source}; HOOKSTATS_CUDA=0 builds without the CUDA kernels")
    return str(target), resources(done.stderr)


def resources(said: str) -> list[dict[str, Any]]:
    """What ptxas -v says of each kernel and GPU: registers, bytes of stack frame and of spills."""
    pattern = re.compile(
        r"Compiling entry function '(?P<kernel>\w+)' for '(?P<gpu>\w+)'.*?"
        r"(?P<stack>\d+) bytes stack frame, (?P<spilled>\d+) bytes spill stores.*?Used (?P<registers>\d+) registers",
        re.DOTALL,
    )
    return [
        {key: int(value) if value.isdigit() else value for key, value in match.groupdict().items()}
        for match in pattern.finditer(said)
    ]


class BuildWithCuda(BuildExtension):
    """Adds the CUDA objects to the one extension, and records beside it what was built."""

    def build_extensions(self) -> None:
        (extension,) = self.extensions
        self.force = True  # without ninja, a changed .cu, torch or HOOKSTATS_CUDA would not link again
        nvcc = find_nvcc()
        built: dict[str, Any] = {"torch": str(torch.__version__), "cuda": None, "architectures": []}
        if nvcc:
            version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
            release = re.search(r"release (\d+\.\d+)", version)
            targets = architectures(nvcc)
            built |= {"cuda": release.group(1) if release else "unknown", "architectures": targets, "kernels": []}
            extension.define_macros.append(("HOOKSTATS_CUDA", "1"))
            for source in sorted(Path("csrc/cuda").glob("*.cu")):
                compiled, kernels = compile_cuda(nvcc, source, Path(self.build_temp), targets)
                extension.extra_objects.append(compiled)
                built["kernels"] += kernels
            extension.library_dirs.append(cudart_folder(nvcc))
            extension.libraries += ["cudart_static", "dl", "rt", "pthread"]
        super().build_extensions()
        self.record = json.dumps(built, indent=2) + "\n"
        self.write_record()

    def copy_extensions_to_source(self) -> None:  # --inplace and editable installs
        super().copy_extensions_to_source()
        self.write_record()

    def write_record(self) -> None:
        Path(self.get_ext_fullpath("hookstats._C")).with_name("_built.json").write_text(self.record)


os.chdir(ROOT)  # the sources below are relative, as setuptools wants them
setup(
    ext_modules=[
        CppExtension(
            "hookstats._C",
            sources=[
                "csrc/ops.cpp",
                "csrc/scratch.cpp",
                "csrc/batch.cpp",
                "csrc/totals.cpp",
                "csrc/hook.cpp",
                "csrc/cpu/accumulate.cpp",
            ],
            depends=[str(header) for header in sorted(Path("csrc").rglob("*.h"))],
            extra_compile_args={"cxx": CXX_FLAGS + KERNEL_FLAGS},
            # One libstdc++, the one that torch uses, also where g++ links its own in statically.
            extra_link_args=["-fopenmp", "-l:libstdc++.so.6"],
        )
    ],
    cmdclass={"build_ext": BuildWithCuda},
)
