"""A run that is looked at is written sooner: the server says so by the time of one file, and writes nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import hookstats
from hookstats.records import places, writer
from hookstats.records.store import Store
from hookstats.serve import runs
from tests.records.recorded import measured, wait_for
from tests.serve.served import Growing, serving


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {f"{path}": (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


class Clock:
    """`time` for writer.py and runs.py: it passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_what_is_measured_is_written_within_seconds_while_somebody_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, folder, looks = Clock(), tmp_path / "run" / "rank=0", False
    monkeypatch.setattr(writer, "time", clock)
    monkeypatch.setattr(writer, "is_watched", lambda path: path == folder and looks)
    recording = hookstats.record(tmp_path / "run")
    recording.begin({"rank": 0})
    monkeypatch.setattr(recording._writer, "look_after", lambda ring: None)  # which writes is this process
    recording.take(measured(0))
    ring = recording._ring
    store = Store(folder)
    attempt = writer.Attempt(store, folder, recording._description, {"rules": [], "sinks": []})

    def after(seconds: float) -> bool:
        """Whether all that was taken is written when they have passed."""
        clock.now += seconds
        attempt.serve()
        return ring.tail == ring.head

    assert not after(0.0)
    assert not after(writer.PART_SECONDS - 1)
    assert after(1.1)
    looks = True
    recording.take(measured(1))
    assert not after(1000.0)  # it counts from when a step is read
    assert not after(writer.WATCHED_SECONDS - 1)
    assert after(1.1)
    looks = False
    recording.take(measured(2))
    assert not after(0.0)
    assert not after(writer.WATCHED_SECONDS + 1)
    assert after(writer.PART_SECONDS)
    assert writer.WATCHED_SECONDS < writer.PART_SECONDS / 4
    attempt.finish()
    store.close()
    recording.close()
    assert hookstats.load(tmp_path / "run").steps == [0, 1, 2]


def test_a_page_that_is_looked_at_shows_what_was_measured_last(tmp_path: Path) -> None:
    """Though nothing more comes."""
    recording = hookstats.record(tmp_path / "run")
    recording.begin({"rank": 0})
    recording.take(measured(0))
    with serving(tmp_path) as served:
        [address] = served.runs().values()
        assert not (tmp_path / "run" / "rank=0" / "watched").exists()  # the index alone is nobody who looks
        wait_for(lambda: served.json(f"{address}update?version=0").get("record", {}).get("steps", [])[:2] == [0, 0])
        assert (tmp_path / "run" / "rank=0" / "watched").exists()
    recording.close()


def test_nothing_else_is_written(tmp_path: Path) -> None:
    run = Growing(tmp_path / "run")
    run.add(range(30))
    with serving(tmp_path) as served:
        [address] = served.runs().values()
        before = files_of(tmp_path)
        for _ in range(3):
            for path in (address, f"{address}update?version=0", "/", "/rows"):
                assert served.ask(path).status == 200
        after = files_of(tmp_path)
        assert set(after) - set(before) == {f"{run.folder / 'watched'}"}
        assert all(after[path] == told for path, told in before.items() if path != f"{run.folder}")
        assert after[f"{run.folder / 'watched'}"][0] == 0


def test_that_somebody_looks_is_said_once_a_second_and_not_where_nobody_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(runs, "time", clock)
    run = Growing(tmp_path / "run")
    run.add(range(30))
    seen = runs.Watched(tmp_path / "run", "run")

    def is_said(seconds: float) -> bool:
        clock.now += seconds
        seen.watch()
        said = (run.folder / "watched").exists()
        (run.folder / "watched").unlink(missing_ok=True)
        return said

    assert [is_said(seconds) for seconds in (0.0, 0.5, 0.4, 0.2, 1.1)] == [True, False, False, True, True]
    run.end()
    assert not is_said(1.1)


def test_a_link_is_not_followed_and_a_folder_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_text("kept")
    os.utime(foreign, (1.0, 1.0))
    (tmp_path / "watched").symlink_to(foreign)
    places.watch(tmp_path)
    assert foreign.stat().st_mtime == 1.0
    places.watch(tmp_path / "none")
    assert not places.is_watched(tmp_path / "none")
    (tmp_path / "watched").unlink()
    os.mkfifo(tmp_path / "watched")  # nobody waits for a reader
    places.watch(tmp_path)
    (tmp_path / "watched").unlink()
    places.watch(tmp_path)
    assert places.is_watched(tmp_path)
    old = time.time() - 60
    os.utime(tmp_path / "watched", (old, old))
    assert not places.is_watched(tmp_path)
