"""The record of a run that grows: read once, and then what came since."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hookstats.numbers.fields import Array
from hookstats.records.arrays import to_arrow, to_numpy
from hookstats.records.errors import RunError
from hookstats.records.manifest import Manifest
from hookstats.records.reading import Chosen
from hookstats.records.run import findings_in, load
from hookstats.report.loading import EVENTS, Loaded, scalars_of, settings_of, skipped_of
from hookstats.report.record import Recorded, together
from hookstats.rules import Finding
from hookstats.serve.columns import Columns

_TRIES = 3  # where parts are merged meanwhile
_FAR = 1 << 62  # further than any step
_CELLS = 1 << 19  # of a plane that are read at once


class Source:
    """``recorded``: rank 0 as it was when it was last read. Its rows stay in their order; it has no planes.

    ``columns``: to which its planes are added, by whoever reads them here.
    """

    def __init__(self, path: Path, name: str) -> None:
        """RunError, OSError as for `hookstats.load`. ValueError where nothing was measured yet."""
        self._findings = path / "rank=0" / "findings.jsonl"
        self._findings_read = 0  # bytes
        for _ in range(_TRIES):
            run = load(path)
            if not run.steps:
                raise ValueError("nothing was measured yet")
            self._reader, manifest = run._reader, run._reader.manifest
            loaded = Loaded(run)
            found = loaded.recorded()
            if self._reader.manifest is manifest:
                break
        else:
            raise RunError(f"{path}: expected parts that stay for as long as they are read")
        if not found.sites:
            raise ValueError("nothing was measured yet")
        self._timeline, self._row, self._grid = loaded.timeline, loaded.row, loaded.grid
        self._last = max(self._timeline.base)  # the attempt that may go on
        self._records = self._timeline.base[self._last][1]
        self._seen = _seen(manifest)
        self.recorded = replace(found, name=name, grows=True, findings=self._new_findings() or [])
        self.columns = Columns(len(found.sites), len(found.steps))

    def stretches(self) -> list[tuple[int, int]]:
        """Of the steps that were there at first: what `read` gives of each lies side by side."""
        return self._grid.stretches(_CELLS)

    def read(self, names: Sequence[str], begin: int, end: int) -> dict[str, Array]:
        """Planes of these steps, by their places among those that were there at first."""
        return self._grid.read(names, begin, end)

    def more(self) -> dict[str, Array] | None:
        """Planes ``[n, new steps]`` of `Columns.ALL`, and ``recorded`` has what is new.

        None: more is new than steps behind those that were there (another attempt, other sites); read it anew.
        """
        for _ in range(_TRIES):
            self._reader.refresh()
            manifest = self._reader.manifest
            new = self._new(manifest)
            if self._reader.manifest is manifest:
                findings = self._new_findings() if new else None
                if new is None or findings is None:
                    return None
                recorded, planes = new
                self.recorded = replace(recorded, findings=[*recorded.findings, *findings])
                self._records, self._seen = manifest.attempts[-1].records, _seen(manifest)
                return planes
        return None

    def _new(self, manifest: Manifest) -> tuple[Recorded, dict[str, Array]] | None:
        """What ``recorded`` becomes, but for its findings, and what `more` gives."""
        old, last, seen = self.recorded, manifest.attempts[-1], _seen(manifest)
        if seen[0] != self._seen[0] or last.attempt != self._last:
            return None
        count, after = last.records - self._records, int(old.steps[-1])
        table = self._behind("steps", ["record", "step", "time", "sites"], after)
        record, steps, times, sites = (to_numpy(table[name]) for name in ("record", "step", "time", "sites"))
        is_next = len(record) == count and (record == self._records + np.arange(count)).all()
        planes = self._planes(after, count, int(sites.sum())) if is_next and (np.diff(steps) > 0).all() else None
        latest = max([after, *(int(numbers[-1]) for numbers, _ in old.scalars.values())])
        scalars = self._behind("scalars", ["step", "name", "value"], latest)
        events = self._behind("events", ["record", *EVENTS], after)
        is_all = all(
            len(table) == seen[1][name] - self._seen[1][name]
            for name, table in (("scalars", scalars), ("events", events))
        )
        if planes is None or not is_all or (np.diff(to_numpy(scalars["step"])) < 0).any():
            return None
        both = dict(old.scalars)
        for name, more in scalars_of(scalars).items():
            known = both.get(name, (np.empty(0, np.int64), np.empty(0)))
            both[name] = (np.append(known[0], more[0]), np.append(known[1], more[1]))
        skipped = skipped_of(events, to_numpy(events["record"]) - self._records, manifest.sites, steps)
        tables = [to_numpy(self._behind(name, ["record"], after)["record"]) for name in ("channels", "histograms")]
        places = np.unique(np.concatenate(tables)) - self._records
        recorded = replace(
            old,
            steps=np.append(old.steps, steps),
            times=None if old.times is None else np.append(old.times, times / 1e6),
            detailed=np.append(old.detailed, steps[places[(places >= 0) & (places < count)]]),
            scalars=both,
            skipped=together([*old.skipped, *skipped]),
            settings=settings_of(manifest),
        )
        return recorded, planes

    def _behind(self, table: str, columns: Sequence[str], after: int) -> pa.Table:
        """What the last attempt has of later steps: an earlier one may have gone further."""
        found = self._reader.table(table, ["attempt", *columns], Chosen((after + 1, _FAR)))
        is_last = to_numpy(found["attempt"]) == self._last
        return found if is_last.all() else found.filter(to_arrow(is_last, pa.bool_()))

    def _planes(self, after: int, count: int, expected: int) -> dict[str, Array] | None:
        """None where a row belongs to another step. expected: how many rows there are."""
        table = self._behind("totals", ["record", "site", "calls", *Columns.ALL], after)
        site, record = to_numpy(table["site"]), to_numpy(table["record"]) - self._records
        if len(site) != expected or ((record < 0) | (record >= count)).any():
            return None
        if len(site) and not 0 <= site.min() <= site.max() < len(self._row):
            return None
        calls = to_numpy(table["calls"])
        fired = slice(None) if calls.all() else np.flatnonzero(calls)
        where = (self._row[site] * count + record)[fired]
        planes = {}
        for name in Columns.ALL:
            flat = np.full(len(self._row) * count, np.nan)
            flat[where] = to_numpy(table[name])[fired]
            planes[name] = flat.reshape(len(self._row), count)
        return planes

    def _new_findings(self) -> list[Finding] | None:
        """Those of lines that have come and count; None where the file is shorter than it was."""
        try:
            with self._findings.open("rb") as file:
                if file.seek(0, 2) < self._findings_read:
                    return None
                file.seek(self._findings_read)
                text = file.read()
        except FileNotFoundError:
            return [] if not self._findings_read else None
        self._findings_read += text.rfind(b"\n") + 1
        found = findings_in(self._findings, text)
        return [each for each in found if not self._timeline.is_replaced(each.step, each.attempt)]


def _seen(manifest: Manifest) -> tuple[Any, dict[str, int]]:
    """What stays as it is where only the last attempt goes on; and rows of tables, whatever parts hold them."""
    others = [(each.attempt, each.records) for each in manifest.attempts[:-1]]
    rows = {table: sum(part.rows for part in manifest.parts[table]) for table in ("scalars", "events")}
    return (others, manifest.attempts[-1].attempt, len(manifest.sites)), rows
