"""Statistics over sites and steps, against the Snapshots of the same run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hookstats.numbers.frame import StepFrame
from hookstats.records import timeline
from hookstats.records.grid import planes
from hookstats.records.reading import Reader
from hookstats.records.run import load
from tests.records import recorded

NAMES = ("rms", "nans", "zeros", "max")


def frames(steps: range) -> list[StepFrame]:
    """In every third of them one more site is silent."""
    made = [recorded.measured(step) for step in steps]
    for frame in made[::3]:
        frame.calls[2] = 0
        frame.order = np.flatnonzero(frame.calls)
    return made


def check(path: Path, reader: Reader, times: timeline.Timeline, count: int) -> None:
    """The first steps, of all sites."""
    found = planes(reader, times, np.arange(len(reader.sites)), NAMES)
    run = load(path)
    for name in NAMES:
        expected = np.full((len(run.sites), count), np.nan)
        for t, snapshot in enumerate(list(run)[:count]):
            rows = [run.sites.index(site) for site in snapshot.order]
            expected[rows, t] = getattr(snapshot.totals, name)
        np.testing.assert_array_equal(found[name], expected)


@pytest.mark.parametrize("merge", [False, True])
def test_planes_are_those_of_the_snapshots(tmp_path: Path, merge: bool) -> None:
    """Two sites come late, and an attempt replaces steps."""
    attempts = {1: frames(range(40, 60)), 2: frames(range(54, 70))}
    recorded.keep(tmp_path, attempts, commit_each=8, merge=merge)
    reader = Reader(tmp_path / "rank=0")
    check(tmp_path, reader, timeline.read(reader), 30)


def test_parts_that_are_merged_away_meanwhile_are_read_where_they_went(tmp_path: Path) -> None:
    recorded.keep(tmp_path, {1: frames(range(32))}, commit_each=1)
    reader = Reader(tmp_path / "rank=0")
    times = timeline.read(reader)
    recorded.keep(tmp_path, {2: frames(range(32, 40))}, commit_each=1, merge=True)  # of which it knows nothing
    check(tmp_path, reader, times, 32)
