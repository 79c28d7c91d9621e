"""Rows out of a rank's parts: only the columns, files and row groups that are asked for, and nothing unchecked."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hookstats.numbers.fields import Counts
from hookstats.records import manifest
from hookstats.records.arrays import to_arrow, to_numpy
from hookstats.records.derived import DERIVED, columns_for, completed
from hookstats.records.errors import NO_STEP, RunError
from hookstats.records.manifest import Part
from hookstats.records.parts import footer_of
from hookstats.records.schema import SAME_AS, SCHEMAS

_T = TypeVar("_T")
_LARGEST = 1 << 31  # bytes of a column of a row group
_AT_ONCE = 64 << 20  # bytes of row groups, of all their columns
_NULLABLE = {"order", "channel_dim", "group_size", "grad_scale", "overflowed", "drifts", "histogram", "times"}
_NULLABLE |= set(SAME_AS)


class Chosen(NamedTuple):
    """Which rows are wanted. steps: from the first to the last; sites: ids, ascending; None: all."""

    steps: tuple[int, int] | None = None
    sites: Counts | None = None


class Reader:
    """A rank's directory. What it names may be merged away meanwhile: then the manifest is read again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._footers: dict[tuple[str, str], pq.FileMetaData] = {}
        self._row_groups: dict[tuple[str, str], dict[str, Counts]] = {}
        try:
            self.manifest = manifest.read(directory)
        except FileNotFoundError:
            raise RunError(f"{directory}: {NO_STEP} (there is no manifest.json)") from None

    def table(self, table: str, columns: Sequence[str], chosen: Chosen) -> pa.Table:
        """In the order of the parts; of totals, within a part, by site and step."""
        while True:
            try:
                return self._table(table, columns, chosen)
            except FileNotFoundError as error:
                self.follow(table, error)

    def follow(self, table: str, error: FileNotFoundError) -> None:
        """Reads the manifest again because a part was not there. RunError where the same parts are named still.

        Merging alone is followed: what was committed since is not of this look at the run.
        """
        now = manifest.read(self.directory)
        if now.parts[table] == self.manifest.parts[table]:
            raise RunError(f"{error.filename}: expected a part that the manifest names, got no file") from None
        self.manifest = now

    def _table(self, table: str, columns: Sequence[str], chosen: Chosen) -> pa.Table:
        read = [_empty(table, columns)]
        for part in self.manifest.parts[table]:
            if not chosen.steps or (part.steps[1] >= chosen.steps[0] and part.steps[0] <= chosen.steps[1]):
                read.append(self.part(table, part, columns, chosen))
        return pa.concat_tables(read)

    def refresh(self) -> None:
        """The manifest as it is now. What is known of the parts that it still names is not read again."""
        self.manifest = manifest.read(self.directory, self.manifest)
        named = {(table, part.file) for table, parts in self.manifest.parts.items() for part in parts}
        for known in (self._footers, self._row_groups):
            for key in known.keys() - named:
                del known[key]

    def bounds(self, table: str, part: Part) -> dict[str, Counts]:
        """Of each row group: rows, bytes, and the ends of the columns for which they are kept. FileNotFoundError."""
        path = self.directory / table / part.file
        with _checked(path):
            self._footer(table, part, path)
        return self._row_groups[table, part.file]

    def part(self, table: str, part: Part, columns: Sequence[str], chosen: Chosen) -> pa.Table:
        """Of one of the parts. FileNotFoundError where it was merged away."""
        path = self.directory / table / part.file
        with _checked(path):
            footer = self._footer(table, part, path)
            groups = self._overlapping((table, part.file), footer, chosen)
            if not len(groups):
                return _empty(table, columns)
            told = self._row_groups[table, part.file]
            if chosen.steps and _is_inside(told, groups, chosen.steps):
                chosen = chosen._replace(steps=None)
            keys = [*(["step"] if chosen.steps else []), *(["site"] if chosen.sites is not None else [])]
            needed = list(dict.fromkeys([*columns, *keys]))
            there = columns_for(needed, footer.schema.to_arrow_schema().names)
            read = []
            with pq.ParquetFile(path, metadata=footer, page_checksum_verification=True, pre_buffer=False) as file:
                for few in _portions(groups, told["bytes"]):
                    rows = file.read_row_groups(few.tolist(), columns=there, use_threads=False).select(there)
                    _check(table, rows, int(told["rows"][few].sum()))
                    read.append(completed(_filtered(rows, chosen), columns))
            return pa.concat_tables(read)

    def _footer(self, table: str, part: Part, path: Path) -> pq.FileMetaData:
        key = (table, part.file)
        if key in self._footers:
            return self._footers[key]
        size = path.stat().st_size
        if size != part.bytes:
            raise ValueError(f"expected {part.bytes} bytes, got {size}")
        raw = footer_of(path)
        if zlib.crc32(raw) != part.footer:
            raise ValueError(f"expected a footer with checksum {part.footer}, got {zlib.crc32(raw)}")
        footer = pq.read_metadata(pa.BufferReader(b"PAR1" + raw))
        if footer.num_rows != part.rows:
            raise ValueError(f"expected {part.rows} rows, got {footer.num_rows}")
        found = footer.schema.to_arrow_schema()
        for column in SCHEMAS[table]:
            types = [found.field(i).type for i in found.get_all_field_indices(column.name)]
            if types != [column.type] and not (column.name in DERIVED and not types):
                raise ValueError(f"expected the columns of {table}, got {found}")
        self._row_groups[key] = _bounds(footer)
        self._footers[key] = footer
        return footer

    def _overlapping(self, key: tuple[str, str], footer: pq.FileMetaData, chosen: Chosen) -> Counts:
        bounds = self._row_groups[key]
        wanted = np.ones(footer.num_row_groups, bool)
        if chosen.steps:
            wanted &= (bounds["step_max"] >= chosen.steps[0]) & (bounds["step_min"] <= chosen.steps[1])
        if chosen.sites is not None:
            first = np.searchsorted(chosen.sites, bounds["site_min"])
            last = np.searchsorted(chosen.sites, bounds["site_max"], side="right")
            wanted &= last > first
        return np.flatnonzero(wanted)


def _empty(table: str, columns: Sequence[str]) -> pa.Table:
    return pa.Table.from_batches([], pa.schema([SCHEMAS[table].field(name) for name in columns]))


def _is_inside(bounds: dict[str, Counts], groups: Counts, steps: tuple[int, int]) -> bool:
    """Whether all rows of these row groups are of steps from the first to the last."""
    return bool((bounds["step_min"][groups] >= steps[0]).all() and (bounds["step_max"][groups] <= steps[1]).all())


def _portions(groups: Counts, sizes: Counts) -> list[Counts]:
    """Row groups that are read at once: many small ones, or a large one. sizes: bytes of each row group."""
    ends = np.cumsum(sizes[groups])
    return np.split(groups, np.flatnonzero(np.diff(ends // _AT_ONCE)) + 1)


def _bounds(footer: pq.FileMetaData) -> dict[str, Counts]:
    """Of each row group: its rows, and the smallest and largest step and site."""
    names = [footer.schema.column(i).path for i in range(footer.num_columns)]
    keys = [name for name in ("step", "site", "attempt", "record") if name in names]
    found: dict[str, list[int]] = {"rows": [], "bytes": []}
    found.update({f"{name}_{end}": [] for name in keys for end in ("min", "max")})
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        if not 0 <= group.total_byte_size <= _LARGEST:
            raise ValueError(f"expected a row group of at most {_LARGEST} bytes, got {group.total_byte_size}")
        found["rows"].append(group.num_rows)
        found["bytes"].append(group.total_byte_size)
        for name in keys:
            statistics = group.column(names.index(name)).statistics
            if statistics is None or not statistics.has_min_max:
                raise ValueError(f"expected the smallest and largest {name} of each row group, got none")
            found[f"{name}_min"].append(statistics.min)
            found[f"{name}_max"].append(statistics.max)
    return {name: np.array(values, np.int64) for name, values in found.items()}


def _check(table: str, rows: pa.Table, count: int) -> None:
    expected = pa.schema([SCHEMAS[table].field(name) for name in rows.column_names])
    if rows.schema != expected:
        raise ValueError(f"expected the columns {expected}, got {rows.schema}")
    if rows.num_rows != count:
        raise ValueError(f"expected {count} rows, got {rows.num_rows}")
    rows.validate(full=True)
    for name in rows.column_names:
        nulls = rows[name].null_count
        if pa.types.is_list(rows[name].type):
            nulls += sum(chunk.values.null_count for chunk in rows[name].chunks)
        if nulls and name not in _NULLABLE:
            raise ValueError(f"expected no null in {name}, got {nulls}")


def _filtered(rows: pa.Table, chosen: Chosen) -> pa.Table:
    mask = None
    if chosen.sites is not None:
        site = to_numpy(rows["site"])
        at = np.minimum(np.searchsorted(chosen.sites, site), max(len(chosen.sites) - 1, 0))
        mask = chosen.sites[at] == site if len(chosen.sites) else np.zeros(len(site), bool)
    if chosen.steps:
        step = to_numpy(rows["step"])
        inside = (step >= chosen.steps[0]) & (step <= chosen.steps[1])
        mask = inside if mask is None else mask & inside
    return rows if mask is None or mask.all() else rows.filter(to_arrow(mask, pa.bool_()))


@contextmanager
def _checked(path: Path) -> Iterator[None]:
    """What a file that is not as it was written makes Arrow raise, as RunError."""
    try:
        yield
    except FileNotFoundError as error:
        error.filename = str(path)
        raise
    except (ValueError, OSError, MemoryError, OverflowError, NotImplementedError, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise RunError(f"{path}: {str(error)[:500]}") from None
