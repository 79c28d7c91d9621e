"""Streams, scratch, and what CUDA graphs keep: csrc/streams.cpp and csrc/scratch.cpp, in Python."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from hookstats.portable.library import Launch, Library, Versions

_OLDEST_DRIVER = 12010  # from this on kernels take 32 KB of parameters
_OLDEST_GPU = 80  # from this on shared memory is filled asynchronously
_SPARE = 6  # pieces of scratch of 3.8 MB
_CAPTURES = 4  # whose graphs may be replayed at once

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

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._event: torch.cuda.Event | None = None

    def written(self) -> None:
        """All has been. Waits for nothing."""
        if self._stream is None or is_capturing():  # in its graph alone, where it comes first
            self._stream = None
            return
        self._event = torch.cuda.Event()
        self._event.record(self._stream)

    def used_here(self, memory: Iterable[torch.Tensor]) -> None:
        """Before a launch on the current stream that uses it."""
        if self._stream is None or self._event is None or is_capturing():
            return
        here = torch.cuda.current_stream(self._device)
        if here == self._stream:
            return
        self._event.wait(here)
        for each in memory:
            each.record_stream(here)


class Scratch:
    """The memory that the CUDA kernels of a device work in, by stream and capture."""

    def __init__(self, library: Library, device: torch.device) -> None:
        self._library, self._device = library, device
        self._clock = torch.zeros(1, dtype=torch.int64, device=device)
        self._spare: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._of_captures: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._captures = 0
        self._used: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._lock = threading.Lock()

    def reserve(self) -> None:
        with self._lock:
            while len(self._spare) < _SPARE:
                self._spare.append(self._made())

    def launch(self, stream: int, capture: int, active: torch.Tensor | None) -> Launch:
        with self._lock:
            piece = self._used.get((stream, capture))
            if piece is None:
                piece = self._used[(stream, capture)] = self._for_capture() if capture else self._next()
        partials, arrivals = piece
        number = self._device.index or 0
        flag = None if active is None else active.data_ptr()
        return Launch(stream, number, partials.data_ptr(), arrivals.data_ptr(), self._clock.data_ptr(), flag)

    def _next(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._spare.pop() if self._spare else self._made()

    def _for_capture(self) -> tuple[torch.Tensor, torch.Tensor]:
        if len(self._of_captures) < _CAPTURES and self._spare:
            self._of_captures.append(self._spare.pop())
        if not self._of_captures:
            raise RuntimeError(
                f"hookstats: expected scratch on {self._device} from before the capture of a CUDA graph, where nothing "
                "can be allocated; attach made none there"
            )
        self._captures += 1
        return self._of_captures[(self._captures - 1) % len(self._of_captures)]

    def _made(self) -> tuple[torch.Tensor, torch.Tensor]:
        constants = self._library.constants
        with torch.inference_mode(False):
            partials = torch.empty(constants["SCRATCH_DOUBLES"], dtype=torch.float64, device=self._device)
            arrivals = torch.zeros(constants["SCRATCH_COUNTERS"], dtype=torch.int32, device=self._device)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # it may be used first on another stream
        return partials, arrivals


class Devices:
    """Launches of one library's kernels."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._scratch: dict[torch.device, Scratch] = {}
        self._lock = threading.Lock()

    def runs_cuda_kernels(self, device: torch.device) -> bool:
        return self.library.runs_cuda_kernels(device.type)

    def check(self, device: torch.device) -> None:
        """Refuses a device for which there are no kernels."""
        if device.type != "cpu" and not self.runs_cuda_kernels(device):
            raise RuntimeError(f"hookstats: this build has no kernels for {device}")

    def guard(self, device: torch.device) -> AbstractContextManager[object]:
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def is_captured(self, device: torch.device) -> bool:
        """Whether a kernel that is launched now on this device becomes part of a CUDA graph."""
        if not self.runs_cuda_kernels(device) or device.type != "cuda":
            return False
        assert self.library.cuda is not None
        return bool(self.library.cuda.capture_on(torch.cuda.current_stream(device).cuda_stream))

    def launch(self, device: torch.device, active: torch.Tensor | None = None) -> Launch:
        """On the current stream of the device."""
        assert self.library.cuda is not None
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        return self._scratch_of(device).launch(stream, self.library.cuda.capture_on(stream), active)

    def _scratch_of(self, device: torch.device) -> Scratch:
        with self._lock:
            if device not in self._scratch:
                self._scratch[device] = Scratch(self.library, device)
            return self._scratch[device]

    def reserve_scratch(self, device: torch.device) -> None:
        """Makes sure that later launches find their scratch, and that the kernels can run there at all."""
        if not self.runs_cuda_kernels(device):
            return
        self._check_versions(device)
        self._scratch_of(device).reserve()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def _check_versions(self, device: torch.device) -> None:
        assert self.library.cuda is not None
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
