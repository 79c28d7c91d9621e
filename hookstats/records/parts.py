"""A Parquet file of a table: written under a temporary name, with what the manifest says of it."""

from __future__ import annotations

import contextlib
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hookstats.records import files
from hookstats.records.manifest import Part
from hookstats.records.schema import ROW_GROUP, writer_options, written


class OpenPart:
    """A file of a table under its temporary name."""

    def __init__(self, folder: Path, table: str, number: int) -> None:
        self._name = f"{number:08d}.parquet"
        self._path = folder / (self._name + files.TEMPORARY)
        self._output = files.Output(self._path)
        self._writer = pq.ParquetWriter(pa.PythonFile(self._output, "w"), written(table), **writer_options(table))
        self._rows = 0
        self._steps: list[int] = []

    def write(self, rows: pa.Table) -> None:
        """As a row group, or several."""
        self._writer.write_table(rows, ROW_GROUP)
        self._rows += rows.num_rows
        bounds = pc.min_max(rows["step"]).as_py()
        self._steps = [min([bounds["min"], *self._steps]), max([bounds["max"], *self._steps])]

    def close(self, level: int) -> Part:
        """On disk, still under its temporary name."""
        self._writer.close()
        self._output.sync()
        self._output.close()
        first, last = self._steps
        footer = footer_of(self._path)
        return Part(self._name, level, self._rows, self._path.stat().st_size, (first, last), zlib.crc32(footer))

    def abandon(self) -> None:
        """Nothing is raised: what is left of it is removed when the directory is opened again."""
        self._output.abandon()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def footer_of(path: Path) -> bytes:
    """The footer of a Parquet file, with its length and the magic number; empty where there is none."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - 8, 0))
        end = file.read(8)
        length = int.from_bytes(end[:4], "little") + 8
        if end[4:] != b"PAR1" or length > size:
            return b""
        file.seek(size - length)
        return file.read(length)
