"""Statistics follow from the state: a run that was recorded with fewer or more of them reads as it was measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hookstats
from hookstats.numbers.fields import STATISTICS
from hookstats.numbers.snapshot import Snapshot
from hookstats.records.parts import seal
from hookstats.records.schema import SAME_AS, STATE, writer_options
from hookstats.records.store import Store
from tests.records import recorded

STEPS = 12
DERIVED = [name for name in STATISTICS if name not in (*STATE.values(), *SAME_AS.values())]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    store = Store(tmp_path / "run" / "rank=0")
    store.begin(0, {})
    for step in range(STEPS):
        store.add(recorded.measured(step))
        if step % 3 == 2:
            store.commit(step)
    store.close()
    return tmp_path / "run"


def rewritten(run: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """With totals of other columns, as another version had written them."""
    for path in (run / "rank=0" / "totals").iterdir():
        told = json.loads(pq.read_metadata(path).metadata[b"hookstats"]) | {"crc32": "0" * 8}
        rows = change(pq.ParquetFile(path).read())
        options = {name: value for name, value in writer_options("totals").items() if name != "column_encoding"}
        with pq.ParquetWriter(path, rows.schema, **{**options, "use_dictionary": False}) as writer:
            writer.write_table(rows)
            writer.add_key_value_metadata({"hookstats": json.dumps(told)})
        with path.open("r+b") as file:
            seal(file.fileno())


def less(*names: str) -> Callable[[pa.Table], pa.Table]:
    return lambda rows: rows.drop_columns(list(names))


def more(rows: pa.Table) -> pa.Table:
    return rows.add_column(3, "kurtosis_of_tomorrow", pa.array(np.arange(float(len(rows)))))


def same(a: pa.Table, b: pa.Table) -> None:
    """Bit for bit, and NaN where the other has it."""
    assert a.schema == b.schema
    for name in a.column_names:
        if pa.types.is_floating(a[name].type):
            np.testing.assert_array_equal(a[name].to_numpy().view(np.int64), b[name].to_numpy().view(np.int64))
        else:
            assert a[name].equals(b[name])


CHANGES = {name: less(name) for name in DERIVED} | {"all": less(*DERIVED), "one more": more}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_run_of_fewer_or_more_statistics_reads_as_it_was_measured(run: Path, kind: str) -> None:
    expected = hookstats.load(run).totals
    rewritten(run, CHANGES[kind])
    loaded = hookstats.load(run)
    same(loaded.totals, expected)
    assert loaded.totals.column_names[-len(STATISTICS) :] == list(STATISTICS)
    for snapshot in loaded:
        assert snapshot.equals(Snapshot(recorded.measured(snapshot.step)))
    same(hookstats.load(run, statistics=["rms"]).totals, expected.select([*expected.column_names[:8], "rms"]))


@pytest.mark.parametrize("kind", ["rms", "one more"])
def test_such_a_run_goes_on_and_its_parts_are_merged(run: Path, kind: str) -> None:
    rewritten(run, CHANGES[kind])
    store = Store(run / "rank=0")
    store.begin(0, {})
    for step in range(STEPS, STEPS + 4):
        store.add(recorded.measured(step))
    store.commit(STEPS)
    while store.merge():
        pass
    store.close()
    loaded = hookstats.load(run)
    assert len(list((run / "rank=0" / "totals").iterdir())) == 2
    assert loaded.steps == list(range(STEPS + 4))
    for snapshot in loaded:
        want = Snapshot(recorded.measured(snapshot.step))
        assert snapshot.equals(want)
    rms = loaded.totals.filter(pa.compute.equal(loaded.totals["step"], 5))["rms"].to_numpy()
    np.testing.assert_array_equal(rms, Snapshot(recorded.measured(5)).frame.totals.rms)


def test_files_without_a_state_are_left_out(run: Path) -> None:
    rewritten(run, less("state_m2"))
    with pytest.warns(UserWarning, match="state_m2"):
        assert list(hookstats.load(run)) == []
