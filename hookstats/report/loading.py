"""What a page needs of a run's directory. The one file of this room that knows how runs are kept: it needs pyarrow, and
is imported where a run is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hookstats.numbers.fields import Array, Counts, Site, Skipped
from hookstats.numbers.snapshot import Snapshot
from hookstats.records.arrays import to_numpy
from hookstats.records.errors import NO_STEP, RunError
from hookstats.records.grid import Grid
from hookstats.records.manifest import Manifest
from hookstats.records.reading import Chosen
from hookstats.records.run import Run, load
from hookstats.records.snapshots import Snapshots
from hookstats.report.record import Recorded, by_name, ordered, together

_LOOKED_AT = 3  # steps, from the last: their order of execution is that of the page


def recorded(run: object) -> Recorded:
    """A Run, or the directory of one (rank 0). TypeError for anything else, RunError for what is no recorded run,
    or one without a step.

    Of a Run that was loaded with some sites, some steps, or ranks="merged", all Snapshots are held at once.
    """
    loaded = load(run) if isinstance(run, (str, Path)) else run
    if not isinstance(loaded, Run):
        raise TypeError(f"expected a run, its directory, a monitor that records, or Snapshots; got {loaded!r:.200}")
    if type(loaded) is Run and loaded._chosen_sites is None and loaded._has_all_steps:
        if not loaded.steps:
            raise RunError(f"{loaded._folders[0]}: {NO_STEP}")
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
        known = self.reader.manifest.sites
        orders = (run[step].order for step in run.steps[::-1][:_LOOKED_AT])
        self.sites = ordered([*orders, known])
        row = {site: i for i, site in enumerate(self.sites)}
        self.row = np.array([row[site] for site in known], np.int64)
        self.grid = Grid(self.reader, self.timeline, self.row)

    def recorded(self) -> Recorded:
        steps = self.timeline.step
        return Recorded(
            _name(self._run),
            self.sites,
            steps,
            lambda name: self.grid.read([name], 0, len(steps))[name],
            self._snapshots,
            self._detailed(),
            self.timeline.time / 1e6,
            scalars_of(self._run.scalars),
            self._run.findings,
            skipped_of(*self._table("events", EVENTS), self.reader.manifest.sites, steps),
            settings_of(self.reader.manifest),
            row=self._near,
        )

    def _near(self, site: int, at: slice, names: Sequence[str]) -> list[Array]:
        steps = self.timeline.step[at]
        chosen = Chosen((int(steps[0]), int(steps[-1])), np.flatnonzero(self.row == site))
        table = self.reader.table("totals", ["attempt", "record", "calls", *names], chosen)
        rows = self.timeline.rows_of(table, self.reader.manifest) - at.start
        kept = np.flatnonzero((rows >= 0) & (rows < len(steps)) & (to_numpy(table["calls"]) > 0))
        found = np.full((len(names), len(steps)), np.nan)
        for values, name in zip(found, names, strict=True):
            values[rows[kept]] = to_numpy(table[name])[kept]
        return list(found)

    def _table(self, table: str, columns: Sequence[str]) -> tuple[Any, Counts]:
        """Its rows, and the place in steps of each; -1 for those that do not count."""
        found = self.reader.table(table, ["attempt", "record", *columns], Chosen())
        return found, self.timeline.rows_of(found, self.reader.manifest)

    def _snapshots(self, steps: Sequence[int], sites: Sequence[Site]) -> Iterator[Snapshot]:
        """One step after another: all their channels together may be more than the memory."""
        place = {site: i for i, site in enumerate(self.reader.manifest.sites)}
        chosen = np.sort(np.array([place[site] for site in sites], np.int64))
        reader = Snapshots(self.reader, self.timeline, chosen)
        for at in np.searchsorted(self.timeline.step, np.sort(np.array(steps, np.int64))).tolist():
            yield from reader.read([at])

    def _detailed(self) -> Counts:
        found = [rows[rows >= 0] for table in ("channels", "histograms") for _, rows in [self._table(table, [])]]
        result: Counts = self.timeline.step[np.unique(np.concatenate(found))]
        return result


def scalars_of(table: Any) -> dict[str, tuple[Counts, Array]]:
    """Scalars by their names, as `Recorded` has them, from rows of the table scalars."""
    return by_name(zip(*(table[name].to_pylist() for name in ("step", "name", "value")), strict=True))


EVENTS = ("site", "reason", "times")


def skipped_of(table: Any, rows: Counts, sites: Sequence[Site], steps: Counts) -> list[tuple[Site, Skipped, int]]:
    """What was skipped, from the table of `EVENTS`. rows: of each its place in steps; -1 where it does not count."""
    lines = zip(rows.tolist(), *(table[name].to_pylist() for name in EVENTS), strict=True)
    return together(
        (sites[site], Skipped(reason, times), int(steps[row])) for row, site, reason, times in lines if row >= 0
    )


def settings_of(manifest: Manifest) -> dict[str, Any]:
    last = manifest.attempts[-1]
    return {
        **last.settings,
        "attempts": len(manifest.attempts),
        "ended": last.ended or "it has not ended, or was cut off",
        "dropped": sum(each.dropped for each in manifest.attempts),
    }
