"""Rows of a rank's tables as Snapshots, the same as were measured, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hookstats.numbers.fields import FIELDS, Array, Counts, Site, Skipped, histogram_shape
from hookstats.numbers.frame import Memory, Sites, StepFrame, block_of
from hookstats.numbers.ranks import drifts_from_json
from hookstats.numbers.snapshot import Snapshot
from hookstats.records.arrays import is_null, to_arrow, to_numpy
from hookstats.records.derived import wholes_of
from hookstats.records.errors import LeftOut
from hookstats.records.reading import Chosen, Reader
from hookstats.records.schema import SAME_AS, STATE
from hookstats.records.timeline import Timeline

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
        has_channels, has_histograms = (self._reader.covered(table, *at) for table in ("channels", "histograms"))
        for i, row in enumerate(rows):
            if self._sites is not None or len(totals[i]) == self._timeline.columns["sites"][row]:
                frame = self._frame(row, totals[i], bool(has_channels[i]), bool(has_histograms[i]))
                yield Snapshot(replace(frame, **self._given(row, scalars[i], samples[i])))

    def table(self, table: str, columns: Sequence[str], rows: Sequence[int]) -> list[pa.Table]:
        """Return the rows of each of these steps, as `ordered` has them."""
        found, of = self.ordered(table, columns, rows)
        begins, ends = (np.searchsorted(of, list(rows), side=side) for side in ("left", "right"))
        return [found.slice(begin, end - begin) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]

    def ordered(self, table: str, columns: Sequence[str], rows: Sequence[int]) -> tuple[pa.Table, Counts]:
        """Return the rows of these steps, by step, then of totals by place, of the others as they were recorded.

        And of each row, the step's row of the timeline.
        """
        first, last = (int(self._timeline.step[row]) for row in (rows[0], rows[-1])) if rows else (0, -1)
        is_given = table in ("scalars", "samples")
        if is_given:
            first = min(self._timeline.columns["since"][row] for row in rows)
        chosen = Chosen((first, last), None if is_given else self._sites)
        found = self._reader.table(table, list(dict.fromkeys(["attempt", "record", *columns])), chosen)
        of = self._timeline.rows_of(found)
        order = np.lexsort((to_numpy(found["place"]), of)) if "place" in columns else np.argsort(of, kind="stable")
        order = order[np.isin(of[order], rows)]
        return found.take(to_arrow(order, pa.int64())), of[order]

    def _given(self, row: int, scalars: pa.Table, samples: pa.Table) -> dict[str, Any]:
        """Return what came with a step, as a StepFrame has it."""
        of_step = {name: values[row] for name, values in self._timeline.columns.items()}
        named: dict[int, dict[str, float]] = {}
        for number, name, value in zip(*(scalars[name].to_pylist() for name in scalars.column_names[2:]), strict=True):
            named.setdefault(number, {})[name] = value
        skipped = {Site(name, tensor): Skipped(*why) for name, tensor, *why in json.loads(of_step["skipped"] or "[]")}
        return {
            "scalars": named.pop(int(self._timeline.step[row]), {}),
            "earlier_scalars": named,
            "sample_ids": dict(zip(samples["step"].to_pylist(), lists(samples["ids"]), strict=True)),
            "grad_scale": of_step["grad_scale"],
            "overflowed": of_step["overflowed"],
            "skipped": {site: why for site, why in skipped.items() if self._shown is None or site in self._shown},
            "ranks": self._timeline.ranks[row],
            "rows": of_step["rows"],
            "drifts": drifts_from_json(json.loads(of_step["drifts"] or "[]")),
        }

    def _frame(self, row: int, totals: pa.Table, has_channels: bool, has_histograms: bool) -> StepFrame:
        """Make a frame, of totals alone if the files with channels or histograms cannot be read."""
        ids, calls = to_numpy(totals["site"]), to_numpy(totals["calls"])
        order, fired = to_numpy(totals["order"]), np.flatnonzero(~is_null(totals["order"]))
        wholes, bins, n = wholes_of(totals), self._timeline.bins[row], len(ids)
        channels = to_numpy(totals["channels"]) if has_channels else np.ones(n, np.int32)
        keeps = to_numpy(totals["keeps_channels"]) & (has_channels | (channels == to_numpy(totals["channels"])))
        has_histogram = to_numpy(totals["has_histogram"]) & has_histograms
        counters = np.array([int(np.prod(histogram_shape(bins, width))) for width in channels.tolist()], np.int64)
        places = {site: (i, int(channels[i])) for i, site in enumerate(ids.tolist())}

        def read(block: int) -> Counts:
            """Return the totals, the states of several channels, or the histograms."""
            if block == 0:
                return np.ascontiguousarray(wholes.T).view(np.int64).reshape(-1)
            if block == 1:
                states = self._states(row, places)
                return block_of([states[i] for i in sorted(states)])
            histograms = self._histograms(row, places, has_histogram)
            return block_of([], [histograms[i] for i in sorted(histograms)])

        is_wide = channels > 1
        counters = np.where(has_histogram, counters, 0)
        widths = np.where(is_wide, channels, 0)
        begins = [len(FIELDS) * np.arange(n), len(FIELDS) * (np.cumsum(widths) - widths)]
        sites = Sites(
            [self._reader.sites[site] for site in ids.tolist()],
            keeps,
            totals["channel_dim"].to_pylist(),
            totals["group_size"].to_pylist(),
            bins,
            np.stack(
                [
                    1 * is_wide,
                    np.where(is_wide, begins[1], begins[0]),
                    channels,
                    np.full(n, 2),
                    np.cumsum(counters) - counters,
                    counters,
                ]
            ),
        )
        return StepFrame(
            sites,
            Memory(3, read),
            calls.astype(np.int64),
            fired[np.argsort(order[fired])],
            to_numpy(totals["scale"]),
            int(self._timeline.step[row]),
            known_wholes=wholes,
        )

    def _states(self, row: int, places: dict[int, tuple[int, int]]) -> dict[int, Array]:
        """Return a step's states of several channels, by place. places: of a site's id, its place and its channels."""
        [rows] = self.table("channels", ["site", *STATE.values()], [row])
        fields_of = [lists(rows[name]) for name in STATE.values()]
        found = {
            places[site][0]: np.stack([each[number] for each in fields_of])
            for number, site in enumerate(rows["site"].to_pylist())
        }
        self._complete(row, "states", {place for place, channels in places.values() if channels > 1}, set(found))
        return found

    def _histograms(
        self, row: int, places: dict[int, tuple[int, int]], has_histogram: NDArray[np.bool_]
    ) -> dict[int, Counts]:
        """Return a step's histograms, by place. has_histogram: of each place."""
        found = dict[int, Counts]()
        if has_histogram.any():
            [rows] = self.table("histograms", ["site", "counts"], [row])
            for site, counts in zip(rows["site"].to_pylist(), lists(rows["counts"]), strict=True):
                place, channels = places[site]
                found[place] = counts.reshape(histogram_shape(self._timeline.bins[row], channels))
        self._complete(row, "histograms", set(np.flatnonzero(has_histogram).tolist()), set(found))
        return found

    def _complete(self, row: int, what: str, expected: set[int], got: set[int]) -> None:
        if expected != got:
            raise LeftOut(
                f"step {self._timeline.step[row]}: expected {what} of {len(expected)} sites, but a file with them "
                f"cannot be read, and there are those of {len(got)}; read the step again for what is whole"
            )


def lists(column: pa.ChunkedArray) -> list[Any]:
    """Return the entries of a column of lists, an array each."""
    return [
        values[begin:end]
        for chunk in column.chunks
        for values, offsets in [(to_numpy(chunk.values), to_numpy(chunk.offsets))]
        for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    ]
