"""Steps as Arrow tables. What is kept is copied: the blocks may be overwritten as soon as `rows` returns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from hookstats.numbers.fields import FIELDS, STATISTICS, Array, Counts, Site, Stats, bins_to_json, unscale
from hookstats.numbers.frame import StepFrame
from hookstats.numbers.given import Given
from hookstats.records.arrays import from_list, to_arrow
from hookstats.records.schema import FLUSH, SAME_AS, STATE, escape_surrogates, make_writer_schema, names_of
from hookstats.records.wire import about

_NULL = -(2**31)  # in integers of totals, until they are a table


class Key(NamedTuple):
    """The columns that every row of a step begins with."""

    step: int
    time: int  # microseconds since the epoch
    attempt: int
    record: int


# Of some rows: lists of values, or arrays of which the last axis is that of the rows, or of what is in their lists.
Columns = dict[str, Any]
Piece = tuple[str, Columns, int]  # of a table, and about how many bytes that is


def encode_step(frame: StepFrame, key: Key, ids: Counts) -> Iterator[Piece]:
    """Yield columns for the tables of a run. ids: of frame.sites."""
    since = min([frame.step, *frame.earlier_scalars, *frame.sample_ids])
    said = {name: json.dumps(each) if isinstance(each, list) else each for name, each in about(frame).items()}
    said["histogram"] = None if frame.bins is None else json.dumps(bins_to_json(frame.bins))
    row = {**key._asdict(), **said, "sites": len(ids), "since": since}
    yield "steps", {name: [value] for name, value in row.items()}, 8 * len(row)
    if len(ids):
        yield "totals", _totals(frame, key, ids), len(ids) * 8 * len(make_writer_schema("totals"))
    yield from _details(frame, key, ids)
    yield from encode_given(Given({**frame.earlier_scalars, frame.step: frame.scalars}, frame.sample_ids), key)


def encode_given(given: Given, key: Key) -> Iterator[Piece]:
    """Yield columns of what was given with steps. key: of the step with which it came, of record -1 if with none."""
    for number, scalars in given.scalars.items():
        columns = _make_keys(key, number, len(scalars))
        columns |= {"name": [escape_surrogates(name) for name in scalars], "value": list(scalars.values())}
        yield "scalars", columns, 64 * len(scalars)
    for number, ids in given.sample_ids.items():
        yield "samples", {**_make_keys(key, number, 1), "ids": ids, "lengths": [len(ids)]}, 64 + ids.nbytes


def _make_keys(key: Key, number: int, rows: int) -> Columns:
    columns = {**key._replace(step=number)._asdict(), "measured": key.record >= 0 and number == key.step}
    return {name: [value] * rows for name, value in columns.items()}


def _totals(frame: StepFrame, key: Key, ids: Counts) -> Columns:
    """Columns of the rows of a step, with ``wholes``, from which the others follow."""
    sites, n = frame.sites, len(ids)
    order = np.full(n, _NULL)
    order[frame.order] = np.arange(len(frame.order))
    return {
        **_keys(key, n),
        "site": ids,
        "place": np.arange(n),
        "order": order,
        "calls": frame.calls,
        "scale": frame.scales,
        "channels": sites.channels,
        "keeps_channels": sites.keeps,
        "channel_dim": np.array([_NULL if dim is None else dim for dim in sites.dims], np.int64),
        "group_size": np.array([size or _NULL for size in sites.group_sizes], np.int64),
        "has_histogram": sites.counters > 0,
        "wholes": frame.wholes,
    }


def _details(frame: StepFrame, key: Key, ids: Counts) -> Iterator[Piece]:
    """Columns of states of several channels and of histograms, a few MB at a time.

    ``channels`` and ``bins``: how many each row has; ``states`` ``[fields, all]`` and ``counts``: of all rows.
    """
    is_wide, has_bins = frame.sites.channels > 1, frame.sites.counters > 0
    for chosen in _portions(np.flatnonzero(is_wide | has_bins), frame):
        states = [frame.state(i) if is_wide[i] else np.empty((len(FIELDS), 0)) for i in chosen]
        counts = [np.asarray(frame.histogram(i)).reshape(-1) if has_bins[i] else np.empty(0, np.int64) for i in chosen]
        columns = {
            **_keys(key, len(chosen)),
            "site": ids[chosen],
            "scale": frame.scales[chosen],
            "channels": np.array([each.shape[1] for each in states]),
            "bins": np.array([len(each) for each in counts]),
            "states": np.concatenate(states, axis=1),
            "counts": np.concatenate(counts),
        }
        yield "details", columns, columns["states"].nbytes + columns["counts"].nbytes


def table_of(table: str, rows: list[Columns], sites: list[Site]) -> pa.Table:
    """Make a table of columns of several steps."""
    columns = {name: _join([each[name] for each in rows]) for name in rows[0]}
    if table == "totals":
        columns = _finish_columns(columns)
    elif table == "details":
        channels = _offsets(columns.pop("channels"))
        for name, values in zip(STATE.values(), columns.pop("states"), strict=True):
            columns[name] = pa.ListArray.from_arrays(channels, to_arrow(values, pa.float64()))
        bins, counts = _offsets(columns.pop("bins")), to_arrow(columns["counts"], pa.int64())
        columns["counts"] = pa.ListArray.from_arrays(bins, counts)
    elif table == "samples":
        ids = to_arrow(columns["ids"], pa.int64())
        columns["ids"] = pa.ListArray.from_arrays(_offsets(columns.pop("lengths")), ids)
    return _table(table, columns, sites)


def _join(parts: list[Any]) -> Any:
    return np.concatenate(parts, axis=-1) if isinstance(parts[0], np.ndarray) else list(chain.from_iterable(parts))


def _finish_columns(columns: Columns) -> Columns:
    """Sort totals by site and step, with the statistics that follow from their states."""
    sorting = np.lexsort([columns[name] for name in ("record", "attempt", "step", "site")])
    columns = {name: values[..., sorting] for name, values in columns.items()}
    for name in ("order", "channel_dim", "group_size"):
        columns[name] = to_arrow(columns[name], pa.int32(), columns[name] == _NULL)
    wholes = columns.pop("wholes")
    stats: Stats[Array] = Stats(unscale(wholes, columns["scale"]))
    columns |= {name: getattr(stats, name) for name in STATISTICS}
    for field, name in STATE.items():
        if name not in STATISTICS:
            values = wholes[FIELDS.index(field)]
            same = columns[SAME_AS[name]].view(np.int64) == values.view(np.int64) if name in SAME_AS else None
            columns[name] = to_arrow(values, pa.float64(), same)
    return columns


def _portions(places: Counts, frame: StepFrame) -> Iterator[list[int]]:
    """Split places of sites where what they hold fills FLUSH."""
    channels, counters = frame.sites.channels[places], frame.sites.counters[places]
    sizes = np.cumsum(8 * (len(FIELDS) * channels * (channels > 1) + counters))
    for portion in np.split(places, np.flatnonzero(np.diff(sizes // FLUSH)) + 1):
        if len(portion):
            yield portion.tolist()


def _offsets(lengths: Any) -> pa.Array:
    return to_arrow(np.append(0, np.cumsum(lengths)), pa.int32())


def _keys(key: Key, rows: int) -> dict[str, Counts]:
    return {name: np.full(rows, value) for name, value in key._asdict().items()}


def _table(table: str, columns: dict[str, Any], sites: list[Site]) -> pa.Table:
    schema = make_writer_schema(table)
    if "site" in schema.names:
        columns = {**columns, **names_of(sites, np.asarray(columns["site"], np.int64))}
    arrays = []
    for field in schema:
        values = columns[field.name]
        if isinstance(values, np.ndarray):
            values = to_arrow(values, field.type)
        arrays.append(values if isinstance(values, pa.Array) else from_list(values, field.type))
    return pa.Table.from_arrays(arrays, schema=schema)
