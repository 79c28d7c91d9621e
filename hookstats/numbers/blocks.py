"""Copied blocks of state to columns: where every site lay when they were copied. Pure numpy, with a JSON form.

What the drain copies from a device are blocks of int64: for each site, one part after another, its moments (float64
``[fields, channels]``), its counters (calls, and when the first of them came), its histogram.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from hookstats.numbers.columns import Columns, wholes_of
from hookstats.numbers.fields import (
    FIELDS,
    Array,
    Bins,
    Counts,
    Site,
    Skipped,
    bins_from_json,
    bins_to_json,
    fold_channels,
    histogram_shape,
)
from hookstats.numbers.kinds import kind_of
from hookstats.numbers.ranks import ALONE, Drift, Spread, StepRanks
from hookstats.numbers.snapshot import Snapshot

# When a parameter was measured: as the step ended, as an optimizer stepped, or when somebody asked for gradients.
AT_END, AT_OPTIMIZER, BEFORE_CLIPPING = 1, 2, 3
COUNTERS = 2  # of a site: calls, and when the first of them came, on its device


class Part(NamedTuple):
    """Where a state lies, in units of 8 bytes."""

    block: int  # in the order of Layout.blocks
    offset: int
    channels: int
    bins: int

    @property
    def size(self) -> int:
        return len(FIELDS) * self.channels + COUNTERS + self.bins


class Row(NamedTuple):
    """A site, and where it lies: it may have moved to another width or device, and is read in all places."""

    site: Site
    parts: tuple[Part, ...]  # the present one last
    keep_channels: bool
    channel_dim: int | None
    is_parameter: bool  # measured together with others
    group_size: int | None = None  # channels that belong together


class Layout:
    """Where all sites of a monitor lie in blocks."""

    def __init__(self, devices: Sequence[int], rows: Sequence[Row], bins: Bins | None) -> None:
        """devices: of each block, the number of its device."""
        self.devices = list(devices)
        self.rows = tuple(rows)
        self.bins = bins

    @cached_property
    def _arrays(self) -> _Arrays:
        return _Arrays(self)

    @cached_property
    def sizes(self) -> list[int]:
        """Of each block: as much of it as holds sites."""
        sizes = [0] * len(self.devices)
        for row in self.rows:
            for part in row.parts:
                sizes[part.block] = max(sizes[part.block], part.offset + part.size)
        return sizes

    def to_json(self) -> dict[str, Any]:
        """For json.dumps."""
        bins = self.bins
        return {
            "devices": self.devices,
            "histogram": None if bins is None else bins_to_json(bins),
            "rows": [[*row.site, *row[2:], [list(part) for part in row.parts]] for row in self.rows],
        }

    @classmethod
    def from_json(cls, d: Mapping[str, Any]) -> Layout:
        """What `to_json` gave. ValueError, KeyError or TypeError for anything else."""
        bins = None if d["histogram"] is None else bins_from_json(d["histogram"])
        rows = []
        for name, tensor, keeps, dim, is_parameter, group_size, parts in d["rows"]:
            if not (isinstance(name, str) and isinstance(tensor, str) and parts):
                raise ValueError(f"expected a site and where it lies, got {name!r}, {tensor!r}, {parts!r}")
            if dim is not None and not isinstance(dim, int):
                raise ValueError(f"expected a channel dimension, got {dim!r}")
            if group_size is not None and not (isinstance(group_size, int) and group_size > 0):
                raise ValueError(f"expected a number of channels that belong together, got {group_size!r}")
            lies = tuple(Part(*part) for part in parts)
            row = Row(Site(name, tensor), lies, bool(keeps), dim, bool(is_parameter), group_size)
            for part in row.parts:
                right = all(isinstance(each, int) and each >= 0 for each in part) and part.channels > 0
                if not right or part.block >= len(d["devices"]):
                    raise ValueError(f"expected block, offset, channels and bins, got {part}")
                if part.bins not in (0, int(np.prod(histogram_shape(bins, part.channels)))):
                    raise ValueError(f"expected the bins of {bins} for {part.channels} channels, got {part.bins}")
            rows.append(row)
        return cls([int(device) for device in d["devices"]], rows, bins)


class _Arrays:
    """A layout as arrays over its parts and rows."""

    def __init__(self, layout: Layout) -> None:
        rows = layout.rows
        parts = np.array([part for row in rows for part in row.parts], np.int64).reshape(-1, len(Part._fields))
        self.block, self.offset, self.channels, self.bins = parts.T
        self.device = np.array(layout.devices, np.int64)[self.block]
        counts = np.array([len(row.parts) for row in rows], np.int64)
        self.row = np.repeat(np.arange(len(rows)), counts)
        self.begin = np.cumsum(counts) - counts
        self.last = self.begin + counts - 1
        self.keeps = np.array([row.keep_channels for row in rows], bool)
        self.is_parameter = np.array([row.is_parameter for row in rows], bool)
        kinds_of = [kind_of(row.site.tensor) for row in rows]
        self.is_gradient = np.array([kind.is_gradient and not kind.is_replicated for kind in kinds_of], bool)
        kinds = {kind: number for number, kind in enumerate(dict.fromkeys(row.site.tensor for row in rows))}
        self.kind = np.array([kinds[row.site.tensor] for row in rows], np.int64)

    def counters(self, blocks: Sequence[Counts]) -> Counts:
        """``[2, parts]``: calls, and when the first of them came."""
        found = np.zeros((COUNTERS, len(self.block)), np.int64)
        for number, block in enumerate(blocks):
            here = np.flatnonzero(self.block == number)
            at = self.offset[here] + len(FIELDS) * self.channels[here]
            found[:, here] = block[at + np.arange(COUNTERS)[:, None]]
        return found

    def order(self, calls: Counts, first: Counts, readings: Counts) -> Counts:
        """The rows of parts that were called, in order of execution; parameters of one reading as the first of them."""
        parts = np.flatnonzero(calls)
        parts = parts[np.lexsort((first[parts], self.device[parts]))]
        rows, earliest = np.unique(self.row[parts], return_index=True)
        device, first = self.device[parts[earliest]], first[parts[earliest]]
        chosen = np.flatnonzero(self.is_parameter[rows])
        together = (readings[rows] * (self.kind.max(initial=0) + 1) + self.kind[rows]) * (device.max(initial=0) + 1)
        _, leader, group = np.unique((together + device)[chosen], return_index=True, return_inverse=True)
        first[chosen] = first[chosen][leader][group]
        result: Counts = rows[np.lexsort((first, device))]
        return result


class Read(NamedTuple):
    """The state of a site, where it lies in a block, or merged from several places."""

    moments: Array
    histogram: Counts | None


class ByRow(NamedTuple):
    """Of the rows of a layout in one step."""

    calls: Counts  # [rows]
    order: Counts  # the rows that were called, in order of execution
    shown: Counts  # those of which something is said, ascending
    moved: dict[int, Read]  # of these, what was measured in several places


class Given(NamedTuple):
    """What was given to `Monitor.step` with some steps, by their number."""

    scalars: dict[int, dict[str, float]]
    sample_ids: dict[int, Counts]

    def add(self, other: Given, most: int) -> None:
        """Takes what another has, of so many steps at most: the oldest go."""
        _add(self.scalars, {step: named for step, named in other.scalars.items() if named}, most)
        _add(self.sample_ids, other.sample_ids, most)


def _add(kept: dict[int, Any], new: Mapping[int, Any], most: int) -> None:
    kept.update(new)
    while len(kept) > most:
        del kept[next(iter(kept))]


class Drained:
    """A measured step as it left the device. ``columns`` and `snapshot` read the blocks where they are."""

    def __init__(
        self,
        layout: Layout,
        blocks: Sequence[Counts],
        step: int,
        time: float,
        scalars: Mapping[str, float],
        grad_scale: float | None,
        overflowed: bool | None,
        hidden: Sequence[bool] | Counts,
        readings: Sequence[int] | Counts,
        ranks: StepRanks = ALONE,
    ) -> None:
        """blocks: int64 arrays, in the order of the layout's.

        hidden: of each row, whether nothing is said of it where it was silent. readings: of a parameter, with which
        others it was measured, and when, modulo 4: AT_END, AT_OPTIMIZER or BEFORE_CLIPPING. time: of the closing of the
        step, in seconds since the epoch.
        """
        self.layout = layout
        self.blocks = list(blocks)
        self.step = step
        self.time = time
        self.scalars = dict(scalars)
        self.grad_scale = grad_scale
        self.overflowed = overflowed
        self.hidden = np.asarray(hidden, bool)
        self.readings = np.asarray(readings, np.int64)
        self.ranks = ranks
        # Of the steps closed since the measured one before that were not measured, by their number, ascending.
        self.earlier_scalars: dict[int, dict[str, float]] = {}
        self.sample_ids: dict[int, Counts] = {}  # of these steps and of this one, as far as some were given
        self.skipped: dict[Site, Skipped] = {}
        self.drifts: tuple[Drift, ...] = ()  # the same, of such a step: replicas that are none
        self.spread: dict[str, Spread] = {}  # over `columns.sites`; of a step that was merged over ranks, if asked for

    def snapshot(self) -> Snapshot:
        return Snapshot(
            self.step,
            self.columns,
            self.scalars,
            self.grad_scale,
            self.overflowed,
            self.skipped,
            self.ranks,
            self.spread,
            self.earlier_scalars,
            self.sample_ids,
            self.drifts,
        )

    @cached_property
    def by_row(self) -> ByRow:
        """What is found out of each row before its state is read."""
        layout, blocks, arrays = self.layout, self.blocks, self.layout._arrays
        part_calls, first = arrays.counters(blocks)
        is_live = part_calls > 0
        is_live[arrays.last] = True
        calls, parts = (
            np.add.reduceat(each, arrays.begin) if layout.rows else each for each in (part_calls, 1 * is_live)
        )
        shown = np.flatnonzero((calls > 0) | ~self.hidden)
        moved = {i: _moved(layout, blocks, i, is_live) for i in shown[parts[shown] > 1].tolist()}
        return ByRow(calls, arrays.order(part_calls, first, self.readings), shown, moved)

    def read(self, i: int) -> Read:
        """The state of a row."""
        return self.by_row.moved.get(i) or _read(self.layout, self.blocks, self.layout.rows[i].parts[-1])

    @cached_property
    def columns(self) -> Columns:
        """The same, read."""
        layout, blocks = self.layout, self.blocks  # the functions below hold these alone: no cycle keeps the blocks
        arrays, rows = layout._arrays, layout.rows
        calls, order, shown, moved = self.by_row
        keeps = arrays.keeps.copy()
        for i, part in moved.items():
            keeps[i] &= part.moments.shape[1] == rows[i].parts[-1].channels
        numbers, kept = shown.tolist(), keeps.tolist()

        def part_of(place: int) -> Read:
            i = numbers[place]
            return moved[i] if i in moved else _read(layout, blocks, rows[i].parts[-1])

        def histogram_of(place: int) -> Counts | None:
            i = numbers[place]
            return moved[i].histogram if i in moved else _histogram(layout, blocks, rows[i].parts[-1])

        def wholes() -> Array:
            """Sites of one channel at once, which are most where totals alone were sent."""
            result = np.empty((len(FIELDS), len(numbers)))
            parts = arrays.last[shown]
            is_narrow = (arrays.channels[parts] == 1) & ~np.isin(shown, list(moved))
            for number, block in enumerate(blocks):
                here = np.flatnonzero(is_narrow & (arrays.block[parts] == number))
                at = arrays.offset[parts[here]] + np.arange(len(FIELDS))[:, None]
                result[:, here] = block[at].view(np.float64)
            wide = np.flatnonzero(~is_narrow)
            result[:, wide] = wholes_of([part_of(place).moments for place in wide.tolist()])
            return result

        last = arrays.last[shown]
        shapes = np.stack([arrays.channels[last], arrays.bins[last]])
        for place in np.flatnonzero(np.isin(shown, list(moved))).tolist():
            part = moved[numbers[place]]
            shapes[:, place] = part.moments.shape[1], 0 if part.histogram is None else part.histogram.size

        scales = np.where(arrays.is_gradient, 1.0 if self.grad_scale is None else self.grad_scale, 1.0)
        return Columns(
            [rows[i].site for i in numbers],
            calls[shown],
            np.searchsorted(shown, order),
            scales[shown],
            keeps[shown],
            [rows[i].channel_dim if kept[i] == rows[i].keep_channels else None for i in numbers],
            layout.bins,
            lambda place: part_of(place).moments,
            histogram_of,
            wholes,
            shapes,
            [rows[i].group_size for i in numbers],
        )


def _read(layout: Layout, blocks: Sequence[Counts], part: Part) -> Read:
    memory = blocks[part.block][part.offset : part.offset + part.size]
    fields = len(FIELDS) * part.channels
    moments = memory[:fields].view(np.float64).reshape(len(FIELDS), part.channels)
    return Read(moments, _histogram(layout, blocks, part))


def _histogram(layout: Layout, blocks: Sequence[Counts], part: Part) -> Counts | None:
    if not part.bins:
        return None
    end = part.offset + part.size
    counts = blocks[part.block][end - part.bins : end]
    return counts.reshape(histogram_shape(layout.bins, part.channels))


def _moved(layout: Layout, blocks: Sequence[Counts], i: int, is_live: Any) -> Read:
    """A row that was measured in several places."""
    alive = is_live[layout._arrays.begin[i] :].tolist()
    return merged(
        [_read(layout, blocks, part) for part, live in zip(layout.rows[i].parts, alive, strict=False) if live]
    )


def merged(parts: list[Read]) -> Read:
    """All in one: channel by channel where all have the same ones, else as totals."""
    states = [part.moments for part in parts]
    histograms = [part.histogram for part in parts if part.histogram is not None]
    if len({state.shape for state in states}) > 1:
        states = [fold_channels(state)[:, None] for state in states]
        histograms = [counts.sum(0, keepdims=True) if counts.ndim == 2 else counts for counts in histograms]
    side_by_side = np.stack(states, axis=-1)
    starts = np.arange(0, side_by_side[0].size, len(states))
    moments = fold_channels(side_by_side.reshape(len(FIELDS), -1), starts)
    return Read(moments, np.sum(histograms, axis=0) if histograms else None)
