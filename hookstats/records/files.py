"""Files that are whole or not there: written under a temporary name, fsync, rename, fsync of the folder."""

from __future__ import annotations

import io
import json
import os
import zlib
from pathlib import Path
from typing import Any

from hookstats.records.errors import Damaged

# A directory that somebody else made may hold links to any file of this user's: none of them is written through.
NO_LINK = os.O_CLOEXEC | os.O_NOFOLLOW
TEMPORARY = ".tmp"  # after a name; readers by glob (*.parquet) do not see it
DAMAGED = ".damaged"  # after the name of a file that cannot be read
_LARGEST = 256 << 20  # bytes of a JSON file: more are not read


class Output(io.RawIOBase):
    """A new file, written by os.write alone, so that a test can let every single call fail."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | NO_LINK, 0o666)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        while len(view):
            view = view[os.write(self._descriptor, view) :]
        return memoryview(data).nbytes

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._descriptor)


def rename(path: Path, final: Path) -> None:
    os.replace(path, final)


def patch(descriptor: int, data: bytes, at: int) -> None:
    """Write over some bytes of an open file."""
    os.pwrite(descriptor, data, at)


def set_aside(path: Path) -> None:
    """Give a file that cannot be read a name that no reader looks for."""
    os.replace(path, path.with_name(path.name + DAMAGED))


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that has either its old content or this one, whatever happens meanwhile."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with Output(temporary) as output:
            output.write(content)
            output.sync()
        rename(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_json(path: Path, body: dict[str, Any]) -> None:
    """Write an object, with a checksum: a changed number would come back as another number."""
    write_whole(path, json.dumps(body | {"crc32": _checksum(body)}, indent=1).encode())


def read_json(path: Path) -> dict[str, Any]:
    """Return what `write_json` wrote. FileNotFoundError without a file; Damaged for anything else."""
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"expected at most {_LARGEST} bytes")
        body = json.loads(path.read_bytes())
        expected = body.pop("crc32")
        if expected != _checksum(body):
            raise ValueError(f"expected the checksum {_checksum(body)}, got {expected!r:.40}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(path, f"expected what hookstats wrote, got something else: {str(error)[:200]}") from None
    return dict(body)


def _checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
