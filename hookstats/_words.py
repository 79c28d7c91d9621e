"""Words of memory that two processes share: two C functions of `_kernels.so`, which needs nothing of torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

# PyDLL holds the GIL: to let it go costs more than a load, and a thread that waits for it would take it.
_LIBRARY = ctypes.PyDLL(str(Path(__file__).with_name("_kernels.so")))

# store_release(address, value): whoever loads the value sees what was written before it.
store_release: Callable[[int, int], None] = _LIBRARY.hookstats_store_release
store_release.argtypes = [ctypes.c_void_p, ctypes.c_int64]  # type: ignore[attr-defined]
store_release.restype = None  # type: ignore[attr-defined]
# load_acquire(address): the int64 there.
load_acquire: Callable[[int], int] = _LIBRARY.hookstats_load_acquire
load_acquire.argtypes = [ctypes.c_void_p]  # type: ignore[attr-defined]
load_acquire.restype = ctypes.c_int64  # type: ignore[attr-defined]
