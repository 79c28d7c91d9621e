"""Versions of a run that grows: what is sent of a newer one to somebody who has an older one."""

from __future__ import annotations

import gzip
import time
from pathlib import Path

import numpy as np
import pytest

from hookstats.numbers.fields import Site
from hookstats.serve import growing
from hookstats.serve.runs import Runs, Watched
from tests.serve.served import Growing

SITES = [Site(f"layers.{i}", "output") for i in range(20)]


@pytest.fixture
def followed(tmp_path: Path) -> tuple[Growing, growing.Growing]:
    return Growing(tmp_path / "run", SITES), growing.Growing(Watched(tmp_path / "run", "run"))


def next_of(run: growing.Growing) -> growing.Version:
    before = run.newest
    end = time.monotonic() + 20
    while (found := run.look(1.0)) is before or found is None:
        assert time.monotonic() < end
    return found


def restored(packed: bytes, old: growing.Version, name: str, columns: int, planes: int = 1) -> bytes:
    """As a page does it."""
    told = gzip.decompress(packed)
    if not told[0]:
        return told[1:]
    blob = np.frombuffer(old.blobs[name], np.uint8)
    rows = len(old.record["sites"])
    cells = len(blob) - (16 * rows if name.endswith("absolute") or name.startswith("line.") else 0)
    wide = np.pad(blob[:cells].reshape(planes * rows, -1), ((0, 0), (0, columns - cells // rows // planes)))
    earlier = np.concatenate([wide.reshape(-1), blob[cells:]])
    return bytes(np.frombuffer(told, np.uint8)[1:] ^ earlier)


def test_columns_that_were_there_stay_and_only_what_is_new_is_sent(followed: tuple[Growing, growing.Growing]) -> None:
    run, seen = followed
    run.add(range(700))
    old = next_of(seen)
    run.add(range(700, 720))
    new = next_of(seen)
    assert new.number > old.number
    before, after = (np.frombuffer(each.blobs["rms.relative"], np.uint8).reshape(20, -1) for each in (old, new))
    np.testing.assert_array_equal(before, after[:, :700])
    whole, less = new.packed("rms.relative", None), new.packed("rms.relative", old)
    assert len(less) < len(whole) / 8
    for name, blob in new.blobs.items():
        planes, columns = (2, new.record["line_begin"]) if name.startswith("line.") else (1, new.record["begin"])
        assert restored(new.packed(name, old), old, name, len(columns), planes) == blob, name


def test_a_record_is_sent_once_and_then_what_changed_of_it(followed: tuple[Growing, growing.Growing]) -> None:
    run, seen = followed
    run.add(range(30))
    old = next_of(seen)
    run.add(range(30, 40))
    new = next_of(seen)
    assert new.changes(None) == new.record
    changes = new.changes(old)
    assert {"steps", "begin", "version", "scalars"} <= set(changes)
    assert not {"sites", "rows", "name", "head", "chapters"} & set(changes)
    assert {**old.record, **changes} == new.record


def test_when_two_columns_become_one_all_is_sent(followed: tuple[Growing, growing.Growing]) -> None:
    run, seen = followed
    run.add(range(1000))
    old = next_of(seen)
    run.add(range(1000, 1001))
    new = next_of(seen)
    assert (len(old.record["begin"]), len(new.record["begin"])) == (1000, 501)
    assert gzip.decompress(new.packed("rms.relative", old))[0] == 0


def test_a_run_is_read_only_when_it_has_changed_and_not_more_than_once_a_second(
    followed: tuple[Growing, growing.Growing],
) -> None:
    run, seen = followed
    run.add(range(30))
    first = next_of(seen)
    began = time.monotonic()
    while time.monotonic() - began < 1.5:
        assert seen.look() is first  # nothing has changed
        time.sleep(0.05)
    run.add(range(30, 31))
    second = next_of(seen)
    run.add(range(31, 32))
    began = time.monotonic()
    assert next_of(seen) is not second
    assert time.monotonic() - began > 0.9


def test_few_versions_of_few_runs_are_kept(tmp_path: Path, followed: tuple[Growing, growing.Growing]) -> None:
    run, seen = followed
    for step in range(5):
        run.add(range(step, step + 1))
        seen._rested = 0.0
        next_of(seen)
    assert len(seen.versions) == growing._KEPT
    kept = growing.Kept()
    all_of_them = [kept.get(str(number), seen.watched) for number in range(9)]
    assert kept.get("8", seen.watched) is all_of_them[8]
    assert kept.get("0", seen.watched) is not all_of_them[0]


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
