"""What the page of a run is made from, made anew when the run has grown; and what differs from an earlier one."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from hookstats.numbers.fields import Array
from hookstats.report import planes
from hookstats.report.loading import recorded
from hookstats.report.page import page
from hookstats.report.record import Recorded
from hookstats.report.writing import detailed, of_all_sites, overview
from hookstats.serve.changes import Told, changes
from hookstats.serve.columns import Columns
from hookstats.serve.runs import Both, Watched
from hookstats.serve.source import Source

_KEPT = 4  # versions of a run: a page that shows an older one is sent all of the newest
_RUNS = 4  # of which versions are kept; one that was not asked for longest goes
_REST = 4.0  # times as long as reading all of a run took, that is not done again
_REST_DETAILS = 20.0  # times as long as details took, these are not told again
_LEAST = 1.0  # seconds between two looks at a run
_PATIENCE = 60.0  # seconds that somebody waits for a blob that is being made
_LEVEL = 4  # of gzip
_NO_DETAILS: dict[str, Any] = {"details": {}, "windows": [], "precision": None}
_reading = threading.Lock()  # one run at a time
_detailing = threading.Lock()  # the same of details, which take longer: others are read meanwhile


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
        """A blob in gzip, behind a byte: 0, or 1 where what makes it of an earlier version's is told: see `changes`.

        KeyError for another name.
        """
        if name not in self.blobs:
            self.is_whole.wait(_PATIENCE)
        key = (name, 0 if old is None else old.number)
        if key not in self._packed:
            blob, new = self.blobs[name], None
            if old is not None and name in old.blobs:
                new = changes(name, Told(old.record, old.blobs[name]), Told(self.record, blob))
            self._packed[key] = gzip.compress(b"\0" + blob if new is None else b"\1" + new, _LEVEL, mtime=0)
        return self._packed[key]


class Growing:
    """A run of which versions are made while somebody looks."""

    def __init__(self, watched: Watched | Both) -> None:
        self.watched = watched
        self.versions: OrderedDict[int, Version] = OrderedDict()
        self.error: Exception | None = None
        self._source: Source | None = None
        self._shown: Recorded | None = None  # what the newest version is made of
        self._details = _NO_DETAILS
        self._pictures: dict[str, bytes] = {}
        self._detailed: object = None  # of what there were details
        self._mark: tuple[int, ...] | None = None  # of what all is told
        self._read: tuple[int, ...] | None = None  # of what was read
        self._lock = threading.Lock()
        self._making: threading.Thread | None = None
        self._rested = self._rested_anew = self._rested_details = 0.0  # when that may be done again
        self._slow = 0.0  # seconds that the last look has taken for what is not to be done often
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
        began = time.monotonic()
        self._slow = 0.0
        try:
            with _reading:
                mark = self.watched.mark()
                is_done = self._look(mark)
            if is_done:
                is_done = _detailing.acquire(blocking=False)  # else at a later look
                if is_done:
                    try:
                        is_done = self._tell()
                    finally:
                        _detailing.release()
        except Exception as error:  # deleted or torn, also while it is read: a page says so
            self.error, is_done = error, True
            self._source = self._shown = self._detailed = None
            self._slow = time.monotonic() - began
        finally:
            self._is_told.set()
        with self._lock:
            if is_done:
                self._mark = mark
            self._rested = time.monotonic() + max(_LEAST, _REST * self._slow)

    def _look(self, mark: tuple[int, ...]) -> bool:
        """Reads what is new, and publishes it. False: it is too early for that."""
        source = self._source
        if source is None or mark != self._read:
            new = None if source is None else source.more()
            if source is not None and new is not None:
                source.columns.begin(new)
                source.columns.complete(new)
                self._publish_source(source, _blobs(source.columns))
            elif time.monotonic() < self._rested_anew:
                return False
            else:
                self._begin()
            self._read = mark
        return True

    def _begin(self) -> None:
        """All of the run: first what the first picture shows, then the rest."""
        began = time.monotonic()
        source = Source(self.watched.path, self.watched.name)
        for given in _ahead(source, Columns.FIRST):
            source.columns.begin(given)
        first = self._publish_source(source, source.columns.heatmaps(["rms"]), is_whole=False)
        try:
            for given in _ahead(source, Columns.ALL):
                source.columns.complete(given)
            first.blobs |= _blobs(source.columns)
        finally:
            first.is_whole.set()
        self._publish_source(source, first.blobs)
        self._source = source
        self._rested_anew = time.monotonic() + _REST * (time.monotonic() - began)

    def _publish_source(self, source: Source, blobs: dict[str, bytes], is_whole: bool = True) -> Version:
        record = overview(source.recorded, source.columns.measured, source.columns.fired)
        return self._publish(source.recorded, record, blobs, is_whole)

    def _tell(self) -> bool:
        """Publishes what is told of some sites only, as often as it takes little time. False: it is too early."""
        newest, run = self.newest, self._shown
        assert newest is not None
        assert run is not None
        now = (run.sites, len(run.detailed), len(run.findings))
        if now == self._detailed:
            return True
        if time.monotonic() < self._rested_details:
            return False
        began = time.monotonic()
        self._details, self._pictures = detailed(self._with_snapshots(run), newest.record, newest.blobs)
        self._detailed = now
        rest = {name: blob for name, blob in newest.blobs.items() if name not in newest.pictures}
        self._publish(run, newest.record, rest)
        self._rested_details = time.monotonic() + _REST_DETAILS * (time.monotonic() - began)
        return True

    def _with_snapshots(self, run: Recorded) -> Recorded:
        """With those that have come since its first steps were read, too."""
        return replace(recorded(self.watched.path), sites=run.sites, findings=run.findings)

    def _publish(
        self, run: Recorded, record: dict[str, Any], blobs: dict[str, bytes], is_whole: bool = True
    ) -> Version:
        """A newer version. record, blobs: with what is told of some sites, or without. is_whole: no blob is missing."""
        if self._shown is None or self._shown.sites != run.sites:
            self._details, self._pictures = _NO_DETAILS, {}
        self._number += 1
        version = Version(
            self._number,
            {**record, **self._details, "version": self._number},
            blobs | self._pictures,
            set(self._pictures),
        )
        if is_whole:
            version.is_whole.set()
        with self._lock:
            self.versions[version.number] = version
            while len(self.versions) > _KEPT:
                self.versions.popitem(last=False)
        self._shown, self.error = run, None
        self._is_told.set()
        return version


class GrowingPair(Growing):
    """Two runs on one page that grows. All of both is read again when one of them has grown.

    `Columns` are added to at their end alone. A step that only one run has is a column already, empty for the other
    run. When that run comes to the step, what was reduced before changes in its middle. Of two runs that are recorded
    at the same time, nearly every step is such a step.
    """

    def __init__(self, both: Both) -> None:
        super().__init__(both)
        self._runs = both.runs

    def _look(self, mark: tuple[int, ...]) -> bool:
        if self._shown is None or mark != self._read:
            began = time.monotonic()
            first, second = (_recorded(run) for run in self._runs)
            self._publish(first, *of_all_sites(first, second))
            self._read = mark
            self._slow = time.monotonic() - began
        return True

    def _with_snapshots(self, run: Recorded) -> Recorded:
        return run


def _recorded(run: Watched) -> Recorded:
    found = replace(recorded(run.path), grows=True, name=run.name)
    if not len(found.steps) or not found.sites:
        raise ValueError(f"{run.name}: nothing was measured yet")
    return found


def _blobs(columns: Columns) -> dict[str, bytes]:
    return columns.heatmaps(planes.STATISTICS) | columns.lines()


def _ahead(source: Source, names: Sequence[str]) -> Iterator[dict[str, Array]]:
    """Planes of all steps, a stretch after another: the next one is read while one is reduced."""
    with ThreadPoolExecutor(1) as reader:
        waiting: Future[dict[str, Array]] | None = None
        for begin, end in source.stretches():
            coming = reader.submit(source.read, names, begin, end)
            if waiting:
                yield waiting.result()
            waiting = coming
        if waiting:
            yield waiting.result()


class Kept:
    """Those runs that were looked at last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: OrderedDict[str, Growing] = OrderedDict()

    def get(self, id: str, make: Callable[[], Growing]) -> Growing:
        with self._lock:
            growing = self._runs.get(id) or make()
            self._runs[id] = growing
            self._runs.move_to_end(id)
            while len(self._runs) > _RUNS:
                self._runs.popitem(last=False)
            return growing


def as_json(value: Mapping[str, Any]) -> bytes:
    return gzip.compress(json.dumps(value, allow_nan=False, separators=(",", ":")).encode(), _LEVEL, mtime=0)
