"""The files of a run's tables. Their names say what they hold, so that no other file has to say which of them count.

``totals/a0003.00000120-00000183.parquet`` has the rows of the third attempt's steps 120 to 183. Where a trainer's
numbers go back, ``a0003-2`` is the second time through. The tables of a commit have the same name, and `steps` gets it
last: what no file of `steps` reaches is of a commit that was broken off. A file that covers several others is made of
them, and counts in their place.

A file can be checked by itself: pages have Parquet's checksums, and in its metadata the footer has that of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from hookstats.records import files
from hookstats.records.errors import Damaged, SchemaError
from hookstats.records.schema import ROW_GROUP, SCHEMAS, VERSION, make_writer_schema, writer_options

_NAME = re.compile(r"a(\d{4,9})(?:-(\d{1,9}))?\.(-?\d{7,19})-(-?\d{7,19})\.parquet")
_METADATA = b"hookstats"
_CHECKSUM = b'"crc32": "'  # in the metadata; the checksum is that of the footer with zeros in its place


class Name(NamedTuple):
    """The content of a file's name. turn: how often the numbers of the attempt's steps had gone back, and 1."""

    attempt: int
    turn: int
    first: int
    last: int

    def __str__(self) -> str:
        turn = f"-{self.turn}" if self.turn > 1 else ""
        return f"a{self.attempt:04d}{turn}.{self.first:08d}-{self.last:08d}.parquet"

    @classmethod
    def parse(cls, text: str) -> Name | None:
        """Read the name of a part; None for any other name."""
        match = _NAME.fullmatch(text)
        return match and cls(int(match[1]), int(match[2] or 1), int(match[3]), int(match[4]))


@dataclass(frozen=True)
class Listed:
    """The files in a rank's folder, by table, in the order in which they were recorded.

    counting: the parts that count; others: those that are covered, or of a commit that was broken off. reached: of each
    attempt and turn, the last step that was committed, also where the file that says so is damaged.
    """

    counting: dict[str, list[Name]]
    others: dict[str, list[Name]]
    reached: dict[tuple[int, int], int]
    begun: dict[int, int]  # of each attempt, the first step that was committed, measured or not


def list_parts(folder: Path) -> Listed:
    """Look into the folders of all tables. `steps` is looked at first: what is committed meanwhile counts later."""
    found: dict[str, list[Name]] = {}
    reached: dict[tuple[int, int], int] = {}
    begun: dict[int, int] = {}
    for table in dict.fromkeys(("steps", *SCHEMAS)):
        texts: list[str] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            texts = os.listdir(folder / table)
        names = [(name, text) for text in texts if (name := Name.parse(text.removesuffix(files.DAMAGED)))]
        found[table] = [name for name, text in names if not text.endswith(files.DAMAGED)]
        if table == "steps":
            for name, _ in names:
                reached[name[:2]] = max(name.last, reached.get(name[:2], name.last))
                begun[name.attempt] = min(name.first, begun.get(name.attempt, name.first))
    counting: dict[str, list[Name]] = {}
    others: dict[str, list[Name]] = {}
    for table in SCHEMAS:
        counting[table], others[table] = [], []
        for name in sorted(found[table], key=lambda name: (name.attempt, name.turn, name.first, -name.last)):
            before = counting[table][-1] if counting[table] else None
            is_covered = before is not None and before[:2] == name[:2] and name.last <= before.last
            counts = not is_covered and name.last <= reached.get(name[:2], name.first - 1)
            (counting if counts else others)[table].append(name)
    return Listed(counting, others, reached, begun)


class Progress(NamedTuple):
    """The state of an attempt on the disk. consumed, held: positions in its ring; records: measured steps.

    held: from there on, what was early is still waited for, although it was consumed.
    """

    consumed: int = 0
    held: int = 0
    records: int = 0
    turn: int = 1
    last: int | None = None  # the last step of this turn, measured or not


class OpenPart:
    """A file of a table under a temporary name, which it has until its own is known."""

    def __init__(self, folder: Path, table: str, name: str = "open") -> None:
        """name: a temporary one."""
        self._path = folder / f"{name}.parquet{files.TEMPORARY}"
        self._output = files.Output(self._path)
        self._writer = pq.ParquetWriter(
            pa.PythonFile(self._output, "w"), make_writer_schema(table), **writer_options(table)
        )

    def write(self, rows: pa.Table) -> None:
        """Write rows as a row group, or several."""
        self._writer.write_table(rows, ROW_GROUP)

    def close(self, progress: Progress) -> None:
        """Bring it to the disk, still under its temporary name, with the first three numbers in its metadata."""
        told = {"version": VERSION, **dict(zip(Progress._fields[:3], progress, strict=False)), "crc32": "0" * 8}
        self._writer.add_key_value_metadata({_METADATA: json.dumps(told)})
        self._writer.close()
        seal(self._output.fileno())
        self._output.sync()
        self._output.close()

    def rename(self, name: Name) -> None:
        """Give the file its name. It counts from now on if it is of `steps`, else as soon as that one does."""
        files.rename(self._path, self._path.with_name(str(name)))

    def abandon(self) -> None:
        """Raise nothing: what is left of it is removed when the directory is opened again.

        Arrow writes a footer when its writer is collected, into a file without a name.
        """
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def seal(descriptor: int) -> None:
    """Put the checksum of the footer into it. descriptor: of a file that was written with zeros in its place."""
    size = os.fstat(descriptor).st_size
    raw = _raw_footer(descriptor, size)
    files.patch(descriptor, b"%08x" % zlib.crc32(raw), size - len(raw) + _place_of_checksum(raw))


def read_footer(path: Path) -> tuple[pq.FileMetaData, Progress]:
    """FileNotFoundError without a file; Damaged where it is not what was written; SchemaError for another version."""
    with raise_damaged(path), open(path, "rb") as file:
        raw = bytearray(_raw_footer(file.fileno(), os.fstat(file.fileno()).st_size))
        at = _place_of_checksum(raw)
        expected, raw[at : at + 8] = int(raw[at : at + 8], 16), b"0" * 8
        if zlib.crc32(raw) != expected:
            raise ValueError(f"expected a footer with checksum {expected}, got {zlib.crc32(raw)}")
        metadata = pq.read_metadata(pa.BufferReader(b"PAR1" + raw))
        told = json.loads(metadata.metadata[_METADATA])
    if told["version"] != VERSION:
        raise SchemaError(
            f"{path}: expected schema version {VERSION}, got {told['version']}: this run was recorded by another "
            "version of hookstats; read it with that one, or record into another directory"
        )
    return metadata, Progress(told["consumed"], told["held"], told["records"])


def _raw_footer(descriptor: int, size: int) -> bytes:
    """The footer of a Parquet file, with its length and the magic number. ValueError where there is none."""
    end = os.pread(descriptor, 8, max(size - 8, 0))
    length = int.from_bytes(end[:4], "little") + 8
    if end[4:] != b"PAR1" or length > size:
        raise ValueError("expected a Parquet file, got another one, or a part of it")
    return os.pread(descriptor, length, size - length)


def _place_of_checksum(raw: bytes | bytearray) -> int:
    at = raw.rfind(_CHECKSUM)
    if at < 0:
        raise ValueError("expected a checksum of the footer, got none")
    return at + len(_CHECKSUM)


@contextlib.contextmanager
def raise_damaged(path: Path) -> Iterator[None]:
    """Turn what Arrow raises for a file that is not as it was written into Damaged."""
    try:
        yield
    except FileNotFoundError as error:
        error.filename = str(path)
        raise
    except (SchemaError, Damaged):
        raise
    except (ValueError, KeyError, OSError, MemoryError, OverflowError, NotImplementedError, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise Damaged(path, str(error)[:500]) from None
