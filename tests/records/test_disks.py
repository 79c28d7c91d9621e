"""Disks that take nothing, and those of a network: read-only ones, without locks, and where a ring must not lie."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hookstats
from hookstats.__main__ import main
from hookstats.records import places, recording
from hookstats.records.ring import Ring
from hookstats.records.writer import recover
from hookstats.terminal.following import Followed
from hookstats.terminal.watching import watch
from tests.records import recorded
from tests.records.test_damage import WriterHere


def made(run: Path, steps: int = 3) -> list[str]:
    """A run; what was told meanwhile."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        own = hookstats.record(run, ring_bytes=1 << 20)
        own.begin({"rank": 0})
        for step in range(steps):
            own.take(recorded.measured(step))
        own.close()
    return [str(each.message) for each in told if issubclass(each.category, UserWarning)]


def holds(run: Path, steps: list[int]) -> None:
    loaded = hookstats.load(run)
    assert loaded.steps == steps
    for snapshot in loaded:
        np.testing.assert_array_equal(snapshot.frame.wholes, recorded.measured(snapshot.step).wholes)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A run on a disk that is mounted to be read."""
    made(tmp_path / "disk" / "run")
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    if subprocess.run(["mount", "--bind", tmp_path / "disk", mounted], capture_output=True).returncode:
        pytest.skip("needs the right to mount a disk")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", mounted], check=True)
        yield mounted / "run"
    finally:
        subprocess.run(["umount", "-l", mounted], check=True)


def test_a_run_on_a_read_only_disk_is_read_by_everybody(read_only: Path, tmp_path: Path) -> None:
    holds(read_only, [0, 1, 2])
    assert main(["show", str(read_only)]) == 0
    assert main(["compare", str(read_only), str(read_only)]) == 0
    assert main(["report", str(read_only), "-o", str(tmp_path / "report.html")]) == 0
    assert watch(Followed(read_only), io.StringIO()) == 0


def test_who_would_write_to_a_read_only_disk_is_refused_in_one_line(
    read_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (read_only, read_only.with_name("another")):
        with pytest.raises(OSError, match="Read-only file system"):
            hookstats.record(path).begin({"rank": 0})
    assert main(["recover", str(read_only)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "Read-only file system" in line
    holds(read_only, [0, 1, 2])


def test_a_disk_that_becomes_read_only_stops_the_recording_and_keeps_what_was_taken(tmp_path: Path) -> None:
    """By permissions, from a process without the right to ignore these."""
    without = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override"] if os.getuid() == 0 else []
    if subprocess.run([*without, "true"], capture_output=True).returncode:
        pytest.skip("needs setpriv")
    run, folder = tmp_path / "run", tmp_path / "run" / "rank=0"
    process = recorded.start(run, pause=0.003, ring_bytes=1 << 20, before=without)
    recorded.wait_for(lambda: list(folder.glob("steps/*.parquet")))  # it is committed now and then
    tables = [path for path in folder.iterdir() if path.is_dir()]
    for path in tables:
        path.chmod(0o555)
    ring = Ring(folder / "ring.0001")
    recorded.wait_for(lambda: ring.failed)
    assert "Permission denied" in ring.failure
    before = recorded.lost(run)
    recorded.wait_for(lambda: recorded.lost(run) > before + 50)  # training goes on
    recorded.kill(process.pid)
    process.wait()
    for path in tables:
        path.chmod(0o755)
    recorded.wait_for(lambda: not recorded.writers(run))
    assert recover(run) == {"rank=0": [1]}
    holds(run, recorded.taken(run))


def test_a_disk_without_locks_is_recorded_to_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such is NFS that is mounted with nolock, or whose lock server is gone."""

    def refused(*_: Any) -> Any:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "fcntl", refused)
    monkeypatch.setattr(fcntl, "flock", refused)
    monkeypatch.setattr(recording, "WriterProcess", WriterHere)
    assert made(tmp_path / "run") == []
    assert Followed(tmp_path / "run").state().kind == "ended"
    assert recover(tmp_path / "run") == {"rank=0": []}
    holds(tmp_path / "run", [0, 1, 2])


def test_the_ring_of_a_run_on_a_network_disk_lies_on_a_local_one_and_is_taken_up_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its mount point is called."""
    far, near, mounts = tmp_path / "Läufe 層\u2028\\040\r", tmp_path / "near", tmp_path / "mountinfo"
    far.mkdir()
    near.mkdir()
    point = os.fsencode(far).replace(b"\\", b"\\134").replace(b" ", b"\\040")
    other = b"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
    mounts.write_bytes(other + b"23 22 0:22 / " + point + b" rw shared:1 - nfs4 server:/ rw\n")
    monkeypatch.setattr(places, "_MOUNTS", mounts)
    monkeypatch.setattr(tempfile, "tempdir", str(near))
    monkeypatch.setenv("TMPDIR", str(near))  # of the writer
    own = hookstats.record(far / "run", ring_bytes=1 << 20)
    own.begin({"rank": 0})
    own.take(recorded.measured(0))
    [ring] = near.rglob("ring.0001")
    assert not list(far.rglob("ring.*"))
    own.take(recorded.measured(1))
    own.close()
    assert not ring.exists()
    holds(far / "run", [0, 1])
