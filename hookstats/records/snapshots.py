"""Rows of a rank's tables as Snapshots, the same as were measured, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hookstats.numbers.fields import FIELDS, Array, Counts, histogram_shape
from hookstats.numbers.frame import LazyBlocks, Sites, StepFrame, block_of
from hookstats.numbers.snapshot import Snapshot
from hookstats.records.arrays import is_null, to_arrow, to_numpy
from hookstats.records.errors import LeftOut
from hookstats.records.reading import Chosen, Reader
from hookstats.records.schema import SAME_AS, STATE
from hookstats.records.timeline import Timeline
from hookstats.records.wire import about_from

_SITES = ["site", "place", "order", "calls", "scale", "channels", "keeps_channels", "channel_dim", "group_size"]
_SITES += ["has_histogram"]
_AT_ONCE = 200_000  # rows of totals that are held: about 60 MB


class Snapshots:
    """The Snapshots of a rank, of all sites or of some. Channels and histograms are read when they are asked for."""

    def __init__(self, reader: Reader, timeline: Timeline, sites: Counts | None) -> None:
        """sites: their ids, ascending; None: all."""
        self._reader = reader
        self._timeline = timeline
        self._sites = sites
        self._shown = None if sites is None else {reader.sites[site] for site in sites.tolist()}

    def read(self, rows: Sequence[int]) -> Iterator[Snapshot]:
        """Yield the Snapshots whose rows can be read. rows: of the timeline, ascending."""
        sizes = np.cumsum([0, *(self._timeline.columns["sites"][row] for row in rows)])
        begin = 0
        while begin < len(rows):
            end = max(int(np.searchsorted(sizes, sizes[begin] + _AT_ONCE, side="right")) - 1, begin + 1)
            yield from self._read(rows[begin:end])
            begin = end

    def _read(self, rows: Sequence[int]) -> Iterator[Snapshot]:
        values = list(dict.fromkeys([*STATE.values(), *SAME_AS.values()]))
        totals = self.table("totals", [*_SITES, *values], rows)
        scalars = self.table("scalars", ["step", "name", "value"], rows)
        samples = self.table("samples", ["step", "ids"], rows)
        at = self._timeline.step[rows], self._timeline.attempt[rows]
        is_detailed = self._reader.find_covered("details", *at)
        for i, row in enumerate(rows):
            if self._sites is not None or len(totals[i]) == self._timeline.columns["sites"][row]:
                frame = self._frame(row, totals[i], bool(is_detailed[i]))
                yield Snapshot(replace(frame, **self._read_given(row, scalars[i], samples[i])))

    def table(self, table: str, columns: Sequence[str], rows: Sequence[int]) -> list[pa.Table]:
        """Return the rows of each of these steps, as `read_ordered` has them."""
        found, of = self.read_ordered(table, columns, rows)
        begins, ends = (np.searchsorted(of, list(rows), side=side) for side in ("left", "right"))
        return [found.slice(begin, end - begin) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]

    def read_ordered(self, table: str, columns: Sequence[str], rows: Sequence[int]) -> tuple[pa.Table, Counts]:
        """Return the rows of these steps, by step, then of totals by place, of the others as they were recorded.

        And of each row, the step's row of the timeline.
        """
        first, last = (int(self._timeline.step[row]) for row in (rows[0], rows[-1])) if rows else (0, -1)
        is_given = table in ("scalars", "samples")
        if is_given:
            first = int(self._timeline.since[list(rows)].min())
        chosen = Chosen((first, last), None if is_given else self._sites)
        found = self._reader.table(table, list(dict.fromkeys(["attempt", "record", *columns])), chosen)
        of = self._timeline.rows_of(found)
        order = np.lexsort((to_numpy(found["place"]), of)) if "place" in columns else np.argsort(of, kind="stable")
        order = order[np.isin(of[order], rows)]
        return found.take(to_arrow(order, pa.int64())), of[order]

    def _read_given(self, row: int, scalars: pa.Table, samples: pa.Table) -> dict[str, Any]:
        """Return what came with a step, as a StepFrame has it."""
        of_step = {name: values[row] for name, values in self._timeline.columns.items()}
        named: dict[int, dict[str, float]] = {}
        for number, name, value in zip(*(scalars[name].to_pylist() for name in scalars.column_names[2:]), strict=True):
            named.setdefault(number, {})[name] = value
        said = about_from({**of_step, **{name: json.loads(of_step[name]) for name in ("drifts", "skipped")}})
        if self._shown is not None:
            said["skipped"] = {site: why for site, why in said["skipped"].items() if site in self._shown}
        return {
            "scalars": named.pop(int(self._timeline.step[row]), {}),
            "earlier_scalars": named,
            "sample_ids": dict(zip(samples["step"].to_pylist(), lists(samples["ids"]), strict=True)),
            **said,
        }

    def _frame(self, row: int, totals: pa.Table, is_detailed: bool) -> StepFrame:
        """Make a frame, of totals alone if the files with details cannot be read."""
        ids, calls = to_numpy(totals["site"]), to_numpy(totals["calls"])
        order, fired = to_numpy(totals["order"]), np.flatnonzero(~is_null(totals["order"]))
        wholes, bins, n = _wholes_of(totals), self._timeline.bins[row], len(ids)
        measured = to_numpy(totals["channels"])
        channels = measured if is_detailed else np.ones(n, np.int32)
        keeps = to_numpy(totals["keeps_channels"]) & (channels == measured)
        counters = np.array([int(np.prod(histogram_shape(bins, width))) for width in channels.tolist()], np.int64)
        counters = np.where(to_numpy(totals["has_histogram"]) & is_detailed, counters, 0)
        widths = np.where(channels > 1, channels, 0)
        place = {site: i for i, site in enumerate(ids.tolist())}

        def read(block: int) -> Counts:
            """Return the totals, the states of several channels, or the histograms."""
            if block == 0:
                return np.ascontiguousarray(wholes.T).view(np.int64).reshape(-1)
            if block == 1:
                return block_of(self._details(row, place, list(STATE.values()), widths))
            return block_of([], [counts[0] for counts in self._details(row, place, ["counts"], counters)])

        sites = Sites(
            [self._reader.sites[site] for site in ids.tolist()],
            keeps,
            totals["channel_dim"].to_pylist(),
            totals["group_size"].to_pylist(),
            bins,
            np.stack(
                [
                    widths > 0,
                    len(FIELDS) * np.where(widths > 0, np.cumsum(widths) - widths, np.arange(n)),
                    channels,
                    np.full(n, 2),
                    np.cumsum(counters) - counters,
                    counters,
                ]
            ),
        )
        return StepFrame(
            sites,
            LazyBlocks(3, read),
            calls.astype(np.int64),
            fired[np.argsort(order[fired])],
            to_numpy(totals["scale"]),
            int(self._timeline.step[row]),
            known_wholes=wholes,
        )

    def _details(self, row: int, place: dict[int, int], columns: list[str], sizes: Counts) -> list[NDArray[Any]]:
        """Return lists of a step, by place: ``[columns, size]`` of each site whose size is not 0."""
        if not sizes.any():
            return []
        [rows] = self.table("details", ["site", *columns], [row])
        lists_of = [lists(rows[name]) for name in columns]
        found = {place[site]: np.stack(each) for site, *each in zip(rows["site"].to_pylist(), *lists_of, strict=True)}
        expected = np.flatnonzero(sizes).tolist()
        if [found[i].shape[1] if i in found else 0 for i in expected] != sizes[expected].tolist():
            raise LeftOut(
                f"step {self._timeline.step[row]}: expected {columns[0]} of {len(expected)} sites, but a file with "
                "them cannot be read; read the step again for what is whole"
            )
        return [found[i] for i in expected]


def _wholes_of(totals: pa.Table) -> Array:
    """``[fields, rows]``: the states of rows with the columns of STATE and SAME_AS."""
    wholes = np.empty((len(FIELDS), len(totals)))
    for values, name in zip(wholes, STATE.values(), strict=True):
        column = totals[name]
        values[:] = to_numpy(column)
        if column.null_count:
            same = is_null(column)
            values[same] = to_numpy(totals[SAME_AS[name]])[same]
    return wholes


def lists(column: pa.ChunkedArray) -> list[Any]:
    """Return the entries of a column of lists, an array each."""
    return [
        values[begin:end]
        for chunk in column.chunks
        for values, offsets in [(to_numpy(chunk.values), to_numpy(chunk.offsets))]
        for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    ]
