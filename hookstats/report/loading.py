"""The run of a page, from its directory. The one file of this room that knows how runs are kept: it needs pyarrow, and
is imported where a run is read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hookstats.numbers.fields import Site, Skipped
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
    name = loaded._folders[0].resolve().parent.name
    if type(loaded) is not Run or loaded._chosen_sites is not None or not loaded._has_all_steps:
        return Recorded.of(list(loaded), name, loaded.findings)
    if not loaded.steps:
        raise RunError(f"{loaded._folders[0]}: {NO_STEP}")
    reader, timeline = loaded._reader, loaded._timeline
    known, steps, skipped = reader.sites, timeline.step, timeline.columns["skipped"]
    sites = merge_orders([*(loaded[step].order for step in loaded.steps[::-1][:_LOOKED_AT]), known])
    row = {site: i for i, site in enumerate(sites)}
    rows = np.array([row[site] for site in known], np.int64)

    def snapshots(wanted: Sequence[int], of: Sequence[Site]) -> Iterator[Snapshot]:
        """Yield one step after another: all their channels together may be more than the memory."""
        place = {site: i for i, site in enumerate(known)}
        chosen = Snapshots(reader, timeline, np.sort(np.array([place[site] for site in of], np.int64)))
        for at in np.searchsorted(steps, np.sort(np.array(wanted, np.int64))).tolist():
            yield from chosen.read([at])

    detailed = timeline.rows_of(reader.table("details", ["attempt", "record"], Chosen()))
    scalars = loaded.scalars
    return Recorded(
        name,
        sites,
        steps,
        lambda names: planes(reader, timeline, rows, names),
        snapshots,
        steps[np.unique(detailed[detailed >= 0])],
        timeline.time / 1e6,
        by_name(zip(*(scalars[name].to_pylist() for name in ("step", "name", "value")), strict=True)),
        loaded.findings,
        merge_skipped(
            (Site(name, tensor), Skipped(*why), step)
            for step, text in zip(steps.tolist(), skipped, strict=True)
            for name, tensor, *why in json.loads(text)
        ),
        _settings(loaded.attempts, max(timeline.columns["rows"], default=1)),
    )


def _settings(attempts: list[dict[str, Any]], rows: int) -> dict[str, Any]:
    """rows: one of so many was read, where that was read at least."""
    return {
        **attempts[-1]["settings"],
        "rows": rows,
        "attempts": len(attempts),
        "ended": attempts[-1]["ended"] or "it has not ended, or was cut off",
        "dropped": sum(each["dropped"] for each in attempts),
    }
