"""The run of a page, from its directory. The one file of this room that knows how runs are kept: it needs pyarrow, and
is imported where a run is read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hookstats.numbers.fields import Array, Counts, Site, Skipped
from hookstats.numbers.snapshot import Snapshot
from hookstats.records.errors import NO_STEP, RunError
from hookstats.records.grid import planes
from hookstats.records.reading import Chosen
from hookstats.records.run import Run, load
from hookstats.records.snapshots import Snapshots
from hookstats.report.record import Recorded, by_name, merge_orders, merge_skipped

_LOOKED_AT = 3  # steps, from the last: their order of execution is that of the page


def load_recorded(run: object) -> Recorded:
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
        return _Loaded(loaded).make_recorded()
    return Recorded.of(list(loaded), _name(loaded), loaded.findings)


def _name(run: Run) -> str:
    return run._folders[0].resolve().parent.name


class _Loaded:
    """The tables of a rank, which make a `Recorded`."""

    def __init__(self, run: Run) -> None:
        self._run, self._reader, self._timeline = run, run._reader, run._timeline
        self._known = self._reader.sites
        orders = (run[step].order for step in run.steps[::-1][:_LOOKED_AT])
        self._sites = merge_orders([*orders, self._known])
        row = {site: i for i, site in enumerate(self._sites)}
        self._row = np.array([row[site] for site in self._known], np.int64)

    def make_recorded(self) -> Recorded:
        steps = self._timeline.step
        return Recorded(
            _name(self._run),
            self._sites,
            steps,
            lambda names: planes(self._reader, self._timeline, self._row, names),
            self._snapshots,
            self._list_detailed(),
            self._timeline.time / 1e6,
            self._scalars(),
            self._run.findings,
            self._list_skipped(),
            self._settings(),
        )

    def _snapshots(self, steps: Sequence[int], sites: Sequence[Site]) -> Iterator[Snapshot]:
        """Yield one step after another: all their channels together may be more than the memory."""
        place = {site: i for i, site in enumerate(self._known)}
        chosen = np.sort(np.array([place[site] for site in sites], np.int64))
        reader = Snapshots(self._reader, self._timeline, chosen)
        for at in np.searchsorted(self._timeline.step, np.sort(np.array(steps, np.int64))).tolist():
            yield from reader.read([at])

    def _list_detailed(self) -> Counts:
        found = self._timeline.rows_of(self._reader.table("details", ["attempt", "record"], Chosen()))
        result: Counts = self._timeline.step[np.unique(found[found >= 0])]
        return result

    def _scalars(self) -> dict[str, tuple[Counts, Array]]:
        table = self._run.scalars
        return by_name(zip(*(table[name].to_pylist() for name in ("step", "name", "value")), strict=True))

    def _list_skipped(self) -> list[tuple[Site, Skipped, int]]:
        return merge_skipped(
            (Site(name, tensor), Skipped(*why), step)
            for step, text in zip(self._timeline.step.tolist(), self._timeline.columns["skipped"], strict=True)
            for name, tensor, *why in json.loads(text)
        )

    def _settings(self) -> dict[str, Any]:
        attempts = self._run.attempts
        return {
            **attempts[-1]["settings"],
            "rows": max(self._timeline.columns["rows"], default=1),  # of one of so many, where that was read at least
            "attempts": len(attempts),
            "ended": attempts[-1]["ended"] or "it has not ended, or was cut off",
            "dropped": sum(each["dropped"] for each in attempts),
        }
