"""The store of one rank: steps into Parquet parts, which count as soon as the manifest names them.

What is on disk is whole at every moment: a part is written under a temporary name, synced and renamed, and the manifest
that names it also says how far the ring was consumed. Whatever else lies there is of a writer that died, and goes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import pyarrow as pa

from hookstats.numbers.fields import Counts
from hookstats.numbers.frame import StepFrame
from hookstats.numbers.given import Given
from hookstats.records import encoding, files, manifest, merging
from hookstats.records.errors import RunError
from hookstats.records.manifest import Attempt, Manifest, Part
from hookstats.records.parts import OpenPart
from hookstats.records.schema import FLUSH, ROW_GROUP, SCHEMAS

_P = ParamSpec("_P")
_T = TypeVar("_T")
_OURS = re.compile(r"[0-9]{8,18}\.parquet(\.tmp)?")
_SMALL = ("steps", "scalars", "samples", "events")


def _all_or_broken(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """What fails half way leaves memory and disk apart: from then on the disk alone says how things are."""

    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        store: Any = args[0]
        if store._broken:
            raise RuntimeError(f"{store.directory}: closed, or an earlier call failed; expected a new Store")
        try:
            return method(*args, **kwargs)
        except BaseException:
            store._broken = True
            store._abandon()
            raise

    checked.__doc__, checked.__name__ = method.__doc__, method.__name__
    return checked


class Store:
    """Opens or makes the directory of a rank. One process at a time may have it open: who writes holds a lock.

    OSError from any method: nothing of the open part has come to count, and this object is done for; a new Store on the
    same directory begins with what was committed, which `consumed` says. RunError, or SchemaError for another version,
    where the directory holds anything else than a run.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._broken = False
        self._attempt: Attempt | None = None
        self._open: dict[str, OpenPart] = {}
        for table in SCHEMAS:
            (directory / table).mkdir(parents=True, exist_ok=True)
            if (directory / table).is_symlink():
                raise RunError(f"{directory / table}: expected a folder, got a link to one")
        try:
            self._manifest = manifest.read(directory)
        except FileNotFoundError:
            left = [path for table in SCHEMAS for path in (directory / table).glob("*.parquet")]
            if left:  # what no manifest names is removed: without one, that would be the whole run
                raise RunError(f"{directory / 'manifest.json'}: expected it beside {left[0]}, got no file") from None
            self._manifest = Manifest()
            self._manifest.write(directory)
        self._sites = list(self._manifest.sites)  # with those of the open part
        self._id_of = {site: i for i, site in enumerate(self._sites)}
        self._remove_leftovers()
        self._forget()

    def _remove_leftovers(self) -> None:
        for table, parts in self._manifest.parts.items():
            named = {part.file for part in parts}
            for path in (self.directory / table).iterdir():
                if path.name not in named and _OURS.fullmatch(path.name):
                    path.unlink()

    def _forget(self) -> None:
        """The open part is empty."""
        self._totals: list[dict[str, Any]] = []  # of steps
        self._rows: dict[str, list[dict[str, Any]]] = {table: [] for table in _SMALL}
        self._held = 0  # bytes of totals that are not written
        self._added = 0  # records
        self._open = {}
        self._closed: dict[str, list[Part]] = {table: [] for table in SCHEMAS}
        self.size = 0  # bytes of the open part, before compression

    def _abandon(self) -> None:
        for part in self._open.values():
            part.abandon()
        self._forget()

    @_all_or_broken
    def begin(self, attempt: int, settings: dict[str, Any]) -> None:
        """A new attempt, of a higher number than all before, or one that has not ended, after its writer has died.

        settings: what JSON holds; kept in the manifest. ValueError for an attempt that has ended, or an older number.
        """
        known = self._manifest.find(attempt)
        if known is not None and known.ended is not None:
            raise ValueError(f"expected an attempt that has not ended; attempt {attempt} is {known.ended}")
        if known is None:
            latest = max((each.attempt for each in self._manifest.attempts), default=-1)
            if attempt <= latest:
                raise ValueError(f"expected an attempt after {latest}, got {attempt}")
            known = Attempt(attempt, settings, time.time())
            self._write(replace(self._manifest, attempts=[*self._manifest.attempts, known]))
        self._attempt = known

    def consumed(self, attempt: int) -> int:
        """The position in the attempt's ring up to which everything is committed; 0 for an attempt not begun."""
        known = self._manifest.find(attempt)
        return 0 if known is None else known.consumed

    def ended(self, attempt: int) -> bool:
        """Whether an attempt has ended."""
        known = self._manifest.find(attempt)
        return known is not None and known.ended is not None

    @_all_or_broken
    def add(self, frame: StepFrame) -> None:
        """A step, which counts with the next `commit`. What is kept of it is copied."""
        attempt = self._begun()
        new = dict.fromkeys(site for site in [*frame.sites, *frame.skipped] if site not in self._id_of)
        for site in new:
            self._id_of[site] = len(self._sites)
            self._sites.append(site)
        ids: Counts = np.array([self._id_of[site] for site in frame.sites], np.int64)
        record = attempt.records + self._added
        key = encoding.Key(frame.step, round(frame.time * 1e6), attempt.attempt, record)
        self._totals.append(encoding.totals_of(frame, key, ids))
        size = len(ids) * 8 * len(SCHEMAS["totals"])
        self._held += size
        self.size += size
        for table, tables in (("channels", encoding.channels_tables), ("histograms", encoding.histograms_tables)):
            for rows, size in tables(frame, key, ids, self._sites):
                self._part(table).write(rows)
                self.size += size
        self._rows["steps"].append(encoding.step_row(frame, key, len(ids)))
        for number, scalars in frame.earlier_scalars.items():
            self._rows["scalars"] += encoding.scalar_rows(scalars, key._replace(step=number), measured=False)
        self._rows["scalars"] += encoding.scalar_rows(frame.scalars, key, measured=True)
        self._rows["samples"] += encoding.sample_rows(frame.sample_ids, key)
        self._rows["events"] += encoding.event_rows(frame, key, self._id_of)
        self._added += 1
        if self._held >= FLUSH:
            self._flush_totals()
        self._flush_many_rows()

    @_all_or_broken
    def add_given(self, given: Given, time: float) -> None:
        """Of steps that are not recorded; it counts with the next `commit`.

        time: when it came, in seconds since the epoch.
        """
        key = encoding.Key(0, round(time * 1e6), self._begun().attempt, -1)
        for number, each in given.scalars.items():
            self._rows["scalars"] += encoding.scalar_rows(each, key._replace(step=number), measured=False)
        self._rows["samples"] += encoding.sample_rows(given.sample_ids, key)
        self._flush_many_rows()

    def _flush_many_rows(self) -> None:
        ids = sum(len(row["ids"]) for row in self._rows["samples"])
        if len(self._rows["scalars"]) + len(self._rows["events"]) > ROW_GROUP or ids * 8 > FLUSH:
            self._flush_rows()

    def _flush_totals(self) -> None:
        """A file of its own: each file of totals is sorted by site and step."""
        steps, self._totals, self._held = self._totals, [], 0
        if any(len(each["site"]) for each in steps):
            self._part("totals").write(encoding.totals_table(steps, self._sites))
            self._close("totals")

    def _flush_rows(self) -> None:
        for table, rows in self._rows.items():
            if rows:
                self._part(table).write(encoding.small_table(table, rows, self._sites))
                rows.clear()

    def _part(self, table: str) -> OpenPart:
        if table not in self._open:
            self._open[table] = OpenPart(self.directory / table, table, self._next_file())
        return self._open[table]

    def _next_file(self) -> int:
        number = self._manifest.next_file
        self._manifest.next_file += 1
        return number

    def _close(self, table: str) -> None:
        part = self._open[table].close(level=0)
        del self._open[table]
        self._closed[table].append(part)

    def _begun(self) -> Attempt:
        if self._attempt is None:
            raise RuntimeError("expected begin(attempt, settings) before this")
        return self._attempt

    @_all_or_broken
    def commit(self, consumed: int) -> None:
        """All that was added counts, and the ring is consumed up to here; or, with an OSError, neither."""
        self._commit(replace(self._begun(), consumed=consumed))

    @_all_or_broken
    def finish(
        self, attempt: int, how: str = "closed", dropped: int = 0, told: Mapping[str, Any] | None = None
    ) -> None:
        """Commits, and the attempt has ended: "closed" or "died"; dropped: steps for which the ring had no room.

        told: what else is to stand in its settings.
        """
        if attempt != self._begun().attempt:
            raise ValueError(f"expected the attempt that was begun, {self._begun().attempt}; got {attempt}")
        begun = self._begun()
        self._commit(replace(begun, ended=how, dropped=dropped, settings={**begun.settings, **(told or {})}))
        self._attempt = None

    def _commit(self, attempt: Attempt) -> None:
        if self._totals:
            self._flush_totals()
        self._flush_rows()
        for table in list(self._open):
            self._close(table)
        for table, closed in self._closed.items():
            for part in closed:
                files.rename(self.directory / table / (part.file + files.TEMPORARY))
            if closed:
                files.sync_directory(self.directory / table)
        attempt = replace(attempt, records=attempt.records + self._added)
        attempts = [attempt if each.attempt == attempt.attempt else each for each in self._manifest.attempts]
        parts = {table: [*self._manifest.parts[table], *closed] for table, closed in self._closed.items()}
        self._write(replace(self._manifest, attempts=attempts, parts=parts, sites=list(self._sites)))
        self._attempt = attempt
        self._forget()
        pa.default_memory_pool().release_unused()

    def _write(self, new: Manifest) -> None:
        if len(new.sites) > len(self._manifest.sites):
            new.write_sites(self.directory)
        new.write(self.directory)
        self._manifest = new

    @_all_or_broken
    def merge(self, between: Callable[[], object] = lambda: None) -> bool:
        """Several parts of a level into one of the next, where there are enough; True: something was merged.

        between: called now and then, for what must not wait so long; it may add and commit.
        The old ones go when the manifest no longer names them; a reader that has lost a part reads the manifest again.
        """
        for table, parts in self._manifest.parts.items():
            chosen = merging.choose(parts)
            if chosen:
                self._merge(table, parts[chosen], between)
                return True
        return False

    def _merge(self, table: str, old: list[Part], between: Callable[[], object]) -> None:
        folder = self.directory / table
        merged = OpenPart(folder, table, self._next_file())
        try:
            for rows in merging.merged(table, [folder / part.file for part in old], self._manifest.sites):
                merged.write(rows)
                between()
            part = merged.close(level=old[0].level + 1)
        except BaseException:
            merged.abandon()
            raise
        files.rename(folder / (part.file + files.TEMPORARY))
        files.sync_directory(folder)
        parts = list(self._manifest.parts[table])
        begin = parts.index(old[0])
        parts[begin : begin + len(old)] = [part]
        self._write(replace(self._manifest, parts={**self._manifest.parts, table: parts}))
        for each in old:
            (folder / each.file).unlink()
        pa.default_memory_pool().release_unused()

    def close(self) -> None:
        """What was not committed is forgotten."""
        self._abandon()
        self._broken = True
