"""`hookstats doctor`: what is installed, what is missing, and the command that fixes it."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

# Extras of the package, the module that each needs, and what for.
EXTRAS = {
    "record": ("pyarrow", "record, load, show, compare, watch, report, serve, recover"),
    "terminal": ("rich", "the screen of watch; without, it prints lines"),
    "report": ("matplotlib", "hookstats.report.plot; the page needs record alone"),
    "pandas": ("pandas", "Snapshot.to_pandas"),
    "calibration": ("safetensors", "Calibration.save and load"),
    "lightning": ("lightning", "hookstats.integrations.lightning.HookStats"),
    "transformers": ("transformers", "hookstats.integrations.transformers.HookStats"),
    "tensorboard": ("tensorboard", "hookstats.sinks.TensorBoard"),
    "wandb": ("wandb", "hookstats.sinks.Wandb"),
    "mlflow": ("mlflow", "hookstats.sinks.Mlflow"),
    "trackio": ("trackio", "hookstats.sinks.Trackio"),
}
_TOOLKIT = "/usr/local/cuda"  # where setup.py looks for nvcc last
_REBUILD = "--no-build-isolation --force-reinstall --no-deps ."


class Line(NamedTuple):
    """``state``: "ok", "-" (missing, and nothing needs it) or "fix" (measuring does not work, not on the GPU, or not
    inside compiled graphs).
    """

    state: str
    what: str
    found: str
    command: str = ""


def doctor() -> int:
    """Prints what was found. 0, or 1 where something is to be fixed."""
    found = lines()
    width = max(len(line.what) for line in found)
    for line in found:
        print(f"{line.state:<4}  {line.what:<{width}}  {line.found}")
        if line.command:
            print(f"{'':<4}  {'':<{width}}  $ {line.command}")
    return int(any(line.state == "fix" for line in found))


def lines() -> list[Line]:
    """Return the lines of the report, in the order in which one needs the other."""
    found = [Line("ok", "python", f"{platform.python_version()}, {platform.system()} {platform.machine()}")]
    found.append(Line("ok", "hookstats", f"{_read_own_version()} in {Path(__file__).parent}"))
    try:
        torch = import_module("torch")
    except Exception as error:  # a torch that is broken is as good as none
        found.append(Line("fix", "torch", f"cannot be imported: {_read_first_line(error)}", _install("'torch>=2.11'")))
        return [*found, *_list_extras()]
    found.append(Line("ok", "torch", _describe_torch(torch)))
    build = _build()
    found.append(build)
    found += _describe_gpu(torch, build.state == "ok")
    return [*found, *_list_extras()]


def _install(what: str) -> str:
    """The command that installs it for the Python that runs this, whichever one a shell would find."""
    return f"{shlex.quote(sys.executable or 'python3')} -m pip install {what}"


def _read_own_version() -> str:
    try:
        return version("hookstats")
    except PackageNotFoundError:
        return "not installed, a checkout"


def _describe_torch(torch: Any) -> str:
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return f"{torch.__version__}, {cuda}"


def _build() -> Line:
    """The extension: whether it loads, and measures."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is said here
            native = import_module("hookstats._native")
        built = native.build_info()
        torch = import_module("torch")
        stats = import_module("hookstats").measure(torch.tensor([3.0, 4.0]))
        if stats.total.l2_norm != 5.0:
            raise RuntimeError(f"expected the norm of [3, 4] to be 5, got {stats.total.l2_norm}")
    except Exception as error:
        return Line("fix", "extension", _read_first_line(error), _install(_REBUILD))
    kernels = f"for GPUs {', '.join(built['architectures'])}" if built["architectures"] else "for the CPU alone"
    if built["without_glue"]:
        asked = built["without_glue"].startswith("HOOKSTATS_GLUE")
        slower = f"{built['without_glue']}: hookstats measures the same without it, but more slowly; {kernels}"
        return Line("ok" if asked else "fix", "extension", slower, "" if asked else _install(_REBUILD))
    others = [each for each in built["glues"] if not built["torch"].startswith(f"{each}.")]
    beside = f" (there is glue for {', '.join(others)}, too)" if others else ""
    return Line("ok", "extension", f"built for torch {built['torch']}{beside}, {kernels}")


def _describe_gpu(torch: Any, is_built: bool) -> list[Line]:
    nvcc = _find_nvcc()
    if not torch.cuda.is_available():
        why = "torch sees none" if torch.version.cuda else "this torch is built without CUDA"
        found = [Line("-", "GPU", f"none: {why}")]
        return [*found, Line("ok", "nvcc", nvcc) if nvcc else Line("-", "nvcc", "none; only GPU kernels need it")]
    built = import_module("hookstats._native").build_info() if is_built else {"architectures": []}
    found = []
    for number in range(torch.cuda.device_count()):
        name, capability = torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number)
        if capability < (8, 0):
            found.append(Line("-", f"GPU {number}", f"{name}, {capability[0]}.{capability[1]}: kernels need 8.0"))
        elif not _runs_on(capability, built["architectures"]):
            asked = f"TORCH_CUDA_ARCH_LIST={capability[0]}.{capability[1]} {_install(_REBUILD)}"
            found.append(Line("fix", f"GPU {number}", f"{name}: the extension has no kernels for it", asked))
        else:
            found.append(Line("ok", f"GPU {number}", f"{name}, {capability[0]}.{capability[1]}"))
    if nvcc:
        return [*found, Line("ok", "nvcc", nvcc)]
    needed = any(line.state == "fix" for line in found)
    wanted = f"conda install -c nvidia cuda-toolkit={torch.version.cuda}"
    told = "none on PATH, nor in CUDA_HOME: GPU kernels cannot be built here"
    return [*found, Line("fix" if needed else "-", "nvcc", told, wanted if needed else "")]


def _runs_on(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Return whether there is code for a GPU: of its own generation and not newer, or PTX of an older one."""
    for name in architectures:
        major, _, minor = name.removesuffix("+PTX").partition(".")
        built = (int(major), int(minor))
        if built <= capability and (built[0] == capability[0] or name.endswith("+PTX")):
            return True
    return False


def _find_nvcc() -> str | None:
    """Return the version that nvcc prints."""
    homes = [f"{home}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    path = shutil.which("nvcc", path=os.pathsep.join([*homes, os.environ.get("PATH", ""), f"{_TOOLKIT}/bin"]))
    if path is None:
        return None
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    release = re.search(r"release ([\d.]+)", said)
    return f"{release[1]} {path}" if release else path


def _list_extras() -> list[Line]:
    found = []
    for extra, (module, purpose) in EXTRAS.items():
        if find_spec(module) is None:
            found.append(Line("-", extra, f"{module} is missing: {purpose}", _install(f"'hookstats[{extra}]'")))
        else:
            found.append(Line("ok", extra, f"{module} {_read_version(module)}"))
    return found


def _read_version(module: str) -> str:
    for name in (module, f"{module}-skinny"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def _read_first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
