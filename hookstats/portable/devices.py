"""Streams, and what CUDA graphs keep: csrc/streams.cpp and csrc/scratch.cpp, in Python."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from hookstats.portable.library import Launch, Library, Stream, Versions

_OLDEST_DRIVER = 12010  # from this on kernels take more than 4 KB of parameters
_OLDEST_GPU = 80  # from this on shared memory is filled asynchronously

# Never freed: nobody tells when a CUDA graph is no more, and it may be replayed until then. By id.
_kept: dict[int, torch.Tensor] = {}


def keep_for_graphs(memory: Iterable[torch.Tensor | None]) -> None:
    """What a captured kernel refers to."""
    for each in memory:
        if each is not None:
            _kept.setdefault(id(each), each)


def is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class MadeOn:
    """The stream on which memory was written that may be used on other ones, too."""

    def __init__(self, devices: Devices, device: torch.device) -> None:
        self._devices, self._device = devices, device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._capture = 0  # in which it was written
        self._event: torch.cuda.Event | None = None

    def written(self) -> None:
        """All has been. Waits for nothing."""
        if self._stream is None:
            return
        self._capture = self._devices.capture_on(self._device)
        self._event = torch.cuda.Event()
        self._event.record(self._stream)

    def used_here(self, memory: Iterable[torch.Tensor]) -> None:
        """Before a launch on the current stream that uses it.

        What was made in a capture can be waited for there alone. Before a capture, torch has waited for all.
        """
        if self._stream is None or self._event is None:
            return
        here = torch.cuda.current_stream(self._device)
        if here == self._stream or self._devices.capture_on(self._device) != self._capture:
            return
        self._event.wait(here)
        for each in () if self._capture else memory:
            each.record_stream(here)


class Devices:
    """Launches of one library's kernels."""

    def __init__(self, library: Library) -> None:
        self.library = library

    def runs_cuda_kernels(self, device: torch.device) -> bool:
        return self.library.cuda is not None and (self.library.imitates_cuda or device.type == "cuda")

    def check(self, device: torch.device) -> None:
        """Refuses a device for which there are no kernels."""
        if device.type != "cpu" and not self.runs_cuda_kernels(device):
            raise RuntimeError(f"hookstats: this build has no kernels for {device}")

    def guard(self, device: torch.device) -> AbstractContextManager[object]:
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def capture_on(self, device: torch.device) -> int:
        """The capture into a CUDA graph that a kernel which is launched now becomes part of; 0: none."""
        if not self.runs_cuda_kernels(device) or device.type != "cuda":
            return 0
        number: int = self.library.cuda.capture_on(torch.cuda.current_stream(device).cuda_stream)
        return number

    def _stream(self, device: torch.device) -> Stream:
        """The current one. A stream of torch's own is never destroyed; the number of another one is even."""
        if device.type != "cuda":
            return Stream(None, 0, True)
        stream = torch.cuda.current_stream(device)
        number = stream.stream_id
        return Stream(stream.cuda_stream, device.index or 0, number == 0 or number % 2 != 0)

    def launch(self, device: torch.device, active: torch.Tensor | None = None, has_parts: bool = False) -> Launch:
        """On the current stream of the device. has_parts: they meet in scratch."""
        launch, flag = Launch(), None if active is None else active.data_ptr()
        check(self.library.cuda.launch_on(ctypes.byref(launch), ctypes.byref(self._stream(device)), flag, has_parts))
        return launch

    def run(self, device: torch.device, kernel: str, *arguments: Any, active: torch.Tensor | None = None) -> None:
        """A CUDA kernel on the current stream."""
        with self.guard(device):
            launch = self.launch(device, active)
            check(getattr(self.library.cuda, kernel)(*arguments, ctypes.byref(launch)))

    def planned(self, plan: str, items: Any, device: torch.device, numbers: int) -> tuple[torch.Tensor, list[int]]:
        """The table of a plan for an array of items, on its device, and the numbers that it says."""
        said, function = (ctypes.c_int64 * numbers)(), getattr(self.library.cuda, plan)
        room = function(items, len(items), None, -1, said)
        table = (ctypes.c_uint8 * max(room, 1))()
        function(items, len(items), ctypes.addressof(table), room, said)
        return torch.frombuffer(table, dtype=torch.uint8).to(device, copy=True), list(said)

    @contextmanager
    def closing(self, device: torch.device) -> Iterator[None]:
        """Around what reads or clears memory of monitors on the current stream: see csrc/kernels.h."""
        if not self.runs_cuda_kernels(device):
            yield
            return
        with self.guard(device):
            stream = self._stream(device)
            check(self.library.cuda.begin_closing(ctypes.byref(stream)))
            yield
            check(self.library.cuda.end_closing(ctypes.byref(stream)))

    def give_away(self, blocks: Iterable[torch.Tensor]) -> None:
        """Before blocks of state, all on one device, are freed: others get the memory behind all launches."""
        for each in blocks:
            if each.device.type != "cuda":
                return
            with self.guard(each.device):
                check(self.library.cuda.begin_closing(ctypes.byref(self._stream(each.device))))
                each.record_stream(torch.cuda.current_stream(each.device))

    def load(self, device: torch.device, dtypes: Iterable[int], kind: int) -> None:
        """What tensors of these dtypes and bins need."""
        if not self.runs_cuda_kernels(device):
            return
        with self.guard(device):
            for dtype in dtypes:
                check(self.library.cuda.load(dtype, kind, device.index or 0))

    def reserve_scratch(self, device: torch.device) -> int:
        """Makes sure that launches on the current stream find their scratch, and that kernels can run there at all;
        returns the bytes of all scratch there."""
        if not self.runs_cuda_kernels(device):
            return 0
        self._check_versions(device)
        with self.guard(device):
            self.launch(device, has_parts=True)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        made: int = self.library.cuda.scratch_bytes(device.index or 0)
        return made

    def _check_versions(self, device: torch.device) -> None:
        found = Versions()
        problem = self.library.cuda.ask(ctypes.byref(found), device.index or 0)
        driver = max(found.runtime // 1000 * 1000, _OLDEST_DRIVER)
        if found.driver < driver:
            raise RuntimeError(
                f"hookstats: {device}: expected an NVIDIA driver for CUDA {_in_words(driver)} or newer, found one for "
                f"CUDA {_in_words(found.driver)}; this hookstats was built with CUDA {_in_words(found.runtime)}: "
                "update the driver, or rebuild hookstats with a toolkit from 12.1 to the driver's version"
            )
        check(problem, f"{device}: ")
        if found.capability < _OLDEST_GPU:
            raise RuntimeError(
                f"hookstats: {device}: expected a GPU of compute capability 8.0 or newer, found "
                f"{found.capability // 10}.{found.capability % 10}"
            )


def check(said: bytes | None, where: str = "") -> None:
    """What a CUDA function returned."""
    if said is not None:
        raise RuntimeError(f"hookstats: {where}CUDA: {said.decode()}")


def _in_words(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
