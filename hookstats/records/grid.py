"""Statistics of totals as arrays over sites and steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hookstats.numbers.fields import Array, Counts
from hookstats.records.arrays import to_numpy
from hookstats.records.reading import Reader
from hookstats.records.timeline import Timeline


def planes(reader: Reader, timeline: Timeline, row: Counts, names: Sequence[str]) -> dict[str, Array]:
    """Return planes ``[sites, steps]`` by the names of statistics; NaN where a site was silent.

    names: also of sums, "nans+posinfs". row: of each site by its id, its place in what is read.
    """
    summands = {name: name.split("+") for name in names}
    columns = [
        "attempt",
        "record",
        "site",
        "calls",
        *dict.fromkeys(each for some in summands.values() for each in some),
    ]

    def read() -> dict[str, Array]:
        found = {name: np.full((len(row), len(timeline.step)), np.nan) for name in names}
        for rows in reader.parts("totals", columns):
            at = timeline.rows_of(rows)
            kept = np.flatnonzero((at >= 0) & (to_numpy(rows["calls"]) > 0))
            where = row[to_numpy(rows["site"])[kept]] * len(timeline.step) + at[kept]
            for statistic, plane in found.items():
                first, *rest = (to_numpy(rows[each]) for each in summands[statistic])
                values = sum(rest, first)
                plane.reshape(-1)[where] = values if len(kept) == len(rows) else values[kept]
        return found

    return reader.try_again(read)
