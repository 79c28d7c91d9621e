"""JSON lines: a file that json, pandas, duckdb and a text editor read."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hookstats._locks import Lock
from hookstats.numbers.snapshot import Snapshot
from hookstats.sinks.adapter import FileSink
from hookstats.sinks.keys import DEFAULT_STATISTICS, Keys

_BEGINNING = b'{"step": '  # of each line


class JsonLines(FileSink):
    """Appends a line to a file for each snapshot.

    A line is an object: ``step``, ``nonfinite`` (how many values of all sites are NaN or Inf), ``grad_norm``,
    ``scalars/<name>``, and ``<tensor>/<statistic>/<name>`` for the sites that fired and are sent. What rules find has
    lines of its own, of which ``finding`` is the rule. NaN and Infinity are
    written as Python's json writes them; json, pandas and duckdb read them, polars does not. Each line is one
    write: where the process is killed, the last line may be torn, and is cut off when the file is opened again.

    Args:
        path: of the file; it is made with its directory, and appended to. One process writes it: give each rank a path
            of its own.
        statistics: some of those of `Stats`. By default rms (what vanishes or explodes), std (what collapses around its
            mean) and abs_max (outliers, overflow in low precision). Whatever they are, ``<tensor>/nonfinite/<name>``
            counts NaN and Inf from the first snapshot on in which the site has any, as statistics leave those out.
        sites: globs over the names of sites; all that match are sent. None: at most 64 of them, which are chosen when
            the first snapshot comes and stay the same: each kind of tensor has its share, evenly from the first site to
            the last. A warning says so where there are more. W&B's page freezes at 4,000 keys.
        histograms: whether the histograms of these sites are sent, too: ``<tensor>/histogram/<name>`` with ``counts``
            and ``edges``, at most 512 bars; empty bins side by side are one.

    Names have letters, digits, "_", ".", "-" and spaces; others, and long ones, are spelled with "_" and end in eight
    digits of their SHA-256. The model itself is "whole-model".

    Raises:
        TypeError, ValueError: for arguments that are not as above; for a path whose last line is torn but none of ours.
        OSError: where the file cannot be made.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        statistics: str | Iterable[str] = DEFAULT_STATISTICS,
        sites: str | Iterable[str] | None = None,
        histograms: bool = False,
    ) -> None:
        self._keys = Keys("JsonLines", statistics, sites, histograms)
        self._path = Path(path).absolute()
        self._place = {"path": str(self._path)}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._lock: Lock | None = None
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            self._end_of_whole_lines(file)
        finally:
            os.close(file)  # opened when it is first written, maybe by another process, see spec()

    def __call__(self, snapshot: Snapshot) -> None:
        row: dict[str, Any] = self._keys.values(snapshot)
        for key, bars in self._keys.histograms(snapshot).items():
            row[key] = {"counts": bars.counts.tolist(), "edges": bars.edges.tolist()}
        self._write(row)

    def finding(self, finding: Any) -> None:
        """A line of its own: ``step``, ``finding`` (the rule), ``severity``, ``site``, ``value``, ``sentence``, ..."""
        told = finding.to_json()
        self._write({"step": told.pop("step"), "finding": told.pop("rule"), **told})

    def _write(self, row: dict[str, Any]) -> None:
        line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
        file = None if self._lock is None else self._lock.descriptor
        if file is None:
            file = self._open_file()
        end = os.fstat(file).st_size
        written = os.write(file, line)
        if written < len(line):  # the disk is full, say: what comes next is to begin a line
            os.ftruncate(file, end)
            raise OSError(errno.ENOSPC, f"expected to write {len(line)} bytes, wrote {written}", str(self._path))

    def close(self) -> None:
        """Lets the file go; another snapshot opens it again."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _open_file(self) -> int:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            lock = Lock(file)
        except BlockingIOError as error:
            os.close(file)
            message = "JsonLines: expected a file that nobody else writes; give each rank and each sink its own"
            raise OSError(error.errno, message, str(self._path)) from None
        os.ftruncate(file, self._end_of_whole_lines(file))
        self._lock = lock
        return file

    def _end_of_whole_lines(self, file: int) -> int:
        """Return where the last whole line ends. ValueError if what follows is not ours: that is not cut off."""
        end, tail = os.fstat(file).st_size, b""
        while end and b"\n" not in tail:
            start = max(end - (1 << 16), 0)
            tail = os.pread(file, end - start + len(_BEGINNING), start)  # a line may begin where the piece ends
            end = start
        after = tail.rfind(b"\n") + 1
        torn = tail[after:]
        if not (torn.startswith(_BEGINNING) or _BEGINNING.startswith(torn)):
            raise ValueError(f"JsonLines: expected a file of its own lines, got {self._path}, ending {torn[:40]!r}...")
        return end + after
