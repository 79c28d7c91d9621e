"""Rows out of a rank's files: only the columns, files and row groups that are asked for, and nothing unchecked.

What cannot be read is left out, and said once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hookstats.numbers.fields import Counts, Site
from hookstats.records.arrays import to_arrow, to_numpy
from hookstats.records.attempts import Attempt, attempts_in
from hookstats.records.errors import NO_STEP, Damaged, RunError, tell_once
from hookstats.records.files import read_json
from hookstats.records.parts import Name, list_parts, raise_damaged, read_footer
from hookstats.records.schema import SCHEMAS

_AT_ONCE = 4 << 20  # bytes of row groups, of all their columns
_TRIES = 100  # where files are merged meanwhile
Read = TypeVar("Read")
_damaged: set[Path] = set()  # what this process could not read


class Chosen(NamedTuple):
    """A choice of rows. steps: from the first to the last; sites: ids, ascending; None: all."""

    steps: tuple[int, int] | None = None
    sites: Counts | None = None

    def groups(self, metadata: pq.FileMetaData) -> Counts:
        """Return the row groups that may hold such rows, as far as their smallest and largest keys tell."""
        place = {metadata.schema.column(i).path: i for i in range(metadata.num_columns)}
        found = []
        for i in range(metadata.num_row_groups):
            step, site = (metadata.row_group(i).column(place.get(key, 0)).statistics for key in ("step", "site"))
            in_steps = self.steps is None or (step.max >= self.steps[0] and step.min <= self.steps[1])
            if in_steps and (self.sites is None or _lies_within(self.sites, site.min, site.max)):
                found.append(i)
        return np.array(found, np.int64)

    def rows(self, table: pa.Table) -> pa.Table:
        mask = np.ones(len(table), bool)
        if self.sites is not None:
            mask &= np.isin(to_numpy(table["site"]), self.sites)
        if self.steps is not None:
            step = to_numpy(table["step"])
            mask &= (step >= self.steps[0]) & (step <= self.steps[1])
        return table if mask.all() else table.filter(to_arrow(mask, pa.bool_()))


ALL = Chosen()


class Reader:
    """A rank's directory, as it was when it was looked at. ``sites``: by id. ``attempts``: ascending."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._footers: dict[tuple[str, Name], pq.FileMetaData] = {}
        self.listed = list_parts(folder)
        self.attempts: list[Attempt] = attempts_in(folder)
        if not self.listed.begun and not self.attempts:
            raise RunError(f"{folder}: {NO_STEP}")
        self.sites = read_sites(folder)

    def table(self, table: str, columns: Sequence[str], chosen: Chosen) -> pa.Table:
        """Return rows in the order in which they were recorded; of totals, within a file, by site and step.

        Where files were merged meanwhile, those are read that they have become.
        """
        return self.try_again(lambda: pa.concat_tables([_empty(table, columns), *self.parts(table, columns, chosen)]))

    def try_again(self, read: Callable[[], Read]) -> Read:
        """Read again where files were merged meanwhile."""
        for _ in range(_TRIES):
            try:
                return read()
            except FileNotFoundError:
                self.listed = list_parts(self.folder)
        raise RunError(f"{self.folder}: expected files that stay for as long as they are read")

    def parts(self, table: str, columns: Sequence[str], chosen: Chosen = ALL) -> Iterator[pa.Table]:
        """Yield the rows of one file after another. FileNotFoundError where files were merged meanwhile."""
        for name in self.listed.counting[table]:
            if not chosen.steps or (name.last >= chosen.steps[0] and name.first <= chosen.steps[1]):
                try:
                    yield self.part(table, name, columns, chosen)
                except Damaged as error:
                    leave_out(error)

    def find_covered(self, table: str, steps: Counts, attempts: Counts) -> NDArray[np.bool_]:
        """Tell for each step whether a file has its rows, as far as the footer says."""
        found = np.zeros(len(steps), bool)
        for name in self.listed.counting[table]:
            try:
                self.footer(table, name)
            except Damaged as error:
                leave_out(error)
                continue
            except FileNotFoundError:  # merged meanwhile
                pass
            found |= (attempts == name.attempt) & (steps >= name.first) & (steps <= name.last)
        return found

    def footer(self, table: str, name: Name) -> pq.FileMetaData:
        """Damaged also where anything else of the file could not be read before."""
        path = self.folder / table / str(name)
        if path in _damaged:
            raise Damaged(path, "it could not be read before")
        if (table, name) not in self._footers:
            self._footers[table, name], _ = read_footer(path)
        return self._footers[table, name]

    def part(self, table: str, name: Name, columns: Sequence[str], chosen: Chosen) -> pa.Table:
        """Return rows of one file. FileNotFoundError if it was merged away; Damaged."""
        return pa.concat_tables([_empty(table, columns), *self.pieces(table, name, columns, chosen)])

    def pieces(self, table: str, name: Name, columns: Sequence[str], chosen: Chosen = ALL) -> Iterator[pa.Table]:
        """Yield rows of a file, some row groups at a time."""
        metadata, path = self.footer(table, name), self.folder / table / str(name)
        keys = [*(["step"] if chosen.steps else []), *(["site"] if chosen.sites is not None else [])]
        needed = list(dict.fromkeys([*columns, *keys]))
        with raise_damaged(path):
            options = {"metadata": metadata, "page_checksum_verification": True, "pre_buffer": False}
            with pq.ParquetFile(path, **options) as file:
                for few in _portions(metadata, chosen.groups(metadata)):
                    rows = file.read_row_groups(few, columns=needed, use_threads=False).select(needed)
                    if rows.schema != (expected := _empty(table, needed).schema):
                        raise ValueError(f"expected {expected}, got {rows.schema}")
                    rows.validate(full=True)
                    yield chosen.rows(rows).select(list(columns))


def read_sites(folder: Path) -> list[Site]:
    """Return the sites of a rank, by id. If sites.json cannot be read, the rows of totals name them."""
    try:
        return [Site(*pair) for pair in read_json(folder / "sites.json")["sites"]]
    except FileNotFoundError:
        pass
    except Damaged as error:
        leave_out(error)
    found: dict[int, Site] = {}
    for table in ("totals", "details"):
        for name in list_parts(folder).counting[table]:
            try:
                rows = pq.ParquetFile(folder / table / str(name)).read(["site", *Site._fields])
            except (OSError, pa.ArrowException):
                continue
            pairs = zip(*(rows[column].to_pylist() for column in rows.column_names), strict=True)
            found.update({number: Site(*names) for number, *names in pairs})
    unknown = [Site(f"unknown {number}", "output") for number in range(max(found, default=-1) + 1)]
    return [found.get(number, site) for number, site in enumerate(unknown)]


def leave_out(error: Damaged) -> None:
    """Note that a file cannot be read: it is not tried again, and said once."""
    _damaged.add(error.path)
    tell_once(error.path, f"{error}; it is left out: hookstats recover sets it aside")


def _lies_within(sites: Counts, low: int, high: int) -> bool:
    """Tell whether one of these sites, ascending, is from low to high."""
    return bool(np.searchsorted(sites, low) < np.searchsorted(sites, high, "right"))


def _empty(table: str, columns: Sequence[str]) -> pa.Table:
    return pa.Table.from_batches([], pa.schema([SCHEMAS[table].field(name) for name in columns]))


def _portions(metadata: pq.FileMetaData, groups: Counts) -> Iterator[list[int]]:
    """Split row groups into those that are read at once: many small ones, or a large one."""
    ends = np.cumsum([metadata.row_group(i).total_byte_size for i in groups.tolist()])
    for few in np.split(groups, np.flatnonzero(np.diff(ends // _AT_ONCE)) + 1):
        if len(few):
            yield few.tolist()
