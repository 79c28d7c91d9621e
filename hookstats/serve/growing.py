"""What the page of a run is made from, made anew when the run has grown; and what differs from an earlier one."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from hookstats.report import planes
from hookstats.report.loading import recorded
from hookstats.report.page import page
from hookstats.report.record import Recorded
from hookstats.report.writing import detailed, overview
from hookstats.serve.runs import Watched

_KEPT = 4  # versions of a run: a page that shows an older one is sent all of the newest
_RUNS = 4  # of which versions are kept; one that was not asked for longest goes
_REST = 4.0  # times as long as reading took, nothing is read again: a fifth of a processor at most
_LEAST = 1.0  # seconds between two looks at a run
_PATIENCE = 60.0  # seconds that somebody waits for a blob that is being made
_SCALES = 16  # bytes of a row: two float64 behind the codes
_LEVEL = 4  # of gzip
_NO_DETAILS: dict[str, Any] = {"details": {}, "windows": [], "precision": None}
_DETAILS = tuple(_NO_DETAILS)
_reading = threading.Lock()  # one run at a time
# Planes of a blob, whether scales follow, and by which list of the record its columns are counted.
_LAID_OUT = {"relative": (1, False, "begin"), "absolute": (1, True, "begin"), "line": (2, True, "line_begin")}


@dataclass
class Version:
    """A run as it was: JSON, and bytes by name, as a page is made from."""

    number: int
    record: dict[str, Any]
    blobs: dict[str, bytes]
    pictures: set[str] = field(default_factory=set)  # those of the blobs that are of some sites only
    is_whole: threading.Event = field(default_factory=threading.Event)  # all blobs are there
    _packed: dict[tuple[str, int], bytes] = field(default_factory=dict)

    @cached_property
    def page(self) -> bytes:
        return gzip.compress(page(self.record, {}, is_live=True).encode(), _LEVEL)

    def changes(self, old: Version | None) -> dict[str, Any]:
        """What of the record is other than in an earlier version."""
        known = {} if old is None else old.record
        return {name: value for name, value in self.record.items() if name not in known or known[name] != value}

    def packed(self, name: str, old: Version | None) -> bytes:
        """A blob in gzip, behind a byte: 0, or 1 where it is told as what differs from that of an earlier version.

        That is the exclusive or of both, the earlier one with as many columns as this one. KeyError for another name.
        """
        if name not in self.blobs:
            self.is_whole.wait(_PATIENCE)
        key = (name, 0 if old is None else old.number)
        if key not in self._packed:
            blob = self.blobs[name]
            earlier = None if old is None else _widened(name, old, self)
            told = b"\0" + blob if earlier is None else b"\1" + _apart(earlier, blob)
            self._packed[key] = gzip.compress(told, _LEVEL, mtime=0)
        return self._packed[key]


def _apart(a: bytes, b: bytes) -> bytes:
    return bytes(np.frombuffer(a, np.uint8) ^ np.frombuffer(b, np.uint8))


def _widened(name: str, old: Version, new: Version) -> bytes | None:
    """A blob of an earlier version, with new columns of zeros; None where its columns, or its rows, were others."""
    laid_out = _LAID_OUT.get("line" if name.startswith("line.") else name.rpartition(".")[2])
    if laid_out is None or name not in old.blobs or old.record["sites"] != new.record["sites"]:
        return None
    planes, has_scales, columns = laid_out
    before, after = old.record[columns], new.record[columns]
    if before != after[: len(before)]:
        return None
    rows = len(new.record["sites"])
    blob = np.frombuffer(old.blobs[name], np.uint8)
    cells = blob[: planes * rows * len(before)].reshape(planes, rows, len(before))
    wide = np.zeros((planes, rows, len(after)), np.uint8)
    wide[:, :, : len(before)] = cells
    return wide.tobytes() + (blob[-_SCALES * rows :].tobytes() if has_scales else b"")


class Growing:
    """A run of which versions are made while somebody looks."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.versions: OrderedDict[int, Version] = OrderedDict()
        self.error: Exception | None = None
        self._mark: tuple[int, ...] | None = None
        self._lock = threading.Lock()
        self._making: threading.Thread | None = None
        self._rested = 0.0
        self._is_told = threading.Event()  # there is a version, or an error
        self._number = time.time_ns() // 1_000_000  # of one server, never that of an earlier one

    @property
    def newest(self) -> Version | None:
        with self._lock:
            return next(reversed(self.versions.values()), None)

    def get(self, number: int) -> Version | None:
        with self._lock:
            return self.versions.get(number)

    def look(self, patience: float = 0.0) -> Version | None:
        """The newest version, and if the run has changed, a newer one is being made.

        patience: seconds that are waited where there is none yet, nor an error.
        """
        with self._lock:
            is_idle = self._making is None or not self._making.is_alive()
            if is_idle and time.monotonic() >= self._rested and self.watched.mark() != self._mark:
                self._making = threading.Thread(target=self._make, daemon=True)
                self._making.start()
        if patience and self.newest is None:
            self._is_told.wait(patience)
        return self.newest

    def _make(self) -> None:
        with _reading:
            self._make_alone()

    def _make_alone(self) -> None:
        began = time.monotonic()
        mark = self.watched.mark()
        try:
            run = replace(recorded(self.watched.path), grows=True, name=self.watched.name)
            if not len(run.steps) or not run.sites:
                raise ValueError("nothing was measured yet")
            self.error = None
            self._publish(run)
        except Exception as error:  # deleted or torn, also while it is read: a page says so
            self.error = error
        finally:
            self._is_told.set()
            with self._lock:
                self._mark = mark
                now = time.monotonic()
                self._rested = now + max(_LEAST, _REST * (now - began))

    def _publish(self, run: Recorded) -> None:
        """First what the first picture shows, then the rest of it, then what is told of some sites only.

        Until the last is there, a page has it as it was in the version before.
        """
        before = self.newest
        is_same = before is not None and before.record["sites"] == [list(site) for site in run.sites]
        details = {name: before.record[name] for name in _DETAILS} if before and is_same else dict(_NO_DETAILS)
        pictures = {name: before.blobs[name] for name in before.pictures} if before and is_same else {}
        bad = planes.bad_of(run)
        first = Version(self._numbered(), overview(run, bad) | details, pictures | planes.heatmap(run, "rms", bad))
        first.pictures = set(pictures)
        try:
            self._add(first)
            for key in planes.STATISTICS:
                if key != "rms":
                    first.blobs |= planes.heatmap(run, key, bad)
            first.blobs |= planes.lines(run)
        finally:
            first.is_whole.set()
        told, made = detailed(run, first.blobs["rms.relative"])
        if told != details or any(first.blobs.get(name) != blob for name, blob in made.items()):
            rest = {name: blob for name, blob in first.blobs.items() if name not in first.pictures}
            whole = Version(self._numbered(), first.record | told, rest | made)
            whole.pictures = set(made)
            whole.is_whole.set()
            self._add(whole)

    def _numbered(self) -> int:
        self._number += 1
        return self._number

    def _add(self, version: Version) -> None:
        version.record["version"] = version.number
        with self._lock:
            self.versions[version.number] = version
            while len(self.versions) > _KEPT:
                self.versions.popitem(last=False)
        self._is_told.set()


class Kept:
    """Those runs that were looked at last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: OrderedDict[str, Growing] = OrderedDict()

    def get(self, id: str, watched: Watched) -> Growing:
        with self._lock:
            growing = self._runs.setdefault(id, Growing(watched))
            self._runs.move_to_end(id)
            while len(self._runs) > _RUNS:
                self._runs.popitem(last=False)
            return growing


def as_json(value: Mapping[str, Any]) -> bytes:
    return gzip.compress(json.dumps(value, allow_nan=False, separators=(",", ":")).encode(), _LEVEL, mtime=0)
