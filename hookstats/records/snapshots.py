"""Rows of a rank's tables as Snapshots, the same as were measured, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hookstats.numbers.fields import FIELDS, Array, Counts, Skipped, histogram_shape
from hookstats.numbers.frame import Memory, Sites, StepFrame, block_of
from hookstats.numbers.ranks import drifts_from_json
from hookstats.numbers.snapshot import Snapshot
from hookstats.records.arrays import is_null, to_arrow, to_numpy
from hookstats.records.derived import wholes_of
from hookstats.records.errors import RunError
from hookstats.records.reading import Chosen, Reader
from hookstats.records.schema import SAME_AS, STATE
from hookstats.records.timeline import Timeline

_SITES = ["site", "place", "order", "calls", "scale", "channels", "keeps_channels", "channel_dim", "group_size"]
_SITES += ["has_histogram"]
_AT_ONCE = 200_000  # rows of totals that are held: about 60 MB


class Snapshots:
    """Those of a rank, of all sites or of some. States of channels and histograms are read when they are asked for."""

    def __init__(self, reader: Reader, timeline: Timeline, sites: Counts | None) -> None:
        """sites: their ids, ascending; None: all."""
        self._reader = reader
        self._timeline = timeline
        self._sites = sites
        self._names = list(reader.manifest.sites)

    def read(self, rows: Sequence[int]) -> Iterator[Snapshot]:
        """rows: of the timeline, ascending; as many at once as are held."""
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
        events = self.table("events", ["site", "reason", "times"], rows)
        for i, row in enumerate(rows):
            yield self._snapshot(row, totals[i], scalars[i], samples[i], events[i])

    def table(self, table: str, columns: Sequence[str], rows: Sequence[int]) -> list[pa.Table]:
        """The rows of each of these steps, of totals by place, of the others as they were recorded."""
        first, last = (int(self._timeline.step[row]) for row in (rows[0], rows[-1]))
        is_given = table in ("scalars", "samples")
        if is_given:
            first = min(self._timeline.columns["since"][row] for row in rows)
        chosen = Chosen((first, last), None if is_given else self._sites)
        found = self._reader.table(table, ["attempt", "record", *columns], chosen)
        of = self._timeline.rows_of(found, self._reader.manifest)
        order = np.lexsort((to_numpy(found["place"]), of)) if "place" in columns else np.argsort(of, kind="stable")
        found = found.take(to_arrow(order, pa.int64()))
        begins, ends = (np.searchsorted(of[order], list(rows), side=side) for side in ("left", "right"))
        return [found.slice(begin, end - begin) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]

    def _snapshot(self, row: int, totals: pa.Table, scalars: pa.Table, samples: pa.Table, events: pa.Table) -> Snapshot:
        timeline = self._timeline
        step = int(timeline.step[row])
        of_step = {name: values[row] for name, values in timeline.columns.items()}
        for name, table in (("sites", totals), ("scalars", scalars), ("events", events)):
            if (name == "scalars" or self._sites is None) and table.num_rows != of_step[name]:
                raise RunError(f"step {step}: expected {of_step[name]} rows of {name}, got {table.num_rows}")
        named: dict[int, dict[str, float]] = {}
        for number, name, value in zip(*(scalars[name].to_pylist() for name in scalars.column_names[2:]), strict=True):
            named.setdefault(number, {})[name] = value
        left_out = zip(*(events[name].to_pylist() for name in ("site", "reason", "times")), strict=True)
        skipped = {self._names[self._id(step, site)]: Skipped(reason, times) for site, reason, times in left_out}
        if sum(map(len, named.values())) != scalars.num_rows or len(skipped) != events.num_rows:
            raise RunError(f"step {step}: expected each scalar and skipped site once, got {named}, {skipped}")
        scale, overflowed, own = of_step["grad_scale"], of_step["overflowed"], named.pop(step, {})
        ids = dict(zip(samples["step"].to_pylist(), lists(samples["ids"]), strict=True))
        if len(ids) != samples.num_rows:
            raise RunError(f"step {step}: expected ids of samples once for each step, got {samples['step']}")
        try:
            drifts = drifts_from_json(json.loads(of_step["drifts"] or "[]"))
        except (ValueError, TypeError) as error:
            raise RunError(f"step {step}: expected drifts as JSON, got {error}") from None
        frame = replace(
            self._frame(row, step, totals),
            scalars=own,
            earlier_scalars=named,
            sample_ids=ids,
            grad_scale=scale,
            overflowed=overflowed,
            skipped=skipped,
            ranks=timeline.ranks[row],
            drifts=drifts,
        )
        return Snapshot(frame)

    def _frame(self, row: int, step: int, totals: pa.Table) -> StepFrame:
        ids, place, calls, channels = (to_numpy(totals[name]) for name in ("site", "place", "calls", "channels"))
        order, fired = to_numpy(totals["order"]), np.flatnonzero(~is_null(totals["order"]))
        right = (np.diff(place) > 0).all() and len(np.unique(ids)) == len(ids) == len(totals)
        right = right and (self._sites is not None or len(place) == 0 or place[-1] == len(place) - 1)
        right = right and (channels > 0).all() and (calls >= 0).all() and len(np.unique(order[fired])) == len(fired)
        if not right:
            raise RunError(f"step {step}: expected each site, its place and its place in order once, got others")
        group_sizes = totals["group_size"].to_pylist()
        if not all(size is None or size > 0 for size in group_sizes):
            raise RunError(f"step {step}: expected numbers of channels that belong together, got {group_sizes}")
        wholes, bins, n = wholes_of(totals), self._timeline.bins[row], len(ids)
        places = {site: (i, int(channels[i])) for i, site in enumerate(ids.tolist())}
        has_histogram = to_numpy(totals["has_histogram"])
        counters = np.array([int(np.prod(histogram_shape(bins, width))) for width in channels.tolist()], np.int64)

        def read(block: int) -> Counts:
            """The totals; or the states of several channels, or the histograms, as they are asked for."""
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
            [self._names[self._id(step, site)] for site in ids.tolist()],
            to_numpy(totals["keeps_channels"]),
            totals["channel_dim"].to_pylist(),
            group_sizes,
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
            step,
            known_wholes=wholes,
        )

    def _id(self, step: int, site: int) -> int:
        if not 0 <= site < len(self._names):
            raise RunError(f"step {step}: expected sites 0 to {len(self._names) - 1}, got {site}")
        return site

    def _states(self, row: int, places: dict[int, tuple[int, int]]) -> dict[int, Array]:
        """Of a step, those of more than one channel, by place. places: of a site's id, its place and its channels."""
        step, found = int(self._timeline.step[row]), dict[int, Array]()
        [rows] = self.table("channels", ["site", *STATE.values()], [row])
        fields_of = [lists(rows[name]) for name in STATE.values()]
        for number, site in enumerate(rows["site"].to_pylist()):
            place, channels = places.get(site, (-1, 0))
            fields = [each[number] for each in fields_of]
            if place in found or channels < 2 or {len(values) for values in fields} != {channels}:
                raise RunError(f"step {step}: site {site}: expected the state of {channels} channels, got another")
            found[place] = np.stack(fields)
        _complete(step, "states", {place for place, channels in places.values() if channels > 1}, set(found))
        return found

    def _histograms(
        self, row: int, places: dict[int, tuple[int, int]], has_histogram: NDArray[np.bool_]
    ) -> dict[int, Counts]:
        """The same of histograms. has_histogram: of each place."""
        step, found = int(self._timeline.step[row]), dict[int, Counts]()
        if not has_histogram.any():
            return found
        [rows] = self.table("histograms", ["site", "counts"], [row])
        for site, counts in zip(rows["site"].to_pylist(), lists(rows["counts"]), strict=True):
            place, channels = places.get(site, (-1, 0))
            shape = histogram_shape(self._timeline.bins[row], channels)
            if place in found or counts.size != int(np.prod(shape)) or counts.min(initial=0) < 0:
                raise RunError(f"step {step}: site {site}: expected counts of shape {shape}, got {counts.size}")
            found[place] = counts.reshape(shape)
        _complete(step, "histograms", set(np.flatnonzero(has_histogram).tolist()), set(found))
        return found


def _complete(step: int, what: str, expected: set[int], got: set[int]) -> None:
    if expected != got:
        raise RunError(f"step {step}: expected {what} of {len(expected)} sites, got them of {len(got)}")


def lists(column: pa.ChunkedArray) -> list[Any]:
    """The entries of a column of lists, an array each."""
    return [
        values[begin:end]
        for chunk in column.chunks
        for values, offsets in [(to_numpy(chunk.values), to_numpy(chunk.offsets))]
        for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    ]
