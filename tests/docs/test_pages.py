"""The code of the README and of the pages beside the guide: it runs, page by page, and prints what stands below it.

`python -m tests.docs.test_pages [PAGE ...]` writes what it prints into the pages.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which each rank would import for its optimizer
import torch.distributed as dist
from torch import nn
from torch.distributed.run import get_args_parser

import hookstats
from hookstats.records import recording
from hookstats.watch.drain import Pending
from tests import ranks
from tests.conftest import ROOT

NAMES = (
    "start",
    "numbers",
    "training",
    "language_models",
    "calibration",
    "trainers",
    "distributed",
    "recording",
    "records",
    "rules",
    "report",
    "sinks",
    "commands",
    "recipes/spike",
    "recipes/nan",
    "recipes/mup",
    "recipes/massive",
    "recipes/formats",
    "recipes/experts",
    "recipes/frameworks",
    "recipes/rank",
    "recipes/leaks",
    "recipes/kernel",
    "identities",
    "recipes/from_hooks",
    "frameworks/torchtitan",
    "frameworks/megatron",
)
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in NAMES)]
# Code, and behind it what it prints, where the page shows that.
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.MULTILINE | re.DOTALL)


class Logger(types.ModuleType):
    """The functions of wandb that the pages use; without step=, wandb loses what arrives after a newer step."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)  # which transformers looks at
        self.metrics: dict[str, str] = {}
        self.rows: list[dict[str, float]] = []

    def init(self) -> None:
        pass

    def define_metric(self, name: str, step_metric: str) -> None:
        self.metrics[name] = step_metric

    def log(self, values: dict[str, float]) -> None:
        self.rows.append(values)


def names() -> dict[str, Any]:
    """Return the names that a page takes for granted: a model, its data and its optimizer."""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def evaluate(model: nn.Module) -> None:
        model.eval()
        model(torch.randn(8, 16))
        model.train()

    def train_step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "__name__": "__main__",
        "torch": torch,
        "nn": nn,
        "model": model,
        "optimizer": optimizer,
        "train_step": train_step,
        "loader": [torch.randn(32, 16) for _ in range(21)],
        "evaluate": evaluate,
    }


def run(page: Path, known: dict[str, Any] | None = None) -> list[tuple[re.Match[str], str]]:
    """Each block of a page, and what it printed. known: names that it takes for granted, and gives in return."""
    text = page.read_text()
    done = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        known = names() if known is None else known
        torch.manual_seed(0)
        for block in BLOCK.finditer(text):
            printed = io.StringIO()
            lines_before = text.count("\n", 0, block.start()) + 1
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * lines_before + block["code"], str(page), "exec"), known)
            done.append((block, printed.getvalue()))
    return done


def without_fractions(text: str) -> list[list[str]]:
    """The words of each line, whole numbers among them, such as counts and steps.

    Fractions differ in their last digits from machine to machine; and rules in length. What transformers prints in
    quotes are times and rates, which are whole by chance.
    """
    fraction = r"(?<![\w.])-?(\d+\.\d*(e[-+]?\d+)?|\d+e[-+]?\d+|nan|inf|(?<=')\d+(?='))(?![\w.])"
    return [re.sub(r"--+", "--", re.sub(fraction, "#", line)).split() for line in text.splitlines()]


def is_alike(printed: str, shown: str) -> bool:
    """Return whether two texts differ in fractions alone. A fraction may look whole on one machine: 11 beside 11.7."""

    def is_alike_word(a: str, b: str) -> bool:
        return a == b or ("#" in (a, b) and bool(re.fullmatch(r"-?\d+", a if b == "#" else b)))

    a, b = without_fractions(printed), without_fractions(shown)
    return [len(line) for line in a] == [len(line) for line in b] and all(
        is_alike_word(*words) for lines in zip(a, b, strict=True) for words in zip(*lines, strict=True)
    )


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> Logger:
    logger = Logger()
    monkeypatch.setitem(sys.modules, "wandb", logger)
    return logger


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the environment as torchrun does, but with any free port."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def room_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring that no page fills: on a busy machine, steps would be left out, and a page would print others."""
    monkeypatch.setattr(recording, "_LEAST_RING", 256 << 20)


def of_a_script(rank: int, world: int, script: str) -> str:
    """Run a script and return the output of this rank."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of torchrun are forked from one process, so that one alone imports torch, and not four.

    tests/cluster/test_exchange.py has ranks that torchrun starts.
    """
    started = subprocess.run

    def run_as_torchrun(command: list[str], **given: Any) -> subprocess.CompletedProcess[str]:
        if "torch.distributed.run" not in command:
            return started(command, **given)
        assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
        assert given == {"stdout": subprocess.PIPE, "text": True, "check": True}
        asked = get_args_parser().parse_args(command[3:])
        assert asked.standalone
        printed = ranks.run(of_a_script, int(asked.nproc_per_node), os.path.abspath(asked.training_script), init="")
        return subprocess.CompletedProcess(command, 0, "".join(printed))

    monkeypatch.setattr(subprocess, "run", run_as_torchrun)


@pytest.mark.usefixtures("one_rank", "room_for_all", "forked")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_prints_what_stands_below_it(
    page: Path, logger: Logger, recwarn: pytest.WarningsRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where pages write files
    blocks = run(page)
    assert not [str(warning.message) for warning in recwarn if "hookstats" in str(warning.message)]
    assert blocks, "a page without code"
    for block, printed in blocks:
        assert is_alike(printed, block["output"] or ""), f"{page.name}:\n{printed}"


def check_that_every_measured_step_is_kept() -> None:
    kept = hookstats.load("runs/a")
    assert kept.steps == [0, 10, 20]
    # An optimizer of another model, in the page's tests: what has changed is known from the second measured step on.
    assert [len(snapshot.order) for snapshot in kept] == [15, 19, 19]


def test_the_readmes_query_gives_each_step_once_also_of_a_run_with_two_attempts_whose_numbers_come_late(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Pending, "ready", lambda self: False)  # as may be on a GPU: they come after the loop's end
    known = names()
    run(ROOT / "README.md", known)
    check_that_every_measured_step_is_kept()
    with hookstats.attach(known["model"], every=10, sinks=[hookstats.record("runs/a")]) as monitor:
        for batch in known["loader"]:
            known["model"](batch).mean().backward()
            monitor.step()
    rows = known["duckdb"].sql(known["question"]).fetchall()
    assert [row[0] for row in rows] == [0, 10, 20]
    stats = [hookstats.load("runs/a")[step]["2", "output"].total for step in (0, 10, 20)]
    assert [row[-1] for row in rows] == [each.rms for each in stats]


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


if __name__ == "__main__":
    sys.modules["wandb"] = Logger()
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    asked = [Path(name).resolve() for name in sys.argv[1:]]
    os.chdir(tempfile.mkdtemp())
    for path in asked or PAGES:
        text = path.read_text()
        for block, printed in reversed(run(path)):
            if block["output"] is not None:
                text = text[: block.start("output")] + printed + text[block.end("output") :]
        path.write_text(text)
