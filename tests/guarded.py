"""Memory between pages that nobody may touch: an access outside of a tensor in it ends the process at once."""

from __future__ import annotations

import ctypes
import mmap
import weakref

import torch

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_PROT_NONE = 0  # which mmap does not name
_MOST_COPIED = 1 << 26
_PACK = 16  # tensors begin at such addresses, and kernels read so many bytes at once where a tensor has them


def guarded_copy(x: torch.Tensor) -> torch.Tensor:
    """`x` with its strides and storage offset, in a storage that ends where a page begins that nobody may touch.

    The storage begins on 16 bytes, as all do, so up to 15 bytes lie between its end and that page. They, and what lies
    before it, are NaN in every floating-point type. A storage of gigabytes, which nobody fills, stays where it is.
    """
    storage = x.untyped_storage()
    if storage.nbytes() > _MOST_COPIED:
        return x
    content = torch.empty(0, dtype=torch.uint8).set_(storage)
    memory = _memory_before_a_wall(len(content))
    memory.copy_(content)
    there = torch.empty(0, dtype=x.dtype).set_(memory.untyped_storage(), x.storage_offset(), x.shape, x.stride())
    return with_lazy_bits(there, x)


def with_lazy_bits(there: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`there`, which has the memory's content, seen as `x` sees it: conjugated, negated."""
    there = there.conj() if x.is_conj() else there
    return torch._neg_view(there) if x.is_neg() else there


def guarded_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return guarded_copy(torch.zeros(shape, dtype=dtype))


def _memory_before_a_wall(size: int) -> torch.Tensor:
    """uint8 [size]; the pages before and after may not be touched."""
    page = mmap.PAGESIZE
    room = -(-max(size, 1) // page) * page
    begin = _libc.mmap(None, room + 2 * page, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if begin is None or begin == ctypes.c_void_p(-1).value:
        raise MemoryError(f"guarded memory of {size} bytes: {ctypes.get_errno()}")
    if _libc.mprotect(begin + page, room, mmap.PROT_READ | mmap.PROT_WRITE):
        raise MemoryError(f"guarded memory of {size} bytes: {ctypes.get_errno()}")
    ctypes.memset(begin + page, 0xFF, room)
    start = begin + page + room - -(-max(size, 1) // _PACK) * _PACK
    held = (ctypes.c_uint8 * max(size, 1)).from_address(start)
    weakref.finalize(held, _libc.munmap, begin, room + 2 * page)
    return torch.frombuffer(held, dtype=torch.uint8)[:size]
