"""Files that are whole or not there: written under a temporary name, fsync, rename, fsync of the directory."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

# A directory that somebody else made may hold links to any file of this user's: none of them is written through.
NO_LINK = os.O_CLOEXEC | os.O_NOFOLLOW
TEMPORARY = ".tmp"  # behind a name; readers by glob (*.parquet) do not see it


class Output(io.RawIOBase):
    """A new file, written by os.write alone, so that a test can let every single call fail."""

    def __init__(self, path: Path) -> None:
        self._is_abandoned = False
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | NO_LINK, 0o666)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        while len(view) and not self._is_abandoned:
            view = view[os.write(self._descriptor, view) :]
        return memoryview(data).nbytes

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        if not self.closed:
            super().close()
            if not self._is_abandoned:
                os.close(self._descriptor)

    def abandon(self) -> None:
        """Whatever is still written goes nowhere: Arrow writes a footer when its writer is collected."""
        if not (self.closed or self._is_abandoned):
            self._is_abandoned = True
            os.close(self._descriptor)


def rename(path: Path) -> None:
    """From its temporary name to its own."""
    os.replace(path, path.with_name(path.name.removesuffix(TEMPORARY)))


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """The file has either its old content or this one, whatever happens meanwhile."""
    temporary = path.with_name(path.name + TEMPORARY)
    with Output(temporary) as output:
        output.write(content)
        output.sync()
    rename(temporary)
    sync_directory(path.parent)
