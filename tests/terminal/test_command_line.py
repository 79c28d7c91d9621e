"""hookstats, python -m hookstats: what its commands print, their exit status, and what they import."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats.__main__ import main
from hookstats.records.errors import RunError
from tests.conftest import ROOT
from tests.models import Residual

STEPS = 6


def record(path: Path, seed: int = 0) -> None:
    torch.manual_seed(seed)
    model = Residual(width=16, depth=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hookstats.attach(model, every=1, sinks=[hookstats.record(path)]) as monitor:
        for step in range(STEPS):
            loss = model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss=loss)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: a, b the same, and c with another seed."""
    folder = tmp_path_factory.mktemp("runs")
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        record(folder / name, seed)
    return folder


def test_identities_prints_those_that_were_proved_of_the_model(runs: Path, tmp_path: Path, capsys: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(6, 4)
    found = hookstats.find_identities(model, lambda: model(x))
    assert len(found)
    with hookstats.attach(
        model, every=1, sinks=[hookstats.record(tmp_path)], options=hookstats.Options(identities=found)
    ) as monitor:
        model(x).square().mean().backward()
        monitor.step()
    assert main(["identities", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(each) for each in found.identities]
    assert main(["identities", str(runs / "a")]) == 2
    assert "expected a run of attach(options=Options(identities=" in capsys.readouterr().err


def test_show_prints_the_table_of_a_step(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = hookstats.load(runs / "a")
    assert main(["show", str(runs / "a"), "--step", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"step 2, loss {run[2].scalars['loss']:.6g}\n\n")
    assert printed.endswith(run[2].table() + "\n")
    assert main(["show", str(runs / "a"), "--site", "blocks.0.*", "--site", "head", "--sort", "abs_max"]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith(run[STEPS - 1].select(["blocks.0.*", "head"]).table("abs_max") + "\n")


def test_compare_is_silent_for_equal_runs_and_exits_with_1_for_others(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(runs / "a"), str(runs / "b")]) == 0
    assert capsys.readouterr().out == ""
    assert main(["compare", str(runs / "a"), str(runs / "c")]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("part at step 0, blocks.0.up output: ")
    assert printed == f"{hookstats.compare(hookstats.load(runs / 'a'), hookstats.load(runs / 'c'))}\n"


def test_compare_takes_the_paths_of_runs(runs: Path) -> None:
    assert hookstats.compare(str(runs / "a"), runs / "b").is_equal
    loaded = hookstats.compare(hookstats.load(runs / "a"), hookstats.load(runs / "c"))
    assert str(hookstats.compare(runs / "a", hookstats.load(runs / "c"))) == str(loaded)
    with pytest.raises(ValueError, match="none: expected the directory of a run"):
        hookstats.compare(runs / "a", runs / "none")
    with pytest.raises(ValueError, match="expected two snapshots or two runs, got str and Snapshot"):
        hookstats.compare(str(runs / "a"), hookstats.load(runs / "b")[0])


def test_recover_says_what_was_left(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recover", str(runs / "a")]) == 0
    assert capsys.readouterr().out == "rank=0: nothing was left\n"


def test_report_writes_a_page_and_prints_its_path(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(runs / "a"), "-o", str(tmp_path / "a.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'a.html'}\n"
    assert "blocks.1.down" in (tmp_path / "a.html").read_text()
    assert main(["report", str(runs / "a"), str(runs / "b"), "-o", str(tmp_path / "both.html")]) == 0
    assert 'id="blob-rms.difference"' in (tmp_path / "both.html").read_text()


_NEVER_STEPS = """
import sys, torch, hookstats
model = torch.nn.Linear(4, 4)
hookstats.attach(model, sinks=[hookstats.record(sys.argv[1])])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
"""


def test_a_training_that_never_called_step_is_told_so_at_its_end_and_by_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "run")
    trained = subprocess.run(
        [sys.executable, "-c", _NEVER_STEPS, path], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    words = "monitor.step() was never called"
    assert trained.returncode == 0
    assert words in trained.stderr
    for is_recovered in (False, True):
        for arguments in (["show", path], ["report", path, "-o", str(tmp_path / "page.html")]):
            assert main(arguments) == 2
            printed = capsys.readouterr()
            assert printed.out == ""
            assert len(printed.err.splitlines()) == 1
            assert words in printed.err
        with pytest.raises(RunError, match="never called"):
            hookstats.report.write(path, tmp_path / "page.html")
        os.utime(Path(path) / "rank=0", (0, 0))  # long ago: no writer is expected to come
        assert main(["watch", path]) == 1 - is_recovered
        assert words in capsys.readouterr().out
        if not is_recovered:
            main(["recover", path])
            assert words in capsys.readouterr().out


def test_watch_prints_a_line_a_step_into_a_pipe_and_ends_with_the_run(runs: Path, capsys: Any) -> None:
    assert main(["watch", str(runs / "a")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3:2] for line in lines[:STEPS]] == [["step", "loss"]] * STEPS
    assert "  worst: " in lines[STEPS - 1]
    assert lines[-1] == "the run has ended"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "RUNS/none"], "hookstats show: .*none: expected the directory of a run"),
        (["show", "RUNS/a", "--step", "77"], r"hookstats show: expected a recorded step, such as \[0, 1, 2"),
        (["show", "RUNS/a", "--site", "nothing"], "hookstats show: sites: names: the glob 'nothing' matches nothing"),
        (["show", "RUNS/a", "--sort", "size"], "hookstats show: sort: expected one of count, mean"),
        (["compare", "RUNS/a", "RUNS/none"], "hookstats compare: .*none: expected the directory of a run"),
        (
            ["compare", "RUNS/a", "RUNS/b", "--dtype", "fp32"],
            "hookstats compare: dtype: expected one of float64",
        ),
        (["report", "RUNS/a", "RUNS/none"], "hookstats report: .*none: expected the directory of a run"),
        (["watch", "RUNS/a/rank=0/sites.json"], "hookstats watch: .*json: expected the directory of a run, got a"),
        (["recover", "RUNS/none"], "hookstats recover: .*none: expected the directory of a run"),
        (["serve", "RUNS/none"], "hookstats serve: .*none: expected a directory of runs, got none"),
        (["serve", "RUNS/a/rank=0/sites.json"], "hookstats serve: .*json: expected .*got a file"),
        (["serve", "RUNS", "--port", "99999"], "hookstats serve: .*from 0 to 65535"),
    ],
)
def test_errors_are_one_line_and_status_2(
    arguments: list[str], message: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([argument.replace("RUNS", str(runs)) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert re.match(message, printed.err)


@pytest.mark.parametrize("name", ["show", "watch", "report", "recover", "compare"])
def test_a_directory_of_runs_is_told_with_the_runs_below_it(
    name: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deeper = runs / "more" / "d"
    (deeper / "rank=0").mkdir(parents=True, exist_ok=True)
    assert main([name, str(runs), *([str(runs)] * (name == "compare"))]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        f"hookstats {name}: {runs}: expected the directory of a run, with rank=0 in it; got one with runs below it: "
        "a, b, c, more/d\n"
    )


def test_a_directory_without_anything_that_can_be_read_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "torn" / "rank=0"
    folder.mkdir(parents=True)
    (folder / "a0001.json").write_text("{")
    assert main(["show", str(tmp_path / "torn")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "expected a recorded step" in line


def test_a_usage_error_is_status_2_and_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["sho"])
    assert caught.value.code == 2
    capsys.readouterr()
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{hookstats.__version__}\n"


def test_every_command_has_help_for_which_nothing_is_imported_and_none_but_doctor_imports_torch(runs: Path) -> None:
    a, b = str(runs / "a"), str(runs / "b")
    commands = [
        ["show", a],
        ["compare", a, b],
        ["watch", a],
        ["recover", a],
        ["rule"],
        ["report", a, "-o", f"{a}.html"],
    ]
    code = f"""
import sys
from hookstats.__main__ import main
from hookstats.records.errors import RunError
for name in ("", "show", "compare", "report", "watch", "recover", "rule", "doctor"):
    print("help of", name)
    try:
        main([name, "--help"] if name else ["--help"])
    except SystemExit as ended:
        assert ended.code == 0
    print([each for each in ("torch", "numpy", "pyarrow") if each in sys.modules])
print("end of helps")
import hookstats.serve.routes, hookstats.serve.server
for arguments in {commands!r}:
    assert main(arguments) == 0, arguments
    assert "torch" not in sys.modules, arguments
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    helps = done.stdout.partition("end of helps")[0].split("help of ")[1:]
    assert len(helps) == 8, done.stderr
    for each in helps:
        assert "usage: hookstats" in each
        assert each.splitlines()[-1] == "[]", each


def test_a_reader_that_goes_away_is_no_error(runs: Path) -> None:
    """`| head -1` closes the pipe before anything is written."""
    running = subprocess.Popen(
        [sys.executable, "-m", "hookstats", "show", str(runs / "a")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    assert running.stdout is not None
    assert running.stderr is not None
    running.stdout.close()
    assert running.stderr.read() == ""
    assert running.wait(60) == 128 + signal.SIGPIPE


def test_names_cannot_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Sequential()
    model.add_module("\x1b[31m\u202e<b>", torch.nn.Linear(2, 2))
    with hookstats.attach(model, every=1, sinks=[hookstats.record(tmp_path / "run")]) as monitor:
        model(torch.ones(1, 2)).sum().backward()
        monitor.step(loss=1.0)
    assert main(["show", str(tmp_path / "run")]) == 0
    assert main(["watch", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\u202e" not in printed
    assert "\\x1b[31m\\u202e<b>" in printed
