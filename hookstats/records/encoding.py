"""Steps as Arrow tables. What is kept is copied: the blocks may be overwritten as soon as `rows` returns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from hookstats.numbers.fields import FIELDS, STATISTICS, Counts, Site, bins_to_json
from hookstats.numbers.frame import StepFrame
from hookstats.numbers.ranks import drifts_to_json
from hookstats.records.arrays import from_list, to_arrow
from hookstats.records.derived import finished
from hookstats.records.schema import FLUSH, SAME_AS, STATE, names_of, plain, written

_NULL = -(2**31)  # in integers of totals, until they are a table


class Key(NamedTuple):
    """The columns that every row of a step begins with."""

    step: int
    time: int  # microseconds since the epoch
    attempt: int
    record: int


Columns = dict[
    str, Any
]  # of some rows: arrays of which the last axis is that of the rows, or of what is in their lists


def totals_of(frame: StepFrame, key: Key, ids: Counts) -> Iterator[tuple[Columns, int]]:
    """Columns of the rows of a step, with ``wholes``, from which the others follow; and their bytes.

    ids: of frame.sites.
    """
    sites, n = frame.sites, len(ids)
    if not n:
        return
    order = np.full(n, _NULL)
    order[frame.order] = np.arange(len(frame.order))
    columns = {
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
    yield columns, n * 8 * len(written("totals"))


def channels_of(frame: StepFrame, key: Key, ids: Counts) -> Iterator[tuple[Columns, int]]:
    """Columns of states of several channels, a few MB at a time: ``lengths`` of rows, ``lists`` ``[fields, all]``."""
    wide = np.flatnonzero(frame.sites.channels > 1).tolist()
    return _lists_of(frame, key, ids, wide, frame.state)


def histograms_of(frame: StepFrame, key: Key, ids: Counts) -> Iterator[tuple[Columns, int]]:
    """Columns of histograms, in the same form."""
    measured = np.flatnonzero(frame.sites.counters).tolist()
    return _lists_of(frame, key, ids, measured, lambda i: np.asarray(frame.histogram(i)).reshape(1, -1))


def _lists_of(
    frame: StepFrame, key: Key, ids: Counts, places: list[int], part: Callable[[int], Any]
) -> Iterator[tuple[Columns, int]]:
    for chosen, parts in _portions(places, part):
        columns = {
            **_keys(key, len(chosen)),
            "site": ids[chosen],
            "scale": frame.scales[chosen],
            "lengths": np.array([each.shape[1] for each in parts]),
            "lists": np.concatenate(parts, axis=1),
        }
        yield columns, columns["lists"].nbytes


def sites_table(table: str, rows: list[Columns], sites: list[Site]) -> pa.Table:
    """Make a table of what `totals_of`, `channels_of` or `histograms_of` gave for several steps."""
    columns = {name: np.concatenate([each[name] for each in rows], axis=-1) for name in rows[0]}
    if table == "totals":
        return _table(table, _finished(columns), sites)
    offsets = _offsets(columns.pop("lengths"))
    names = STATE.values() if table == "channels" else ["counts"]
    for name, values in zip(names, columns.pop("lists"), strict=True):
        columns[name] = pa.ListArray.from_arrays(offsets, to_arrow(values, written(table).field(name).type.value_type))
    return _table(table, columns, sites)


def _finished(columns: Columns) -> Columns:
    """Sort totals by site and step, with the statistics that follow from their states."""
    sorting = np.lexsort([columns[name] for name in ("record", "attempt", "step", "site")])
    columns = {name: values[..., sorting] for name, values in columns.items()}
    for name in ("order", "channel_dim", "group_size"):
        columns[name] = to_arrow(columns[name], pa.int32(), columns[name] == _NULL)
    wholes = columns.pop("wholes")
    stats = finished(wholes, columns["scale"])
    columns |= {name: getattr(stats, name) for name in STATISTICS}
    for field, name in STATE.items():
        if name not in STATISTICS:
            values = wholes[FIELDS.index(field)]
            same = columns[SAME_AS[name]].view(np.int64) == values.view(np.int64) if name in SAME_AS else None
            columns[name] = to_arrow(values, pa.float64(), same)
    return columns


def step_row(frame: StepFrame, key: Key, sites: int) -> dict[str, Any]:
    bins = frame.bins
    return {
        **key._asdict(),
        "grad_scale": frame.grad_scale,
        "overflowed": frame.overflowed,
        "ranks": frame.ranks.to_text(),
        "rows": frame.rows,
        "drifts": json.dumps(drifts_to_json(frame.drifts)) if frame.drifts else None,
        "histogram": None if bins is None else json.dumps(bins_to_json(bins)),
        "sites": sites,
        "skipped": json.dumps([[*site, *each] for site, each in frame.skipped.items()]) if frame.skipped else None,
        "since": min([frame.step, *frame.earlier_scalars, *frame.sample_ids]),
    }


def scalar_rows(scalars: Mapping[str, float], key: Key, measured: bool) -> list[dict[str, Any]]:
    """Rows of a step's scalars. key: with the step's number."""
    return [
        {**key._asdict(), "name": plain(name), "value": value, "measured": measured} for name, value in scalars.items()
    ]


def sample_rows(sample_ids: Mapping[int, Counts], key: Key) -> list[dict[str, Any]]:
    """key: of the step with which they came."""
    return [
        {**key._replace(step=number)._asdict(), "ids": ids, "measured": key.record >= 0 and number == key.step}
        for number, ids in sample_ids.items()
    ]


def small_table(table: str, rows: list[dict[str, Any]], sites: list[Site]) -> pa.Table:
    """Make a table of rows of steps, scalars or samples."""
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    if table == "samples":
        ids = columns["ids"]
        flat = to_arrow(np.concatenate(ids), pa.int64())
        columns["ids"] = pa.ListArray.from_arrays(_offsets([len(each) for each in ids]), flat)
    return _table(table, columns, sites)


def _portions(places: list[int], part: Callable[[int], Any]) -> Iterator[tuple[list[int], list[Any]]]:
    chosen: list[int] = []
    arrays: list[Any] = []
    size = 0
    for i in places:
        chosen.append(i)
        arrays.append(part(i))
        size += arrays[-1].nbytes
        if size >= FLUSH:
            yield chosen, arrays
            chosen, arrays, size = [], [], 0
    if chosen:
        yield chosen, arrays


def _offsets(lengths: Any) -> pa.Array:
    return to_arrow(np.append(0, np.cumsum(lengths)), pa.int32())


def _keys(key: Key, rows: int) -> dict[str, Counts]:
    return {name: np.full(rows, value) for name, value in key._asdict().items()}


def _table(table: str, columns: dict[str, Any], sites: list[Site]) -> pa.Table:
    schema = written(table)
    if "site" in schema.names:
        columns = {**columns, **names_of(sites, np.asarray(columns["site"], np.int64))}
    arrays = []
    for field in schema:
        values = columns[field.name]
        if isinstance(values, np.ndarray):
            values = to_arrow(values, field.type)
        arrays.append(values if isinstance(values, pa.Array) else from_list(values, field.type))
    return pa.Table.from_arrays(arrays, schema=schema)
