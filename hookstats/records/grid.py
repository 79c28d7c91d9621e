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


def planes(reader: Reader, timeline: Timeline, row: Counts, names: Sequence[str]) -> dict[str, Array]:
    """Return planes ``[sites, steps]`` by the names of statistics; NaN where a site was silent.

    names: also of sums, "nans+posinfs". row: of each site by its id, its place in what is read.
    """
    for _ in range(_TRIES):
        found = {name: np.full((len(row), len(timeline.step)), np.nan) for name in names}
        try:
            _read(reader, timeline, row, found)
            return found
        except FileNotFoundError:  # merged away meanwhile
            reader.list_again()
    raise RunError(f"{reader.folder}: expected files that stay for as long as they are read")


def _read(reader: Reader, timeline: Timeline, row: Counts, found: dict[str, Array]) -> None:
    summands = {statistic: statistic.split("+") for statistic in found}
    columns = [
        "attempt",
        "record",
        "site",
        "calls",
        *dict.fromkeys(each for some in summands.values() for each in some),
    ]
    for name in reader.listed.counting["totals"]:
        try:
            rows = reader.part("totals", name, columns, Chosen())
        except Damaged as error:
            leave_out(error)
            continue
        at = timeline.rows_of(rows)
        kept = np.flatnonzero((at >= 0) & (to_numpy(rows["calls"]) > 0))
        where = row[to_numpy(rows["site"])[kept]] * len(timeline.step) + at[kept]
        is_all = len(kept) == len(rows)
        for statistic, plane in found.items():
            first, *rest = (to_numpy(rows[each]) for each in summands[statistic])
            values = sum(rest, first)
            plane.reshape(-1)[where] = values if is_all else values[kept]
