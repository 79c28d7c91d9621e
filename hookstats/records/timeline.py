"""Which recorded steps count, over all attempts of a rank."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from hookstats.numbers.fields import Bins, Counts, bins_from_json
from hookstats.numbers.ranks import StepRanks
from hookstats.records.arrays import to_arrow, to_numpy
from hookstats.records.errors import RunError
from hookstats.records.manifest import Manifest
from hookstats.records.reading import Chosen, Reader
from hookstats.records.schema import SCHEMAS


@dataclass
class Timeline:
    """The steps that count, ascending; arrays ``[steps]``.

    ``row``: of each recorded step, by attempt and record, its place here; -1 where it does not count.
    """

    step: Counts
    time: Counts  # microseconds since the epoch
    attempt: Counts
    columns: dict[str, list[Any]]  # the others of the table steps
    bins: list[Bins | None]
    ranks: list[StepRanks]  # whose numbers each has
    base: dict[int, tuple[int, int]]  # of an attempt: where its records begin in `row`, and how many there are
    row: Counts
    begun: dict[int, int]  # of an attempt: its smallest step, measured or not

    def is_replaced(self, step: int, attempt: int) -> bool:
        """Whether a later attempt began at this step, or before."""
        return any(first <= step for later, first in self.begun.items() if later > attempt)

    def rows_of(self, table: pa.Table, manifest: Manifest) -> Counts:
        """Of the rows of a table: which step each belongs to; -1 for those that do not count, or came later.

        manifest: the one by which the table was read. RunError for rows of steps that nobody recorded.
        """
        attempt, record = to_numpy(table["attempt"]), to_numpy(table["record"])
        rows = np.full(len(attempt), -1, np.int64)
        of_recorded = record == -1  # scalars that came with no step
        for each in manifest.attempts:
            here = (attempt == each.attempt) & (record >= 0) & (record < each.records)
            of_recorded |= here
            if each.attempt in self.base:
                begin, size = self.base[each.attempt]
                here &= record < size
                rows[here] = self.row[begin + record[here]]
        if not of_recorded.all():
            raise RunError("expected rows of recorded steps, got others")
        return rows

    def scalars_that_count(self, table: pa.Table, manifest: Manifest) -> Counts:
        """Which rows of the table scalars count, by step and then as they were recorded; as `rows_of` for the rest.

        Steps that were not measured are replaced as others are: by an attempt that began before, and of a number that
        came twice, the later counts.
        """
        self.rows_of(table, manifest)
        step, attempt, record = (to_numpy(table[name]) for name in ("step", "attempt", "record"))
        counts = record == -1
        for number, (_, size) in self.base.items():
            counts |= (attempt == number) & (record < size)
        for later, first in self.begun.items():
            counts &= (attempt >= later) | (step < first)
        rows = np.flatnonzero(counts)
        rows = rows[np.argsort(step[rows], kind="stable")]
        if not len(rows):
            return rows
        is_last = np.append(step[rows][1:] != step[rows][:-1], True)
        last = rows[is_last][np.cumsum(is_last) - is_last]  # of each row, the last one of its step
        result: Counts = rows[(attempt[rows] == attempt[last]) & (record[rows] == record[last])]
        return result


def read(reader: Reader) -> Timeline:
    """RunError where the attempts have other steps than the manifest says."""
    table = reader.table("steps", SCHEMAS["steps"].names, Chosen())
    attempt, record, step = (to_numpy(table[name]) for name in ("attempt", "record", "step"))
    order = np.lexsort((record, attempt))
    table, attempt, record, step = table.take(to_arrow(order, pa.int64())), attempt[order], record[order], step[order]
    counts = {each.attempt: each.records for each in reader.manifest.attempts if each.records}
    expected = sum(counts.values())
    right = len(step) == expected
    if right and expected:
        right = bool((attempt == np.repeat(list(counts), list(counts.values()))).all())
        right &= bool((record == np.concatenate([np.arange(count) for count in counts.values()])).all())
    if not right:
        raise RunError(f"{reader.directory}: expected {expected} recorded steps, each once, got {len(step)}")
    since = to_numpy(table["since"])
    if (since > step).any():
        raise RunError(
            f"{reader.directory}: expected scalars of steps before that with which they came, got later ones"
        )
    chosen = _counting(step, attempt, since)
    begins = np.cumsum([0, *counts.values()]).tolist()
    base = {number: (begin, count) for (number, count), begin in zip(counts.items(), begins, strict=False)}
    row = np.full(len(step), -1, np.int64)
    row[chosen] = np.arange(len(chosen))
    rest = [name for name in SCHEMAS["steps"].names if name not in ("step", "attempt", "record", "time")]
    columns = {name: table[name].take(to_arrow(chosen, pa.int64())).to_pylist() for name in rest}
    bins = [None if text is None else _bins(text) for text in columns["histogram"]]
    ranks = list(map(_ranks, columns["ranks"]))
    time = to_numpy(table["time"])
    begun = {number: int(since[attempt == number].min()) for number in counts}
    return Timeline(step[chosen], time[chosen], attempt[chosen], columns, bins, ranks, base, row, begun)


def _counting(step: Counts, attempt: Counts, since: Counts) -> Counts:
    """The rows that count, by step. What an attempt recorded from the step on with which a higher one began does not
    count, also where the higher one has not come that far; of a number that an attempt gave twice, the later counts.

    step, attempt: sorted by attempt, and in an attempt by time. since: the smallest step of which a row has scalars.
    """
    counts = np.ones(len(step), bool)
    begun = np.inf
    for number in np.unique(attempt)[::-1]:
        here = attempt == number
        counts[here] = step[here] < begun
        begun = min(begun, since[here].min())
    rows = np.flatnonzero(counts)
    rows = rows[np.argsort(step[rows], kind="stable")]
    is_last = np.append(step[rows][1:] != step[rows][:-1], True) if len(rows) else np.empty(0, bool)
    result: Counts = rows[is_last]
    return result


@lru_cache(64)  # those of most steps are the same
def _bins(text: str) -> Bins:
    try:
        return bins_from_json(json.loads(text))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"expected the bins of a histogram, got {text[:100]!r}: {error}") from None


@lru_cache(64)
def _ranks(text: Any) -> StepRanks:
    try:
        return StepRanks.from_text(text)
    except (ValueError, AttributeError) as error:
        raise RunError(f"expected whose numbers a step has, got {str(text)[:100]!r}: {error}") from None
