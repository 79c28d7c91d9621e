"""A ring of bytes in a file that two processes map: what is in it outlives the death of either, and of both.

One process writes records of any length, the other reads them; the kernel keeps the pages. A record counts from the
moment the head is moved behind it, and its room is free when the tail has passed it. Positions count all bytes ever
written; a record never wraps, so that it can be read where it is. Words of the header are stored by a release and
loaded by an acquire: whoever sees a position sees what was written up to it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hookstats._words import load_acquire, store_release
from hookstats.records.errors import RunError, SchemaError
from hookstats.records.files import NO_LINK

_MAGIC, _EARLIER = 0x32_474E_4952_5348, 0x31_474E_4952_5348  # "HSRING2"; the records of "HSRING1" were others
_RECORD = 0x4452_4F43_4552  # before each record, and with its number behind it
_HEADER = 4096  # words and the text of a failure; then the records
_ENDING, _TEXT = 512, 1024  # where texts begin: how training ended, and why the writer failed
_BEGIN, _END = 32, 8  # bytes around a payload: magic, kind, length of the payload, number; number
MAX_BYTES = 1 << 40


class RingError(RunError):
    """A file that is no ring, or a record in it that is not whole."""


class Record(NamedTuple):
    """A payload where it lies: it is overwritten when the tail has passed it."""

    kind: int
    payload: NDArray[np.uint8]
    number: int
    end: int  # the position behind it


class Ring:
    """``head``, ``tail``: positions; ``wanted``: up to which the writer is to commit now; ``committed``: up to which it
    has, though what was early may still take room. ``written``: records so far.

    ``capacity``: bytes for records. The others as their owner uses them.
    """

    # Words of the header. Who writes records owns head, written, dropped, closed and wanted; the other one the rest.
    magic: int
    capacity: int
    head: int
    tail: int
    written: int
    judged: int
    dropped: int
    closed: int
    failed: int
    findings: int
    fed: int
    wanted: int
    committed: int

    def __init__(self, path: Path) -> None:
        """Maps a ring that `create` has made. RingError where it is none, SchemaError of an earlier version's."""
        with open(os.open(path, os.O_RDWR | NO_LINK), "r+b") as file:
            size = os.fstat(file.fileno()).st_size
            if not _HEADER < size <= MAX_BYTES:
                raise RingError(f"{path}: expected a ring of more than {_HEADER} bytes, got {size}")
            self._memory = mmap.mmap(file.fileno(), size)
        self.path = path
        whole = np.frombuffer(self._memory, np.uint8)
        self._address, self._data = whole.ctypes.data, whole[_HEADER:]
        told = self.magic, self.capacity
        if self.magic == _EARLIER:
            raise SchemaError(
                f"{path}: expected a ring of this version of hookstats, got one of an earlier version: recover "
                "the run with that one"
            )
        if told != (_MAGIC, len(self._data)) or len(self._data) % 8:
            raise RingError(f"{path}: expected a ring of {len(self._data)} bytes, got {list(told)}")

    @classmethod
    def create(cls, path: Path, capacity: int) -> Ring:
        """A new file with room for this many bytes, all of which the disk has given and this process has touched.

        FileExistsError where there is one; OSError where the disk has not that much.
        """
        capacity = -(-capacity // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, _HEADER + capacity)
            os.pwrite(descriptor, np.array([_MAGIC, capacity], np.int64).tobytes(), 0)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)
        ring = cls(path)
        ring._data[:: mmap.PAGESIZE] = 0
        return ring

    def __getattr__(self, name: str) -> int:
        if name not in _OFFSET:
            raise AttributeError(name)
        return load_acquire(self._address + _OFFSET[name])

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OFFSET:
            store_release(self._address + _OFFSET[name], value)
        else:
            super().__setattr__(name, value)

    @property
    def failure(self) -> str:
        """The text with which the reader failed."""
        return self._text(_TEXT, _HEADER)

    @property
    def ending(self) -> str:
        """The text with which the process that writes has ended."""
        return self._text(_ENDING, _TEXT)

    def _text(self, begin: int, end: int) -> str:
        return bytes(self._memory[begin:end]).rstrip(b"\0").decode("utf-8", "ignore")

    def fail(self, text: str) -> None:
        """Tells the one who writes that nobody reads any more, and why."""
        self._say(text, _TEXT, _HEADER)
        self.failed = 1

    def close(self, ending: str) -> None:
        """Tells the one who reads that nothing more comes, and how training has ended."""
        self._say(ending, _ENDING, _TEXT)
        self.closed = 1

    def _say(self, text: str, begin: int, end: int) -> None:
        self._memory[begin:end] = text.encode("utf-8", "replace")[: end - begin - 1].ljust(end - begin, b"\0")

    def write(self, kind: int, pieces: Sequence[NDArray[Any]], is_step: bool = False) -> bool:
        """A record of these contiguous arrays, one behind another. False: there is no room for it now.

        is_step: an eighth stays free behind it, for the scalars of steps that find no room.
        """
        parts = [piece.reshape(-1).view(np.uint8) for piece in pieces]
        length = sum(map(len, parts))
        size = _whole(length)
        head, capacity = self.head, self.capacity
        begin = head % capacity
        skipped = capacity - begin if begin + size > capacity else 0
        if head + skipped + size + self._spare * is_step - self.tail > capacity:
            return False
        number = self.written
        if skipped >= _BEGIN + _END:
            self._data[begin : begin + _BEGIN].view(np.int64)[:] = _RECORD, 0, skipped - _BEGIN - _END, number
        at = (begin + skipped) % capacity
        self._data[at : at + _BEGIN].view(np.int64)[:] = _RECORD, kind, length, number
        place = at + _BEGIN
        for part in parts:
            self._data[place : place + len(part)] = part
            place += len(part)
        self._data[at + size - _END : at + size].view(np.int64)[0] = number
        self.written = number + 1
        self.head = head + skipped + size
        return True

    def read(self, position: int) -> Iterator[Record]:
        """Yield the records after this position, as many as there are now. RingError if one is not whole."""
        head, capacity = self.head, self.capacity
        if not 0 <= head - position <= capacity:
            raise RingError(f"{self.path}: expected at most {capacity} bytes to be read, got {position} to {head}")
        while position < head:
            begin = position % capacity
            if capacity - begin < _BEGIN + _END:  # too little for a record
                position += capacity - begin
                continue
            magic, kind, length, number = self._data[begin : begin + _BEGIN].view(np.int64).tolist()
            size = _whole(length) if 0 <= length <= capacity else capacity + 1
            if magic != _RECORD or position + size > head or begin + size > capacity:
                raise RingError(f"{self.path}: expected a record at {position}, got {[magic, kind, length, number]}")
            position += size
            if kind == 0:
                continue
            if self._data[begin + size - _END : begin + size].view(np.int64)[0] != number:
                raise RingError(f"{self.path}: expected the record {number} to end with its number")
            payload = self._data[begin + _BEGIN : begin + _BEGIN + length]
            payload.flags.writeable = False
            yield Record(kind, payload, number, position)

    def fits(self, length: int) -> bool:
        """Tell whether a step of that length can be written when everything before it has been read."""
        return 2 * _whole(length) + self._spare <= self.capacity

    @property
    def _spare(self) -> int:
        return self.capacity // 8


_OFFSET = {name: 8 * number for number, name in enumerate(Ring.__annotations__)}


def _whole(length: int) -> int:
    """Bytes of a record with a payload of that length."""
    return _BEGIN + -(-length // 8) * 8 + _END
