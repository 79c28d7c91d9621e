"""A recording loses nothing that it took, whoever dies, and never disturbs training."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hookstats
from hookstats import Snapshot
from hookstats.records.recording import Recording
from hookstats.records.ring import Ring
from hookstats.records.writer import recover
from tests import recorded
from tests.conftest import ROOT

MOMENTS = int(os.environ.get("HOOKSTATS_KILLS", "3"))


def holds(directory: Path, steps: list[int]) -> None:
    """Each of these steps once, and nothing that is not whole."""
    run = hookstats.load(directory)
    assert set(steps) <= set(run.steps)
    assert len(set(run.steps)) == len(run.steps)
    for step in [*run.steps[:: max(1, len(run.steps) // 40)], *run.steps[-5:]]:
        assert run[step].equals(recorded.drained(step).snapshot()), step


def rings(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "rank=0").glob("ring.*"))


def test_what_was_recorded_is_read_as_it_was(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    assert recorded.start(directory, steps=120, ring_bytes=64 << 20).wait(60) == 0
    steps = recorded.taken(directory)
    assert steps == list(range(120))
    assert hookstats.load(directory).steps == steps
    holds(directory, steps)
    assert rings(directory) == []


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_training_that_is_killed_loses_nothing_that_was_taken(tmp_path: Path, moment: int) -> None:
    directory, draw = tmp_path / "run", np.random.default_rng(moment)
    process = recorded.start(directory)
    recorded.wait_for(lambda: len(recorded.taken(directory)) > draw.integers(1, 400))
    recorded.kill(process.pid)
    process.wait()
    recorded.wait_for(lambda: not rings(directory))
    holds(directory, recorded.taken(directory))


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_writer_that_is_killed_is_followed_by_another_that_goes_on(tmp_path: Path, moment: int) -> None:
    directory, draw = tmp_path / "run", np.random.default_rng(100 + moment)
    process = recorded.start(directory, steps=300, pause=0.005, ring_bytes=96 << 20)
    recorded.wait_for(lambda: recorded.writers(directory))
    time.sleep(draw.random())
    for pid in recorded.writers(directory):
        recorded.kill(pid)
    assert process.wait(60) == 0
    assert recorded.taken(directory) == list(range(300))
    holds(directory, recorded.taken(directory))
    assert rings(directory) == []


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_where_both_are_killed_recover_finds_what_was_taken(tmp_path: Path, moment: int) -> None:
    directory, draw = tmp_path / "run", np.random.default_rng(200 + moment)
    process = recorded.start(directory)
    recorded.wait_for(lambda: recorded.writers(directory))
    time.sleep(0.05 + draw.random())
    pids = [process.pid, *recorded.writers(directory)]
    for pid in draw.permutation(pids).tolist():
        recorded.kill(pid)
    process.wait()
    assert recover(directory) == {"rank=0": [1] if recorded.taken(directory) else []}
    holds(directory, recorded.taken(directory))
    assert rings(directory) == []
    assert recover(directory) == {"rank=0": []}


def test_a_run_that_goes_on_after_both_died_takes_up_what_was_left(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    process = recorded.start(directory)
    recorded.wait_for(lambda: len(recorded.taken(directory)) > 60)
    for pid in [*recorded.writers(directory), process.pid]:
        recorded.kill(pid)
    process.wait()
    before = recorded.taken(directory)
    assert recorded.start(directory, steps=30, first=before[-1] + 100, ring_bytes=16 << 20).wait(60) == 0
    holds(directory, recorded.taken(directory))
    run = hookstats.load(directory)
    assert run.steps[-30:] == list(range(before[-1] + 100, before[-1] + 130))


def test_a_ring_that_is_full_drops_new_steps_and_counts_them(tmp_path: Path) -> None:
    """The writer is stopped, so that nothing leaves the ring."""
    directory = tmp_path / "run"
    recording = hookstats.record(directory, ring_bytes=1 << 20)
    recording.begin({"rank": 0})
    recording.take(recorded.drained(0))
    recorded.wait_for(lambda: recording._ring.judged > 0)
    writer = recording._writer
    assert writer is not None
    os.kill(writer.pid, 19)
    with pytest.warns(UserWarning, match="a step is not recorded, the ring of 1048576 bytes cannot take it"):
        take(recording, range(1, 100))
    dropped = recording._ring.dropped
    assert 0 < dropped < 99
    os.kill(writer.pid, 18)
    recording.close()
    run = hookstats.load(directory)
    assert len(run) == 100 - dropped
    assert run.steps[0] == 0
    holds(directory, run.steps)
    assert run.manifest["attempts"][0]["dropped"] == dropped


def take(recording: Recording, steps: Iterable[int]) -> None:
    for step in steps:
        recording.take(recorded.drained(step))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def train(net: nn.Module, monitor: hookstats.Monitor | None, steps: int, poison: int | None = None) -> list[float]:
    """The losses."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    draw, losses = torch.Generator().manual_seed(1), []
    for step in range(steps):
        x = torch.randn(5, 8, generator=draw)
        if step == poison:
            x[0, 0] = float("nan")
        loss = (net(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if monitor is not None:
            monitor.step(loss=loss)
    return losses


def test_a_training_run_is_kept_and_read_without_torch(tmp_path: Path) -> None:
    net, snapshots = model(), list[Snapshot]()
    with hookstats.attach(net, every=1, sinks=[hookstats.record(tmp_path / "run"), snapshots.append]) as monitor:
        train(net, monitor, 12)
    run = hookstats.load(tmp_path / "run")
    assert run.steps == list(range(12))
    assert run.manifest["attempts"][0]["settings"]["overhead"]["measured_host"] > 0
    assert all(run[snapshot.step].equals(snapshot) for snapshot in snapshots)
    code = f"import hookstats, sys; print(len(hookstats.load({str(tmp_path / 'run')!r})), 'torch' in sys.modules)"
    assert python(code).split() == ["12", "False"]


def test_training_with_a_recording_does_not_change_by_a_bit(tmp_path: Path) -> None:
    net = model()
    with hookstats.attach(net, every=2, sinks=[hookstats.record(tmp_path / "run")]) as monitor:
        losses = train(net, monitor, 20)
    assert losses == train(model(), None, 20)


def test_the_writer_imports_no_torch(tmp_path: Path) -> None:
    recording = hookstats.record(tmp_path / "run")
    recording.begin({"rank": 0})
    recording.take(recorded.drained(0))
    recorded.wait_for(lambda: recording._ring.judged > 0)
    (pid,) = recorded.writers(tmp_path)
    mapped = Path(f"/proc/{pid}/maps").read_text()
    assert "numpy" in mapped
    assert "libtorch" not in mapped
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    assert os.getsid(pid) == pid
    recording.close()
    assert recorded.writers(tmp_path) == []


def test_a_planted_nan_is_found_where_it_began_within_two_steps_and_raised(tmp_path: Path) -> None:
    net = model()
    monitor = hookstats.attach(net, every=1, sinks=[hookstats.record(tmp_path / "run")], on_finding="raise")
    train(net, monitor, 3)
    assert monitor.check() == []
    with pytest.raises(hookstats.FindingError, match="NaN") as caught:
        train_and_check(net, monitor)
    finding = caught.value.findings[0]
    assert (finding.step, finding.site, finding.severity) == (3, ("0", "output"), "critical")
    with suppress(hookstats.FindingError):
        monitor.detach()
    assert hookstats.load(tmp_path / "run").findings[0] == finding


def train_and_check(net: nn.Module, monitor: hookstats.Monitor) -> None:
    train(net, monitor, 1, poison=0)
    monitor.check()


def test_a_directory_that_cannot_be_written_raises_at_attach(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        hookstats.attach(model(), sinks=[hookstats.record(tmp_path / "file" / "run")])


def test_a_directory_that_somebody_records_into_is_refused(tmp_path: Path) -> None:
    net = model()
    first = hookstats.attach(net, sinks=[hookstats.record(tmp_path / "run")])
    with pytest.raises(RuntimeError, match="expected a directory that nobody records into, but process"):
        hookstats.attach(net, sinks=[hookstats.record(tmp_path / "run")])
    first.detach()
    hookstats.attach(net, sinks=[hookstats.record(tmp_path / "run")]).detach()


def test_a_directory_that_vanishes_costs_one_warning(tmp_path: Path) -> None:
    net = model()
    monitor = hookstats.attach(net, every=1, sinks=[hookstats.record(tmp_path / "run")])
    train(net, monitor, 3)
    monitor.check()
    for path in sorted((tmp_path / "run").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "run").rmdir()
    for pid in recorded.writers(tmp_path):
        recorded.kill(pid)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert len(train(net, monitor, 5)) == 5
        monitor.detach()
    texts = [str(each.message) for each in told]
    assert len([text for text in texts if "stopped, training goes on" in text]) == 1
    assert len(texts) <= 2  # the other one: that the writer is dead


_FULL = """
import json, os, resource, sys, time, warnings
import hookstats
from tests.test_recording import model, train
directory, what = sys.argv[1:]
net = model()
monitor = hookstats.attach(net, every=1, sinks=[hookstats.record(directory, ring_bytes=2 << 20)])
if what == "ring":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    losses = train(net, monitor, 5)
    if what == "part":
        monitor.check()
        writer = monitor._delivery.recorders[0]._writer
        resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (512, 512))
    losses += train(net, monitor, 300)
    monitor.detach()
print(json.dumps([len(losses), [str(each.message) for each in told]]))
"""


@pytest.mark.parametrize("what", ["ring", "part"])
def test_a_disk_that_is_full_costs_one_warning_and_no_step_of_training(tmp_path: Path, what: str) -> None:
    """Too little for the ring, or too little for what the writer writes; then what is in the ring is kept there."""
    done = python(_FULL, str(tmp_path / "run"), what)
    losses, told = json.loads(done)
    assert losses == 305
    assert len(told) == 1
    assert "stopped, training goes on" in told[0]
    assert "File too large" in told[0]
    if what == "part":
        assert recover(tmp_path / "run") == {"rank=0": [1]}
        assert hookstats.load(tmp_path / "run").steps[:5] == [0, 1, 2, 3, 4]


def test_a_small_disk_that_fills_up_keeps_what_was_taken(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        process = recorded.start(small / "run", pause=0.003, ring_bytes=4 << 20, log=tmp_path / "run.log")
        ring = small / "run" / "rank=0" / "ring.0001"
        recorded.wait_for(lambda: recorded.taken(tmp_path / "run"))
        recorded.wait_for(lambda: Ring(ring).failed)
        assert "No space left" in Ring(ring).failure
        time.sleep(0.2)
        assert process.poll() is None
        recorded.kill(process.pid)
        process.wait()
        shutil.copytree(small / "run", tmp_path / "run")
    finally:
        recorded.wait_for(lambda: not recorded.writers(small))
        subprocess.run(["umount", "-l", small], check=True)
    for path in (tmp_path / "run" / "rank=0").glob("ring.*.json"):  # the ring has moved with it
        path.write_text(path.read_text().replace(str(small), str(tmp_path)))
    assert recover(tmp_path / "run") == {"rank=0": [1]}
    holds(tmp_path / "run", recorded.taken(tmp_path / "run"))


def python(code: str, *arguments: str) -> str:
    """What it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"ring_bytes": 5}, ValueError, "ring_bytes: expected at least 65536 bytes, or None; got 5"),
        ({"rules": [print]}, TypeError, "rules: expected one of hookstats.rules"),
        ({"sinks": [print]}, TypeError, "sinks: expected file sinks"),
    ],
)
def test_arguments_that_cannot_be_are_refused(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        hookstats.record(tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()


def test_a_rule_of_ones_own_judges_in_the_writer(tmp_path: Path) -> None:
    net = model()
    with hookstats.attach(
        net, every=1, sinks=[hookstats.record(tmp_path / "run", rules=["tests.test_recording:even"])]
    ) as monitor:
        train(net, monitor, 5)
        assert [(found.rule, found.step) for found in monitor.check()] == [("even", 0)]


def even(step: Any) -> list[Any]:
    return [step.finding("even", None, 1.0, 0.0, "note", "This step is even.")] if step.number % 2 == 0 else []


def test_findings_are_told_once_though_the_writer_died(tmp_path: Path) -> None:
    net = model()
    with hookstats.attach(net, every=1, sinks=[hookstats.record(tmp_path / "run")]) as monitor:
        train(net, monitor, 3, poison=1)
        before = monitor.check()
        assert before
        for pid in recorded.writers(tmp_path):
            recorded.kill(pid)
        with pytest.warns(UserWarning, match="a new one goes on where it stopped"):
            train(net, monitor, 4)
        assert monitor.check() == before
    lines = (tmp_path / "run" / "rank=0" / "findings.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [finding.step for finding in before]


def test_recover_runs_nothing_that_a_file_names(tmp_path: Path) -> None:
    """A directory that somebody else wrote may be recovered: only our own rules judge, and nothing else is written."""
    directory = tmp_path / "run"
    process = recorded.start(directory)
    recorded.wait_for(lambda: len(recorded.taken(directory)) > 3)
    for pid in [process.pid, *recorded.writers(directory)]:
        recorded.kill(pid)
    process.wait()
    (path,) = (directory / "rank=0").glob("ring.*.json")
    described = json.loads(path.read_text())
    described["rules"] = [
        {"rule": "tests.evil:rule", "arguments": {}},
        {"rule": "subprocess:Popen", "arguments": {"args": ["touch", str(tmp_path / "touched")]}},
    ]
    described["sinks"] = [
        {"sink": "hookstats.sinks.jsonl:JsonLines", "arguments": {"path": str(tmp_path / "elsewhere")}}
    ]
    path.write_text(json.dumps(described))
    assert recover(directory) == {"rank=0": [1]}
    holds(directory, recorded.taken(directory))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run", "run.log"]
    described["rules"] = [{"rule": "hookstats.rules.judging:import_module", "arguments": {"name": "tests.evil"}}]
    with pytest.raises(ValueError, match="expected a rule at"):
        hookstats.rules.rule_from_json(described["rules"][0])


def test_a_torn_ring_gives_what_lies_before_the_tear(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    process = recorded.start(directory, steps=40, pause=0.001, ring_bytes=16 << 20)
    recorded.wait_for(lambda: recorded.writers(directory))
    for pid in recorded.writers(directory):
        os.kill(pid, 19)  # it stops
    recorded.wait_for(lambda: len(recorded.taken(directory)) == 40)
    for pid in [process.pid, *recorded.writers(directory)]:
        recorded.kill(pid)
    process.wait()
    ring = Ring(directory / "rank=0" / "ring.0001")
    ends = [record.end for record in ring.read(ring.tail)]
    ring._data[ends[20] % ring.capacity] ^= 1
    run = recover(directory)
    assert run == {"rank=0": [1]}
    loaded = hookstats.load(directory)
    assert 10 < len(loaded) < 40
    assert loaded.manifest["attempts"][0]["ended"] == "torn"
    holds(directory, loaded.steps)
    assert recover(directory) == {"rank=0": []}


EVERY = ["tests.test_recording:each"]


def each(step: Any) -> list[Any]:
    return [step.finding(f"step {step.number}", None, 1.0, 0.0, "critical", "This is a step.")]


def begun(directory: Path, **arguments: Any) -> Recording:
    recording = hookstats.record(directory, ring_bytes=1 << 20, **arguments)
    recording.begin({"rank": 0})
    return recording


def killed(directory: Path) -> list[int]:
    """A run whose processes both died. The steps that were taken."""
    process = recorded.start(directory, ring_bytes=16 << 20, pause=0.002)
    ring = directory / "rank=0" / "ring.0001"
    recorded.wait_for(lambda: len(recorded.taken(directory)) > 20 and Ring(ring).judged)
    kill_both(process, directory)
    process.wait()
    return recorded.taken(directory)


def kill_both(process: subprocess.Popen[bytes], directory: Path) -> None:
    """The writer stops first: it neither finishes what is left, nor does training start another one."""
    writers = recorded.writers(directory)
    for pid in writers:
        os.kill(pid, signal.SIGSTOP)
    for pid in [process.pid, *writers]:
        recorded.kill(pid)


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


def test_a_run_that_was_moved_is_recovered(tmp_path: Path) -> None:
    steps = killed(tmp_path / "run")
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
    """As in a container whose first process waits for nobody."""
    process = recorded.start(tmp_path / "run", pause=0.002)
    recorded.wait_for(lambda: len(recorded.taken(tmp_path / "run")) > 3)
    kill_both(process, tmp_path / "run")
    try:
        assert recover(tmp_path / "run") == {"rank=0": [1]}
    finally:
        process.wait()


def test_recover_takes_no_ring_of_another_run(tmp_path: Path) -> None:
    killed(tmp_path / "theirs")
    steps = killed(tmp_path / "ours")
    (path,) = (tmp_path / "theirs" / "rank=0").glob("ring.*.json")
    (path.parent / "ring.0001").unlink()
    described = json.loads(path.read_text()) | {"ring": str(tmp_path / "ours" / "rank=0" / "ring.0001")}
    path.write_text(json.dumps(described))
    with pytest.raises(ValueError, match=r"expected the ring ring\.0001 in it"):
        recover(tmp_path / "theirs")
    assert recover(tmp_path / "ours") == {"rank=0": [1]}
    holds(tmp_path / "ours", steps)


@pytest.mark.parametrize("name", ["lock", "manifest.json.tmp", "findings.jsonl", "ring.0001", "totals"])
def test_recover_writes_through_no_link(tmp_path: Path, name: str) -> None:
    killed(tmp_path / "run")
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
    manifest = (folder / "manifest.json").read_bytes()
    later = begun(tmp_path / "run")
    number = later._attempt
    later.close()
    Ring.create(folder / "ring.0000", 1 << 16)
    described = {"attempt": 0, "ring": str(folder / "ring.0000"), "host": socket.gethostname(), "pid": 1}
    described |= {"started": -1, "settings": {"rank": 0}, "rules": []}
    (folder / "ring.0000.json").write_text(json.dumps(described))
    assert (folder / "manifest.json").read_bytes() == manifest
    last = begun(tmp_path / "run")
    assert last._attempt == number
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
    """What it forgets is its own mapping, and nothing that lies there since."""
    assert python(_FORKED, str(tmp_path / "ring")).split() == ["0"]
