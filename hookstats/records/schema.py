"""The tables of a run: their columns, and how these lie in Parquet.

All tables have the step, its time, the attempt and the record: the index of the measured step within its attempt,
because a trainer may give a number twice. Tables of sites have the site's id of sites.json, its name and its tensor.

A column whose name begins with ``state_`` is as it was measured: of a gradient behind a GradScaler, still with its
``scale``. Counts are not scaled, and stand once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hookstats.numbers.fields import FIELDS, STATISTICS, Site
from hookstats.records.arrays import from_list, to_arrow

VERSION = 10
ROW_GROUP = 10_000  # rows of totals
FLUSH = 8 << 20  # bytes that are held before they are written as row groups
LISTS = 1 << 20  # in a row group of details: one step is read without many others

# Of each field of a state, the column that holds it; those not in STATISTICS are raw.
STATE = {name: name if name in ("count", "zeros", "nans", "posinfs", "neginfs") else f"state_{name}" for name in FIELDS}
# Where a raw field has the bits of the finished statistic beside it, it is null.
SAME_AS = {"state_mean": "mean", "state_min": "min", "state_max": "max", "state_abs_sum": "l1_norm"}

_KEYS = {
    "step": pa.int64(),
    "time": pa.timestamp("us"),  # UTC; without a zone, as duckdb needs pytz for such with one
    "attempt": pa.int32(),
    "record": pa.int64(),
}
_SITE = {"site": pa.int32(), "name": pa.string(), "tensor": pa.string()}
_DOUBLES = pa.list_(pa.float64())

_COLUMNS: dict[str, dict[str, pa.DataType]] = {
    # One row for each measured step. sites: how many rows it has in totals. skipped: sites that were left out, as JSON,
    # each its name, tensor, reason, and how often, null where it was given up.
    # histogram: the bins, as JSON; null where there are none. ranks: whose numbers these are, "0-7 of 8".
    # rows: of activations and their gradients, every so-many-th row was read; 1: all.
    # drifts: replicas that are none, as JSON (numbers/ranks.py).
    "steps": {
        **_KEYS,
        "grad_scale": pa.float64(),
        "overflowed": pa.bool_(),
        "ranks": pa.string(),
        "rows": pa.int32(),
        "drifts": pa.string(),
        "histogram": pa.string(),
        "sites": pa.int32(),
        "skipped": pa.string(),
    },
    # One row for each site of a step. place: in the Snapshot; order: in the order of execution, null where silent.
    # channels: how many the state had that was sent; more than one are in the table details. group_size: how many of
    # them belong together, or null.
    "totals": {
        **_KEYS,
        **_SITE,
        "place": pa.int32(),
        "order": pa.int32(),
        "calls": pa.int64(),
        "scale": pa.float64(),
        "channels": pa.int32(),
        "keeps_channels": pa.bool_(),
        "channel_dim": pa.int32(),
        "group_size": pa.int32(),
        "has_histogram": pa.bool_(),
        **dict.fromkeys(STATISTICS, pa.float64()),
        **{name: pa.float64() for name in STATE.values() if name not in STATISTICS},
    },
    # One row for each site of a step with several channels, whose states it has, or with a histogram: its counts, of
    # channels one after another. A list is empty where there is no such thing.
    "details": {
        **_KEYS,
        **_SITE,
        "scale": pa.float64(),
        **dict.fromkeys(STATE.values(), _DOUBLES),
        "counts": pa.list_(pa.int64()),
    },
    # Of every step. Those of a step that was not measured (measured is false) have the record of the next one that was,
    # also where none came, those of a step that was left out -1; and the time at which they came.
    "scalars": {**_KEYS, "name": pa.string(), "value": pa.float64(), "measured": pa.bool_()},
    # Of every step with which ids of samples were given; as scalars for the rest.
    "samples": {**_KEYS, "ids": pa.list_(pa.int64()), "measured": pa.bool_()},
}
SCHEMAS = {table: pa.schema(list(columns.items())) for table, columns in _COLUMNS.items()}


def escape_surrogates(text: str) -> str:
    """UTF-8 has no lone surrogates; where a name has one, tables show it escaped, and sites.json has it as it is."""
    return text.encode("utf-8", "backslashreplace").decode()


def names_of(sites: list[Site], ids: NDArray[Any]) -> dict[str, pa.Array]:
    """Return the columns name and tensor of sites with these numbers."""
    columns = {}
    for part in Site._fields:
        names = [escape_surrogates(getattr(site, part)) for site in sites]
        place = {name: i for i, name in enumerate(dict.fromkeys(names))}
        codes = np.array([place[name] for name in names], np.int32)[ids]
        distinct = from_list(list(place), pa.string())
        columns[part] = pa.DictionaryArray.from_arrays(to_arrow(codes, pa.int32()), distinct)
    return columns


@cache
def make_writer_schema(table: str) -> pa.Schema:
    """Return the schema for the writer: strings of sites as dictionaries, which Parquet stores as plain strings."""
    schema = SCHEMAS[table]
    if "site" not in schema.names:
        return schema
    dictionary = pa.dictionary(pa.int32(), pa.string())
    return pa.schema([field.with_type(dictionary) if field.name in Site._fields else field for field in schema])


def writer_options(table: str) -> dict[str, object]:
    """Options of ParquetWriter: floats by byte planes and zstd, integers by differences, strings by dictionary."""
    schema = SCHEMAS[table]
    encodings, strings = {}, []
    for field in schema:
        is_list = pa.types.is_list(field.type)
        kind = field.type.value_type if is_list else field.type
        path = f"{field.name}.list.element" if is_list else field.name
        if pa.types.is_string(kind):
            strings.append(path)
        elif pa.types.is_floating(kind) or is_list:
            encodings[path] = "BYTE_STREAM_SPLIT"
        elif not pa.types.is_boolean(kind):
            encodings[path] = "DELTA_BINARY_PACKED"
    return {
        "compression": "zstd",
        "use_dictionary": strings,
        "column_encoding": encodings,
        "write_statistics": [name for name in ("step", "site", "attempt", "record") if name in schema.names],
        "write_page_checksum": True,
        "store_schema": False,
    }
