"""What makes a blob of an earlier one: new columns, and how those that were there are told on another scale."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hookstats.numbers.fields import Array, Counts
from hookstats.report.reducing import FIRST, LAST, LAST_OF_LINE

_SCALES = 16  # bytes of a row: two float64 behind the codes
# Planes of a blob, whether scales follow, and by which list of the record its columns are counted.
_LAID_OUT = {"relative": (1, False, "begin"), "absolute": (1, True, "begin"), "line": (2, True, "line_begin")}


class Told(NamedTuple):
    """A blob, and the record that it belongs to."""

    record: dict[str, Any]
    blob: bytes


def changes(name: str, old: Told, new: Told) -> bytes | None:
    """What makes a blob of an earlier one; None where its columns, or its rows, were others, or most of it differs.

    Four bytes each: the column from which all is sent, how many rows are sent whole, how many bytes of bits there are;
    these rows. Then all rows from that column on; these rows up to it; the bits; the scales of all rows. A row whose
    scale is another one and that is not sent whole is told on its new scale by whoever has the old codes, see
    `_rescaled`: a bit says of each code that lies between two new ones whether it is the upper one.
    """
    laid_out = _LAID_OUT.get("line" if name.startswith("line.") else name.rpartition(".")[2])
    if laid_out is None or old.record["sites"] != new.record["sites"]:
        return None
    count, has_scales, columns = laid_out
    before, after = old.record[columns], new.record[columns]
    if before != after[: len(before)]:
        return None
    sites = len(new.record["sites"])
    a, b = (
        np.frombuffer(told.blob, np.uint8)[: count * sites * len(each)].reshape(count, sites, len(each))
        for told, each in ((old, before), (new, after))
    )
    first = len(before) - 1  # more steps may have come into the last of them
    differs = (a[:, :, :first] != b[:, :, :first]).any(axis=(0, 2))
    bits = np.empty(0, bool)
    if has_scales:
        scales = [np.frombuffer(told.blob[-_SCALES * sites :], "<f8").reshape(2, sites) for told in (old, new)]
        moved = np.flatnonzero((scales[0] != scales[1]).any(axis=0))
        codes, others = (_codes(each[:, moved, :first]) for each in (a, b))
        last = LAST if count == 1 else LAST_OF_LINE
        can, bits = _rescaled(codes, others, scales[0][:, moved], scales[1][:, moved], last)
        differs[moved] = ~can
    rows = np.flatnonzero(differs)
    if 2 * len(rows) > sites:
        return None
    packed = np.packbits(bits)
    head = np.array([first, len(rows), len(packed), *rows], "<u4").tobytes()
    rest = new.blob[-_SCALES * sites :] if has_scales else b""
    return head + b[:, :, first:].tobytes() + b[:, rows, :first].tobytes() + packed.tobytes() + rest


def _codes(planes: NDArray[np.uint8]) -> Counts:
    """``[n, columns]`` of one plane, or of two: the high bytes and the low ones."""
    codes: Counts = planes[0].astype(np.int64)
    if len(planes) == 2:
        codes = codes << 8 | planes[1]
    return codes


def _rescaled(
    old: Counts, new: Counts, scale: Array, other: Array, last: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which rows follow from what they were, ``[n]``, and of those that do the bits that this needs, row by row.

    scale, other: ``[2, n]``, low and step, before and now. Both are counted in steps, powers of two, of which a new one
    holds ``by`` old ones: a value that was rounded to the number n of old ones is nearest to n / by of the new, unless
    that lies in the middle between two.
    """
    with np.errstate(all="ignore"):
        by = other[1] / scale[1]
        base, now = scale[0] / scale[1], other[0] / other[1]
    whole = (base == np.floor(base)) & (now == np.floor(now)) & (np.abs(base) < 2.0**50) & (np.abs(now) < 2.0**50)
    can = whole & (by >= 1) & (np.frexp(by)[0] == 0.5)
    by, base, now = (np.where(can, each, 1.0)[:, None] for each in (by, base, now))
    near = (base + (old - FIRST)) / by
    below = np.floor(near)
    is_told = (old >= FIRST) & (old <= last)
    is_between = is_told & (near - below == 0.5)
    is_upper = is_between & (new - FIRST + now == below + 1)
    found = np.where(is_between, below + is_upper, np.floor(near + 0.5)) - now + FIRST
    can &= (np.where(is_told, found, old) == new).all(axis=1)
    return can, is_upper[can][is_between[can]]
