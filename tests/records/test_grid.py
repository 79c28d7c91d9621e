"""Statistics over sites and steps, against the Snapshots of the same run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.report_size import sites_of, step_of
from hookstats.numbers.fields import Site
from hookstats.records import timeline
from hookstats.records.grid import planes
from hookstats.records.reading import Reader
from hookstats.records.run import load
from hookstats.records.store import Store

SITES = [Site(f"layers.{i}", "output") for i in range(7)]
NAMES = ("rms", "nans", "zeros", "max")


def write(store: Store, steps: range, sites: list[Site] = SITES, silent: int | None = None) -> None:
    where = sites_of(sites, 1, 0)
    for step in steps:
        frame = step_of(where, np.random.default_rng(step), step, np.exp(np.arange(len(sites)) / 3))
        if silent is not None and step % 3 == 0:
            frame.calls[silent] = 0
            frame.order = np.flatnonzero(frame.calls)
        store.add(frame)
    store.commit(steps[-1])


def expected(path: Path, name: str) -> np.ndarray:
    run = load(path)
    plane = np.full((len(run.sites), len(run)), np.nan)
    for t, snapshot in enumerate(run):
        rows = [run.sites.index(site) for site in snapshot.order]
        plane[rows, t] = getattr(snapshot.totals, name)
    return plane


def check(path: Path) -> None:
    reader = Reader(path / "rank=0")
    times = timeline.read(reader)
    whole = planes(reader, times, np.arange(len(reader.sites)), NAMES)
    for name in NAMES:
        np.testing.assert_array_equal(whole[name], expected(path, name))


@pytest.mark.parametrize("silent", [None, 2])
def test_planes_are_those_of_the_snapshots(tmp_path: Path, silent: int | None) -> None:
    store = Store(tmp_path / "rank=0")
    store.begin(1, {"rank": 0})
    for begin in range(0, 40, 8):
        write(store, range(begin, begin + 8), silent=silent)
    store.merge()
    store.close()
    check(tmp_path)


def test_a_site_that_comes_late_and_an_attempt_that_replaces_steps_are_read(tmp_path: Path) -> None:
    store = Store(tmp_path / "rank=0")
    store.begin(1, {"rank": 0})
    write(store, range(0, 9), SITES[:4])
    write(store, range(9, 20))
    store.finish(1, "died")
    store.begin(2, {"rank": 0})
    write(store, range(14, 30))
    while store.merge():
        pass
    store.close()
    check(tmp_path)


def test_parts_that_are_merged_away_meanwhile_are_read_where_they_went(tmp_path: Path) -> None:
    store = Store(tmp_path / "rank=0")
    store.begin(1, {"rank": 0})
    for begin in range(0, 32, 8):
        write(store, range(begin, begin + 8))
    reader = Reader(tmp_path / "rank=0")
    times = timeline.read(reader)
    row = np.arange(len(SITES))
    write(store, range(32, 40))  # of which this reader knows nothing
    while store.merge():
        pass
    np.testing.assert_array_equal(planes(reader, times, row, ["rms"])["rms"], expected(tmp_path, "rms")[:, :32])
    store.close()
