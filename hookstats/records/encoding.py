"""Steps as Arrow tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from hookstats.numbers.fields import FIELDS, STATISTICS, Array, Counts, Site, Stats, bins_to_json, unscale
from hookstats.numbers.frame import StepFrame
from hookstats.numbers.given import Given
from hookstats.records.arrays import from_list, to_arrow
from hookstats.records.schema import LISTS, SAME_AS, SCHEMAS, STATE, escape_surrogates, make_writer_schema, names_of
from hookstats.records.wire import about

_NULL = -(2**31)  # in integers of totals, until they are a table
_KEYS = ("step", "time", "attempt", "record")  # the columns that every row begins with
Columns = dict[str, Any]  # lists of values, or arrays


class Taken(NamedTuple):
    """A measured step; or, without a frame and with the record -1, what was given with no recorded step.

    time: microseconds since the epoch. given: of steps before it, and of this one. ids: of the frame's sites.
    """

    step: int
    time: int
    attempt: int
    record: int
    given: Given
    frame: StepFrame | None = None
    ids: Counts = np.empty(0, np.int64)

    @property
    def size(self) -> int:
        """Return about how many bytes its rows have."""
        size = 64 * sum(map(len, self.given.scalars.values())) + sum(
            ids.nbytes for ids in self.given.sample_ids.values()
        )
        if self.frame is not None:
            size += 8 * (sum(self.frame.sites.sizes) + len(SCHEMAS["totals"]) * len(self.ids))
        return size


def encode(taken: list[Taken], sites: list[Site]) -> Iterator[tuple[str, pa.Table]]:
    """Yield the rows of each table; of details, a few MB at a time. sites: of the run, by id."""
    steps = [(each, each.frame) for each in taken if each.frame is not None]
    found = [
        ("steps", _steps(steps)),
        ("totals", _totals(steps)),
        ("scalars", _scalars(taken)),
        ("samples", _samples(taken)),
    ]
    for table, columns in found:
        if len(columns["step"]):
            yield table, _table(table, columns, sites)
    for columns in _details(steps):
        yield "details", _table("details", columns, sites)


def _steps(steps: list[tuple[Taken, StepFrame]]) -> Columns:
    rows = []
    for each, frame in steps:
        said = {name: json.dumps(value) if isinstance(value, list) else value for name, value in about(frame).items()}
        said["histogram"] = None if frame.bins is None else json.dumps(bins_to_json(frame.bins))
        rows.append({**each._asdict(), **said, "sites": len(each.ids)})
    return {name: [row[name] for row in rows] for name in SCHEMAS["steps"].names}


def _scalars(taken: list[Taken]) -> Columns:
    given = [(each, step, named) for each in taken for step, named in each.given.scalars.items()]
    columns = _keys_of_given([(each, step) for each, step, named in given for _ in named])
    columns["name"] = [escape_surrogates(name) for *_, named in given for name in named]
    return columns | {"value": [value for *_, named in given for value in named.values()]}


def _samples(taken: list[Taken]) -> Columns:
    given = [(each, step, ids) for each in taken for step, ids in each.given.sample_ids.items()]
    columns = _keys_of_given([(each, step) for each, step, _ in given])
    return columns | {"ids": _lists([ids for *_, ids in given], pa.int64())}


def _keys_of_given(given: list[tuple[Taken, int]]) -> Columns:
    columns: Columns = {name: [getattr(each, name) for each, _ in given] for name in _KEYS}
    measured = [each.frame is not None and step == each.step for each, step in given]
    return columns | {"step": [step for _, step in given], "measured": measured}


def _totals(steps: list[tuple[Taken, StepFrame]]) -> Columns:
    """Columns sorted by site and step, with the statistics that follow from the states."""
    if not steps:
        return {"step": []}
    frames = [frame for _, frame in steps]
    of = [frame.sites for frame in frames]
    columns = _keys([each for each, _ in steps], [len(each.ids) for each, _ in steps])
    columns |= {
        "site": np.concatenate([each.ids for each, _ in steps]),
        "place": np.concatenate([np.arange(len(sites)) for sites in of]),
        "order": np.concatenate([_order(frame) for frame in frames]),
        "calls": np.concatenate([frame.calls for frame in frames]),
        "scale": np.concatenate([frame.scales for frame in frames]),
        "channels": np.concatenate([sites.channels for sites in of]),
        "keeps_channels": np.concatenate([sites.keeps for sites in of]),
        "channel_dim": np.array([_NULL if dim is None else dim for sites in of for dim in sites.dims], np.int64),
        "group_size": np.array([size or _NULL for sites in of for size in sites.group_sizes], np.int64),
        "has_histogram": np.concatenate([sites.counters > 0 for sites in of]),
    }
    sorting = np.lexsort([columns[name] for name in ("record", "attempt", "step", "site")])
    columns = {name: values[sorting] for name, values in columns.items()}
    for name in ("order", "channel_dim", "group_size"):
        columns[name] = to_arrow(columns[name], pa.int32(), columns[name] == _NULL)
    wholes = np.concatenate([frame.wholes for frame in frames], axis=1)[:, sorting]
    stats: Stats[Array] = Stats(unscale(wholes, columns["scale"]))
    columns |= {name: getattr(stats, name) for name in STATISTICS}
    for field, name in STATE.items():
        if name not in STATISTICS:
            values = wholes[FIELDS.index(field)]
            same = columns[SAME_AS[name]].view(np.int64) == values.view(np.int64) if name in SAME_AS else None
            columns[name] = to_arrow(values, pa.float64(), same)
    return columns


def _order(frame: StepFrame) -> Counts:
    order = np.full(len(frame), _NULL)
    order[frame.order] = np.arange(len(frame.order))
    return order


def _details(steps: list[tuple[Taken, StepFrame]]) -> Iterator[Columns]:
    """Yield columns of states of several channels and of histograms."""
    rows, size = list[tuple[Taken, StepFrame, int, Array, Counts]](), 0
    for each, frame in steps:
        is_wide, has_bins = frame.sites.channels > 1, frame.sites.counters > 0
        for i in np.flatnonzero(is_wide | has_bins).tolist():
            state = frame.state(i) if is_wide[i] else np.empty((len(FIELDS), 0))
            counts = np.empty(0, np.int64) if (found := frame.histogram(i)) is None else found.reshape(-1)
            rows.append((each, frame, i, state, counts))
            size += state.nbytes + counts.nbytes
            if size >= LISTS:
                yield _columns_of_details(rows)
                rows, size = [], 0
    if rows:
        yield _columns_of_details(rows)


def _columns_of_details(rows: list[tuple[Taken, StepFrame, int, Array, Counts]]) -> Columns:
    columns = _keys([each for each, *_ in rows], [1] * len(rows))
    columns["site"] = np.array([each.ids[i] for each, _, i, *_ in rows])
    columns["scale"] = np.array([frame.scales[i] for _, frame, i, *_ in rows])
    for number, name in enumerate(STATE.values()):
        columns[name] = _lists([state[number] for *_, state, _ in rows], pa.float64())
    return columns | {"counts": _lists([counts for *_, counts in rows], pa.int64())}


def _lists(arrays: list[Any], kind: pa.DataType) -> pa.Array:
    offsets = np.append(0, np.cumsum([len(each) for each in arrays], dtype=np.int64))
    values = to_arrow(np.concatenate(arrays or [np.empty(0)]), kind)
    return pa.ListArray.from_arrays(to_arrow(offsets, pa.int32()), values)


def _keys(taken: list[Taken], rows: list[int]) -> Columns:
    return {name: np.repeat([getattr(each, name) for each in taken], rows) for name in _KEYS}


def _table(table: str, columns: Columns, sites: list[Site]) -> pa.Table:
    schema = make_writer_schema(table)
    if "site" in schema.names:
        columns = columns | names_of(sites, columns["site"])
    arrays = []
    for field in schema:
        values = columns[field.name]
        if isinstance(values, np.ndarray):
            values = to_arrow(values, field.type)
        arrays.append(values if isinstance(values, pa.Array) else from_list(values, field.type))
    return pa.Table.from_arrays(arrays, schema=schema)
