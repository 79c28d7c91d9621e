"""However a training ends, its attempt says how, and the losses of all of its steps are there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

import hookstats
from hookstats.__main__ import main
from hookstats.numbers.given import Given
from hookstats.records.endings import Exits, ending_of, is_death
from tests.conftest import ROOT
from tests.ranks import outcomes
from tests.records import recorded

# Every fifth step is measured; the last is 16, so that the losses of one step come after the last measured one.
_SCRIPT = """
import os, signal, sys, time
import torch
import hookstats
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
monitor = hookstats.attach(model, every=5, sinks=[hookstats.record(sys.argv[1])])
def train(last=16):
    for step in range(last + 1):
        loss = model(torch.randn(2, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss=loss)
def hook(kind, error, trace):
    print("their hook:", error, flush=True)
def theirs(*_):
    sys.exit(143)
sys.excepthook = hook
"""
_HOW = {
    "exception": "train(); raise RuntimeError('boom')",
    "exception in with": "with monitor:\n    train(); raise RuntimeError('boom')",
    "exit": "train(); sys.exit(3)",
    "exit 0": "train(); sys.exit()",
    "exit that was caught": "try:\n    sys.exit(3)\nexcept SystemExit:\n    pass\ntrain()",
    "end": "train()",
    "detach": "train(); monitor.detach()",
    "term": "train(); print('ready', flush=True); time.sleep(600)",
    "term in C": "train(); torch.set_num_threads(1); print('ready', flush=True)\nwhile True:\n    sum(range(10**9))",
    "term, their handler": "signal.signal(signal.SIGTERM, theirs); train(); print('ready', flush=True); "
    "time.sleep(600)",
    "kill": "train(); print('ready', flush=True); time.sleep(600)",
    "forked": "train(); child = os.fork()\nif child == 0:\n    time.sleep(600)\n"
    "os.kill(child, signal.SIGTERM); os.waitpid(child, 0); monitor.step(loss=1.0); monitor.detach()",
    "spawned": "import multiprocessing\ndef child():\n    global monitor\n    monitor = hookstats.attach("
    "model, every=5, sinks=[hookstats.record(sys.argv[1] + '-child')])\n    train(); raise RuntimeError('boom')\n"
    "process = multiprocessing.get_context('fork').Process(target=child)\nprocess.start(); process.join()\n"
    "monitor.detach()",
}
_WITHOUT_A_WORD = "died: without a word"
_ENDED = {
    "exception": "died: RuntimeError: boom",
    "exception in with": "died: RuntimeError: boom",
    "exit": "died: sys.exit(3)",
    "exit 0": "ended: sys.exit()",
    "exit that was caught": "ended: without monitor.detach()",
    "end": "ended: without monitor.detach()",
    "detach": "closed",
    "term": "died: SIGTERM in ",
    "term in C": "died: SIGTERM in ",
    "term, their handler": "died: sys.exit(143)",
    "kill": _WITHOUT_A_WORD,
    "forked": "closed",
}
_SIGNALS = {
    "term": signal.SIGTERM,
    "term in C": signal.SIGTERM,
    "term, their handler": signal.SIGTERM,
    "kill": signal.SIGKILL,
}
_STATUS = {"exception": 1, "exception in with": 1, "exit": 3, "term": -15, "term in C": -15, "kill": -9}
_STATUS |= {"term, their handler": 143}


# One process imports torch, and forks one for each script, which it runs as the interpreter does, to the end of it.
_SERVER = """
import ctypes, json, os, sys, time
import torch, hookstats
folder, scripts, signals = sys.argv[1], *map(json.loads, sys.argv[2:])
model = torch.nn.Linear(2, 2)  # what is imported when it is used is imported here
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with hookstats.attach(model, every=1, sinks=[hookstats.record(folder + "/first", rules=[])]) as monitor:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    monitor.step(loss=1.0)
children = {}
for kind, script in scripts.items():
    path = f"{folder}/{kind.replace(' ', '_').replace(',', '')}"
    child = os.fork()
    if child == 0:
        output = os.open(path + ".out", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1), os.dup2(output, 2)
        sys.argv[:] = [path, path]
        failed = ctypes.pythonapi.PyRun_SimpleString(script.encode())
        ctypes.pythonapi.Py_Exit(int(failed != 0))
    children[kind] = path, child
found = {}
for kind, (path, child) in children.items():
    while kind in signals and "ready" not in open(path + ".out").read():
        time.sleep(0.02)
    if kind in signals:
        os.kill(child, signals[kind])
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found[kind] = path, status, open(path + ".out").read()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int, str]]:
    """Return for each kind of end the run, its process's exit status and its output."""
    scripts = {kind: _SCRIPT + how for kind, how in _HOW.items()}
    arguments = [str(tmp_path_factory.mktemp("ended")), json.dumps(scripts), json.dumps(_SIGNALS)]
    done = subprocess.run(
        [sys.executable, "-c", _SERVER, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {kind: (Path(path), status, printed) for kind, (path, status, printed) in found.items()}


@pytest.mark.parametrize("kind", _ENDED)
def test_an_attempt_says_how_it_ended_and_has_the_losses_of_all_steps(
    ended: dict[str, tuple[Path, int, str]], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, status, printed = ended[kind]
    recorded.wait_for(lambda: hookstats.load(path).attempts[0]["ended"])
    run = hookstats.load(path)
    how = run.attempts[0]["ended"]
    assert how.startswith(_ENDED[kind]), printed
    assert status == _STATUS.get(kind, 0), printed
    assert run.steps == [0, 5, 10, 15]
    assert run.scalars["step"].to_pylist() == list(range(17 + (kind == "forked")))
    assert main(["watch", str(path)]) == int(is_death(how))
    said = capsys.readouterr().out.splitlines()[-1]
    assert _ENDED[kind].removeprefix("ended: ").removeprefix("closed") in said
    assert ("their hook: boom" in printed) == kind.startswith("exception")
    assert not [each.name for each in (path / "rank=0").iterdir() if each.name.startswith("ring")]


def test_what_a_process_of_multiprocessing_died_of_is_said(ended: dict[str, tuple[Path, int, str]]) -> None:
    path, _, printed = ended["spawned"]
    child = path.with_name(path.name + "-child")
    recorded.wait_for(lambda: hookstats.load(child).attempts[0]["ended"])
    assert hookstats.load(child).attempts[0]["ended"] == "died: RuntimeError: boom", printed
    assert hookstats.load(child).scalars["step"].to_pylist() == list(range(17))


def test_the_place_in_which_a_signal_came_is_kept(ended: dict[str, tuple[Path, int, str]]) -> None:
    path, _, _ = ended["term in C"]
    recorded.wait_for(lambda: hookstats.load(path).attempts[0]["ended"])
    assert "in <string>, line " in hookstats.load(path).attempts[0]["ended"]


def test_an_exit_is_noted_by_each_that_listens_and_taken_back() -> None:
    before = sys.exit
    Exits().close()
    assert sys.exit is before
    first, second = Exits(), Exits()
    first.close()
    with pytest.raises(SystemExit, match="why"):
        sys.exit("why")
    assert second.describe_ending() == "died: sys.exit('why')"
    second.forget()
    assert second.describe_ending() == "ended: without monitor.detach()"
    second.close()


def test_an_error_whose_text_cannot_be_made_is_named() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert ending_of(Odd()) == "died: Odd"
    assert ending_of(KeyboardInterrupt()) == "died: KeyboardInterrupt"
    assert ending_of(RuntimeError("a\n  b" + 1000 * "x")).startswith("died: RuntimeError: a bxxx")
    assert len(ending_of(RuntimeError(1000 * "x"))) < 450
    assert ending_of(None) == ending_of(GeneratorExit()) == "closed"


def test_the_writer_starts_beside_files_with_the_names_of_pythons_own(tmp_path: Path) -> None:
    """In the directory of the script, and where it was started."""
    for name in ("random", "json", "select", "socket", "numbers"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')\n")
    (tmp_path / "mine.py").write_text(
        "def rule(step):\n    return [step.finding(f'mine {step.number}', None, 0, 0, 'note', 'mine')]\n"
    )
    code = """
import sys
at = sys.path.pop(0)
import hookstats
from tests.records.recorded import measured
recording = hookstats.record("run", rules=["mine:rule"])
recording.begin({"rank": 0})
frame = measured(0)
sys.path.insert(0, at)
recording.take(frame)
recording.wait(60)
recording.close()
print(len(hookstats.load("run")), [each.rule for each in recording.findings()])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == "1 ['mine 0']\n", done.stderr


def is_killed(rank: int, world: int, folder: str) -> None:
    """Train 17 steps, of which every fifth is measured; then both ranks are killed, the last step not yet merged."""
    model = torch.nn.Linear(4, 4)
    sinks = [hookstats.record(f"{folder}/{name}", rules=[], every_rank=name == "each") for name in ("all", "each")]
    monitor = hookstats.attach(model, every=5, process_group=dist.group.WORLD, sinks=sinks)
    for step in range(17):
        model(torch.ones(2, 4)).sum().backward()
        monitor.step(loss=step + rank / 2)
        if step == 7:
            monitor.check(timeout=60)  # the first two have been merged
    os.kill(os.getpid(), signal.SIGKILL)


def test_ranks_that_are_killed_have_left_the_scalars_of_all_steps(tmp_path: Path) -> None:
    """Merged or not: means where a step was merged, else those of the first rank."""
    assert [each.code for each in outcomes(is_killed, 2, str(tmp_path))] == [-9, -9]
    for name, rank in (("all", 0), ("each", 0), ("each", 1)):
        load = partial(hookstats.load, tmp_path / name, ranks=rank)
        recorded.wait_for(lambda load=load: load().attempts[0]["ended"])
        run = load()
        merged = {snapshot.step for snapshot in run if snapshot.ranks == (0, 1)}
        steps, losses = run.history("loss")
        assert steps.tolist() == list(range(17))
        assert losses.tolist() == [step + (0.25 if step in merged else rank / 2) for step in range(17)]
        if name == "all":
            assert {0, 5} <= merged <= {0, 5, 10, 15}
        else:
            assert (run.steps, merged) == ([0, 5, 10, 15], set())


def test_scalars_that_come_before_their_step_are_there_once_whoever_dies(tmp_path: Path) -> None:
    """A step of merged ranks comes late, and brings means, or it does not come."""
    recording = hookstats.record(tmp_path / "run", rules=[])
    recording.begin({"rank": 0})

    def early(*steps: int) -> None:
        for step in steps:
            recording.take_early(Given({step: {"loss": float(step)}}, {}))

    def late(step: int, *earlier: int) -> None:
        means = {each: {"loss": each + 0.5} for each in earlier}
        recording.take(replace(recorded.measured(step), scalars={"loss": step + 0.5}, earlier_scalars=means))

    early(0, 1)
    late(0)
    early(2, 3)
    recording.wait_until_written(60)  # 1, 2 and 3 are waited for, and in no table
    early(4)
    recorded.kill(*recorded.writers(tmp_path))
    late(2, 1)
    early(5, 6, 7)
    late(5)  # that of 3 and 4 does not come any more
    recording.wait_until_written(60)
    recorded.kill(*recorded.writers(tmp_path))
    late(6)
    recording.close()
    run = hookstats.load(tmp_path / "run")
    assert dict(zip(*(each.tolist() for each in run.history("loss")), strict=True)) == {
        0: 0.5, 1: 1.5, 2: 2.5, 3: 3.0, 4: 4.0, 5: 5.5, 6: 6.5, 7: 7.0
    }  # fmt: skip
    assert run[2].earlier_scalars == {1: {"loss": 1.5}}
    table = pq.read_table(tmp_path / "run/rank=0/scalars")
    assert sorted(table["step"].to_pylist()) == list(range(8))
    assert not list((tmp_path / "run/rank=0/scalars").glob("a0001-*"))  # as if numbers had gone back
