"""hookstats watch: a run that is written, one that ended, one that was killed; what it shows first."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hookstats.__main__ import main
from hookstats.numbers.fields import Site
from hookstats.records.attempts import next_attempt
from hookstats.records.ring import Ring
from hookstats.records.store import Store
from hookstats.rules import Finding
from hookstats.terminal import following
from hookstats.terminal.following import WINDOW, Followed, RunState
from hookstats.terminal.formatting import BARS, escape_controls, sparkline
from hookstats.terminal.watching import lines, picture, watch
from tests.records.recorded import ROOT, keep, kill, measured, start, taken, wait_for, writers
from tests.serve.served import describe


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A process that has recorded six steps, and is not done."""
    run = tmp_path / "run"
    running = start(run, stops=[5])
    wait_for(lambda: len(taken(run)) == 6)
    ring = Ring(run / "rank=0" / "ring.0001")
    wait_for(lambda: ring.judged == ring.written)
    yield run, running
    running.kill()
    running.wait()


def written(path: Path, steps: range) -> Path:
    """A run without a process."""
    (path / "rank=0").mkdir(parents=True, exist_ok=True)
    keep(path, {next_attempt(path / "rank=0"): [measured(step) for step in steps]})
    return path


def shown(followed: Followed, width: int = 120, height: int = 40) -> list[str]:
    """The lines of the screen."""
    console = pytest.importorskip("rich.console").Console(
        file=io.StringIO(), width=width, height=height, force_terminal=False
    )
    console.print(picture(followed, followed.state(), height, width))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_run_that_is_recorded_says_by_whom_and_ends_when_it_ends(
    recording: tuple[Path, subprocess.Popen[bytes]],
) -> None:
    path, running = recording
    followed = Followed(path)
    assert followed.state() == RunState("recording", f"process {running.pid} records it")
    running.kill()
    running.wait()
    wait_for(lambda: followed.look() and followed.state().kind == "died")
    assert followed.state().sentence == (
        "training died: without a word (SIGKILL, out of memory, a crash in native code, or os._exit); "
        "all that it had measured is in the record"
    )
    followed.look()
    assert [each.step for each in followed.steps] == list(range(6))


def test_a_run_whose_writer_was_killed_too_says_what_writes_the_rest(
    recording: tuple[Path, subprocess.Popen[bytes]],
) -> None:
    path, running = recording
    kill(*writers(path))
    running.kill()
    running.wait()
    output = io.StringIO()
    assert watch(Followed(path), output) == 1
    assert output.getvalue().splitlines()[-1] == (
        f"the training process {running.pid} died; what its last steps left is written by: hookstats recover {path}"
    )
    assert main(["recover", str(path)]) == 0
    output = io.StringIO()
    assert watch(Followed(path), output) == 1
    told = output.getvalue().splitlines()
    assert [line.split()[1] for line in told if line.startswith("step ") and "," not in line] == list("012345")
    assert told[-1].startswith("training died: without a word")


@pytest.mark.parametrize(("moment", "dropped"), [("between two looks", 0), ("in a look", 0), ("in a look", 33)])
def test_a_run_whose_writer_finishes_meanwhile_ends_as_it_did(
    tmp_path: Path, moment: str, dropped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run" / "rank=0"
    store = Store(folder)
    store.begin(1, {"model": "made of numbers"})
    store.add(measured(0))
    store.commit(1)
    describe(folder, 1, os.getpid())
    followed = Followed(tmp_path / "run")
    followed.look()
    assert followed.state().kind == "recording"

    def finish(*_: object) -> bool:
        store.finish(1, "died: of a test", dropped)
        store.close()
        return False

    if moment == "in a look":
        monkeypatch.setattr(following, "is_training", finish)
    else:
        finish()
    what = "33 steps found no room and are missing" if dropped else "all that it had measured is in the record"
    assert followed.state() == RunState("died", f"training died: of a test; {what}")


def test_new_steps_and_findings_come_once(tmp_path: Path) -> None:
    path = written(tmp_path / "run", range(3))
    followed = Followed(path)
    snapshots, _ = followed.look()
    assert [snapshot.step for snapshot in snapshots] == [0, 1, 2]
    assert followed.look() == ([], [])
    written(path, range(3, 5))
    finding = Finding("a-rule", 4, Site("layers.3", "grad_output"), 2.0, 1.0, "critical", "too large")
    with open(path / "rank=0" / "findings.jsonl", "a") as file:
        file.write(json.dumps(finding.to_json()) + "\n{torn\n" + json.dumps(finding.to_json())[:20])
    snapshots, found = followed.look()
    assert ([snapshot.step for snapshot in snapshots], found) == ([3, 4], [finding])
    assert lines(followed, [], found) == [str(finding)]
    assert followed.look() == ([], [])


def test_steps_that_a_resumed_attempt_replaces_leave_the_screen(tmp_path: Path) -> None:
    followed = Followed(written(tmp_path / "run", range(10)))
    followed.look()
    written(tmp_path / "run", range(5, 7))
    followed.look()
    assert [each.step for each in followed.steps] == list(range(7))
    assert len(followed.find_worst(1)[0].rms) == 7


def test_a_step_that_was_looked_at_is_not_held(tmp_path: Path) -> None:
    """Each holds what was read of the run at its look."""
    followed = Followed(written(tmp_path / "run", range(3)))
    seen = [weakref.ref(snapshot) for snapshot in followed.look()[0]]
    written(tmp_path / "run", range(3, 5))
    followed.look()
    gc.collect()
    assert [each() for each in seen] == [None] * 3
    assert [each.step for each in followed.steps] == list(range(5))


def test_a_long_run_is_entered_at_its_end(tmp_path: Path) -> None:
    followed = Followed(written(tmp_path / "run", range(WINDOW + 20)))
    assert [snapshot.step for snapshot in followed.look()[0]] == list(range(20, WINDOW + 20))


def test_sites_with_findings_come_first_then_those_far_from_their_past(tmp_path: Path) -> None:
    followed = Followed(written(tmp_path / "run", range(8)))
    followed.look()
    sites = list(followed._rms[-1])
    for step, rms in enumerate(followed._rms):
        rms |= dict.fromkeys(sites, 1.0) | {sites[3]: 1.0, sites[5]: 50.0 if step == 7 else 1.0}
    followed._rms[-1][sites[7]] = float("inf")
    followed.findings = [
        Finding("a", 7, sites[2], 2.0, 1.0, "warning", "so so"),
        Finding("b", 7, sites[1], 2.0, 1.0, "critical", "bad"),
    ]
    worst = followed.find_worst(5)
    assert [each.site for each in worst[:4]] == [sites[1], sites[2], sites[7], sites[5]]
    assert [each.severity for each in worst] == ["critical", "warning", None, None, None]
    assert worst[3].change == 50.0
    assert worst[4].change == 1.0


def test_what_was_zero_in_the_first_step_alone_is_not_far_from_its_past(tmp_path: Path) -> None:
    followed = Followed(written(tmp_path / "run", range(4)))
    followed.look()
    site = next(iter(followed._rms[-1]))
    last = followed._rms[-1]
    last[site] = 0.5
    for values, change in (([0.0], 1.0), ([0.0, 0.0], float("inf")), ([0.0, 0.25], 4.0)):
        followed._rms.clear()
        followed._rms.extend([*({site: value} for value in values), last])
        assert {each.site: each.change for each in followed.find_worst(100)}[site] == change


def test_the_screen_fits_the_terminal_and_shows_names_as_they_are(tmp_path: Path) -> None:
    followed = Followed(written(tmp_path / "run", range(8)))
    followed.look()
    sentence = "[bold]no markup[/bold] \x1b[31m"
    site = Site("layers.1", "output")
    followed.findings = [Finding("a", step, site, 2.0, 1.0, "warning", sentence) for step in range(30)]
    for height, width in ((24, 80), (12, 40), (60, 200)):
        lines = shown(followed, width, height)
        assert len(lines) <= height, (height, width)
        assert all(len(line) <= width for line in lines)
        text = "\n".join(lines)
        assert "the run has ended" in text
        assert "worst s" in text
        assert "\x1b" not in text
    assert "[bold]no markup[/bold] \\x1b[31m" in text


def test_the_screen_has_the_gravest_findings_the_oldest_first_and_says_how_many_it_leaves_out(tmp_path: Path) -> None:
    followed = Followed(written(tmp_path / "run", range(8)))
    followed.look()
    kinds = [(0, "note"), (1, "critical"), (2, "warning"), (3, "critical"), *((step, "note") for step in range(4, 20))]
    followed.findings = [Finding("a", step, None, 2.0, 1.0, kind, "look") for step, kind in kinds]
    screen = shown(followed, height=20)
    at = screen.index("findings: 20, 15 of them not shown")
    assert [line.partition(", a:")[0] for line in screen[at + 1 : at + 6]] == [
        "step 1, critical",
        "step 3, critical",
        "step 2, warning",
        "step 0, note",
        "step 4, note",
    ]


def test_what_follows_is_counted_and_the_end_of_a_run_tells_it_in_a_few_sentences(tmp_path: Path) -> None:
    path = written(tmp_path / "run", range(8))
    cause = Finding("input-shift", 3, Site("", "input"), 9.0, 3.0, "warning", "the batch is unlike the others. Look.")
    effect = Finding("loss-spike", 4, None, 9.0, 3.0, "warning", "it rose.", because=cause.as_cause, is_news=False)
    cause, effect = replace(cause, attempt=1), replace(effect, attempt=1)
    (path / "rank=0" / "findings.jsonl").write_text(
        "".join(json.dumps(each.to_json()) + "\n" for each in (cause, effect))
    )
    output, followed = io.StringIO(), Followed(path)
    assert watch(followed, output) == 0
    told = output.getvalue().splitlines()
    assert str(cause) in told
    assert str(effect) not in told
    assert told[-2:] == [
        "In step 3: the batch is unlike the others; what follows from it: loss-spike.",
        "the run has ended",
    ]
    screen = shown(followed)
    at = screen.index("findings: 1")
    assert screen[at + 1] == "step 3, warning, input-shift (and 1 that follows): the batch is unlike the others. Look."
    assert screen[at + 2] == ""


def test_what_is_not_finite_is_told_as_such(tmp_path: Path) -> None:
    followed = Followed(written(tmp_path / "run", range(3)))
    snapshots, _ = followed.look()
    site = next(iter(followed._rms[-1]))
    for rms in followed._rms:
        rms[site] = float("inf")
    assert lines(followed, snapshots, [])[-1].endswith(f"  worst: {site} is not finite")
    row = next(line for line in shown(followed) if line.startswith(site.name))
    assert row.split() == [site.name, site.tensor, "!", "!", "!!!"]


def test_a_run_of_which_nothing_is_recorded_yet_says_so_once(tmp_path: Path) -> None:
    (tmp_path / "run" / "rank=0").mkdir(parents=True)
    output = io.StringIO()

    def wait(_: float, looks: list[None] = []) -> None:  # noqa: B006  (counts the calls)
        looks.append(None)
        if len(looks) == 3:
            written(tmp_path / "run", range(1))

    assert watch(Followed(tmp_path / "run"), output, wait) == 0
    first, *_, last = told = output.getvalue().splitlines()
    assert first == "nothing is recorded yet"
    assert told.count(first) == 1
    assert last == "the run has ended"


def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "later" / "run"
    output, looks = io.StringIO(), []

    def wait(_: float) -> None:
        looks.append(None)
        if len(looks) == 2:
            (path / "rank=1").mkdir(parents=True)
        if len(looks) == 4:
            written(path, range(2))

    assert watch(Followed(path), output, wait) == 0
    assert [line.split("  ")[0] for line in output.getvalue().splitlines()] == [
        f"waiting for rank=0: there is no run in {path} yet",
        f"waiting for rank=0: {path} has only rank=1",
        "step 0",
        "step 1",
        "No rule found anything wrong.",
        "the run has ended",
    ]


def test_a_file_is_no_run_that_may_begin(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file: expected the directory of a run, got a file"):
        Followed(tmp_path / "file")


def test_waiting_ends_with_an_interrupt_in_silence(tmp_path: Path) -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "hookstats", "watch", str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where the tests run behind an "&"
    )
    assert running.stdout is not None
    assert running.stdout.readline() == f"waiting for rank=0: there is no run in {tmp_path / 'run'} yet\n"
    running.send_signal(signal.SIGINT)
    assert running.communicate(timeout=60) == ("", "")
    assert running.returncode == 128 + signal.SIGINT


def test_a_sparkline_is_by_the_logarithm_and_marks_what_is_not_finite() -> None:
    assert sparkline([1, 2, 4, 8, 16, 32, 64, 128]) == BARS
    assert sparkline([1.0, 1.0001, 1.0]) == BARS[0] * 3
    assert sparkline([1.0, float("nan"), float("inf"), 0.0, 4.0]) == f"{BARS[0]}!!{BARS[0]}{BARS[-1]}"
    assert sparkline([0.0, 0.0]) == BARS[0] * 2
    assert sparkline([float("nan")]) == "!"
    assert len(sparkline(np.full(5, 1e308).tolist())) == 5


def test_what_would_command_a_terminal_is_shown_as_an_escape() -> None:
    assert escape_controls("a\x1b[2J\u202eb\n\t\x07é☃") == "a\\x1b[2J\\u202eb\n\\t\\x07é☃"
