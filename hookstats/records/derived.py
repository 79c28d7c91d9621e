"""Statistics follow from the state that stands beside them: those that a file has not are computed from it.

So a run stays readable whatever statistics the version knew that recorded it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pyarrow as pa

from hookstats.numbers.fields import FIELDS, STATISTICS, Array, Stats, unscale
from hookstats.records.arrays import is_null, to_arrow, to_numpy
from hookstats.records.schema import SAME_AS, STATE

DERIVED = frozenset(STATISTICS) - set(STATE.values()) - set(SAME_AS.values())
_SOURCES = [*STATE.values(), *SAME_AS.values(), "scale"]


def wholes_of(totals: pa.Table) -> Array:
    """``[fields, rows]``: the states of rows with the columns of STATE and SAME_AS."""
    wholes = np.empty((len(FIELDS), len(totals)))
    for values, name in zip(wholes, STATE.values(), strict=True):
        column = totals[name]
        values[:] = to_numpy(column)
        if column.null_count:
            same = is_null(column)
            values[same] = to_numpy(totals[SAME_AS[name]])[same]
    return wholes


def finished(wholes: Array, scales: Array) -> Stats[Array]:
    """Statistics without the scale of a GradScaler."""
    return Stats(unscale(wholes, scales))


def columns_for(names: Sequence[str], present: Collection[str]) -> list[str]:
    """Return which columns to read of a file that lacks some, so that `completed` can add these."""
    there = [name for name in names if name in present]
    return there if len(there) == len(names) else list(dict.fromkeys([*there, *_SOURCES]))


def completed(rows: pa.Table, names: Sequence[str]) -> pa.Table:
    """Rows of `columns_for` with exactly these columns."""
    missing = [name for name in names if name not in rows.column_names]
    if missing:
        stats = finished(wholes_of(rows), to_numpy(rows["scale"]))
        for name in missing:
            rows = rows.append_column(name, to_arrow(getattr(stats, name), pa.float64()))
    return rows.select(list(names))
