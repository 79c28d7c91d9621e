"""The harness: built once, loaded, its operators and its switches."""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

import hookstats

ROOT = Path(__file__).parent.parent.parent
NAME = "hookstats_cuda_on_cpu"


class Harness:
    """A stand-in for torch.ops.hookstats that runs the CUDA kernels on CPU tensors; and its switches."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        for name in ("take_error", "take_order"):
            getattr(self._library, name).restype = ctypes.c_char_p
        self._library.near_addresses.restype = ctypes.POINTER(ctypes.c_int64)

    def __getattr__(self, name: str) -> Any:
        """An operator, or a switch that takes numbers and gives one; RuntimeError where it says that it failed."""
        if hasattr(space := getattr(torch.ops, NAME), name):
            return getattr(space, name)
        return lambda *numbers: self._call(name, *map(ctypes.c_int64, numbers))

    def _call(self, name: str, *arguments: Any) -> int:
        function = getattr(self._library, name)
        function.restype = ctypes.c_int64
        given: int = function(*arguments)
        if (error := self._library.take_error()) is not None:
            raise RuntimeError(error.decode())
        return given

    def use_stream(self, stream: int, capture: int = 0) -> None:
        self._call("use_stream", ctypes.c_int64(stream), ctypes.c_int64(capture))

    def use_gpu(
        self, capability: int = 0, shared_memory: int = 0, driver: int = 0, runtime: int = 0, multiprocessors: int = 0
    ) -> None:
        numbers = (capability, shared_memory, driver, runtime, multiprocessors)
        self._call("use_gpu", *map(ctypes.c_int64, numbers))

    def switch_off_after(self, flag: torch.Tensor, blocks: int) -> None:
        """The flag has to live until it is switched off no more: blocks < 0."""
        self._call("switch_off_after", ctypes.c_void_p(flag.data_ptr()), ctypes.c_int64(blocks))

    def run_faulty(self, name: str) -> int:
        return self._call("run_faulty", name.encode())

    def order(self) -> list[str]:
        lines: list[str] = self._library.take_order().decode().splitlines()
        return lines

    def near_addresses(self, inner: int, outer_stride: int, first: int, step: int, count: int) -> list[int]:
        found = self._library.near_addresses(*map(ctypes.c_int64, (inner, outer_stride, first, step, count)))
        return list(found[:count]) if found else []

    def close_step(self, blocks: Sequence[torch.Tensor]) -> None:
        self.begin_closing(-1)
        for block in blocks:
            block.zero_()
        self.end_closing(-1)


def build() -> Path:
    """The library, compiled unless it is there."""
    sources = ["harness.cpp", "kernels.cpp"]
    package = Path(hookstats.__file__).parent  # the CPU's kernels are those of the package, which is built
    # Ends the process at an access past an array of a thread's own (tests/guarded.py does so for tensors), and at one
    # that is not aligned.
    sanitized = ["-fsanitize=bounds,alignment", "-fno-sanitize-recover=bounds,alignment"]
    folder = ROOT / "build" / f"cuda_on_cpu-{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with (folder / "building").open("w") as building:
        fcntl.flock(building, fcntl.LOCK_EX)  # the first of several processes builds, the others wait for it
        (folder / "lock").unlink(missing_ok=True)  # load() would wait forever for a process that was killed
        cpp_extension.load(
            name=NAME,
            sources=[str(ROOT / "tests" / "cuda_on_cpu" / source) for source in sources],
            # What is static in the kernels is the harness's own, though the same kernels lie in the package.
            extra_cflags=[
                "-Og",
                "-U_FORTIFY_SOURCE",
                "-fopenmp",
                "-fno-gnu-unique",
                "-DHOOKSTATS_CUDA_ON_CPU",
                *sanitized,
            ],
            extra_ldflags=["-fopenmp", *sanitized, f"-L{package}", "-l:_kernels.so", f"-Wl,-rpath,{package}"],
            extra_include_paths=[str(ROOT / "tests" / "cuda_on_cpu"), str(ROOT / "csrc")],
            build_directory=str(folder),
            is_python_module=False,
        )
    return folder / f"{NAME}.so"


def load_harness() -> Harness:
    return Harness(build())
