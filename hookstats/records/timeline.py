"""The recorded steps that count, over all attempts of a rank."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from hookstats.numbers.fields import Bins, Counts, bins_from_json
from hookstats.records.arrays import to_arrow, to_numpy
from hookstats.records.reading import Chosen, Reader
from hookstats.records.schema import SCHEMAS


@dataclass
class Timeline:
    """The steps that count, ascending; arrays ``[steps]``."""

    step: Counts
    time: Counts  # microseconds since the epoch
    attempt: Counts
    record: Counts
    since: Counts  # no step before this one came with it
    columns: dict[str, list[Any]]  # the others of the table steps
    bins: list[Bins | None]
    begun: dict[int, int]  # of an attempt: its smallest step, measured or not
    recorded: dict[int, int]  # of an attempt: how many steps it measured, whether they count or not

    def __post_init__(self) -> None:
        self._places = dict[int, Counts]()  # of an attempt: of each of its records the step, and -1 for all others
        for attempt in np.unique(self.attempt).tolist():
            rows = np.flatnonzero(self.attempt == attempt)
            self._places[attempt] = places = np.full(self.record[rows].max() + 2, -1)
            places[self.record[rows]] = rows

    def is_replaced(self, step: int, attempt: int) -> bool:
        """Tell whether a later attempt began at this step, or before."""
        return any(first <= step for later, first in self.begun.items() if later > attempt)

    def rows_of(self, table: pa.Table) -> Counts:
        """Return the step that each row of a table belongs to; -1 for rows that do not count, or came later."""
        attempt, record = to_numpy(table["attempt"]), to_numpy(table["record"])
        found: Counts = np.full(len(record), -1)
        for number, places in self._places.items():
            found = np.where(attempt == number, places[np.minimum(record, len(places) - 1)], found)
        return found

    def scalars_that_count(self, table: pa.Table) -> Counts:
        """Return the rows of the table scalars that count, by step and then as they were recorded; else as `rows_of`.

        Steps that were not measured are replaced as others are: by an attempt that began before, and of a number that
        came twice, the later counts.
        """
        step, attempt, record = (to_numpy(table[name]) for name in ("step", "attempt", "record"))
        return _select_counting(step, attempt, record, self.begun)


def read(reader: Reader) -> Timeline:
    table = reader.table("steps", SCHEMAS["steps"].names, Chosen())
    begun = dict(reader.listed.begun)
    attempt, record, step, sites = (to_numpy(table[name]) for name in ("attempt", "record", "step", "sites"))
    whole = (sites == 0) | reader.find_covered("totals", step, attempt)
    order = np.lexsort((record, attempt))
    since = np.array([begun[number] for number in attempt.tolist()], np.int64)
    before, after = order[:-1], order[1:]
    goes_on = (attempt[before] == attempt[after]) & (step[before] < step[after])
    since[after[goes_on]] = step[before[goes_on]] + 1
    order = order[whole[order]]
    chosen = order[_select_counting(step[order], attempt[order], record[order], begun)]
    rest = [name for name in SCHEMAS["steps"].names if name not in ("step", "attempt", "record", "time")]
    columns = {name: table[name].take(to_arrow(chosen, pa.int64())).to_pylist() for name in rest}
    bins = [None if text is None else _bins(text) for text in columns["histogram"]]
    recorded = dict(zip(*(each.tolist() for each in np.unique(attempt, return_counts=True)), strict=True))
    time = to_numpy(table["time"])
    step, time, attempt, record, since = (each[chosen] for each in (step, time, attempt, record, since))
    return Timeline(step, time, attempt, record, since, columns, bins, begun, recorded)


def _select_counting(step: Counts, attempt: Counts, record: Counts, begun: dict[int, int]) -> Counts:
    """Return the rows that count, by step, in the order in which they are given.

    What an attempt recorded from the step on with which a higher one began does not count, also where the higher one
    has not come that far. Of a number that an attempt gave twice, the later record counts, whose rows come last.
    """
    counts = np.ones(len(step), bool)
    for later, first in begun.items():
        counts &= (attempt >= later) | (step < first)
    rows = np.flatnonzero(counts)
    rows = rows[np.argsort(step[rows], kind="stable")]
    if not len(rows):
        return rows
    is_last = np.append(step[rows][1:] != step[rows][:-1], True)
    last = rows[is_last][np.cumsum(is_last) - is_last]  # of each row, the last one of its step
    result: Counts = rows[(attempt[rows] == attempt[last]) & (record[rows] == record[last])]
    return result


@lru_cache(64)  # those of most steps are the same
def _bins(text: str) -> Bins:
    return bins_from_json(json.loads(text))
