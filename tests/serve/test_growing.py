"""Versions of a run that grows: what is sent of a newer one to somebody who has an older one."""

from __future__ import annotations

import gzip
import threading
from pathlib import Path

import numpy as np
import pytest

from hookstats.numbers.fields import Site
from hookstats.records.errors import RunError
from hookstats.serve import growing, pages
from hookstats.serve.runs import Both, Runs, Watched
from tests.serve.served import Growing, restored

SITES = [Site(f"layers.{i}", "output") for i in range(20)]
LONG = 1000.0  # seconds, after which all may be looked at again


class Clock:
    """`time` for growing.py: it passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return 1_700_000_000_000_000_000


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(growing, "time", clock)
    return clock


@pytest.fixture
def followed(tmp_path: Path) -> tuple[Growing, growing.Growing]:
    return Growing(tmp_path / "run", SITES), growing.Growing(Watched(tmp_path / "run", "run"))


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Those that were begun, the last one last."""
    begun: list[threading.Thread] = []
    start = threading.Thread.start

    def counted(thread: threading.Thread) -> None:
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", counted)
    return begun


def look(seen: growing.Growing) -> growing.Version | None:
    """The newest version, when what the look has begun is made."""
    before = set(threading.enumerate())
    seen.look()
    for begun in set(threading.enumerate()) - before:
        begun.join(60)
        assert not begun.is_alive()
    return seen.newest


def grown(seen: growing.Growing, run: Growing) -> growing.Version:
    """A whole version with the last step that was written: a look after some time makes it."""
    growing.time.now += LONG  # type: ignore[attr-defined]
    found = look(seen)
    assert found is not None
    assert found.record["steps"][1] == run.last
    assert found.is_whole.is_set()
    return found


@pytest.mark.parametrize("steps", [700, 1101])  # a column each, and two a column, the last with one
def test_columns_that_were_there_stay_and_only_what_is_new_is_sent(
    followed: tuple[Growing, growing.Growing], steps: int
) -> None:
    run, seen = followed
    run.add(range(steps))
    old = grown(seen, run)
    run.add(range(steps, steps + 20))
    new = grown(seen, run)
    assert new.number > old.number
    before, after = (np.frombuffer(each.blobs["rms.relative"], np.uint8).reshape(20, -1) for each in (old, new))
    full = steps if steps == 700 else steps // 2
    np.testing.assert_array_equal(before[:, :full], after[:, :full])
    whole, less = new.packed("rms.relative", None), new.packed("rms.relative", old)
    assert len(less) < len(whole) / 8
    for name, blob in new.blobs.items():
        planes, begin = (2, "line_begin") if name.startswith("line.") else (1, "begin")
        columns = (len(old.record[begin]), len(new.record[begin]))
        assert restored(gzip.decompress(new.packed(name, old)), old.blobs[name], 20, columns, planes) == blob, name


def test_a_record_is_sent_once_and_then_what_changed_of_it(followed: tuple[Growing, growing.Growing]) -> None:
    run, seen = followed
    run.add(range(30))
    old = grown(seen, run)
    run.add(range(30, 40))
    new = grown(seen, run)
    assert new.changes(None) == new.record
    changes = new.changes(old)
    assert {"steps", "begin", "version", "scalars"} <= set(changes)
    assert not {"sites", "rows", "name", "head", "chapters"} & set(changes)
    assert {**old.record, **changes} == new.record


def test_when_two_columns_become_one_all_is_sent(followed: tuple[Growing, growing.Growing]) -> None:
    run, seen = followed
    run.add(range(1000))
    old = grown(seen, run)
    run.add(range(1000, 1001))
    new = grown(seen, run)
    assert (len(old.record["begin"]), len(new.record["begin"])) == (1000, 501)
    assert gzip.decompress(new.packed("rms.relative", old))[0] == 0


def test_a_run_is_read_only_when_it_has_changed_and_not_more_than_once_a_second(
    followed: tuple[Growing, growing.Growing], clock: Clock, threads: list[threading.Thread]
) -> None:
    run, seen = followed
    run.add(range(30))
    first = grown(seen, run)
    begun = len(threads)
    for _ in range(5):
        clock.now += LONG
        assert look(seen) is first  # nothing has changed
        assert len(threads) == begun
    run.add(range(30, 31))
    second = look(seen)
    assert second is not None
    assert second.record["steps"][1] == 30
    run.add(range(31, 32))
    clock.now += 0.99
    assert look(seen) is second
    clock.now += 0.02
    third = look(seen)
    assert third is not None
    assert third.record["steps"][1] == 31


def test_details_of_one_run_keep_no_other_waiting(followed: tuple[Growing, growing.Growing]) -> None:
    run, seen = followed
    run.add(range(30))
    with growing._detailing:  # as another run holds it
        assert len(grown(seen, run).record["begin"]) == 30
        run.add(range(30, 35))
        assert len(grown(seen, run).record["begin"]) == 35
        assert seen._detailed is None
    grown(seen, run)
    assert seen._detailed is not None


def test_a_run_that_is_torn_says_so_until_it_is_read_again(
    followed: tuple[Growing, growing.Growing], clock: Clock
) -> None:
    """Also while it is too early to read all of it once more."""
    run, seen = followed
    run.add(range(30))
    grown(seen, run)
    manifest = run.folder / "manifest.json"
    whole = manifest.read_bytes()
    for text in (b"{}", whole[:-9]):
        manifest.write_bytes(text)
        clock.now += LONG
        seen._rested_anew = clock.now + (60 if text != b"{}" else 0)
        look(seen)
        assert isinstance(seen.error, RunError)
    manifest.write_bytes(whole)
    run.add(range(30, 32))
    assert len(grown(seen, run).record["begin"]) == 32
    assert seen.error is None


def test_two_runs_of_which_one_was_torn_are_told_of_in_detail_anew(tmp_path: Path, clock: Clock) -> None:
    """Though there are as many steps and findings as before."""
    runs = [Growing(tmp_path / name, SITES) for name in ("first", "second")]
    for run in runs:
        run.add(range(30))
    seen = growing.GrowingPair(Both(*(Watched(tmp_path / name, name) for name in ("first", "second"))))
    grown(seen, runs[0])
    before = seen._detailed
    assert before is not None
    manifest = runs[0].folder / "manifest.json"
    whole = manifest.read_bytes()
    for text in (b"{}", whole):
        manifest.write_bytes(text)
        clock.now += LONG
        look(seen)
        assert (seen._detailed is None) == (text == b"{}")
    assert seen.error is None
    assert seen._detailed == before


def test_few_versions_of_few_runs_are_kept(tmp_path: Path, followed: tuple[Growing, growing.Growing]) -> None:
    run, seen = followed
    for step in range(5):
        run.add(range(step, step + 1))
        grown(seen, run)
    assert len(seen.versions) == growing._KEPT
    kept = growing.Kept()
    all_of_them = [kept.get(str(number), lambda: growing.Growing(seen.watched)) for number in range(9)]
    assert kept.get("8", lambda: seen) is all_of_them[8]
    assert kept.get("0", lambda: seen) is seen


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


def test_a_loss_that_is_not_finite_is_shown_in_the_index_and_its_number_is_the_last_one(tmp_path: Path) -> None:
    broken, healed = Growing(tmp_path / "broken", SITES), Growing(tmp_path / "healed", SITES)
    for run, last in ((broken, float("nan")), (healed, 0.25)):
        run.add(range(120))
        run.add(range(120, 199), loss=float("nan"))
        run.add(range(199, 200), loss=last)
    for run, words in ((broken, "nan"), (healed, "0.25")):
        summary = Watched(run.folder.parent, "run").summary()
        assert np.isnan(summary.loss).tolist() == [False] * 72 + [True] * 48  # of 200 steps, 120 in 72 parts
        row = pages.rows([("0", summary)])
        assert f"{words}</td>" in row.replace("</span>", "")
        assert '<path class="nan"' in row


def test_a_loss_that_was_never_finite_is_shown_as_that(tmp_path: Path) -> None:
    run = Growing(tmp_path / "run", SITES)
    run.add(range(3), loss=float("inf"))
    row = pages.rows([("0", Watched(tmp_path / "run", "run").summary())])
    assert "inf" in row
    assert '<path class="nan"' in row
