"""Tests of recovery: a dead run's rest is taken up whole by `recover` or a resumed run; nothing else is touched."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hookstats
from hookstats.records.attempts import Attempt, machine, read_attempt
from hookstats.records.recording import Recording
from hookstats.records.ring import Ring
from hookstats.records.writer import recover
from tests.records import recorded
from tests.records.test_recording import holds, python, rings, take


def test_recover_runs_nothing_that_a_file_names(tmp_path: Path, died: Path) -> None:
    """A directory that somebody else wrote may be recovered: only our own rules judge, and nothing else is written."""
    directory = tmp_path / "run"
    steps = killed(died, directory)
    rules = [
        {"rule": "tests.evil:rule", "arguments": {}},
        {"rule": "subprocess:Popen", "arguments": {"args": ["touch", str(tmp_path / "touched")]}},
    ]
    described(directory, rules=rules)
    assert recover(directory) == {"rank=0": [1]}
    holds(directory, steps)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run"]
    with pytest.raises(ValueError, match="expected a rule at"):
        hookstats.rules.rule_from_json({"rule": "hookstats.rules.judging:import_module", "arguments": {"name": "evil"}})


def test_a_torn_ring_gives_what_lies_before_the_tear(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    process = recorded.start(directory, ring_bytes=16 << 20, stops=[0, 39])
    recorded.wait_for(lambda: recorded.taken(directory))
    (writer,) = recorded.writers(directory)
    recorded.stop(writer)  # nothing is in a part before the ring is torn, but it may be that of the first step
    recorded.go_on(process)
    recorded.wait_for(lambda: len(recorded.taken(directory)) == 40)
    recorded.kill_all(process, directory)
    process.wait()
    ring = Ring(directory / "rank=0" / "ring.0001")
    ends = [record.end for record in ring.read(ring.tail)]
    ring._data[ends[20] % ring.capacity] ^= 1
    run = recover(directory)
    assert run == {"rank=0": [1]}
    loaded = hookstats.load(directory)
    assert 10 < len(loaded) < 40
    assert "the end of its ring was torn" in loaded.attempts[0]["ended"]
    assert (directory / "rank=0" / "ring.0001.damaged").exists()
    holds(directory, loaded.steps)
    assert recover(directory) == {"rank=0": []}


EVERY = ["tests.records.recorded:each"]


def begun(directory: Path, **arguments: Any) -> Recording:
    recording = hookstats.record(directory, ring_bytes=1 << 20, **arguments)
    recording.begin({"rank": 0})
    return recording


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose processes both died."""
    directory = tmp_path_factory.mktemp("died") / "run"
    process = recorded.start(directory, ring_bytes=2 << 20, pause=0.002)
    ring = directory / "rank=0" / "ring.0001"
    recorded.wait_for(lambda: len(recorded.taken(directory)) > 20 and Ring(ring).judged)
    recorded.kill_all(process, directory)
    process.wait()
    return directory


def killed(died: Path, directory: Path) -> list[int]:
    """It as if it had died in this directory. The steps that were taken."""
    shutil.copytree(died, directory)
    described(directory, ring=str(directory / "rank=0" / "ring.0001"))
    return recorded.taken(died)


def test_what_is_found_in_the_last_steps_is_told_when_the_recording_is_closed(tmp_path: Path) -> None:
    recording = begun(tmp_path / "run", rules=EVERY)
    take(recording, range(4))
    recording.close()
    assert [found.step for found in recording.findings()] == [0, 1, 2, 3]
    assert recording.findings() == []


def test_a_run_that_is_resumed_is_not_told_again_what_was_found_before(tmp_path: Path) -> None:
    """With on_finding="raise" it could never go on."""
    first = begun(tmp_path / "run", rules=EVERY)
    take(first, range(4))
    first.close()
    second = begun(tmp_path / "run", rules=EVERY)
    take(second, [10])
    second.wait(60)
    found = second.findings()
    second.close()
    assert [(each.step, each.attempt) for each in found] == [(10, 2)]


COUNTING = ["tests.records.recorded:counting"]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 230 steps, of which a rule counts all."""
    directory = tmp_path_factory.mktemp("counted") / "run"
    recording = begun(directory, rules=COUNTING)
    for begin in range(0, 230, 10):
        take(recording, range(begin, begin + 10))
        recording.wait(60)
    recording.close()
    return directory


@pytest.mark.parametrize("damage", [None, "", "{}", "[1]", "[" * 100_000])
def test_a_run_that_is_resumed_goes_on_with_what_its_rules_remember(
    tmp_path: Path, counted: Path, damage: str | None
) -> None:
    """Rules whose memory cannot be read begin with nothing."""
    shutil.copytree(counted, tmp_path / "run")
    if damage is not None:
        (tmp_path / "run" / "rank=0" / "rules.json").write_text(damage)
    second = begun(tmp_path / "run", rules=COUNTING)
    take(second, [230])
    second.close()
    (found,) = second.findings()
    assert (found.step, found.value) == (230, 231 if damage is None else 1)


def test_a_run_that_was_moved_is_recovered(tmp_path: Path, died: Path) -> None:
    steps = killed(died, tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    assert recover(tmp_path / "moved") == {"rank=0": [1]}
    holds(tmp_path / "moved", steps)
    assert rings(tmp_path / "moved") == []


def test_recover_leaves_a_training_alone_that_had_no_step_yet(tmp_path: Path) -> None:
    recording = begun(tmp_path / "run")
    with pytest.raises(RuntimeError, match="expected that training has ended, but process"):
        recover(tmp_path / "run")
    take(recording, range(3))
    recording.close()
    holds(tmp_path / "run", [0, 1, 2])


def test_a_process_that_died_and_was_not_waited_for_is_dead(tmp_path: Path) -> None:
    """The first process of a container may wait for nobody."""
    process = recorded.start(tmp_path / "run", pause=0.002)
    recorded.wait_for(lambda: len(recorded.taken(tmp_path / "run")) > 3)
    recorded.kill_all(process, tmp_path / "run")
    try:
        assert recover(tmp_path / "run") == {"rank=0": [1]}
    finally:
        process.wait()


def described(directory: Path, **changed: Any) -> None:
    """Other words in the file of the one attempt, which keeps its lock."""
    folder, elsewhere = directory / "rank=0", directory.with_name("elsewhere")
    elsewhere.mkdir(exist_ok=True)
    replace(read_attempt(folder, 1), **changed).write(elsewhere)
    (folder / "a0001.json").write_bytes((elsewhere / "a0001.json").read_bytes())
    shutil.rmtree(elsewhere)


def test_a_container_that_was_made_anew_recovers_what_the_one_before_left(tmp_path: Path, died: Path) -> None:
    """Its name is another one, its kernel the same; where that is another one, too, so is the machine."""
    steps = killed(died, tmp_path / "run")
    boot = machine()["boot"]
    described(tmp_path / "run", host="another", boot="another")
    with pytest.raises(ValueError, match="expected a ring of this machine, got one of another"):
        recover(tmp_path / "run")
    described(tmp_path / "run", boot=boot)
    assert recover(tmp_path / "run") == {"rank=0": [1]}
    holds(tmp_path / "run", steps)


def test_a_run_that_goes_on_in_another_container_of_this_machine_is_left_alone(tmp_path: Path) -> None:
    """There its process has a number that says nothing here."""
    process = recorded.start(tmp_path / "run", pause=0.002)
    try:
        recorded.wait_for(lambda: len(recorded.taken(tmp_path / "run")) > 3)
        recorded.stop(process.pid)
        recorded.kill(*recorded.writers(tmp_path / "run"))
        described(tmp_path / "run", host="another", pid=1 << 22)
        with pytest.raises(RuntimeError, match="expected that training has ended"):
            recover(tmp_path / "run")
        with pytest.raises(RuntimeError, match="expected a directory that nobody records into"):
            begun(tmp_path / "run")
    finally:
        process.kill()
        process.wait()


def test_recover_takes_no_ring_of_another_run(tmp_path: Path, died: Path) -> None:
    killed(died, tmp_path / "theirs")
    steps = killed(died, tmp_path / "ours")
    (tmp_path / "theirs" / "rank=0" / "ring.0001").unlink()
    described(tmp_path / "theirs", ring=str(tmp_path / "ours" / "rank=0" / "ring.0001"))
    with pytest.raises(ValueError, match=r"expected the ring ring\.0001 in it"):
        recover(tmp_path / "theirs")
    assert recover(tmp_path / "ours") == {"rank=0": [1]}
    holds(tmp_path / "ours", steps)


@pytest.mark.parametrize("name", ["lock", "a0001.json.tmp", "findings.jsonl", "ring.0001", "totals"])
def test_recover_writes_through_no_link(tmp_path: Path, died: Path, name: str) -> None:
    killed(died, tmp_path / "run")
    precious, link = tmp_path / "precious", tmp_path / "run" / "rank=0" / name
    if name == "totals":
        precious.mkdir()
        (precious / "00000001.parquet").write_text("precious")
        shutil.rmtree(link)
    else:
        precious.write_bytes(link.read_bytes() if name == "ring.0001" else b"precious")
        link.unlink(missing_ok=True)
    before = {path: path.read_bytes() for path in [precious, *precious.glob("*")] if path.is_file()}
    link.symlink_to(precious)
    with pytest.raises((OSError, ValueError), match="link"):
        recover(tmp_path / "run")
    assert {path: path.read_bytes() for path in before} == before


def test_a_recording_that_stopped_leaves_no_writer_behind(tmp_path: Path) -> None:
    """Training goes on for days, and the directory is another recording's then."""
    recording = begun(tmp_path / "run")
    take(recording, [0])
    recording.wait(60)
    with pytest.warns(UserWarning, match="stopped, training goes on"):
        recording.take(None)  # type: ignore[arg-type]
    recorded.wait_for(lambda: not recorded.writers(tmp_path))
    recording.close()
    assert len(hookstats.load(tmp_path / "run")) == 1
    assert rings(tmp_path / "run") == []
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(recording._wake)


def test_a_ring_of_another_machine_that_cannot_be_taken_up_stops_no_later_recording(tmp_path: Path) -> None:
    """It came back to a machine on which an attempt had died before its writer began."""
    recording = begun(tmp_path / "run")
    take(recording, [0])
    recording.close()
    folder = tmp_path / "run" / "rank=0"
    Ring.create(folder / "ring.0002", 1 << 16)
    Attempt(2, {"rank": 0}, ring=str(folder / "ring.0002"), host="another", boot="another", pid=1, started=-1).write(
        folder
    )
    last = begun(tmp_path / "run")
    assert last._attempt == 3
    take(last, [1])
    last.close()
    holds(tmp_path / "run", [0, 1])


_FORKED = """
import gc, mmap, os, sys
from pathlib import Path
from hookstats.records.ring import Ring
ring = Ring.create(Path(sys.argv[1]), 1 << 22)
child = os.fork()
if child == 0:
    others = [mmap.mmap(-1, 1 << 20) for _ in range(40)]
    for other in others:
        other[:] = b"x" * len(other)
    del ring
    gc.collect()
    os._exit(sum(other[0] != 120 for other in others))
print(os.waitpid(child, 0)[1])
"""


def test_a_worker_that_was_forked_may_forget_a_ring(tmp_path: Path) -> None:
    """It forgets its own mapping, and nothing written there since."""
    assert python(_FORKED, str(tmp_path / "ring")).split() == ["0"]
