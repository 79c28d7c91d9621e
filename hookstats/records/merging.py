"""Many small parts into fewer large ones. Streamed: what is held is a row group of each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hookstats.numbers.fields import Site
from hookstats.records.arrays import to_arrow, to_numpy
from hookstats.records.derived import columns_for, completed
from hookstats.records.manifest import Part
from hookstats.records.schema import FLUSH, ROW_GROUP, SCHEMAS, names_of, written

FAN_IN = 4
LARGE = 16 << 20  # bytes: such a part is not merged further, so that one step is not spread over the whole run


def choose(parts: list[Part]) -> slice | None:
    """Those of a table that are to be merged: neighbours of one level, so that the order in time stays."""
    for begin in range(len(parts) - FAN_IN + 1):
        chosen = parts[begin : begin + FAN_IN]
        if len({part.level for part in chosen}) == 1 and all(part.bytes < LARGE for part in chosen):
            return slice(begin, begin + FAN_IN)
    return None


def merged(table: str, paths: list[Path], sites: list[Site]) -> Iterator[pa.Table]:
    """The rows of these files: totals sorted by site and step, the others one file after another."""
    names = SCHEMAS[table].names
    columns = [name for name in names if "site" not in names or name not in Site._fields]
    runs = [_run(path, columns) for path in paths]
    rows = _sorted(runs) if table == "totals" else (group for run in runs for group in run)
    for portion in _portions(rows, ROW_GROUP if table == "totals" else None):
        yield _named(table, portion, sites)


def _run(path: Path, columns: list[str]) -> Iterator[pa.Table]:
    with pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False) as file:
        there = columns_for(columns, file.schema_arrow.names)
        for number in range(file.num_row_groups):
            yield completed(file.read_row_group(number, columns=there, use_threads=False), columns)


def _sorted(runs: list[Iterator[pa.Table]]) -> Iterator[pa.Table]:
    """A merge by blocks: all rows up to the smallest of the last keys held are complete, and leave together."""
    waiting = [_Waiting(run) for run in runs]
    while waiting := [each for each in waiting if each.fill()]:
        bound = min(each.last for each in waiting)
        rows = pa.concat_tables([each.take(bound) for each in waiting])
        keys = [to_numpy(rows[name]) for name in ("record", "attempt", "step", "site")]
        yield rows.take(to_arrow(np.lexsort(keys), pa.int64()))


class _Waiting:
    """The rows of a run that are held."""

    def __init__(self, run: Iterator[pa.Table]) -> None:
        self._run = run
        self._rows: pa.Table | None = None

    def fill(self) -> bool:
        """Whether any are left."""
        while self._rows is None or self._rows.num_rows == 0:
            self._rows = next(self._run, None)
            if self._rows is None:
                return False
            self._site, self._step = (to_numpy(self._rows[name]) for name in ("site", "step"))
        return True

    @property
    def last(self) -> tuple[int, int]:
        return int(self._site[-1]), int(self._step[-1])

    def take(self, bound: tuple[int, int]) -> pa.Table:
        """Those up to this site and step."""
        assert self._rows is not None
        site, step = bound
        begin, end = np.searchsorted(self._site, [site, site + 1])
        end = begin + int(np.searchsorted(self._step[begin:end], step, side="right"))
        taken, self._rows = self._rows.slice(0, end), self._rows.slice(end)
        self._site, self._step = self._site[end:], self._step[end:]
        return taken


def _portions(tables: Iterator[pa.Table], rows: int | None) -> Iterator[pa.Table]:
    """Tables that are large enough to be a row group, by rows or by bytes."""
    held: list[pa.Table] = []
    for table in tables:
        held.append(table)
        if rows is None:
            if sum(each.nbytes for each in held) >= FLUSH:
                yield pa.concat_tables(held)
                held = []
            continue
        count = sum(each.num_rows for each in held)
        if count >= rows:
            whole = pa.concat_tables(held)
            full = count // rows * rows
            yield whole.slice(0, full)
            held = [whole.slice(full)] if count > full else []
    if held:
        yield pa.concat_tables(held)


def _named(table: str, rows: pa.Table, sites: list[Site]) -> pa.Table:
    schema = written(table)
    columns = {name: rows[name] for name in rows.column_names}
    if "site" in columns:
        columns |= names_of(sites, to_numpy(rows["site"]))
    return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)
