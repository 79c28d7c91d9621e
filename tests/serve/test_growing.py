"""The pages of runs that grow, as they are answered: what is sent, when it is made anew, and what is never done."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from hookstats.numbers.fields import Site
from hookstats.report.loading import load_recorded
from hookstats.report.writing import PageContents
from hookstats.serve import pages, routes, runs
from hookstats.serve.routes import Routes
from hookstats.serve.runs import Runs, Watched
from hookstats.serve.server import Answer, Query
from tests.serve.served import Clock, Growing, record_of

SITES = [Site(f"layers.{i}", "output") for i in range(20)]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(routes, "time", clock)
    monkeypatch.setattr(runs, "time", clock)
    return clock


class Asked:
    """The page of a run, or of two, below a directory."""

    def __init__(self, directory: Path, *names: str) -> None:
        self.routes = Routes(directory)
        self.routes(Query("/", {}))  # which finds the runs
        ids = {run.name: id for id, run in self.routes._runs.find().items()}
        self.path = "/run/" + "".join(f"{ids[name]}/" for name in names)

    def page(self) -> Answer:
        return self.routes(Query(self.path, {}))

    def record(self) -> dict[str, object]:
        found = self.page()
        assert found.packed, found.body
        return record_of(gzip.decompress(found.body).decode())

    def blob(self, version: object, name: str) -> Answer:
        return self.routes(Query(f"{self.path}blob", {"version": str(version), "name": name}))


@pytest.fixture
def run(tmp_path: Path) -> Growing:
    return Growing(tmp_path / "run", SITES)


def test_what_is_sent_is_what_a_report_has(tmp_path: Path, run: Growing) -> None:
    """Pages of one run and of two, and the channels of any site."""
    run.add(range(30))
    other = Growing(tmp_path / "other", SITES[3:])
    other.add(range(20, 40))
    for names in (("run",), ("run", "other")):
        asked = Asked(tmp_path, *names)
        record = asked.record()
        expected, blobs = PageContents(*(load_recorded(tmp_path / name) for name in names)).render_all()
        more = json.loads(gzip.decompress(asked.blob(record["version"], "more").body))
        found = {**record, **more, "written": expected["written"], "detailed": expected["detailed"]}
        assert {name: found[name] for name in expected} == expected
        assert set(found) - set(expected) == {"version", "tag", "state"}
        for name, blob in blobs.items():
            assert gzip.decompress(asked.blob(record["version"], name).body) == blob, name


def test_a_page_is_made_anew_when_its_run_has_changed_and_at_most_every_ten_seconds(
    run: Growing, tmp_path: Path, clock: Clock
) -> None:
    run.add(range(30))
    asked = Asked(tmp_path, "run")
    first = asked.page()
    for _ in range(3):
        clock.now += 1000
        assert asked.page() is not first
        assert asked.page() == first  # nothing has changed
    clock.now += 1000
    run.add(range(30, 31))
    assert asked.record()["steps"] == [0, 30, 31]
    run.add(range(31, 32))
    clock.now += 9.9
    assert asked.record()["steps"] == [0, 30, 31]
    clock.now += 0.2
    assert asked.record()["steps"] == [0, 31, 32]


def test_a_page_that_takes_long_to_make_is_made_less_often(run: Growing, tmp_path: Path, clock: Clock) -> None:
    run.add(range(30))
    asked = Asked(tmp_path, "run")
    asked.record()
    [page] = asked.routes._pages.values()
    assert page._made is not None
    page._made.seconds = 20.0
    run.add(range(30, 31))
    clock.now += 79
    assert asked.record()["steps"] == [0, 29, 30]
    clock.now += 2
    assert asked.record()["steps"] == [0, 30, 31]


def test_how_a_run_is_is_told_at_once(run: Growing, tmp_path: Path, clock: Clock) -> None:
    run.add(range(30))
    asked = Asked(tmp_path, "run")
    before = asked.record()
    run.die()
    clock.now += 1.1
    after = asked.record()
    assert (before["state"][0], after["state"][0]) == ("recording", "died")  # type: ignore[index]
    assert after["tag"] != before["tag"]
    assert asked.page().tag == after["tag"]


def test_two_runs_are_recorded_as_long_as_one_is_and_both_are_told(run: Growing, tmp_path: Path, clock: Clock) -> None:
    other = Growing(tmp_path / "other", SITES)
    for each in (run, other):
        each.add(range(30))
    asked = Asked(tmp_path, "other", "run")
    other.die()
    clock.now += 1.1
    kind, sentence, _ = asked.record()["state"]  # type: ignore[misc]
    assert kind == "recording"
    assert "other: the training process" in sentence
    assert "; run: process" in sentence


def test_bytes_belong_to_a_version(run: Growing, tmp_path: Path, clock: Clock) -> None:
    asked, versions = Asked.__new__(Asked), []
    for step in range(3):
        run.add(range(step, step + 1))
        asked = asked if versions else Asked(tmp_path, "run")
        clock.now += 11
        versions.append(asked.record()["version"])
    assert [asked.blob(version, "line.rms").status for version in versions] == [410, 410, 200]
    for name in ("line.20", "details.20", "details.", "details.x", "nothing", "rms.", "", "line", "more.x", "../x"):
        assert asked.blob(versions[-1], name).status == 404, name


def test_few_pages_are_kept(tmp_path: Path) -> None:
    names = [f"run{number}" for number in range(5)]
    for name in names:
        Growing(tmp_path / name, SITES).add(range(2))
    asked = [Asked(tmp_path, name) for name in names]
    versions = []
    for each in asked:
        each.routes = asked[0].routes
        versions.append(each.record()["version"])
    given = [each.blob(version, "more").status for each, version in zip(asked[::-1], versions[::-1], strict=True)]
    assert given == [200, 200, 200, 200, 410]


def test_nothing_is_written(run: Growing, tmp_path: Path) -> None:
    def files() -> dict[str, tuple[int, int]]:
        return {f"{path}": (path.stat().st_size, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")}

    run.add(range(30))
    before = files()
    asked = Asked(tmp_path, "run")
    version = asked.record()["version"]
    for name in ("more", "details.0", "line.1", "peak.absolute"):
        assert asked.blob(version, name).status == 200
    assert files() == before


def test_runs_are_found_below_a_directory_without_following_links(tmp_path: Path) -> None:
    for name in ("a", "b/c", "b/d/e"):
        (tmp_path / "runs" / name / "rank=0").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "inner" / "rank=0").mkdir(parents=True)  # of a run, and none itself
    (tmp_path / "runs" / ".hidden" / "rank=0").mkdir(parents=True)
    (tmp_path / "outside" / "rank=0").mkdir(parents=True)
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "outside")
    found = Runs(tmp_path / "runs").find()
    assert sorted(each.name for each in found.values()) == ["a", "b/c", "b/d/e"]
    [(_, alone)] = Runs(tmp_path / "runs" / "a").find().items()
    assert alone.name == "a"


def row_of(run: Growing) -> str:
    summary = Watched(run.folder.parent, "run").summary()
    return pages.index("runs", [("0", summary)]).body.decode().partition("<tbody")[2]


def test_a_loss_that_is_not_finite_is_shown_in_the_index_and_its_number_is_the_last_one(tmp_path: Path) -> None:
    broken, healed = Growing(tmp_path / "broken", SITES), Growing(tmp_path / "healed", SITES)
    for run, last in ((broken, float("nan")), (healed, 0.25)):
        run.add(range(120))
        run.add(range(120, 199), loss=float("nan"))
        run.add(range(199, 200), loss=last)
    for run, words in ((broken, "nan"), (healed, "0.25")):
        summary = Watched(run.folder.parent, "run").summary()
        assert np.isnan(summary.loss).tolist() == [False] * 72 + [True] * 48  # of 200 steps, 120 in 72 parts
        assert f"{words}</td>" in row_of(run).replace("</span>", "")
        assert '<path class="nan"' in row_of(run)


def test_a_loss_that_was_never_finite_is_shown_as_that(tmp_path: Path) -> None:
    run = Growing(tmp_path / "run", SITES)
    run.add(range(3), loss=float("inf"))
    assert "inf" in row_of(run)
    assert '<path class="nan"' in row_of(run)
