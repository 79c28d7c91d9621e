"""Statistics of totals as arrays over sites and steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hookstats.numbers.fields import Array, Counts
from hookstats.records.arrays import to_numpy
from hookstats.records.errors import Damaged, RunError
from hookstats.records.reading import Chosen, Reader, leave_out
from hookstats.records.timeline import Timeline

_TRIES = 10


def planes(
    reader: Reader, timeline: Timeline, row: Counts, names: Sequence[str], begin: int, end: int
) -> dict[str, Array]:
    """Planes ``[sites, end - begin]`` by the names of statistics; NaN where a site was silent.

    row: of each site by its id, its place in what is read. begin, end: places in the timeline.
    """
    for _ in range(_TRIES):
        found = {name: np.full((len(row), end - begin), np.nan) for name in names}
        try:
            _read(reader, timeline, row, found, begin, end)
            return found
        except FileNotFoundError:  # merged away meanwhile
            reader.look()
    raise RunError(f"{reader.folder}: expected files that stay for as long as they are read")


def _read(reader: Reader, timeline: Timeline, row: Counts, found: dict[str, Array], begin: int, end: int) -> None:
    if begin == end:
        return
    first, last = int(timeline.step[begin]), int(timeline.step[end - 1])
    for name in reader.listed.counting["totals"]:
        if name.last < first or name.first > last:
            continue
        try:
            rows = reader.part("totals", name, ["attempt", "record", "site", "calls", *found], Chosen((first, last)))
        except Damaged as error:
            leave_out(error)
            continue
        at = timeline.rows_of(rows)
        kept = np.flatnonzero((at >= begin) & (at < end) & (to_numpy(rows["calls"]) > 0))
        where = row[to_numpy(rows["site"])[kept]] * (end - begin) + at[kept] - begin
        is_all = len(kept) == len(rows)
        for statistic, plane in found.items():
            values = to_numpy(rows[statistic])
            plane.reshape(-1)[where] = values if is_all else values[kept]
