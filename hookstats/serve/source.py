"""The record of a run that grows: read once, and then what came since."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hookstats.numbers.fields import Array, Counts, Site, Skipped
from hookstats.records.arrays import to_arrow, to_numpy
from hookstats.records.errors import RunError
from hookstats.records.grid import Grid
from hookstats.records.manifest import Manifest
from hookstats.records.reading import Chosen
from hookstats.records.run import load
from hookstats.report.loading import EVENTS, Loaded, settings_of, skipped_of
from hookstats.report.record import by_name
from hookstats.rules import Finding
from hookstats.serve.columns import Columns

_TRIES = 3  # where parts are merged meanwhile
_FAR = 1 << 62  # further than any step
_CELLS = 1 << 19  # of a plane that are read at once


@dataclass
class New:
    """What came since: arrays over the new steps, planes ``[n, new steps]`` by statistic, and the rest."""

    steps: Counts
    times: Array
    planes: dict[str, Array]
    detailed: Counts
    scalars: dict[str, tuple[Counts, Array]]
    skipped: list[tuple[Site, Skipped, int]]


class Source:
    """``recorded``: rank 0 as it was when it was last read. Its rows stay in their order; it has no planes."""

    def __init__(self, path: Path, name: str) -> None:
        """RunError, OSError as for `hookstats.load`. ValueError where nothing was measured yet."""
        self._findings = _Findings(path / "rank=0" / "findings.jsonl")
        for _ in range(_TRIES):
            run = load(path)
            loaded = Loaded(run)
            manifest = loaded.reader.manifest
            found = loaded.recorded()
            if loaded.reader.manifest is manifest:
                break
        else:
            raise RunError(f"{path}: expected parts that stay for as long as they are read")
        if not len(found.steps) or not found.sites:
            raise ValueError("nothing was measured yet")
        self._reader, self._timeline = loaded.reader, loaded.timeline
        self._row = loaded.row
        self._grid = Grid(self._reader, self._timeline, self._row)
        self._last = max(self._timeline.base)  # the attempt that may go on
        self._records = self._timeline.base[self._last][1]
        self._seen = _seen(manifest)
        last = [int(steps[-1]) for steps, _ in found.scalars.values() if len(steps)]
        self._last_scalar = max([int(found.steps[-1]), *last])
        self.recorded = replace(found, name=name, grows=True, findings=self._counting(self._findings.more() or []))

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
                found = self._findings.more() if new else None
                if new is None or found is None:
                    return None
                self._take(new, found, manifest)
                return new.planes
        return None

    def _new(self, manifest: Manifest) -> New | None:
        last = manifest.attempts[-1]
        if _seen(manifest)[0] != self._seen[0] or last.attempt != self._last:
            return None
        count = last.records - self._records
        after = int(self.recorded.steps[-1])
        if count:
            table = self._behind("steps", ["record", "step", "time", "sites"], after)
            record, steps, times, sites = (to_numpy(table[name]) for name in ("record", "step", "time", "sites"))
            is_next = len(record) == count and (record == self._records + np.arange(count)).all()
            planes = self._planes(after, count, int(sites.sum())) if is_next and (np.diff(steps) > 0).all() else None
        else:
            steps, times = np.empty(0, np.int64), np.empty(0)
            planes = {name: np.empty((len(self._row), 0)) for name in Columns.ALL}
        scalars = self._scalars(manifest)
        events = self._behind("events", ["record", *EVENTS], after)
        is_all = len(events) == _seen(manifest)[1]["events"] - self._seen[1]["events"]
        if planes is None or scalars is None or not is_all:
            return None
        skipped = skipped_of(events, to_numpy(events["record"]) - self._records, manifest.sites, steps)
        tables = [to_numpy(self._behind(name, ["record"], after)["record"]) for name in ("channels", "histograms")]
        places = np.unique(np.concatenate(tables)) - self._records
        detailed = steps[places[(places >= 0) & (places < count)]]
        return New(steps, times / 1e6, planes, detailed, scalars, skipped)

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
            planes[name] = flat.reshape(-1, count)
        return planes

    def _scalars(self, manifest: Manifest) -> dict[str, tuple[Counts, Array]] | None:
        """None where some came that are not of later steps."""
        table = self._behind("scalars", ["step", "name", "value"], self._last_scalar)
        is_all = len(table) == _seen(manifest)[1]["scalars"] - self._seen[1]["scalars"]
        if not is_all or (np.diff(to_numpy(table["step"])) < 0).any():
            return None
        return by_name(zip(*(table[name].to_pylist() for name in ("step", "name", "value")), strict=True))

    def _take(self, new: New, findings: list[Finding], manifest: Manifest) -> None:
        old = self.recorded
        scalars = dict(old.scalars)
        for name, more in new.scalars.items():
            known = scalars.get(name, (np.empty(0, np.int64), np.empty(0)))
            scalars[name] = (np.append(known[0], more[0]), np.append(known[1], more[1]))
            self._last_scalar = max(self._last_scalar, int(more[0][-1]))
        steps = np.append(old.steps, new.steps)
        self._records += len(new.steps)
        self._seen = _seen(manifest)
        self.recorded = replace(
            old,
            steps=steps,
            times=None if old.times is None else np.append(old.times, new.times),
            detailed=np.append(old.detailed, new.detailed),
            scalars=scalars,
            skipped=_together(old.skipped, new.skipped),
            settings=settings_of(manifest),
            findings=[*old.findings, *self._counting(findings)] if findings else old.findings,
        )

    def _counting(self, findings: Sequence[Finding]) -> list[Finding]:
        return [each for each in findings if not self._timeline.is_replaced(each.step, each.attempt)]


def _seen(manifest: Manifest) -> tuple[Any, dict[str, int]]:
    """What stays as it is where only the last attempt goes on; and rows of tables, whatever parts hold them."""
    others = [(each.attempt, each.records) for each in manifest.attempts[:-1]]
    rows = {table: sum(part.rows for part in manifest.parts[table]) for table in ("scalars", "events")}
    return (others, manifest.attempts[-1].attempt, len(manifest.sites)), rows


def _together(
    old: Sequence[tuple[Site, Skipped, int]], new: Sequence[tuple[Site, Skipped, int]]
) -> list[tuple[Site, Skipped, int]]:
    found = {(site, why.reason): (why.times, since) for site, why, since in old}
    for site, why, since in new:
        times, first = found.get((site, why.reason), (0, since))
        both = None if times is None or why.times is None else times + why.times
        found[site, why.reason] = (both, min(first, since))
    return [(site, Skipped(reason, times), since) for (site, reason), (times, since) in found.items()]


class _Findings:
    """A file to which lines are appended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0  # bytes that were read

    def more(self) -> list[Finding] | None:
        """Those of whole lines that have come; None where the file is shorter than it was. RunError for other lines."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._at:
                    return None
                file.seek(self._at)
                text = file.read()
        except FileNotFoundError:
            return [] if not self._at else None
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        try:
            return [Finding.from_json(json.loads(line)) for line in whole.split(b"\n")[:-1]]
        except (ValueError, TypeError, RecursionError) as error:
            raise RunError(f"{self._path}: expected a finding in each line; {str(error)[:300]}") from None
