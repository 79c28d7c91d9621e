"""The kernels' library, by its C interface (csrc/cpu/interface.cpp, csrc/cuda/interface.cu) and ctypes."""

from __future__ import annotations

import ctypes
import json
from ctypes import POINTER, Structure, c_bool, c_double, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MOST_DIMS = 12


class Layout(Structure):
    """csrc/layout.h."""

    _fields_ = (
        ("channels", c_int64),
        ("channel_stride", c_int64),
        ("count", c_int64),
        ("ndim", c_int),
        ("size", c_int64 * MOST_DIMS),
        ("stride", c_int64 * MOST_DIMS),
        ("row_dims", c_int),
        ("row_index", c_void_p),
        ("kept", c_void_p),
    )


class Input(Structure):
    _fields_ = (("data", c_void_p), ("dtype", c_int), ("layout", Layout), ("matrix", Layout))


class State(Structure):
    _fields_ = (
        ("moments", c_void_p),
        ("row_stride", c_int64),
        ("channels", c_int64),
        ("counters", c_void_p),
        ("histogram", c_void_p),
        ("kind", c_int),
        ("by_channel", c_bool),
        ("bins", c_int),
        ("block", c_int),
        ("low", c_double),
        ("high", c_double),
    )


class Sampled(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("values", c_void_p),
        ("differences", c_void_p),
        ("count", c_int64),
        ("dtype", c_int),
    )


class Words(Structure):
    """csrc/checksum.h."""

    _fields_ = (("data", c_void_p), ("layout", Layout), ("element_bytes", c_int))


class SoftmaxRows(Structure):
    """csrc/softmax.h."""

    _fields_ = (("data", c_void_p), ("at", Layout), ("n", c_int64), ("stride", c_int64), ("top_k", c_int))


class Launch(Structure):
    _fields_ = (
        ("stream", c_void_p),
        ("device", c_int),
        ("partials", c_void_p),
        ("arrivals", c_void_p),
        ("clock", c_void_p),
        ("active", c_void_p),
        ("capture", c_uint64),
        ("launched", c_void_p),
    )


class Stream(Structure):
    """csrc/kernels.h, as `Launch`."""

    _fields_ = (("handle", c_void_p), ("device", c_int), ("stays", c_bool))


class Versions(Structure):
    _fields_ = (("runtime", c_int), ("driver", c_int), ("capability", c_int))


STRUCTURES = (Layout, Input, State, Sampled, Words, SoftmaxRows, Launch, Stream, Versions)
_TEXT = ctypes.c_char_p
# What each function takes; of what returns text, the name says so.
_CPU: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "lay_out": (c_bool, (POINTER(Layout), POINTER(c_int64), c_int, c_int, c_bool)),
    "accumulate": (None, (c_void_p, c_void_p, c_void_p)),  # addresses, which take less time than pointers
    "merge": (None, (POINTER(State), POINTER(State))),
    "take": (
        None,
        (POINTER(State), c_int64, c_void_p, c_int64, POINTER(c_void_p), POINTER(c_void_p), POINTER(c_int64), c_bool),
    ),
    "checksums": (None, (POINTER(Words), c_int64, c_void_p)),
    "softmax_rows": (None, (POINTER(SoftmaxRows), c_int, c_void_p)),
    "sample": (None, (POINTER(Sampled), c_int64)),
}
_CUDA: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "capture_on": (c_uint64, (c_void_p,)),
    "launch_on": (_TEXT, (POINTER(Launch), POINTER(Stream), c_void_p, c_bool)),
    "scratch_bytes": (c_int64, (c_int,)),
    "begin_closing": (_TEXT, (POINTER(Stream),)),
    "end_closing": (_TEXT, (POINTER(Stream),)),
    "load": (_TEXT, (c_int, c_int, c_int)),
    "ask": (_TEXT, (POINTER(Versions), c_int)),
    "accumulate": (_TEXT, (c_void_p, c_void_p, c_void_p, POINTER(Launch))),
    "merge": (_TEXT, (POINTER(State), POINTER(State), POINTER(Launch))),
    "plan_totals": (c_int64, (POINTER(State), c_int64, c_void_p, c_int64, POINTER(c_int64))),
    "totals": (_TEXT, (c_int64, c_int64, c_void_p, c_void_p, c_void_p, POINTER(Launch))),
    "plan_checksums": (c_int64, (POINTER(Words), c_int64, c_void_p, c_int64, POINTER(c_int64))),
    "checksums": (_TEXT, (c_int64, c_int64, c_void_p, c_void_p, POINTER(Launch))),
    "softmax_rows": (_TEXT, (POINTER(SoftmaxRows), c_int, c_void_p, POINTER(Launch))),
    "sample": (_TEXT, (POINTER(Sampled), c_int64, POINTER(Launch))),
}


def _functions(library: ctypes.CDLL, prefix: str, functions: dict[str, tuple[Any, tuple[Any, ...]]]) -> Any:
    """By their names behind a prefix."""
    found = SimpleNamespace()
    for name, (result, arguments) in functions.items():
        function = getattr(library, prefix + name)
        function.restype, function.argtypes = result, arguments
        setattr(found, name, function)
    return found


class Library:
    """``cpu`` and ``cuda``: the functions for each, the latter None in a library without kernels for GPUs.

    ``constants``: what csrc says of itself. ImportError where its structures are others than those here.
    """

    def __init__(self, path: Path, imitates_cuda: bool = False) -> None:
        """imitates_cuda: CPU tensors go to the CUDA kernels, as in tests/cuda_on_cpu."""
        loaded = ctypes.CDLL(str(path))
        try:
            describe = loaded.hookstats_describe
        except AttributeError as error:
            raise ImportError(f"hookstats: {path} is older than the Python files beside it: rebuild it") from error
        describe.restype = _TEXT
        self.constants: dict[str, Any] = json.loads(describe())
        sizes = {each.__name__: ctypes.sizeof(each) for each in STRUCTURES}
        if sizes != self.constants["sizes"] or self.constants["MOST_DIMS"] != MOST_DIMS:
            raise ImportError(
                f"hookstats: expected structures of {sizes} bytes in {path}, got {self.constants['sizes']}: rebuild it"
            )
        self.cpu = _functions(loaded, "hookstats_", _CPU)
        has_cuda = hasattr(loaded, "hookstats_cuda_accumulate")
        self.cuda: Any = _functions(loaded, "hookstats_cuda_", _CUDA) if has_cuda else None
        self.imitates_cuda = imitates_cuda


def array(kind: type[Any], values: list[Any]) -> Any:
    return (kind * len(values))(*values)
