"""`hookstats.load`: tables, what is asked for alone, attempts, ranks, and other readers of the same files."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import hookstats
from hookstats import Site, Snapshot
from hookstats.numbers.fields import STATISTICS
from hookstats.numbers.frame import StepFrame
from hookstats.records.errors import RunError, SchemaError
from hookstats.records.schema import VERSION
from hookstats.records.store import Store
from hookstats.rules import Finding
from tests.conftest import ROOT
from tests.frames import merged_snapshot
from tests.records import recorded


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 steps, of which the later ones were recorded twice."""
    directory = tmp_path_factory.mktemp("kept")
    recorded.keep(
        directory,
        {
            0: [recorded.measured(step) for step in range(40)],
            1: [recorded.measured(step, step + 1000) for step in range(30, 60)],
        },
    )
    recorded.merge(directory)
    return directory


def expected_rows(snapshots: list[Snapshot]) -> dict[tuple[int, str, str], list[float]]:
    rows = {}
    for snapshot in snapshots:
        for i, site in enumerate(snapshot):
            values = [float(getattr(snapshot.frame.totals, name)[i]) for name in STATISTICS]
            rows[snapshot.step, site.name, site.tensor] = [float(snapshot.frame.calls[i]), *values]
    return rows


def snapshots_of_kept() -> list[Snapshot]:
    seeds = [*range(30), *range(1030, 1060)]
    return [Snapshot(recorded.measured(step, seed)) for step, seed in enumerate(seeds)]


def test_a_run_has_the_steps_that_count_and_their_snapshots(kept: Path) -> None:
    run = hookstats.load(kept)
    assert len(run) == 60
    assert run.steps == list(range(60))
    assert 59 in run
    assert 60 not in run
    assert not any(other in run for other in ("59", None, 58.5))
    for got, want in zip(run, snapshots_of_kept(), strict=True):
        assert got.equals(want)
    with pytest.raises(KeyError, match=r"expected a recorded step, such as \[0, 1, 2, 3, 4\]; got 60"):
        run[60]


def test_totals_scalars_and_pandas_have_the_numbers_of_the_snapshots(kept: Path) -> None:
    run, snapshots = hookstats.load(kept), snapshots_of_kept()
    table, frame = run.totals, run.to_pandas()
    want = expected_rows(snapshots)
    assert len(table) == len(frame) == len(want)
    rows = table.to_pylist()
    assert [(row["step"], row["name"], row["tensor"]) for row in rows] == list(want)
    for row, values in zip(rows, want.values(), strict=True):
        np.testing.assert_array_equal([row["calls"], *(row[name] for name in STATISTICS)], values)
    np.testing.assert_array_equal(frame[list(STATISTICS)].to_numpy(), np.array(list(want.values()))[:, 1:])
    orders = [row["order"] for row in rows if row["step"] == 7]
    assert [orders[i] for i in snapshots[7].frame.order] == list(range(len(snapshots[7].order)))
    assert all(order is None for i, order in enumerate(orders) if snapshots[7].frame.calls[i] == 0)
    scalars = run.scalars.to_pylist()
    assert [(row["step"], row["name"], row["value"]) for row in scalars] == [
        (snapshot.step, *pair) for snapshot in snapshots for pair in snapshot.scalars.items()
    ]


def test_duckdb_polars_and_pandas_read_the_same_numbers(kept: Path) -> None:
    duckdb, polars, pandas = (pytest.importorskip(name) for name in ("duckdb", "polars", "pandas"))
    columns = ["step", "name", "tensor", "calls", *STATISTICS]
    files = f"{kept}/rank=0/totals/*.parquet"
    want = expected_rows(snapshots_of_kept())

    def compare(rows: list[tuple[Any, ...]]) -> None:
        assert len(rows) == len(want)
        for step, name, tensor, *values in rows:
            np.testing.assert_array_equal(np.array(values, float), want[step, name, tensor])

    compare(
        duckdb.sql(
            f"SELECT {', '.join(columns)} FROM '{files}' QUALIFY attempt = max(attempt) OVER (PARTITION BY step)"
        ).fetchall()
    )
    latest = polars.col("attempt") == polars.col("attempt").max().over("step")
    compare(polars.scan_parquet(files).filter(latest).select(columns).collect().rows())
    frame = pandas.concat(map(pandas.read_parquet, sorted((kept / "rank=0" / "totals").glob("*.parquet"))))
    frame = frame[frame.attempt == frame.groupby("step").attempt.transform("max")]
    compare(list(frame[columns].itertuples(index=False)))


_WITHOUT_PYTZ = """
import datetime, sys
sys.modules["pytz"] = None  # importing it raises, as where it is not installed
import duckdb, pandas, polars
for path, first in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    rows = duckdb.sql(f"SELECT * FROM '{path}'").fetchall()
    at = duckdb.sql(f"SELECT * FROM '{path}'").columns.index("time")
    told = [row[at] for row in rows]
    assert told == polars.read_parquet(path)["time"].to_list()
    assert told == pandas.read_parquet(path)["time"].to_list()
    assert told[0] == datetime.datetime(2023, 11, 14, 22, 13, 20) + datetime.timedelta(seconds=int(first)), path
"""


def test_times_are_utc_and_read_without_pytz(kept: Path) -> None:
    for name in ("duckdb", "polars", "pandas"):
        pytest.importorskip(name)
    arguments: list[str] = []
    for table in ("totals", "steps", "scalars", "details"):
        path = min((kept / "rank=0" / table).glob("*.parquet"))
        first = pq.read_table(path)["time"][0].value / 1e6 - 1.7e9
        arguments += [str(path), str(int(first))]
    subprocess.run([sys.executable, "-c", _WITHOUT_PYTZ, *arguments], check=True)


def test_other_readers_see_channels_and_histograms(kept: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    snapshot = hookstats.load(kept)[8]
    site = next(site for site in snapshot.order if snapshot[site].channels is not None)
    where = f"step = 8 AND name = '{site.name}' AND tensor = '{site.tensor}'"
    [[mean, scale, count]] = duckdb.sql(
        f"SELECT state_mean, scale, count FROM '{kept}/rank=0/details/*.parquet' WHERE {where}"
    ).fetchall()
    channels = snapshot[site].channels
    assert channels is not None
    np.testing.assert_array_equal(np.array(mean) / scale, channels.mean)
    np.testing.assert_array_equal(count, channels.count)
    [[counts]] = duckdb.sql(f"SELECT counts FROM '{kept}/rank=0/details/*.parquet' WHERE {where}").fetchall()
    histogram = snapshot[site].histogram
    assert histogram is not None
    assert sum(counts) - counts[255] - counts[256] - counts[511] == histogram.counts.sum()


def test_sites_and_steps_and_statistics_are_chosen(kept: Path) -> None:
    run = hookstats.load(kept, sites=["layers.1?", ("layers.2", "output")], steps=slice(10, 20), statistics=["rms"])
    assert run.steps == list(range(10, 20))
    for step in run.steps:
        whole = snapshots_of_kept()[step]
        sites = [site for site in whole if site.name[:-1] == "layers.1" or site == ("layers.2", "output")]
        want = whole.frame.select(np.array([whole.frame.sites.place[site] for site in sites]))
        assert list(run[step]) == sites
        assert run[step].order == [site for site in whole.order if site in sites]
        assert all(str(run[step][site]._to_dict()) == str(want.stats(i)._to_dict()) for i, site in enumerate(sites))
        assert set(run[step].skipped) <= set(sites)
    assert run.totals.column_names == ["step", "time", "attempt", "site", "name", "tensor", "order", "calls", "rms"]
    assert {row["step"] for row in run.totals.to_pylist()} == set(range(10, 20))
    assert list(hookstats.load(kept, sites=Site("layers.2", "output"))[10]) == [("layers.2", "output")]
    assert hookstats.load(kept, steps=[50, 3]).steps == [3, 50]
    assert hookstats.load(kept, steps=slice(70, None)).steps == []
    assert len(hookstats.load(kept, steps=slice(70, None)).totals) == 0
    for wrong, expected in (
        ({"sites": "nothing"}, "sites: names: the glob 'nothing' matches nothing; the names are"),
        ({"sites": [("layers.2", "grad_output")]}, "sites: .*expected .* got .*'grad_output'"),
        ({"steps": [3, 77]}, r"expected recorded steps, got \[77\]"),
        ({"steps": slice(0, 9, 2)}, "expected a slice from a step to a step"),
        ({"statistics": ["rsm"]}, "statistics: expected some of count, mean.*'rsm'"),
        ({"ranks": 3}, r"expected the directory of a run, with rank=3 in it; got \['rank=0'\]"),
        ({"ranks": "all"}, "expected a number, or \"merged\", got 'all'"),
    ):
        with pytest.raises(ValueError, match=expected):
            hookstats.load(kept, **wrong)


@pytest.mark.parametrize("steps", [7, "last", [None]])
def test_steps_that_are_no_numbers_are_refused_with_what_is_expected(kept: Path, steps: Any) -> None:
    with pytest.raises(ValueError, match="steps: expected a slice of step numbers, or a list of them, got"):
        hookstats.load(kept, steps=steps)


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "not there"):
        with pytest.raises(RunError, match="expected the directory of a run, with rank=0 in it; got none"):
            hookstats.load(path)
        with pytest.raises(RunError, match="expected the directory of a run"):
            hookstats.load(path, ranks="merged")


def test_one_site_is_read_without_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookstats.records.store.ROW_GROUP", 100)
    monkeypatch.setattr("hookstats.records.parts.ROW_GROUP", 100)
    recorded.keep(tmp_path, {0: [recorded.measured(step) for step in range(64)]}, commit_each=4)
    recorded.merge(tmp_path)
    one, every = (hookstats.load(tmp_path, sites=sites, statistics=["rms"]) for sites in ("layers.20", None))
    asked = ["step", "time", "attempt", "site", "place", "order", "calls", "rms"]
    data = 0
    for path in (tmp_path / "rank=0" / "totals").iterdir():
        footer = pq.read_metadata(path)
        groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
        columns = [group.column(i) for group in groups for i in range(footer.num_columns)]
        data += sum(each.total_compressed_size for each in columns if each.path_in_schema in asked)
    before, few, many = bytes_read(), len(one.totals), bytes_read()
    assert few == 64
    assert len(every.totals) > 2000
    of_one, of_all = many - before, bytes_read() - many  # both with the footers
    assert of_all - of_one > 0.8 * data


def bytes_read() -> int:
    """By this process so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("is_merged", [False, True])
def test_the_latest_attempt_holds_also_for_steps_that_it_has_not_repeated(tmp_path: Path, is_merged: bool) -> None:
    def attempt(steps: range, seed: int) -> list[StepFrame]:
        return [recorded.measured(step, seed + step) for step in steps]

    attempts = {0: attempt(range(0, 100, 10), 0), 1: attempt(range(55, 80, 10), 200), 4: attempt(range(60, 63), 400)}
    recorded.keep(tmp_path, attempts)
    store = Store(tmp_path / "rank=0")
    store.begin(5, {})  # has recorded nothing, and replaces nothing
    store.close()
    if is_merged:
        recorded.merge(tmp_path)
    run = hookstats.load(tmp_path)
    assert run.steps == [0, 10, 20, 30, 40, 50, 55, 60, 61, 62]
    seeds = [0, 10, 20, 30, 40, 50, 255, 460, 461, 462]
    for step, seed in zip(run.steps, seeds, strict=True):
        assert run[step].equals(Snapshot(recorded.measured(step, seed)))
    assert [row["step"] for row in run.scalars.to_pylist()] == run.steps
    assert sorted({row["attempt"] for row in run.totals.to_pylist()}) == [0, 1, 4]


def test_of_a_number_that_was_given_twice_the_later_step_counts(tmp_path: Path) -> None:
    recorded.keep(tmp_path, {0: [recorded.measured(step, seed) for seed, step in enumerate([0, 1, 2, 1, 5])]})
    run = hookstats.load(tmp_path)
    assert run.steps == [0, 1, 2, 5]
    assert run[1].equals(Snapshot(recorded.measured(1, 3)))
    assert len(run.totals) == sum(len(snapshot) for snapshot in run)


def test_findings_are_those_of_attempts_sites_and_steps_that_count(kept: Path) -> None:
    def finding(step: int, site: Site | None, attempt: int) -> Finding:
        return Finding("spike", step, site, float("nan"), 1.0, "critical", f"at {step}", 0, attempt)

    first, second = Site("layers.1", "grad_output"), Site("layers.2", "output")
    at_both = replace(finding(31, second, 1), sites=(second, Site("layers.4", "output")), site_count=2)
    found = [finding(3, first, 0), finding(35, first, 0), at_both, finding(33, None, 1)]
    lines = [json.dumps(each.to_json()) + "\n" for each in found]
    path = kept / "rank=0" / "findings.jsonl"
    path.write_text("".join(lines) + lines[0][:20])  # torn
    try:

        def steps(**arguments: Any) -> list[int]:
            return [each.step for each in hookstats.load(kept, **arguments).findings]

        assert steps() == [3, 31, 33]  # 35 was of an attempt that was resumed at 30
        assert steps(sites="layers.1") == [3, 33]
        assert steps(sites="layers.4") == [31, 33]
        assert steps(steps=slice(31, 32)) == [31]
        path.write_text('{"rule": 1}\n' + lines[0])
        with pytest.warns(
            UserWarning, match=r"expected a finding in each line, and one is left out; expected a finding's rule"
        ):
            assert steps() == [3]
    finally:
        path.unlink()


def test_ranks_merge_as_their_steps_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one has two sites more, and a step; in the first step it has another scale."""
    ranks = [[recorded.measured(step, step + 100 * rank) for step in range(4 + rank)] for rank in (0, 1)]
    other = ranks[1][0]
    other.grad_scale, other.scales = 16.0, other.sites.scales(16.0)
    for rank, frames in enumerate(ranks):
        recorded.keep(tmp_path, {0: frames}, rank)
    run = hookstats.load(tmp_path, ranks="merged")
    assert run.steps == [0, 1, 2, 3]
    wanted = [merged_snapshot([Snapshot(frames[step]) for frames in ranks]) for step in range(4)]
    for got, want in zip(run, wanted, strict=True):
        assert got.equals(want)
        assert (got.order, got.scalars, got.skipped) == (want.order, want.scalars, want.skipped)
    rows = run.totals.to_pylist()
    sites = [(each, site) for each in wanted for site in each]
    assert [(row["step"], row["name"], row["tensor"]) for row in rows] == [(each.step, *site) for each, site in sites]
    np.testing.assert_allclose([row["rms"] for row in rows], [each[site].total.rms for each, site in sites], rtol=1e-14)
    assert [row["value"] for row in run.scalars.to_pylist()] == [each.scalars["loss"] for each in wanted]
    late = Site("layers.41", "grad_output")
    assert list(hookstats.load(tmp_path, ranks="merged", sites=late)[1]) == [late]
    assert [each["settings"]["rank"] for each in run.attempts] == [0]
    assert hookstats.load(tmp_path, ranks=1)[4].equals(Snapshot(ranks[1][4]))
    scaled = Site("layers.1", "grad_output")  # by 8 and by 16
    means = [Snapshot(frames[0])[scaled].total.mean for frames in ranks]
    assert run[0][scaled].total.mean == pytest.approx(sum(means) / 2, rel=1e-12)
    monkeypatch.chdir(tmp_path)  # long paths are cut off
    assert "rank=1" in hookstats.load(".", ranks="merged")._repr_html_()


def test_a_reader_follows_parts_that_are_merged_away(tmp_path: Path) -> None:
    steps = [recorded.measured(step) for step in range(20)]
    recorded.keep(tmp_path, {0: steps}, commit_each=1)
    run = hookstats.load(tmp_path)
    store = Store(tmp_path / "rank=0")
    store.begin(1, {})
    for step in (20, 21):
        store.add(recorded.measured(step))
        store.commit(step)
    recorded.merge(tmp_path)
    assert run.steps == list(range(20))
    assert all(got.equals(Snapshot(want)) for got, want in zip(run, steps, strict=True))
    assert len(hookstats.load(tmp_path)) == 22


def test_another_version_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookstats.records.parts.VERSION", 99)
    recorded.keep(tmp_path, {0: [recorded.measured(0)]})
    monkeypatch.undo()
    for read in (lambda: hookstats.load(tmp_path), lambda: Store(tmp_path / "rank=0")):
        with pytest.raises(SchemaError, match=rf"expected schema version {VERSION}, got 99: .* into another directory"):
            read()


def test_reading_imports_no_torch_and_names_the_extra_that_is_missing(kept: Path) -> None:
    def python(code: str) -> str:
        done = subprocess.run([sys.executable, "-c", code, str(kept)], cwd=ROOT, capture_output=True, text=True)
        return (done.stdout + done.stderr).splitlines()[-1]

    read = "import sys, hookstats; run = hookstats.load(sys.argv[1]); run.totals, run.scalars, run[3].table()\n"
    assert python(f"{read}print([name for name in ('torch', 'pandas') if name in sys.modules])") == "[]"
    missing = python(f"import sys; sys.modules['pyarrow'] = None\n{read}")
    assert missing == "ImportError: recorded runs need pyarrow: pip install 'hookstats[record]'"
