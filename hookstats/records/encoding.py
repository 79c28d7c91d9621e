"""Drained steps as Arrow tables. What is kept is copied: the blocks may be overwritten as soon as `rows` returns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from hookstats.numbers.blocks import Drained
from hookstats.numbers.fields import (
    FIELDS,
    STATISTICS,
    Array,
    Counts,
    Site,
    bins_to_json,
)
from hookstats.records.arrays import from_list, to_arrow
from hookstats.records.derived import finished
from hookstats.records.schema import FLUSH, SAME_AS, STATE, names_of, plain, written


class Key(NamedTuple):
    """What every row of a step begins with."""

    step: int
    time: int  # microseconds since the epoch
    attempt: int
    record: int


class Totals(NamedTuple):
    """The rows of a step, before they are finished."""

    key: Key
    ids: Counts
    place_in_order: Counts  # -1 where silent
    calls: Counts
    scales: Array
    widths: Counts
    keeps: Any
    dims: Counts
    has_dim: Any
    group_sizes: Counts  # 0 where nothing belongs together
    has_histogram: Any
    wholes: Array

    @property
    def size(self) -> int:
        return len(self.ids) * 8 * (len(FIELDS) + len(STATISTICS) + len(self))


def totals_of(drained: Drained, key: Key, ids: Counts) -> Totals:
    """ids: of drained.columns.sites."""
    columns, n = drained.columns, len(ids)
    order = np.full(n, -1, np.int64)
    order[columns.order] = np.arange(len(columns.order))
    return Totals(
        key,
        ids,
        order,
        columns.calls,
        columns.scales,
        columns.shapes[0],
        columns.keeps,
        np.array([0 if dim is None else dim for dim in columns.dims], np.int64),
        np.array([dim is not None for dim in columns.dims], bool),
        np.array([size or 0 for size in columns.group_sizes], np.int64),
        columns.shapes[1] > 0,
        columns.wholes,
    )


def totals_table(steps: list[Totals], sites: list[Site]) -> pa.Table:
    """Of several steps, sorted by site and step."""
    lengths = [len(each.ids) for each in steps]
    ids = np.concatenate([each.ids for each in steps])
    keys = {name: np.repeat([getattr(each.key, name) for each in steps], lengths) for name in Key._fields}
    sorting = np.lexsort((keys["record"], keys["attempt"], keys["step"], ids))

    def joined(name: str) -> Any:
        return np.concatenate([getattr(each, name) for each in steps])[sorting]

    scales, order, has_dim = joined("scales"), joined("place_in_order"), joined("has_dim")
    group_sizes = joined("group_sizes")
    wholes = np.concatenate([each.wholes for each in steps], axis=1)[:, sorting]
    stats = finished(wholes, scales)
    columns: dict[str, Any] = {name: values[sorting] for name, values in keys.items()}
    columns |= {
        "site": ids[sorting],
        "place": np.concatenate([np.arange(length) for length in lengths])[sorting],
        "order": to_arrow(order, pa.int32(), order < 0),
        "calls": joined("calls"),
        "scale": scales,
        "channels": joined("widths"),
        "keeps_channels": joined("keeps"),
        "channel_dim": to_arrow(joined("dims"), pa.int32(), ~has_dim),
        "group_size": to_arrow(group_sizes, pa.int32(), group_sizes == 0),
        "has_histogram": joined("has_histogram"),
    }
    columns |= {name: getattr(stats, name) for name in STATISTICS}
    for field, name in STATE.items():
        if name not in STATISTICS:
            values = wholes[FIELDS.index(field)]
            same = columns[SAME_AS[name]].view(np.int64) == values.view(np.int64) if name in SAME_AS else None
            columns[name] = to_arrow(values, pa.float64(), same)
    return _table("totals", columns, sites)


def channels_tables(drained: Drained, key: Key, ids: Counts, sites: list[Site]) -> Iterator[tuple[pa.Table, int]]:
    """The states of more than one channel, a few MB at a time, and how many bytes these are."""
    columns = drained.columns
    wide = np.flatnonzero(columns.shapes[0] > 1).tolist()
    for chosen, states in _portions(wide, columns.state):
        offsets = _offsets([state.shape[1] for state in states])
        fields = np.concatenate(states, axis=1)
        lists = {
            name: pa.ListArray.from_arrays(offsets, to_arrow(values, pa.float64()))
            for name, values in zip(STATE.values(), fields, strict=True)
        }
        table = _of_sites("channels", key, ids[chosen], sites, {"scale": columns.scales[chosen], **lists})
        yield table, sum(state.nbytes for state in states)


def histograms_tables(drained: Drained, key: Key, ids: Counts, sites: list[Site]) -> Iterator[tuple[pa.Table, int]]:
    """The same of histograms."""
    columns = drained.columns
    measured = np.flatnonzero(columns.shapes[1]).tolist()
    for chosen, counts in _portions(measured, columns.histogram):
        flat = np.concatenate([each.reshape(-1) for each in counts])
        lists = pa.ListArray.from_arrays(_offsets([each.size for each in counts]), to_arrow(flat, pa.int64()))
        table = _of_sites("histograms", key, ids[chosen], sites, {"scale": columns.scales[chosen], "counts": lists})
        yield table, flat.nbytes


def step_row(drained: Drained, key: Key, sites: int) -> dict[str, Any]:
    bins = drained.layout.bins
    return {
        **key._asdict(),
        "grad_scale": drained.grad_scale,
        "overflowed": drained.overflowed,
        "ranks": drained.ranks.to_text(),
        "histogram": None if bins is None else json.dumps(bins_to_json(bins)),
        "sites": sites,
        "scalars": len(drained.scalars) + sum(map(len, drained.earlier_scalars.values())),
        "events": len(drained.skipped),
        "since": min([drained.step, *drained.earlier_scalars, *drained.sample_ids]),
    }


def scalar_rows(scalars: Mapping[str, float], key: Key, measured: bool) -> list[dict[str, Any]]:
    """Of a step; key: with its number."""
    return [
        {**key._asdict(), "name": plain(name), "value": value, "measured": measured} for name, value in scalars.items()
    ]


def sample_rows(sample_ids: Mapping[int, Counts], key: Key) -> list[dict[str, Any]]:
    """key: of the step with which they came."""
    return [
        {**key._replace(step=number)._asdict(), "ids": ids, "measured": key.record >= 0 and number == key.step}
        for number, ids in sample_ids.items()
    ]


def event_rows(drained: Drained, key: Key, id_of: dict[Site, int]) -> list[dict[str, Any]]:
    return [
        {**key._asdict(), "site": id_of[site], "reason": plain(skipped.reason), "times": skipped.times}
        for site, skipped in drained.skipped.items()
    ]


def small_table(table: str, rows: list[dict[str, Any]], sites: list[Site]) -> pa.Table:
    """Of steps, scalars, samples or events."""
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


def _offsets(lengths: list[int]) -> pa.Array:
    return to_arrow(np.cumsum([0, *lengths]), pa.int32())


def _of_sites(table: str, key: Key, ids: Counts, sites: list[Site], columns: dict[str, Any]) -> pa.Table:
    keys = {name: np.full(len(ids), value) for name, value in key._asdict().items()}
    return _table(table, {**keys, "site": ids, **columns}, sites)


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
