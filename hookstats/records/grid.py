"""Statistics of totals as arrays over sites and steps, read a stretch of steps at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from hookstats.numbers.fields import Array, Counts
from hookstats.records.arrays import to_numpy
from hookstats.records.errors import RunError
from hookstats.records.manifest import Part
from hookstats.records.reading import Chosen, Reader
from hookstats.records.timeline import Timeline

_KEYS = ["attempt", "record", "site"]


class Grid:
    """The steps that count, by their places in the timeline."""

    def __init__(self, reader: Reader, timeline: Timeline, row: Counts) -> None:
        """row: of each site by its id, its place in what is read."""
        self._reader = reader
        self._timeline = timeline
        self._row = row

    def stretches(self, cells: int) -> list[tuple[int, int]]:
        """Of the timeline, from place to place: each of whole parts, as far as these do not overlap.

        cells: as many as a stretch has at least, but for the last one.
        """
        step = self._timeline.step
        parts = sorted(self._reader.manifest.parts["totals"], key=lambda part: part.steps)
        stretches: list[tuple[int, int]] = []
        begin, last = 0, -(1 << 62)
        for part in parts:
            end = int(np.searchsorted(step, part.steps[0]))
            if part.steps[0] > last and (end - begin) * len(self._row) >= cells:
                stretches.append((begin, end))
                begin = end
            last = max(last, part.steps[1])
        if begin < len(step):
            stretches.append((begin, len(step)))
        return stretches

    def read(self, names: Sequence[str], begin: int, end: int) -> dict[str, Array]:
        """Planes ``[sites, end - begin]`` by the names of statistics; NaN where a site was silent."""
        while True:
            planes = {name: np.full((len(self._row), end - begin), np.nan) for name in names}
            try:
                self._read(planes, begin, end)
                return planes
            except FileNotFoundError as error:
                self._reader.follow("totals", error)

    def _read(self, planes: Mapping[str, Array], begin: int, end: int) -> None:
        first, last = (int(self._timeline.step[place]) for place in (begin, end - 1))
        for part in self._reader.manifest.parts["totals"]:
            if part.steps[1] < first or part.steps[0] > last:
                continue
            is_inside = first <= part.steps[0] and part.steps[1] <= last
            block = self._block(part) if is_inside else None
            columns = ["calls", *planes] if block else [*_KEYS, "calls", *planes]
            rows = self._reader.part("totals", part, columns, Chosen(None if is_inside else (first, last)))
            if block is None:
                self._scatter(planes, rows, begin, end)
                continue
            (low, high), (since, until) = block
            is_silent = to_numpy(rows["calls"]).reshape(high - low, -1) == 0
            for name, plane in planes.items():
                values = to_numpy(rows[name]).reshape(is_silent.shape)
                plane[self._row[low:high], since - begin : until - begin] = np.where(is_silent, np.nan, values)

    def _block(self, part: Part) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """Ids of sites and places of steps of which a part holds each with each, from and behind; None: others.

        Rows of totals are sorted by site and step, so it needs no more than the ends of both.
        """
        bounds = self._reader.bounds("totals", part)
        (attempt, latest), (first, last), (low, high) = (
            (int(bounds[f"{name}_min"].min()), int(bounds[f"{name}_max"].max())) for name in _KEYS
        )
        base, records = self._timeline.base.get(attempt, (0, 0))
        is_whole = part.rows == (high - low + 1) * (last - first + 1) and low >= 0 and high < len(self._row)
        if attempt != latest or not is_whole or not 0 <= first <= last < records:
            return None
        places = self._timeline.row[base + first : base + last + 1]
        if places[0] < 0 or (np.diff(places) != 1).any():
            return None
        return (low, high + 1), (int(places[0]), int(places[-1]) + 1)

    def _scatter(self, planes: Mapping[str, Array], rows: pa.Table, begin: int, end: int) -> None:
        at = self._timeline.rows_of(rows, self._reader.manifest)
        site = to_numpy(rows["site"])
        if len(site) and not 0 <= site.min() <= site.max() < len(self._row):
            raise RunError(f"expected sites 0 to {len(self._row) - 1}, got {site.min()} to {site.max()}")
        kept = np.flatnonzero((at >= begin) & (at < end) & (to_numpy(rows["calls"]) > 0))
        where = (self._row[site[kept]], at[kept] - begin)
        for name, plane in planes.items():
            plane[where] = to_numpy(rows[name])[kept]
