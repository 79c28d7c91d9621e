"""A recording loses nothing that it took, whoever dies, and never disturbs training."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import hookstats
from hookstats import Snapshot
from hookstats.records.recording import Recording
from hookstats.records.ring import Ring
from hookstats.records.writer import recover
from tests.conftest import ROOT
from tests.plain import hearing
from tests.records import recorded

MOMENTS = int(os.environ.get("HOOKSTATS_KILLS", "2"))


def holds(directory: Path, steps: list[int]) -> None:
    """Each of these steps once, and nothing that is not whole."""
    run = hookstats.load(directory)
    assert set(steps) <= set(run.steps)
    assert len(set(run.steps)) == len(run.steps)
    for step in [*run.steps[:: max(1, len(run.steps) // 40)], *run.steps[-5:]]:
        assert run[step].equals(Snapshot(recorded.measured(step))), step


def rings(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "rank=0").glob("ring.*"))


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_training_that_is_killed_loses_nothing_that_was_taken(tmp_path: Path, moment: int) -> None:
    directory, draw = tmp_path / "run", np.random.default_rng(moment)
    process, steps = recorded.start(directory), draw.integers(1, 400)
    recorded.wait_for(lambda: len(recorded.taken(directory)) >= steps)
    recorded.kill(process.pid)
    process.wait()
    recorded.wait_for(lambda: not rings(directory))
    holds(directory, recorded.taken(directory))


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_writer_that_is_killed_is_followed_by_another_that_goes_on(tmp_path: Path, moment: int) -> None:
    directory, draw = tmp_path / "run", np.random.default_rng(100 + moment)
    process, steps = recorded.start(directory, steps=120, ring_bytes=48 << 20, stops=[100]), draw.integers(0, 100)
    recorded.wait_for(lambda: recorded.writers(directory))
    ring = Ring(directory / "rank=0" / "ring.0001")
    recorded.wait_for(lambda: ring.judged >= steps)
    recorded.kill(*recorded.writers(directory))
    recorded.go_on(process)
    assert process.wait(60) == 0
    assert recorded.taken(directory) == list(range(120))
    holds(directory, recorded.taken(directory))
    assert rings(directory) == []


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_where_both_are_killed_recover_finds_what_was_taken(tmp_path: Path, moment: int) -> None:
    directory, draw = tmp_path / "run", np.random.default_rng(200 + moment)
    process, steps = recorded.start(directory, pause=0.002), draw.integers(1, 200)
    recorded.wait_for(lambda: len(recorded.taken(directory)) >= steps)
    recorded.kill_all(process, directory, draw)
    process.wait()
    assert recover(directory) == {"rank=0": [1]}
    holds(directory, recorded.taken(directory))
    assert rings(directory) == []
    assert recover(directory) == {"rank=0": []}


def test_a_run_that_goes_on_after_both_died_takes_up_what_was_left(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    process = recorded.start(directory, pause=0.002)
    recorded.wait_for(lambda: len(recorded.taken(directory)) > 60)
    recorded.kill_all(process, directory)
    process.wait()
    before = recorded.taken(directory)
    assert recorded.start(directory, steps=30, first=before[-1] + 100, ring_bytes=16 << 20).wait(60) == 0
    holds(directory, recorded.taken(directory))
    run = hookstats.load(directory)
    assert run.steps[-30:] == list(range(before[-1] + 100, before[-1] + 130))


def test_a_ring_that_is_full_drops_new_steps_and_counts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer is stopped, so that nothing leaves the ring, and waited for at the end."""
    monkeypatch.setattr("hookstats.records.recording._BEHIND_SECONDS", 60.0)
    directory = tmp_path / "run"
    recording = hookstats.record(directory, ring_bytes=1 << 20)
    recording.begin({"rank": 0})
    recording.take(recorded.measured(0))
    recorded.wait_for(lambda: recording._ring.judged > 0)
    writer = recording._writer
    assert writer is not None
    recorded.stop(writer.pid)
    take(recording, range(1, 100))
    dropped = recording._ring.dropped
    assert 0 < dropped < 99
    os.kill(writer.pid, signal.SIGCONT)
    with pytest.warns(UserWarning, match=r"falls behind.* attach\(every=\d+\) is advised"):
        recording.close()
    run = hookstats.load(directory)
    assert len(run) == 100 - dropped
    assert run.steps[0] == 0
    holds(directory, run.steps)
    assert run.attempts[0]["dropped"] == dropped


def test_the_end_does_not_wait_for_a_writer_that_falls_behind_and_scalars_of_all_steps_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer is stopped until the end has given up waiting: so little room has never to last for so long.

    It waits for a writer that is behind by other seconds than for one that is not, which is what it says.
    """
    monkeypatch.setattr("hookstats.records.recording._BEHIND_SECONDS", 0.0)
    directory = tmp_path / "run"
    recording = hookstats.record(directory, ring_bytes=8 << 20)
    recording.begin({"rank": 0, "every": 3})
    recording.take(recorded.measured(0))
    recorded.wait_for(lambda: recording._ring.judged == recording._ring.written)  # not only what comes before a step
    writer = recording._writer
    assert writer is not None
    recorded.stop(writer.pid)
    with pytest.warns(UserWarning, match=r"falls behind: .* are left out; attach\(every=\d+\) is advised") as told:
        take(recording, range(1, 1000))
    assert len(told) == 1
    dropped = recording._ring.dropped
    assert dropped >= 128
    with pytest.warns(UserWarning, match=r"after 0 s the writer .* has not ended; it goes on"):
        recording.close()
    os.kill(writer.pid, signal.SIGCONT)
    recorded.wait_for(lambda: not recording._ring_path.exists())
    run = hookstats.load(directory)
    assert len(run) == 1000 - dropped
    assert run.steps[:100] == list(range(100))
    assert set(run.scalars["step"].to_pylist()) == set(range(1000))


def take(recording: Recording, steps: Iterable[int]) -> None:
    for step in steps:
        recording.take(recorded.measured(step))


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


def test_the_options_are_logged_and_kept_with_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = model()
    options = hookstats.Options(attention_rows=None, training_only=True)
    caplog.set_level("INFO", logger="hookstats")
    with hookstats.attach(net, sinks=hookstats.record(tmp_path / "run"), options=options) as monitor:
        train(net, monitor, 1)
    kept = {
        "strict": False,
        "memory_budget": 256 << 20,
        "training_only": True,
        "attention_rows": None,
        "laws": {},
        "identities": None,
    }
    assert hookstats.load(tmp_path / "run").attempts[0]["settings"]["options"] == kept
    assert f"Options({', '.join(f'{name}={value}' for name, value in kept.items())})" in caplog.text


def test_a_training_run_is_kept_and_read_without_torch(tmp_path: Path) -> None:
    net, snapshots = model(), list[Snapshot]()
    with hookstats.attach(net, every=1, sinks=[hookstats.record(tmp_path / "run"), snapshots.append]) as monitor:
        train(net, monitor, 12)
    run = hookstats.load(tmp_path / "run")
    assert run.steps == list(range(12))
    assert run.attempts[0]["settings"]["overhead"]["measured_host"] > 0
    assert all(run[snapshot.step].equals(snapshot) for snapshot in snapshots)
    code = f"import hookstats, sys; print(len(hookstats.load({str(tmp_path / 'run')!r})), 'torch' in sys.modules)"
    assert python(code).split() == ["12", "False"]


def test_all_closed_steps_stand_in_the_run_when_somebody_asks_for_it(tmp_path: Path) -> None:
    """Steps that are not measured count, too, and each once though the next measured step brings them again."""
    net = model()
    with hookstats.attach(net, every=5, sinks=[hookstats.record(tmp_path / "run", rules=[])]) as monitor:
        train(net, monitor, 8)
        assert monitor.recorded(60) == tmp_path / "run"
        assert hookstats.load(tmp_path / "run").scalars["step"].to_pylist() == list(range(8))
        train(net, monitor, 4)
    assert hookstats.load(tmp_path / "run").scalars["step"].to_pylist() == list(range(12))
    paths = (tmp_path / "run" / "rank=0" / "scalars").glob("*.parquet")
    assert sorted(step for path in paths for step in pq.read_table(path)["step"].to_pylist()) == list(range(12))


def test_the_writer_imports_no_torch(tmp_path: Path) -> None:
    recording = hookstats.record(tmp_path / "run")
    recording.begin({"rank": 0})
    recording.take(recorded.measured(0))
    recorded.wait_for(lambda: recording._ring.judged > 0)
    (pid,) = recorded.writers(tmp_path)
    mapped = Path(f"/proc/{pid}/maps").read_text()
    assert "numpy" in mapped
    assert "libtorch" not in mapped
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    assert os.getsid(pid) == pid
    recording.close()
    recorded.wait_for(lambda: not recorded.writers(tmp_path))  # its last word was that everything is written


def test_a_planted_nan_is_found_where_it_began_within_two_steps_and_raised(tmp_path: Path) -> None:
    net = model()
    monitor = hookstats.attach(net, every=1, sinks=[hookstats.record(tmp_path / "run", on_finding="raise")])
    train(net, monitor, 3)
    assert monitor.check(timeout=60) == []
    with pytest.raises(hookstats.FindingError, match="NaN") as caught:
        train_and_check(net, monitor)
    finding = caught.value.findings[0]
    assert (finding.step, finding.site, finding.severity) == (3, ("", "input"), "critical")
    with suppress(hookstats.FindingError):
        monitor.detach()
    assert hookstats.load(tmp_path / "run").findings[0] == finding


def train_and_check(net: nn.Module, monitor: hookstats.Monitor) -> None:
    train(net, monitor, 1, poison=0)
    monitor.check(timeout=60)


def test_a_directory_that_vanishes_costs_one_warning(tmp_path: Path) -> None:
    net = model()
    monitor = hookstats.attach(net, every=1, sinks=[hookstats.record(tmp_path / "run")])
    train(net, monitor, 3)
    monitor.check(timeout=60)
    (writer,) = recorded.writers(tmp_path)
    recorded.stop(writer)  # it makes nothing anew meanwhile
    shutil.rmtree(tmp_path / "run")
    recorded.kill(writer)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert len(train(net, monitor, 5)) == 5
        monitor.detach()
    texts = [str(each.message) for each in told]
    assert len([text for text in texts if "stopped, training goes on" in text]) == 1
    assert len(texts) <= 2  # the other one: that the writer is dead


_FULL = """
import json, resource, sys, warnings
from contextlib import suppress
import hookstats
from tests.records.test_recording import model, train
told_of = []
for what in ("part", "ring"):
    net = model()
    monitor = hookstats.attach(net, every=1, sinks=[hookstats.record(f"{sys.argv[1]}/{what}", ring_bytes=2 << 20)])
    if what == "ring":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        losses = train(net, monitor, 5)
        recording = monitor._delivery.recorders[0]
        if what == "part":
            monitor.check(timeout=60)
            resource.prlimit(recording._writer.pid, resource.RLIMIT_FSIZE, (512, 512))
        for _ in range(100):
            losses += train(net, monitor, 1)
            with suppress(RuntimeError):  # it has stopped
                recording.wait(60)  # a writer that falls behind would be another warning
        monitor.detach()
    told = [each for each in told if each.category is not ResourceWarning]  # a writer that failed may still be ending
    told_of.append([len(losses), [str(each.message) for each in told]])
print(json.dumps(told_of))
"""


def test_a_disk_that_is_full_costs_one_warning_and_no_step_of_training(tmp_path: Path) -> None:
    """Too little for what the writer writes, then what is in the ring is kept there; or too little for the ring."""
    for losses, told in json.loads(python(_FULL, str(tmp_path))):
        assert losses == 105
        assert len(told) == 1
        assert "stopped, training goes on" in told[0]
        assert "File too large" in told[0]
    assert recover(tmp_path / "part") == {"rank=0": [1]}
    assert hookstats.load(tmp_path / "part").steps[:5] == [0, 1, 2, 3, 4]
    assert rings(tmp_path / "ring") == []


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
        before = recorded.lost(tmp_path / "run")
        recorded.wait_for(lambda: recorded.lost(tmp_path / "run") > before + 50)  # training goes on
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
    """Run a script and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_findings_are_told_once_though_the_writer_died(tmp_path: Path) -> None:
    net = model()
    with hookstats.attach(net, every=1, sinks=[hookstats.record(tmp_path / "run")]) as monitor:
        train(net, monitor, 3, poison=1)
        before = monitor.check(timeout=60)
        assert before
        recorded.kill(*recorded.writers(tmp_path))
        with pytest.warns(UserWarning, match="a new one goes on where it stopped"):
            train(net, monitor, 4)
        assert monitor.check(timeout=60) == before
    lines = (tmp_path / "run" / "rank=0" / "findings.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [finding.step for finding in before]


_FORKED = """
import os, sys, warnings
import hookstats
from tests.records.recorded import measured
recording = hookstats.record(sys.argv[1], ring_bytes=1 << 20)
recording.begin({"rank": 0})
recording.take(measured(0))
child = os.fork()
if child == 0:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in (1, 2):
            recording.take(measured(step))
            recording.findings()
        recording.close()
    print(*(each.message for each in told), flush=True)
    os._exit(len(told))
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
recording.take(measured(3))
recording.close()
print(status, hookstats.load(sys.argv[1]).steps)
"""


def test_a_forked_process_that_trains_on_is_told_once_that_nothing_of_it_is_recorded(tmp_path: Path) -> None:
    *told, end = python(_FORKED, str(tmp_path / "run")).splitlines()
    assert end == "1 [0, 3]"
    assert "was forked from process" in " ".join(told)


def test_an_attempt_that_hides_steps_of_those_before_says_once_which_ones(tmp_path: Path) -> None:
    heard = []
    for steps in (range(10), range(20, 30), range(25, 28), range(3, 5), range(40, 42)):
        with hearing() as told:
            recording = hookstats.record(tmp_path / "run")
            recording.begin({"rank": 0})
            take(recording, list(steps))
            recording.close()
        heard.append(told)
    assert heard[:2] == [[], []]
    assert heard[4] == []
    [third], [fourth] = heard[2:4]
    assert f"attempt 3 in {tmp_path / 'run'} begins at step 25: of the steps up to 29, recorded there before," in third
    assert "those from 25 on no longer count" in third
    assert "begins at step 3: of the steps up to 27, recorded there before, those from 3 on no longer count" in fourth
    assert hookstats.load(tmp_path / "run").steps == [0, 1, 2, 3, 4, 40, 41]
