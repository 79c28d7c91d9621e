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


def recorded(run: object) -> Recorded:
    """A Run, or the directory of one (rank 0). TypeError for anything else, RunError for what is no recorded run.

    Of a Run that was loaded with some sites, some steps, or ranks="merged", all Snapshots are held at once.
    """
    from hookstats.records.run import Run, load

    loaded = load(run) if isinstance(run, (str, Path)) else run
    if not isinstance(loaded, Run):
        raise TypeError(f"expected a run, its directory, a monitor that records, or Snapshots; got {loaded!r:.200}")
    if type(loaded) is Run and loaded._chosen_sites is None and loaded._has_all_steps:
        return Loaded(loaded).recorded()
    return Recorded.of(list(loaded), _name(loaded), loaded.findings)


def _name(run: Run) -> str:
    return run._folders[0].resolve().parent.name


class Loaded:
    """What of a rank's tables makes a `Recorded`. ``row``: of each site by its id, its place there."""

    def __init__(self, run: Run) -> None:
        self.reader = run._reader
        self.timeline = run._timeline
        self._run = run
        self._known: tuple[Manifest, NDArray[np.integer[Any]]] | None = None

    def recorded(self) -> Recorded:
        steps = self.timeline.step
        places = self.reader.manifest.sites
        orders = (snapshot.order for snapshot in self._at(steps[::-1][:_LOOKED_AT].tolist()))
        self._sites = ordered([*orders, places])
        row = {site: i for i, site in enumerate(self._sites)}
        self.row = np.array([row[site] for site in places], np.int64)
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
            skipped_of(*self.table("events", EVENTS), self.reader.manifest.sites, steps),
            settings_of(self.reader.manifest),
            row=self._near,
        )

    def _near(self, site: int, at: slice, names: Sequence[str]) -> list[Array]:
        from hookstats.records.arrays import to_numpy
        from hookstats.records.reading import Chosen

        steps = self.timeline.step[at]
        chosen = Chosen((int(steps[0]), int(steps[-1])), np.flatnonzero(self.row == site))
        table = self.reader.table("totals", ["attempt", "record", "calls", *names], chosen)
        rows = self.timeline.rows_of(table, self.reader.manifest) - at.start
        kept = np.flatnonzero((rows >= 0) & (rows < len(steps)) & (to_numpy(table["calls"]) > 0))
        found = np.full((len(names), len(steps)), np.nan)
        for values, name in zip(found, names, strict=True):
            values[rows[kept]] = to_numpy(table[name])[kept]
        return list(found)

    def table(self, table: str, columns: Sequence[str]) -> tuple[Any, Counts]:
        """Its rows, and the place in steps of each; -1 for those that do not count."""
        from hookstats.records.reading import Chosen

        found = self.reader.table(table, ["attempt", "record", *columns], Chosen())
        return found, self.timeline.rows_of(found, self.reader.manifest)

    def _statistic(self, name: str) -> Array:
        from hookstats.records.arrays import to_numpy
        from hookstats.records.reading import Chosen

        if self._known is None or self._known[0] is not self.reader.manifest:
            self._known = None
            at = self._cells()
            self._known = (self.reader.manifest, at)
        manifest, at = self._known
        table = self.reader.table("totals", [name], Chosen())
        if self.reader.manifest is not manifest:  # parts were merged meanwhile: their rows have another order
            return self._statistic(name)
        plane = np.full(len(self._sites) * len(self.timeline.step) + 1, np.nan)
        plane[at] = to_numpy(table[name])
        return plane[:-1].reshape(len(self._sites), -1)

    def _cells(self) -> NDArray[np.integer[Any]]:
        """Of each row of totals, its place in a plane; behind it if the row does not count or its site was silent."""
        from hookstats.records.arrays import to_numpy

        table, rows = self.table("totals", ["site", "calls"])
        last = len(self._sites) * len(self.timeline.step)
        at: Counts = self.row[to_numpy(table["site"])] * len(self.timeline.step) + rows
        at[(rows < 0) | (to_numpy(table["calls"]) == 0)] = last
        return at.astype(np.int32) if last < 2**31 else at

    def _at(self, steps: Sequence[int]) -> Iterator[Snapshot]:
        return (self._run[step] for step in steps)

    def _snapshots(self, steps: Sequence[int], sites: Sequence[Site]) -> Iterator[Snapshot]:
        """One step after another: all their channels together may be more than the memory."""
        from hookstats.records.snapshots import Snapshots

        place = {site: i for i, site in enumerate(self.reader.manifest.sites)}
        chosen = np.sort(np.array([place[site] for site in sites], np.int64))
        reader = Snapshots(self.reader, self.timeline, chosen)
        for at in np.searchsorted(self.timeline.step, np.sort(np.array(steps, np.int64))).tolist():
            yield from reader.read([at])

    def _detailed(self) -> Counts:
        steps = self.timeline.step
        found = [rows[rows >= 0] for table in ("channels", "histograms") for _, rows in [self.table(table, [])]]
        result: Counts = steps[np.unique(np.concatenate(found))]
        return result

    def _times(self) -> Array:
        from hookstats.records.arrays import to_numpy

        table, rows = self.table("steps", ["time"])
        times = np.full(len(self.timeline.step), np.nan)
        seconds = to_numpy(table["time"]) / 1e6
        times[rows[rows >= 0]] = seconds[rows >= 0]
        return times

    def _scalars(self) -> dict[str, tuple[Counts, Array]]:
        table = self._run.scalars
        return by_name(zip(*(table[name].to_pylist() for name in ("step", "name", "value")), strict=True))


EVENTS = ("site", "reason", "times")


def skipped_of(table: Any, rows: Counts, sites: Sequence[Site], steps: Counts) -> list[tuple[Site, Skipped, int]]:
    """What was skipped, from the table of `EVENTS`. rows: of each its place in steps; -1 where it does not count."""
    times: Counter[tuple[int, str]] = Counter()
    since: dict[tuple[int, str], int] = {}
    given_up: set[tuple[int, str]] = set()
    lines = zip(rows.tolist(), *(table[name].to_pylist() for name in EVENTS), strict=True)
    for row, site, reason, count in lines:
        if row < 0:
            continue
        times[site, reason] += count or 0
        since[site, reason] = min(row, since.get((site, reason), row))
        if count is None:
            given_up.add((site, reason))
    return [
        (
            sites[site],
            Skipped(reason, None if (site, reason) in given_up else times[site, reason]),
            int(steps[since[site, reason]]),
        )
        for site, reason in since
    ]


def settings_of(manifest: Manifest) -> dict[str, Any]:
    last = manifest.attempts[-1]
    return {
        **last.settings,
        "attempts": len(manifest.attempts),
        "ended": last.ended or "it has not ended, or was cut off",
        "dropped": sum(each.dropped for each in manifest.attempts),
    }
