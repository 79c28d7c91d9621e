"""A directory that is torn, altered or hostile: what is read is what was written, or RunError; nothing worse."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hookstats
from hookstats import Snapshot
from hookstats.records.errors import RunError
from hookstats.records.schema import SCHEMAS
from hookstats.records.store import Store
from tests.records import recorded

TRIES = int(os.environ.get("HOOKSTATS_FUZZ", "150"))
STEPS = 12


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kept")
    store = Store(directory / "rank=0")
    store.begin(0, {"model": "small"})
    for step in range(STEPS):
        store.add(recorded.measured(step))
        if step % 4 == 3:
            store.commit(step)
    store.finish(0)
    return directory


@pytest.fixture
def run(kept: Path, tmp_path: Path) -> Path:
    shutil.copytree(kept, tmp_path / "run")
    return tmp_path / "run"


def read_all(directory: Path) -> list[Snapshot]:
    """Everything that can be read of it, and read."""
    run = hookstats.load(directory)
    assert run.totals.num_rows >= 0
    assert run.scalars.num_rows >= 0
    snapshots = list(run)
    for snapshot in snapshots:
        snapshot.to_dict()
    return snapshots


def altered(content: bytes, draw: np.random.Generator) -> bytes:
    """With bytes flipped, cut off, doubled, or replaced by others of it."""
    kind, changed = draw.integers(5), bytearray(content)
    at = int(draw.integers(len(content)))
    if kind == 0:
        changed[at] ^= 1 << int(draw.integers(8))
    elif kind == 1:
        for place in draw.integers(0, len(content), 8).tolist():
            changed[place] = int(draw.integers(256))
    elif kind == 2:
        del changed[at:]
    elif kind == 3:
        end = min(len(content), at + int(draw.integers(1, 64)))
        changed[at:end] = bytes(end - at)
    else:
        begin = int(draw.integers(len(content)))
        piece = content[begin : begin + 16]
        changed[at : at + len(piece)] = piece
    return bytes(changed)


def test_altered_files_give_what_was_written_or_raise(run: Path) -> None:
    paths = sorted(path for path in (run / "rank=0").rglob("*") if path.is_file())
    expected = [Snapshot(recorded.measured(step)) for step in range(STEPS)]
    draw, refused = np.random.default_rng(int(os.environ.get("HOOKSTATS_SEED", "0"))), 0
    for number in range(TRIES):
        path = paths[int(draw.integers(len(paths)))]
        content = path.read_bytes()
        path.write_bytes(altered(content, draw))
        try:
            got = read_all(run)
        except RunError:
            refused += 1
        else:
            assert len(got) == STEPS, (number, path)
            for have, want in zip(got, expected, strict=True):
                assert have.equals(want), (number, path)
        finally:
            path.write_bytes(content)
    assert refused > TRIES // 2
    assert len(read_all(run)) == STEPS


def test_a_file_that_is_gone_is_told(run: Path) -> None:
    for path in [*sorted((run / "rank=0").rglob("*.parquet")), run / "rank=0" / "sites.json"]:
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(RunError, match="got no file"):
            read_all(run)
        path.write_bytes(content)


DEEP = b'{"schema": 1, "attempts": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
TEXTS = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"7",
    b'"x"',
    b"\xff\xfe",
    b'{"schema": 1}',
    b'{"schema": NaN}',
    b"9" * 10_000,
    DEEP,
]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:20]))
@pytest.mark.parametrize("name", ["manifest.json", "sites.json"])
def test_other_json_is_refused(run: Path, name: str, text: bytes) -> None:
    (run / "rank=0" / name).write_bytes(text)
    with pytest.raises(RunError):
        hookstats.load(run)


def with_checksum(body: dict[str, Any]) -> str:
    """As one who wants to be believed writes it."""
    body.pop("crc32", None)
    return json.dumps(body | {"crc32": zlib.crc32(json.dumps(body, sort_keys=True).encode())})


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "a path": lambda d: d["parts"]["totals"][0].update(file="../../../etc/passwd"),
    "an absolute path": lambda d: d["parts"]["totals"][0].update(file="/dev/zero"),
    "no list": lambda d: d["parts"].update(totals={}),
    "no parts": lambda d: d.update(parts=[]),
    "another table": lambda d: d["parts"].update(more=[]),
    "a part twice": lambda d: d["parts"]["totals"].append(d["parts"]["totals"][0]),
    "rows that are not there": lambda d: d["parts"]["totals"][0].update(rows=2**62),
    "negative rows": lambda d: d["parts"]["totals"][0].update(rows=-1),
    "a float": lambda d: d["parts"]["totals"][0].update(bytes=1.5),
    "a bool": lambda d: d["parts"]["totals"][0].update(level=True),
    "beyond int64": lambda d: d["parts"]["totals"][0].update(steps=[0, 2**70]),
    "steps backwards": lambda d: d["parts"]["totals"][0].update(steps=[5, 1]),
    "a part less": lambda d: d["parts"]["totals"].pop(),
    "no scalars": lambda d: d["parts"]["scalars"].clear(),
    "no events": lambda d: d["parts"]["events"].clear(),
    "a part of steps less": lambda d: d["parts"]["steps"].pop(),
    "more records": lambda d: d["attempts"][0].update(records=13),
    "fewer records": lambda d: d["attempts"][0].update(records=11),
    "another attempt": lambda d: d["attempts"][0].update(attempt=1),
    "no attempts": lambda d: d["attempts"].clear(),
    "an attempt twice": lambda d: d["attempts"].append(d["attempts"][0]),
    "an attempt of text": lambda d: d.update(attempts=["x"]),
    "other fields": lambda d: d.update(fields=["count"]),
    "fewer sites": lambda d: d.update(sites=3),
    "more sites": lambda d: d.update(sites=10**9),
    "no sites": lambda d: d.update(sites=0),
    "a key more": lambda d: d.update(more=1),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_manifest_that_says_something_else_is_refused(run: Path, kind: str) -> None:
    path = run / "rank=0" / "manifest.json"
    body = json.loads(path.read_text())
    HOSTILE[kind](body)
    path.write_text(with_checksum(body))
    with pytest.raises(RunError, match="expected"):
        read_all(run)


def replace_column(run: Path, table: str, column: str, change: Callable[[Any], Any]) -> None:
    """In the first file, with a footer and a manifest that are in order."""
    manifest = run / "rank=0" / "manifest.json"
    body = json.loads(manifest.read_text())
    part = body["parts"][table][0]
    path = run / "rank=0" / table / part["file"]
    rows = pq.read_table(path)
    values = change(rows[column].to_pylist())
    at = rows.column_names.index(column)
    rows = rows.set_column(at, rows.schema.field(column), [pa.array(values, SCHEMAS[table].field(column).type)])
    pq.write_table(rows.cast(SCHEMAS[table]), path, store_schema=False)
    content = path.read_bytes()
    length = int.from_bytes(content[-8:-4], "little") + 8
    part.update(bytes=len(content), footer=zlib.crc32(content[-length:]), steps=[-(2**63), 2**63 - 1])
    manifest.write_text(with_checksum(body))


def first(value: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda values: [value, *values[1:]]


COLUMNS: dict[str, tuple[str, str, Callable[[list[Any]], list[Any]]]] = {
    "a site that is not there": ("totals", "site", first(10**6)),
    "a negative site": ("totals", "site", first(-1)),
    "a site twice": ("totals", "site", lambda values: [values[0]] * len(values)),
    "a place twice": ("totals", "place", lambda values: [0] * len(values)),
    "a place beyond": ("totals", "place", first(10**6)),
    "an order twice": ("totals", "order", lambda values: [0] * len(values)),
    "no channels": ("totals", "channels", first(0)),
    "many channels": ("totals", "channels", first(2**31 - 1)),
    "negative calls": ("totals", "calls", first(-3)),
    "no state": ("totals", "state_m2", first(None)),
    "a histogram that is not there": ("totals", "has_histogram", lambda values: [True] * len(values)),
    "a record that is not there": ("totals", "record", first(99)),
    "a negative record": ("totals", "record", first(-1)),
    "another attempt": ("totals", "attempt", first(7)),
    "other bins": ("steps", "histogram", first('{"linear": null, "per_channel": true}')),
    "bins of text": ("steps", "histogram", first("[[[[")),
    "bins without end": ("steps", "histogram", first('{"linear": {"lo": 0, "hi": 1, "n": 1e999}, "per_channel": 0}')),
    "a record twice": ("steps", "record", first(1)),
    "fewer scalars": ("steps", "scalars", first(0)),
    "more sites": ("steps", "sites", first(10**9)),
    "negative sites": ("steps", "sites", first(-5)),
    "a scalar without a name": ("scalars", "name", first(None)),
    "a shorter list": ("channels", "state_mean", first([1.0])),
    "an empty list": ("channels", "count", first([])),
    "a null in a list": ("channels", "state_m2", lambda values: [[None, *values[0][1:]], *values[1:]]),
    "a channel's site": ("channels", "site", first(10**6)),
    "fewer counts": ("histograms", "counts", first([1, 2, 3])),
    "negative counts": ("histograms", "counts", lambda values: [[-1, *values[0][1:]], *values[1:]]),
    "an event's site": ("events", "site", first(10**6)),
    "an event without a reason": ("events", "reason", first(None)),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_values_that_no_store_writes_are_refused(run: Path, kind: str) -> None:
    table, column, change = COLUMNS[kind]
    replace_column(run, table, column, change)
    with pytest.raises(RunError, match="expected"):
        read_all(run)


def test_a_hostile_store_is_not_appended_to(run: Path) -> None:
    path = run / "rank=0" / "manifest.json"
    body = json.loads(path.read_text())
    body["parts"]["totals"][0]["file"] = "../../../x"
    path.write_text(with_checksum(body))
    with pytest.raises(RunError, match=r"parts\.totals\[0\]\.file: expected text like"):
        Store(run / "rank=0")
