"""What is read of a run that grows, against the same run read at once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.report_size import sites_of, step_of
from hookstats.numbers.fields import Site, Skipped
from hookstats.numbers.given import Given
from hookstats.records import manifest
from hookstats.records.reading import Reader
from hookstats.records.store import Store
from hookstats.report.loading import recorded
from hookstats.rules import Finding
from hookstats.serve.columns import Columns
from hookstats.serve.source import Source

SITES = [Site(f"layers.{i}", ("output", "grad_output")[i % 2]) for i in range(9)]


class Written:
    def __init__(self, path: Path) -> None:
        self.folder = path / "rank=0"
        self.store = Store(self.folder)
        self.attempt = 0
        self.begin()

    def begin(self) -> None:
        self.attempt += 1
        self.store.begin(self.attempt, {"rank": 0, "model": "GPT"})

    def add(self, steps: range, sites: list[Site] = SITES, channels: int = 1) -> None:
        """With scalars between steps, a site that is skipped and one that is silent now and then."""
        where = sites_of(sites, channels, 512 if channels > 1 else 0)
        for step in steps:
            frame = step_of(where, np.random.default_rng(step), step, np.exp(np.arange(len(sites)) / 3))
            if step % 4 == 0:
                frame.calls[2] = 0
                frame.order = np.flatnonzero(frame.calls)
                frame.skipped[SITES[0]] = Skipped("a dtype", 3)
            self.store.add(frame)
        self.store.commit(steps[-1])

    def find(self, *steps: int) -> None:
        with (self.folder / "findings.jsonl").open("a") as file:
            for step in steps:
                found = Finding("spike", step, SITES[1], 6.0, 3.0, "note", "It rose.", 0, self.attempt)
                file.write(json.dumps(found.to_json()) + "\n")


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "run")


def planes_of(source: Source) -> dict[str, np.ndarray]:
    read = [source.read(Columns.ALL, begin, end) for begin, end in source.stretches()]
    return {name: np.concatenate([each[name] for each in read], axis=1) for name in Columns.ALL}


def check(source: Source, planes: dict[str, np.ndarray], path: Path) -> None:
    """Against all of it, read by the report."""
    expected, mine = recorded(path), source.recorded
    rows = [expected.sites.index(site) for site in mine.sites]
    assert sorted(rows) == list(range(len(expected.sites)))
    for name in Columns.ALL:
        np.testing.assert_array_equal(planes[name], expected.statistic(name)[rows], err_msg=name)
    for name in ("steps", "times", "detailed"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(expected, name), err_msg=name)
    assert mine.findings == expected.findings
    assert sorted(mine.skipped) == sorted(expected.skipped)
    assert mine.settings == expected.settings
    assert mine.scalars.keys() == expected.scalars.keys()
    for name, given in expected.scalars.items():
        for got, want in zip(mine.scalars[name], given, strict=True):
            np.testing.assert_array_equal(got, want)


def test_what_came_since_is_what_the_whole_run_has_more(written: Written, tmp_path: Path) -> None:
    """Over commits, merged parts, scalars alone, steps with channels, and findings."""
    written.add(range(0, 20))
    written.find(3)
    source = Source(tmp_path / "run", "run")
    planes = planes_of(source)

    def more() -> None:
        new = source.more()
        assert new is not None
        for name in Columns.ALL:
            planes[name] = np.concatenate([planes[name], new[name]], axis=1)
        check(source, planes, tmp_path / "run")

    check(source, planes, tmp_path / "run")
    for begin in range(20, 60, 5):
        written.add(range(begin, begin + 5), channels=4 if begin == 40 else 1)
        written.find(begin, begin + 1)
        while written.store.merge():
            pass
        more()
    written.store.add_given(Given({70: {"loss": 1.0, "accuracy": 0.5}, 71: {"loss": 2.0}}, {}), 1.8e9)
    written.store.commit(60)
    more()
    written.add(range(80, 82))
    more()
    more()  # nothing is new


def test_only_parts_with_new_steps_are_read(written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written.add(range(0, 20))
    source = Source(tmp_path / "run", "run")
    asked: list[tuple[int, int]] = []
    read = Reader.part
    monkeypatch.setattr(
        Reader, "part", lambda self, table, part, *rest: asked.append(part.steps) or read(self, table, part, *rest)
    )
    written.add(range(20, 25))
    assert source.more() is not None
    assert asked
    assert all(first >= 20 for first, _ in asked)


def test_a_manifest_is_what_it_is_whatever_was_known_of_it(written: Written) -> None:
    """Also where a known part, or what was known of the sites, is not what the file says."""
    written.add(range(0, 20))
    known = manifest.read(written.folder)
    written.add(range(20, 25), [*SITES, Site("late", "output")])
    expected = manifest.read(written.folder)
    assert manifest.read(written.folder, known) == expected
    known = manifest.read(written.folder, expected)
    assert all(a is b for a, b in zip(known.parts["totals"], expected.parts["totals"], strict=True))
    known.parts["totals"] = [replace(part, rows=part.rows + 1) for part in known.parts["totals"]]
    assert manifest.read(written.folder, known) == expected
    assert manifest.read(written.folder, known).sites is expected.sites


@pytest.mark.parametrize("what", ["attempt", "site", "number", "findings"])
def test_what_is_more_than_new_steps_is_read_anew(written: Written, tmp_path: Path, what: str) -> None:
    """Another attempt, another site, a number that is given twice, findings that were removed."""
    written.add(range(0, 20))
    written.find(3, 4)
    source = Source(tmp_path / "run", "run")
    if what == "attempt":
        written.store.finish(1, "died")
        written.begin()
        written.add(range(10, 15))
    elif what == "site":
        written.add(range(20, 25), [*SITES, Site("late", "output")])
    elif what == "number":
        written.add(range(15, 25))
    else:
        (written.folder / "findings.jsonl").write_text("")
        written.add(range(20, 25))
    assert source.more() is None
    anew = Source(tmp_path / "run", "run")
    check(anew, planes_of(anew), tmp_path / "run")


def test_an_attempt_that_was_resumed_goes_on_step_by_step_where_the_earlier_one_had_gone_further(
    written: Written, tmp_path: Path
) -> None:
    written.add(range(0, 40))
    written.find(5, 30)
    written.store.finish(1, "died")
    written.begin()
    written.add(range(10, 15))
    source = Source(tmp_path / "run", "run")
    planes = planes_of(source)
    written.add(range(15, 22))
    written.find(16)
    new = source.more()
    assert new is not None
    check(source, {name: np.concatenate([planes[name], new[name]], axis=1) for name in planes}, tmp_path / "run")
    assert [each.step for each in source.recorded.findings] == [5, 16]
    assert replace(source.recorded).grows
