"""Tensors of any bits, of every dtype that a model may hold."""

from __future__ import annotations

import numpy as np
import torch

NAMES = "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32 complex64 "
NAMES += "complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
ALL_DTYPES = [getattr(torch, name) for name in NAMES.split()]


def bits_of(x: torch.Tensor) -> bytes:
    return x.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def of_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bits, NaNs with payloads and subnormals among them; of bool 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    count = int(np.prod(shape)) * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    return torch.randint(0, high, (count,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


def changed_bit(x: torch.Tensor, element: int, bit: int) -> torch.Tensor:
    content = bytearray(bits_of(x))
    content[element * x.element_size() + bit // 8] ^= 1 << bit % 8
    return torch.frombuffer(content, dtype=x.dtype).view(x.shape)
