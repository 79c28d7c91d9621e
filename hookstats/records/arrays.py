"""Between numpy and Arrow without a copy, and without pandas, which Arrow's own ways import: 38 MB in each writer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_DTYPES = {pa.float64(): np.float64, pa.int64(): np.int64, pa.int32(): np.int32, pa.bool_(): np.bool_}
_DTYPES[pa.timestamp("us")] = np.int64


def to_arrow(values: NDArray[Any], kind: pa.DataType, is_null: NDArray[np.bool_] | None = None) -> pa.Array:
    """Return an Arrow array of one of these types; the numpy array must stay as it is."""
    array: NDArray[Any] = np.ascontiguousarray(values, _DTYPES[kind])
    bits = np.packbits(array, bitorder="little") if kind == pa.bool_() else array
    valid = None if is_null is None or not is_null.any() else pa.py_buffer(np.packbits(~is_null, bitorder="little"))
    return pa.Array.from_buffers(kind, len(array), [valid, pa.py_buffer(bits)])


def from_list(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Numbers or strings, and None where there is none."""
    null = np.array([value is None for value in values], bool)
    if kind != pa.string():
        return to_arrow(np.array([0 if value is None else value for value in values]), kind, null)
    encoded = [b"" if value is None else value.encode() for value in values]
    offsets = np.cumsum([0, *map(len, encoded)]).astype(np.int32)
    valid = pa.py_buffer(np.packbits(~null, bitorder="little"))
    buffers = [valid, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(kind, len(values), buffers)


def to_numpy(column: pa.Array | pa.ChunkedArray) -> NDArray[Any]:
    """Return the values; where an entry is null, anything."""
    if isinstance(column, pa.ChunkedArray):
        chunks = [to_numpy(chunk) for chunk in column.chunks]
        return chunks[0] if len(chunks) == 1 else np.concatenate([np.empty(0, _DTYPES[column.type]), *chunks])
    dtype, begin, end = _DTYPES[column.type], column.offset, column.offset + len(column)
    if not len(column):
        return np.empty(0, dtype)
    if column.type == pa.bool_():
        bits = np.frombuffer(column.buffers()[1], np.uint8)
        return np.unpackbits(bits, count=end, bitorder="little")[begin:].astype(bool)
    return np.frombuffer(column.buffers()[1], dtype, end)[begin:]


def is_null(column: pa.ChunkedArray) -> NDArray[np.bool_]:
    if not column.null_count:
        return np.zeros(len(column), bool)
    return to_numpy(column.is_null())
