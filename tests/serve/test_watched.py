"""A run that is looked at is written sooner: the server says so by the time of one file, and writes nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

import hookstats
from hookstats.records import manifest, places, writer
from tests.serve.served import Growing, serving


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {f"{path}": (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def written(run: Path) -> float:
    """When the steps that are there were committed."""
    return (run / "rank=0" / "manifest.json").stat().st_mtime


def test_what_is_measured_is_written_within_seconds_while_somebody_looks(tmp_path: Path) -> None:
    run, model = tmp_path / "run", torch.nn.Linear(4, 4)

    def train(seconds: float, commits: int, look: object = None) -> list[float]:
        """Times of commits, at most so many."""
        end, found = time.monotonic() + seconds, []
        while time.monotonic() < end and len(found) < commits:
            model(torch.randn(2, 4)).sum().backward()
            monitor.step()
            if callable(look):
                look()
            time.sleep(0.1)
            if (run / "rank=0" / "manifest.json").exists() and written(run) not in found:
                found.append(written(run))
        return found

    with (
        hookstats.attach(model, every=1, sinks=[hookstats.record(run)]) as monitor,
        serving(tmp_path) as served,
    ):
        assert len(train(60.0, 1)) == 1  # the manifest of a new run
        assert len(train(3 * writer.WATCHED_SECONDS, 3)) <= 2  # that one, and at most one more
        assert not (run / "rank=0" / "watched").exists()
        [address] = served.runs().values()
        # The last of them, and three more: unwatched, they would take thirty seconds, less those that are over.
        assert len(train(writer.PART_SECONDS + 5, 4, lambda: served.ask(f"{address}update?version=0"))) == 4
        assert (run / "rank=0" / "watched").exists()
    assert manifest.read(run / "rank=0").attempts[-1].ended == "closed"
    assert writer.WATCHED_SECONDS < writer.PART_SECONDS / 4


def test_nothing_else_is_written_and_nothing_where_nobody_records(tmp_path: Path) -> None:
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
        (run.folder / "watched").unlink()
        run.end()
        time.sleep(1.1)
        served.ask(f"{address}update?version=0")
        assert not (run.folder / "watched").exists()


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
