"""Tests of locks: a writer counts as alive until it lets go or ends, whatever else of its process opens the files."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import hookstats
from hookstats.numbers.snapshot import Snapshot
from hookstats.records.attempts import Attempt, is_training, open_attempts, path_of
from hookstats.terminal.following import Followed
from tests.frames import frame_of
from tests.records import recorded
from tests.records.recorded import ROOT

# As another container sees it: a process's number and its machine's name say nothing there.
ELSEWHERE = Attempt(1, host="another", boot="another", pid=1 << 22, started=0)
_ASK = """
import sys
from pathlib import Path
from hookstats.records.attempts import is_training
from tests.records.test_locks import ELSEWHERE
print(is_training(Path(sys.argv[1]), 1, ELSEWHERE))
"""


def is_alive(folder: Path) -> bool:
    """Ask as a process of another container does."""
    command = [sys.executable, "-c", _ASK, str(folder)]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout == "True\n"


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[tuple[hookstats.records.recording.Recording, Path]]:  # type: ignore[name-defined]
    recording = hookstats.record(tmp_path / "run")
    recording.begin({"rank": 0})
    (number,) = open_attempts(tmp_path / "run" / "rank=0")
    yield recording, path_of(tmp_path / "run" / "rank=0", number)
    recording.close()


def test_a_recording_is_seen_to_live_when_its_process_reads_its_files(begun: tuple[object, Path]) -> None:
    _, path = begun
    run = path.parent.parent
    with pytest.raises(RuntimeError, match="expected a directory that nobody records into"):
        hookstats.record(run).begin({"rank": 0})
    assert Followed(run).state().kind == "recording"
    path.read_text()
    shutil.copytree(run, run.with_name("copy"))
    assert is_training(path.parent, 1, ELSEWHERE)
    assert is_alive(path.parent)
    assert not is_alive(run.with_name("copy") / "rank=0")


def test_a_forked_worker_neither_holds_nor_drops_the_lock(begun: tuple[object, Path], tmp_path: Path) -> None:
    recording, path = begun
    kept = tmp_path / "kept"
    kept.mkdir()
    os.link(path, kept / path.name)
    worker = os.fork()
    if worker == 0:
        time.sleep(600)
        os._exit(0)
    try:
        assert is_alive(kept)
        recording.close()  # type: ignore[attr-defined]
        os.kill(worker, 0)
        recorded.wait_for(lambda: not is_alive(kept))  # until the worker has run its first line
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


def test_a_second_sink_of_a_file_lets_nobody_else_write_it(tmp_path: Path) -> None:
    path, snapshot = tmp_path / "a.jsonl", Snapshot(frame_of([], scalars={"loss": 1.0}))
    first = hookstats.sinks.JsonLines(path)
    first(snapshot)
    second = hookstats.sinks.JsonLines(path)  # looks at how the file ends
    with pytest.raises(OSError, match="expected a file that nobody else writes"):
        second(snapshot)
    first(snapshot)
    first.close()
    second(snapshot)
    assert len(path.read_text().splitlines()) == 3
