"""What a page needs of a run's directory. The one file of this room that knows how runs are kept, and needs pyarrow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hookstats.numbers.fields import Array, Counts, Site, Skipped
from hookstats.numbers.snapshot import Snapshot
from hookstats.report.record import Recorded, by_name, ordered

if TYPE_CHECKING:
    from hookstats.records.manifest import Manifest
    from hookstats.records.run import Run

_LOOKED_AT = 3  # steps, from the last: their order of execution is that of the page


def recorded(run: Run | str | Path) -> Recorded:
    """A run, or the directory of one (rank 0). RunError for what is no recorded run.

    Of a Run that was loaded with some sites, some steps, or ranks="merged", all Snapshots are held at once.
    """
    from hookstats.records.run import Run, load

    loaded = load(run) if isinstance(run, (str, Path)) else run
    if type(loaded) is Run and loaded._chosen_sites is None and loaded._has_all_steps:
        return _Loaded(loaded).recorded()
    return Recorded.of(list(loaded), _name(loaded), loaded.findings)


def _name(run: Run) -> str:
    return run._folders[0].resolve().parent.name


class _Loaded:
    def __init__(self, run: Run) -> None:
        self._reader = run._reader
        self._timeline = run._timeline
        self._run = run
        self._known: tuple[Manifest, NDArray[np.integer[Any]]] | None = None

    def recorded(self) -> Recorded:
        steps = self._timeline.step
        places = self._reader.manifest.sites
        orders = (snapshot.order for snapshot in self._at(steps[::-1][:_LOOKED_AT].tolist()))
        self._sites = ordered([*orders, places])
        row = {site: i for i, site in enumerate(self._sites)}
        self._row = np.array([row[site] for site in places], np.int64)
        times = self._times()
        return Recorded(
            _name(self._run),
            self._sites,
            steps,
            self._statistic,
            lambda wanted, sites: self._snapshots(wanted, sites),
            self._detailed(),
            times,
            self._scalars(),
            self._run.findings,
            self._skipped(),
            self._settings(times),
        )

    def _table(self, table: str, columns: Sequence[str]) -> tuple[Any, Counts]:
        """Its rows, and the place in steps of each; -1 for those that do not count."""
        from hookstats.records.reading import Chosen

        found = self._reader.table(table, ["attempt", "record", *columns], Chosen())
        return found, self._timeline.rows_of(found, self._reader.manifest)

    def _statistic(self, name: str) -> Array:
        from hookstats.records.arrays import to_numpy
        from hookstats.records.reading import Chosen

        if self._known is None or self._known[0] is not self._reader.manifest:
            self._known = None
            at = self._cells()
            self._known = (self._reader.manifest, at)
        manifest, at = self._known
        table = self._reader.table("totals", [name], Chosen())
        if self._reader.manifest is not manifest:  # parts were merged meanwhile: their rows have another order
            return self._statistic(name)
        plane = np.full(len(self._sites) * len(self._timeline.step) + 1, np.nan)
        plane[at] = to_numpy(table[name])
        return plane[:-1].reshape(len(self._sites), -1)

    def _cells(self) -> NDArray[np.integer[Any]]:
        """Of each row of totals, its place in a plane; behind it if the row does not count or its site was silent."""
        from hookstats.records.arrays import to_numpy

        table, rows = self._table("totals", ["site", "calls"])
        last = len(self._sites) * len(self._timeline.step)
        at: Counts = self._row[to_numpy(table["site"])] * len(self._timeline.step) + rows
        at[(rows < 0) | (to_numpy(table["calls"]) == 0)] = last
        return at.astype(np.int32) if last < 2**31 else at

    def _at(self, steps: Sequence[int]) -> Iterator[Snapshot]:
        return (self._run[step] for step in steps)

    def _snapshots(self, steps: Sequence[int], sites: Sequence[Site]) -> Iterator[Snapshot]:
        """One step after another: all their channels together may be more than the memory."""
        from hookstats.records.snapshots import Snapshots

        place = {site: i for i, site in enumerate(self._reader.manifest.sites)}
        chosen = np.sort(np.array([place[site] for site in sites], np.int64))
        reader = Snapshots(self._reader, self._timeline, chosen)
        for at in np.searchsorted(self._timeline.step, np.sort(np.array(steps, np.int64))).tolist():
            yield from reader.read([at])

    def _detailed(self) -> Counts:
        steps = self._timeline.step
        found = [rows[rows >= 0] for table in ("channels", "histograms") for _, rows in [self._table(table, [])]]
        result: Counts = steps[np.unique(np.concatenate(found))]
        return result

    def _times(self) -> Array:
        from hookstats.records.arrays import to_numpy

        table, rows = self._table("steps", ["time"])
        times = np.full(len(self._timeline.step), np.nan)
        seconds = to_numpy(table["time"]) / 1e6
        times[rows[rows >= 0]] = seconds[rows >= 0]
        return times

    def _scalars(self) -> dict[str, tuple[Counts, Array]]:
        table = self._run.scalars
        return by_name(zip(*(table[name].to_pylist() for name in ("step", "name", "value")), strict=True))

    def _skipped(self) -> list[tuple[Site, Skipped, int]]:
        table, rows = self._table("events", ["site", "reason", "times"])
        times: Counter[tuple[int, str]] = Counter()
        since: dict[tuple[int, str], int] = {}
        given_up: set[tuple[int, str]] = set()
        lines = zip(rows.tolist(), *(table[name].to_pylist() for name in ("site", "reason", "times")), strict=True)
        for row, site, reason, count in lines:
            if row < 0:
                continue
            times[site, reason] += count or 0
            since[site, reason] = min(row, since.get((site, reason), row))
            if count is None:
                given_up.add((site, reason))
        return [
            (
                self._reader.manifest.sites[site],
                Skipped(reason, None if (site, reason) in given_up else times[site, reason]),
                int(self._timeline.step[since[site, reason]]),
            )
            for site, reason in since
        ]

    def _settings(self, times: Array) -> dict[str, Any]:
        attempts = self._reader.manifest.attempts
        last = attempts[-1]
        return {
            **last.settings,
            "attempts": len(attempts),
            "ended": last.ended or "it has not ended, or was cut off",
            "dropped": sum(each.dropped for each in attempts),
        }
