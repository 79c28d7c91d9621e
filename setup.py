"""Builds hookstats/_kernels.so, which names nothing of torch; hookstats/_ops.so, the operators, by torch's stable ABI,
for every torch; and the hook for the torch that is here: hookstats/_glue/torch2_13/_C.*.so, by torch's own build.

Where nvcc is found (in CUDA_HOME, on PATH, or in /usr/local/cuda), the CUDA kernels are compiled for

    TORCH_CUDA_ARCH_LIST="9.0 10.0+PTX"    these architectures
    HOOKSTATS_CUDA=1                       8.0, 9.0, 10.0 and 12.0, for CI and wheels; a missing nvcc is then an error
    neither of them                        the GPUs of this machine, as nvidia-smi names them; none where it has none
    HOOKSTATS_CUDA=0                       none, whatever else is set

This also works beside a CPU-only torch; the CUDA runtime is linked statically. Objects stay in build/ and are compiled
again only after a change of their sources, flags or compilers, those with torch's headers also for another torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    import torch
    from torch.utils.cpp_extension import (
        BuildExtension,
        CppExtension,
        get_cxx_compiler,
        include_paths,
        is_ninja_available,
        library_paths,
    )
except ImportError:
    torch = None  # type: ignore[assignment]  # enough for an sdist

    class BuildExtension(build_ext):  # type: ignore[misc, no-redef]
        def run(self) -> None:
            sys.exit(
                "hookstats: torch was not found while building. Install torch >= 2.11 first, then run "
                "pip install --no-build-isolation . (hookstats is built against the torch that will load it)"
            )


ROOT = Path(__file__).parent
DEFAULT_ARCHITECTURES = ["8.0", "9.0", "10.0", "12.0"]
OLDEST_GPU = (8, 0)  # the first that copies to shared memory asynchronously
OLDEST_TOOLKIT = (12, 1)  # the first whose kernels take more than 4 KB of parameters
CXX_FLAGS = ["-O3", "-g0", "-fopenmp", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-psabi"]
# The first two hold for IEEE arithmetic: they give up errno and floating-point traps, no value. The last undoes
# Python's -fwrapv: nothing here relies on signed integers that wrap around, and loops are faster without it.
KERNEL_FLAGS = ["-fno-math-errno", "-fno-trapping-math", "-fstrict-overflow"]
KERNELS, OPERATORS = "_kernels.so", "_ops.so"
OLDEST_TORCH = "0x020b000000000000"  # 2.11: what is newer is not used of the ABI
# One libstdc++, the one that torch uses, also where g++ links its own in statically. OpenMP is what torch brings.
LIBRARIES = ("-l:libstdc++.so.6",)


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


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
    """Find libcudart_static.a in nvcc's own toolkit."""
    said = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
    home = Path(top.group(1)) if top else Path(nvcc).resolve().parent.parent
    for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
        if (home / folder / "libcudart_static.a").exists():
            return str((home / folder).resolve())
    sys.exit(f"hookstats: {nvcc} was found, but no libcudart_static.a in its toolkit {home.resolve()}")


def gpus() -> list[str]:
    """The compute capabilities of this machine's GPUs, ascending, for example ["8.6", "9.0"]."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = {(int(major), int(minor)) for major, minor in re.findall(r"^(\d+)\.(\d+)\s*$", said, re.MULTILINE)}
    return [f"{major}.{minor}" for major, minor in sorted(found) if (major, minor) >= OLDEST_GPU]


def architectures(nvcc: str) -> list[str]:
    """For example ["8.0", "9.0", "10.0+PTX"]: what was asked for, else this machine's GPUs; [] where it has none."""
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if asked:
        return asked
    everything = os.environ.get("HOOKSTATS_CUDA") == "1"
    here = [] if everything else gpus()
    if not everything and not here:
        return []
    said = output_of(nvcc, "--list-gpu-arch").split()

    def known(each: str) -> bool:
        return f"compute_{each.replace('.', '')}" in said

    # A GPU that is newer than nvcc compiles the default's PTX when it runs.
    wanted = here if here and all(map(known, here)) else DEFAULT_ARCHITECTURES
    targets = list(filter(known, wanted))
    if not targets:
        sys.exit(
            f"hookstats: {nvcc} knows none of {DEFAULT_ARCHITECTURES}: set TORCH_CUDA_ARCH_LIST, or HOOKSTATS_CUDA=0"
        )
    return [*targets[:-1], targets[-1] + "+PTX"]


def check_toolkit(nvcc: str) -> str:
    """nvcc's release, for example "13.0"."""
    release = re.search(r"release (\d+)\.(\d+)", output_of(nvcc, "--version"))
    if release is None:
        return "unknown"
    if (int(release[1]), int(release[2])) < OLDEST_TOOLKIT:
        sys.exit(
            f"hookstats: expected nvcc of CUDA 12.1 or newer, whose kernels take more than 4 KB of parameters, got "
            f"{nvcc} of CUDA {release[1]}.{release[2]}: name a newer toolkit by "
            "CUDA_HOME, or build without: HOOKSTATS_CUDA=0"
        )
    return f"{release[1]}.{release[2]}"


def gencode(architecture: str) -> list[str]:
    number, plus, suffix = architecture.partition("+")
    if not re.fullmatch(r"\d+\.\d+[af]?", number) or (plus and suffix != "PTX"):
        sys.exit(f"hookstats: TORCH_CUDA_ARCH_LIST: expected entries such as 9.0 or 10.0+PTX, got {architecture!r}")
    compute = number.replace(".", "")
    flags = ["-gencode", f"arch=compute_{compute},code=sm_{compute}"]
    if plus:
        flags += ["-gencode", f"arch=compute_{compute},code=compute_{compute}"]
    return flags


def build_kernels(library: Path, into: Path, nvcc: str | None, targets: list[str]) -> list[dict[str, Any]]:
    """Makes one library of csrc/cpu and, for GPUs, csrc/cuda. Returns what each CUDA kernel takes."""
    sources = sorted(Path("csrc/cpu").glob("*.cpp"))
    libraries = [*LIBRARIES, "-lm", "-lgcc_s", "-lc"]
    if nvcc and targets:
        sources += sorted(Path("csrc/cuda").glob("*.cu"))
        libraries = [f"-L{cudart_folder(nvcc)}", "-lcudart_static", "-ldl", "-lrt", "-lpthread", *libraries]
    objects, kernels = compile_kernels(sources, into, nvcc, targets)
    library.parent.mkdir(parents=True, exist_ok=True)
    link = [*shlex.split(get_cxx_compiler()), "-shared", f"-Wl,-soname,{library.name}", "-Wl,-z,defs"]
    run(*link, "-o", str(library), *objects, *libraries)
    return kernels


def build_operators(library: Path, into: Path, kernels: Path, has_cuda: bool) -> None:
    """Makes one library of csrc/library.cpp, which needs of torch the C functions of its stable ABI alone."""
    flags = [f"-DTORCH_TARGET_VERSION={OLDEST_TORCH}", *(["-DHOOKSTATS_CUDA"] if has_cuda else [])]
    flags += [word for path in include_paths() for word in ("-isystem", path)]
    objects, _ = compile_kernels([Path("csrc/library.cpp")], into, None, [], flags)
    link = [*shlex.split(get_cxx_compiler()), "-shared", f"-Wl,-soname,{library.name}", "-Wl,-Bsymbolic", "-Wl,-z,defs"]
    link += ["-Wl,-rpath,$ORIGIN", "-o", str(library), *objects, str(kernels), *LIBRARIES]
    run(*link, *(f"-L{path}" for path in library_paths()), "-ltorch_cpu", "-ldl")


def compile_kernels(
    sources: list[Path], into: Path, nvcc: str | None, targets: list[str], flags: list[str] | None = None
) -> tuple[list[str], list[dict[str, Any]]]:
    """Compiles sources; the objects, and what each CUDA kernel takes. flags: more of them, for the CPU's compiler.

    ninja runs the compilers side by side, nvcc the architectures of each file, and only for what has changed; without
    ninja one file is compiled after the other, for the CPU alone.
    """
    cxx = [*shlex.split(get_cxx_compiler()), "-std=c++17", "-fPIC", "-DNDEBUG", *CXX_FLAGS, *KERNEL_FLAGS]
    cxx += flags or []
    # A warning of any of nvcc's programs, ptxas and the host's compiler among them, is an error.
    cuda = [nvcc or "nvcc", "-std=c++17", "-O3", "--expt-relaxed-constexpr", "--threads", "0"]
    cuda += ["-Werror", "all-warnings", "-Xcompiler", "-fPIC,-Wall", "-Xptxas", "-v"]
    cuda += [flag for each in targets for flag in gencode(each)]
    objects = {source: into / source.with_suffix(f"{source.suffix}.o").name for source in sources}
    into.mkdir(parents=True, exist_ok=True)
    if not is_ninja_available():
        if targets:
            sys.exit("hookstats: the CUDA kernels are compiled by ninja, which was not found: pip install ninja")
        for source, target in objects.items():
            run(*cxx, "-c", str(source), "-o", str(target))
        return [str(target) for target in objects.values()], []
    lines = [f"builddir = {into}", *rule("cxx", cxx), *rule("nvcc", cuda)]
    lines += [
        f"build {target}: {'nvcc' if source.suffix == '.cu' else 'cxx'} {source}" for source, target in objects.items()
    ]
    plan = into / "build.ninja"
    plan.write_text("\n".join(lines) + "\n")
    print(*lines, sep="\n", flush=True)
    run("ninja", "-f", str(plan))
    logs = [Path(f"{target}.log").read_text() for target in objects.values()]
    return [str(target) for target in objects.values()], [each for log in logs for each in resources(log)]


def run(*command: str) -> None:
    if subprocess.run(command).returncode:
        sys.exit(f"hookstats: {command[0]} failed on the kernels; HOOKSTATS_CUDA=0 builds without those for GPUs")


def rule(name: str, command: list[str]) -> list[str]:
    """Write a rule of ninja that compiles a file and keeps the compiler's output."""
    run = shlex.join(command).replace("$", "$$")
    return [
        f"rule {name}",
        f"  command = {run} -MD -MF $out.d -c $in -o $out > $out.log 2>&1 || (cat $out.log; false)",
        "  depfile = $out.d",
        "  deps = gcc",
    ]


def resources(said: str) -> list[dict[str, Any]]:
    """Parse ptxas -v for each kernel and GPU: registers, bytes of stack frame and of spills."""
    pattern = re.compile(
        r"Compiling entry function '(?P<kernel>\w+)' for '(?P<gpu>\w+)'.*?"
        r"(?P<stack>\d+) bytes stack frame, (?P<spilled>\d+) bytes spill stores.*?Used (?P<registers>\d+) registers",
        re.DOTALL,
    )
    return [
        {key: int(value) if value.isdigit() else value for key, value in match.groupdict().items()}
        for match in pattern.finditer(said)
    ]


class BuildInThree(BuildExtension):
    """The kernels, the operators and the hook, each linked with the one before, and a record of what was built."""

    def build_extensions(self) -> None:
        (extension,) = self.extensions
        self.force = True  # without ninja, a changed torch or HOOKSTATS_CUDA would not link again
        nvcc = find_nvcc()
        targets = architectures(nvcc) if nvcc else []
        if nvcc and not targets:
            print("hookstats: no GPU was found here: no CUDA kernels. HOOKSTATS_CUDA=1 builds them", flush=True)
        built: dict[str, Any] = {"cuda": check_toolkit(nvcc) if nvcc and targets else None, "architectures": targets}
        compilers = [output_of(*shlex.split(get_cxx_compiler()), "--version")]
        if nvcc and targets:
            compilers.append(output_of(nvcc, "--version"))
            # nvcc takes longest for one file: the hook is compiled meanwhile, and leaves it half of the cores.
            os.environ.setdefault("MAX_JOBS", str(max(1, (os.cpu_count() or 2) // 2)))
        # pip gives each editable install a new temporary folder, in which all would be compiled again.
        self.build_temp = folder_of(platform.python_version(), str(torch.__version__), *compilers)
        kernels, operators = self.folder() / KERNELS, self.folder() / OPERATORS
        # At once: later, a symbol might be found in another library that has it, such as that of tests/cuda_on_cpu.
        extension.extra_link_args += [str(operators), "-Wl,-rpath,$ORIGIN/../..", "-Wl,-z,now"]

        def build_libraries() -> None:
            built["kernels"] = build_kernels(kernels, Path(folder_of(*compilers, *targets), "kernels"), nvcc, targets)
            build_operators(operators, Path(self.build_temp, "operators"), kernels, bool(nvcc and targets))

        with ThreadPoolExecutor(1) as beside:
            compiled = beside.submit(build_libraries)
            link = self.compiler.link_shared_object

            def link_with_operators(*args: Any, **options: Any) -> None:
                compiled.result()
                link(*args, **options)

            self.compiler.link_shared_object = link_with_operators
            super().build_extensions()
        (self.folder() / "_built.json").write_text(json.dumps(built, indent=2) + "\n")

    def copy_extensions_to_source(self) -> None:  # --inplace and editable installs
        """Copy the libraries and the record, which still lie where everything was built."""
        self.inplace, was = 0, self.inplace
        built = self.folder()
        self.inplace = was
        (extension,) = self.extensions
        Path(self.get_ext_fullpath(extension.name)).parent.mkdir(parents=True, exist_ok=True)
        super().copy_extensions_to_source()
        for name in (KERNELS, OPERATORS, "_built.json"):
            shutil.copy2(built / name, self.folder() / name)

    def folder(self) -> Path:
        """Its folder, where things are built, or in the sources."""
        (extension,) = self.extensions
        return Path(self.get_ext_fullpath(extension.name)).parents[2]


def folder_of(*made_by: str) -> str:
    """For objects that these have made."""
    return str(Path("build", "objects-" + hashlib.sha256("\n".join(made_by).encode()).hexdigest()[:12]))


os.chdir(ROOT)  # the sources below are relative, as setuptools wants them
# pip runs this without the environment's programs on PATH; without ninja one file is compiled after the other.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
if torch is None:
    glue = Extension("hookstats._glue._C", [])
else:
    major, minor = torch.__version__.split(".")[:2]
    glue = CppExtension(
        f"hookstats._glue.torch{major}_{minor}._C",
        sources=["csrc/hook.cpp", "csrc/module.cpp"],
        depends=[str(each) for each in sorted([*Path("csrc").glob("*.h"), *Path("csrc").glob("*.cpp")])],
        extra_compile_args={"cxx": CXX_FLAGS},
        extra_link_args=list(LIBRARIES),
    )
setup(ext_modules=[glue], cmdclass={"build_ext": BuildInThree})
