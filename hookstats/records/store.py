"""The store of one rank: steps into Parquet files, which count as soon as those of `steps` have their name.

What is on disk is whole at every moment: a file is written under a temporary name, synced and renamed, that of `steps`
after all others. What lies there of a writer that died goes, and what cannot be read is set aside.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hookstats.numbers.fields import Counts, Site
from hookstats.numbers.frame import StepFrame
from hookstats.numbers.given import Given
from hookstats.records import encoding, files
from hookstats.records.arrays import to_arrow, to_numpy
from hookstats.records.attempts import Attempt, end_attempt, is_training, read_attempt
from hookstats.records.errors import Damaged, RunError
from hookstats.records.parts import Name, OpenPart, Progress, list_parts, read_footer
from hookstats.records.reading import Chosen, Reader, read_sites
from hookstats.records.schema import FLUSH, ROW_GROUP, SCHEMAS, make_writer_schema, names_of

FAN_IN = 4  # files that become one
# Bytes: such a file is not made larger, of totals and of other tables. In one of totals a site's rows lie together, and
# fewer files are read faster. Rows of others stay as they are: writing them anew would save no reading.
_LARGE_SORTED, _LARGE = 16 << 20, 2 << 20


class Store:
    """Opens or makes the directory of a rank. One process at a time may have it open: who writes holds a lock.

    OSError from any method: nothing of the open commit has come to count, and this object is done for; a new Store on
    the same directory begins with what was committed, which `read_progress` says. SchemaError for another version's
    run. ``set_aside``: what could not be read, with the reason.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.set_aside: list[Damaged] = []
        self._attempt: Attempt | None = None
        self._progress = Progress()
        self._open: dict[str, OpenPart] = {}
        for table in SCHEMAS:
            (folder / table).mkdir(parents=True, exist_ok=True)
            if (folder / table).is_symlink():
                raise RunError(f"{folder / table}: expected a folder, got a link to one")
        self._forget()
        self._set_damaged_aside()
        self._sites = read_sites(folder)  # with those of the open commit
        self._written_sites = len(self._sites) if (folder / "sites.json").exists() else 0
        self._id_of = {site: i for i, site in enumerate(self._sites)}

    def _set_damaged_aside(self) -> None:
        for table, names in list_parts(self.folder).counting.items():
            for name in names:
                self._try_part(table, name)
        for path in [self.folder / "sites.json", *self.folder.glob("a*.json")]:
            try:
                files.read_json(path)
            except FileNotFoundError:
                continue
            except Damaged as error:
                number = path.stem[1:]
                is_alive = number.isdigit() and is_training(self.folder, int(number), None)
                if path.stat().st_size and not is_alive:  # an empty one is of a process that has just begun
                    self.put_aside(error)

    def _try_part(self, table: str, name: Name) -> Progress | None:
        """Return what a file says of its attempt. None: it cannot be read, and is set aside."""
        path = self.folder / table / str(name)
        try:
            return read_footer(path)[1]._replace(turn=name.turn, last=name.last)
        except Damaged as error:
            self.put_aside(error)
            return None

    def put_aside(self, error: Damaged) -> None:
        self.set_aside.append(error)
        files.set_aside(error.path)

    def check_rows(self) -> None:
        """Read all of it, and set aside what cannot be read."""
        if not list_parts(self.folder).begun:
            return
        reader = Reader(self.folder)
        for table, names in reader.listed.counting.items():
            for name in names:
                try:
                    for _ in reader.pieces(table, name, SCHEMAS[table].names):
                        pass
                except Damaged as error:
                    self.put_aside(error)

    def _forget(self) -> None:
        """Empty the open commit."""
        self._taken: list[encoding.Taken] = []  # that no row group has yet
        self._added = 0  # measured steps
        self._numbers: list[int] = []  # of all steps, the first and the last
        self._open = {}
        self.size = self._flushed = 0  # bytes, before compression: of all, and of those that are in row groups

    def close(self) -> None:
        """Forget what was not committed."""
        for part in self._open.values():
            part.abandon()
        self._forget()

    def begin(self, attempt: int, settings: dict[str, Any]) -> None:
        """An attempt of a higher number than all before, or one that has not ended, after its writer has died.

        settings: of one that no process has described. ValueError for an attempt that has ended, or an older number.
        """
        listed = list_parts(self.folder)
        latest = max(listed.begun, default=attempt)
        try:
            known = read_attempt(self.folder, attempt)
        except (FileNotFoundError, Damaged):
            if attempt < latest:
                raise ValueError(f"expected an attempt after {latest}, got {attempt}") from None
            known = Attempt(attempt, settings, time.time())
            known.write(self.folder)
        if known.ended is not None:
            raise ValueError(f"expected an attempt that has not ended; attempt {attempt} is {known.ended}")
        for table, names in listed.others.items():
            for name in names:
                (self.folder / table / str(name)).unlink(missing_ok=True)
        for path in self.folder.glob(f"*/*{files.TEMPORARY}"):
            if path.parent.name in SCHEMAS and path.name.startswith(("open.", "merged.")):
                path.unlink()
        self._progress = self.read_progress(attempt)
        self._attempt = known

    def read_progress(self, attempt: int) -> Progress:
        """Return what the last commit says, in whatever table can be read; zeros for an attempt not begun."""
        found = [Progress()]
        for table, names in list_parts(self.folder).counting.items():
            for name in [each for each in names if each.attempt == attempt][-1:]:
                found += [told for told in [self._try_part(table, name)] if told is not None]
        reached = [
            (turn, last) for (number, turn), last in list_parts(self.folder).reached.items() if number == attempt
        ]
        turn, last = max(reached, default=(1, None))
        return max(found, key=lambda each: each[:3])._replace(turn=turn, last=last)

    def add(self, frame: StepFrame) -> None:
        """A step, which counts with the next `commit`; until then its memory must stay as it is."""
        attempt = self._require_attempt()
        for site in dict.fromkeys(site for site in [*frame.sites, *frame.skipped] if site not in self._id_of):
            self._id_of[site] = len(self._sites)
            self._sites.append(site)
        ids: Counts = np.array([self._id_of[site] for site in frame.sites], np.int64)
        record = self._progress.records + self._added
        given = Given({**frame.earlier_scalars, frame.step: frame.scalars}, frame.sample_ids)
        self._added += 1
        self._take(
            encoding.Taken(frame.step, round(frame.time * 1e6), attempt.attempt, record, given, frame, ids),
            [frame.step],
        )

    def add_given(self, given: Given, time: float) -> None:
        """Add what was given with steps that are not recorded; it counts with the next `commit`.

        time: when it came, in seconds since the epoch.
        """
        self._take(encoding.Taken(0, round(time * 1e6), self._require_attempt().attempt, -1, given), [])

    def _take(self, taken: encoding.Taken, numbers: list[int]) -> None:
        self._taken.append(taken)
        self.size += taken.size
        both = [*self._numbers, *numbers, *taken.given.scalars, *taken.given.sample_ids]
        self._numbers = [min(both), max(both)] if both else []
        if self.size - self._flushed >= FLUSH:
            self._flush()

    def _flush(self) -> None:
        """Write row groups. Each of totals is sorted by site and step; `merge` sorts several."""
        taken, self._taken, self._flushed = self._taken, [], self.size
        for table, rows in encoding.encode(taken, self._sites):
            self._part(table).write(rows)

    def _part(self, table: str) -> OpenPart:
        if table not in self._open:
            self._open[table] = OpenPart(self.folder / table, table)
        return self._open[table]

    def _require_attempt(self) -> Attempt:
        if self._attempt is None:
            raise RuntimeError("expected begin(attempt, settings) before this")
        return self._attempt

    def commit(self, consumed: int, held: int | None = None) -> None:
        """Make all that was added count, with the ring consumed up to here; or, with an OSError, nothing of it.

        held: see `Progress`; None: nothing is.
        """
        attempt, before = self._require_attempt(), self._progress
        self._flush()
        if not self._numbers:
            return
        first, last = self._numbers
        turn = before.turn + (before.last is not None and first <= before.last)
        after = Progress(consumed, consumed if held is None else held, before.records + self._added, turn, last)
        self._part("steps")  # also where there is none: it says that the others count
        if len(self._sites) > self._written_sites:
            files.write_json(self.folder / "sites.json", {"sites": [list(site) for site in self._sites]})
            self._written_sites = len(self._sites)
        for part in self._open.values():
            part.close(after)
        for table in sorted(self._open, key=lambda table: table == "steps"):
            self._open[table].rename(Name(attempt.attempt, turn, first, last))
            files.sync_directory(self.folder / table)
        self._progress = after
        self._forget()
        pa.default_memory_pool().release_unused()

    def finish(self, attempt: int, how: str = "closed", dropped: int = 0, told: dict[str, Any] | None = None) -> None:
        """End the attempt, as `Attempt.ended` says it. dropped: steps for which the ring had no room.

        told: what else is to stand in its settings.
        """
        if attempt != self._require_attempt().attempt:
            raise ValueError(f"expected the attempt that was begun, {self._require_attempt().attempt}; got {attempt}")
        self.commit(self._progress.consumed)
        end_attempt(self.folder, self._require_attempt(), how, dropped, told or {})
        self._attempt = None

    def merge(self, between: Callable[[], object] = lambda: None) -> bool:
        """Make one file of several of a table, where there are enough; True: some were merged.

        between: called now and then, for what must not wait so long; it may add and commit.
        The old ones go when the new one has its name, and do not count from then on.
        """
        for table, names in list_parts(self.folder).counting.items():
            chosen = self._choose(table, names)
            if chosen:
                self._merge(table, chosen, between)
                return True
        return False

    def _choose(self, table: str, names: list[Name]) -> list[Name]:
        """Neighbours of about one size: each row is then merged only a few times, however long the run is."""
        sizes = []
        for name in names:
            with suppress(FileNotFoundError):
                sizes.append(os.stat(self.folder / table / str(name)).st_size)
        for begin in range(len(sizes) - FAN_IN + 1):
            chosen, size = names[begin : begin + FAN_IN], sizes[begin : begin + FAN_IN]
            largest, most = max(size), _LARGE_SORTED if table == "totals" else _LARGE
            if len({name[:2] for name in chosen}) == 1 and largest < most and 2 * largest <= sum(size):
                return chosen
        return []

    def _merge(self, table: str, names: list[Name], between: Callable[[], object]) -> None:
        told = [each for name in names if (each := self._try_part(table, name)) is not None]
        if len(told) < len(names):
            return
        merged = OpenPart(self.folder / table, table, "merged")
        try:
            for rows in self._merge_rows(table, names):
                merged.write(rows)
                between()
            merged.close(told[-1])
        except Damaged as error:
            merged.abandon()
            return self.put_aside(error)
        except BaseException:
            merged.abandon()
            raise
        merged.rename(names[0]._replace(last=names[-1].last))
        files.sync_directory(self.folder / table)
        for name in names:
            (self.folder / table / str(name)).unlink()
        pa.default_memory_pool().release_unused()

    def _merge_rows(self, table: str, names: list[Name]) -> Iterator[pa.Table]:
        """Totals sorted by site and step, some sites at a time; the others one file after another."""
        reader, schema = Reader(self.folder), make_writer_schema(table)
        columns = [name for name in schema.names if "site" not in schema.names or name not in Site._fields]

        def add_names(rows: pa.Table) -> pa.Table:
            named = names_of(self._sites, to_numpy(rows["site"])) if "site" in columns else {}
            return pa.Table.from_arrays([named[n] if n in named else rows[n] for n in schema.names], schema=schema)

        if table != "totals":
            for name in names:
                yield from map(add_names, reader.pieces(table, name, columns))
            return
        count = sum(reader.footer(table, name).num_rows for name in names)
        several = max(1, FAN_IN * ROW_GROUP * len(self._sites) // count)  # of each file about a row group
        for first in range(0, len(self._sites), several):
            chosen = Chosen(sites=np.arange(first, min(first + several, len(self._sites))))
            rows = pa.concat_tables([reader.part(table, name, columns, chosen) for name in names])
            if len(rows):
                sorting = np.lexsort([to_numpy(rows[key]) for key in ("record", "step", "site")])
                yield add_names(rows.take(to_arrow(sorting, pa.int64())))
