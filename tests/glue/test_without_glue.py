"""Tests without glue for this torch: the same numbers, one line about it, and no harm to training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import hookstats
from tests.conftest import ROOT

PACKAGE = Path(hookstats.__file__).parent  # an installed one, too
GLUE = f"torch{'_'.join(torch.__version__.split('.')[:2])}"
# Runs each program in a process of its own, which has imported nothing but torch.
FORKING = """
import json, os, sys, tempfile, warnings
import torch._dynamo.backends.debugging, torch._dynamo.compiled_autograd, torch._functorch.aot_autograd
for line in sys.stdin:
    code, folder, glue, warnings_are_errors = json.loads(line)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            status = 1
            try:
                sys.path.insert(0, folder)
                os.environ["HOOKSTATS_GLUE"] = glue
                if warnings_are_errors:
                    warnings.simplefilter("error", UserWarning)
                exec(compile(code, "program", "exec"), {"__name__": "__main__"})
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        print(json.dumps([status, out.read(), err.read()]), flush=True)
"""


class Ended(NamedTuple):
    status: int
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a program with the hookstats of a folder, by default the one of these tests."""
    command = [sys.executable, "-c", FORKING]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as forking:
        assert forking.stdin is not None
        assert forking.stdout is not None
        asked, answers = forking.stdin, forking.stdout

        def run(code: str, folder: Path = PACKAGE.parent, glue: str = "", warnings_are_errors: bool = False) -> Ended:
            print(json.dumps([code, str(folder), glue, warnings_are_errors]), file=asked, flush=True)
            return Ended(*json.loads(answers.readline()))

        yield run


def other_package(folder: Path) -> Path:
    """hookstats without glue, which may be put into it."""
    package = folder / "hookstats"
    package.mkdir()
    for path in PACKAGE.iterdir():
        if path.name != "_glue" and (path.is_dir() or path.suffix in (".py", ".so", ".json")):
            (package / path.name).symlink_to(path)
    (package / "_glue" / GLUE).mkdir(parents=True)
    return package


MEASURE = "import hookstats, torch; print(hookstats.measure(torch.tensor([3.0, 4.0])).total.l2_norm)"


def test_a_torch_that_no_glue_is_for_is_measured_beside_and_told_in_one_line(run: Run, tmp_path: Path) -> None:
    package = other_package(tmp_path)
    (package / "_glue" / GLUE).rename(package / "_glue" / "torch2_1")
    (package / "_glue" / "torch2_1" / f"_C{EXTENSION_SUFFIXES[0]}").touch()
    done = run(MEASURE, tmp_path)
    assert done.out == "5.0\n", done.err
    (told,) = [line for line in done.err.splitlines() if "hookstats: " in line]
    assert f"there is no compiled hook for torch {torch.__version__} and Python 3." in told
    assert "only for torch 2.1. hookstats measures the same without it, but more slowly" in told
    assert "--no-build-isolation --force-reinstall" in told


def test_glue_that_does_not_load_is_told_with_its_reason(run: Run, tmp_path: Path) -> None:
    package = other_package(tmp_path)
    (package / "_glue" / GLUE / f"_C{EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    done = run(MEASURE, tmp_path)
    assert done.out == "5.0\n", done.err
    assert "that does not load (" in done.err
    assert "invalid ELF header" in done.err or "file too short" in done.err


def test_warnings_as_errors_do_not_keep_it_from_being_imported(run: Run, tmp_path: Path) -> None:
    other_package(tmp_path)
    done = run(MEASURE, tmp_path, warnings_are_errors=True)
    assert done.out == "5.0\n", done.err


def test_another_word_than_none_is_refused(run: Run) -> None:
    done = run(MEASURE, glue="2.13")
    assert "HOOKSTATS_GLUE: expected none, or that it is not set, got '2.13'" in done.err.splitlines()[-1]


TRAINING = """
import runpy
runpy.run_module("tests.glue.training", run_name="__main__")
"""

COMPILED = """
import hookstats, torch, warnings
from torch import nn
def trained(attached, whole):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    monitor = hookstats.attach(model, every=1) if attached else None
    if whole:
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
    else:
        model[0].compile(backend="aot_eager")
        run = model
    for _ in range(4):
        run(torch.randn(32, 8)).square().mean().backward()
        if monitor:
            monitor.step()
    bits = [parameter.grad.clone() for parameter in model.parameters()]
    return bits, monitor
for whole in (True, False):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        bits, monitor = trained(True, whole)
    print([str(each.message) for each in told if "hookstats" in str(each.message)], dict(monitor.skipped))
    for site, stats in monitor.snapshot().items():
        print(site, stats.calls, stats.total.l2_norm.hex(), stats.total.mean.hex())
    assert all(map(torch.equal, bits, trained(False, whole)[0]))
"""


BACKWARD = """
import hookstats, torch
from torch import nn
import torch._dynamo.compiled_autograd
def trained(attached):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    monitor = hookstats.attach(model, every=1, tensors=("output", "grad_output")) if attached else None
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        model(torch.randn(32, 8)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()], monitor
bits, monitor = trained(True)
for site, stats in monitor.snapshot().items():
    print(site, stats.calls, stats.total.l2_norm.hex())
assert all(map(torch.equal, bits, trained(False)[0]))
"""


OWN = """
import hookstats, torch
from torch import nn
from torch.overrides import TorchFunctionMode
class Own(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        assert function not in asked_by_hookstats, function
        return super().__torch_function__(function, types, args, kwargs)
class Mode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function not in asked_by_hookstats, function
        return function(*args, **(kwargs or {}))
T = torch.Tensor
asked_by_hookstats = [T.shape.__get__, T.layout.__get__, T.stride, T.data_ptr, T.is_neg, T.register_hook, T.dim]
model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
monitor = hookstats.attach(model, every=1, tensors=("output", "grad_output"))
model(torch.ones(3, 8)).sum().backward()  # now its sites know their widths
monitor.step()
with Mode():
    loss = model(torch.ones(3, 8)).sum() + model(torch.ones(3, 8).as_subclass(Own)).sum()
loss.backward()
print(sorted(str(site) for site, stats in monitor.snapshot().items() if stats.calls), dict(monitor.skipped))
"""


FAILING = """
import hookstats, torch, warnings
from torch import nn
from hookstats import _native
warnings.simplefilter("ignore")
def fold(*given, before=_native.OPS.fold):
    if torch._C._current_graph_task_id() != -1:
        raise ValueError("not today")
    return before(*given)
_native.OPS.fold = fold
model = nn.Sequential(nn.Linear(8, 4))
monitor = hookstats.attach(model, every=1, options=hookstats.Options(strict={strict}))
model(torch.randn(3, 8)).sum().backward()
monitor.step()
print({{str(site): (each.reason, each.times) for site, each in monitor.skipped.items()}})
"""


def said_by(run: Run, program: str, glue: str) -> str:
    ended = run(program, glue=glue)
    assert ended.status == 0, ended.err
    return ended.out


def test_a_training_is_measured_and_trained_to_the_same_bits(run: Run) -> None:
    said = said_by(run, TRAINING, "")
    assert len(said.splitlines()) > 700
    assert said_by(run, TRAINING, "none").splitlines() == said.splitlines()


def test_what_is_inside_a_compiled_graph_is_measured_to_the_same_numbers(run: Run) -> None:
    said = said_by(run, COMPILED, "none")
    assert said.count("output 1 0x") == 2 * 6  # of three modules, and their gradients
    assert said == said_by(run, COMPILED, "")


def test_compiled_autograd_measures_the_same_gradients(run: Run) -> None:
    said = said_by(run, BACKWARD, "none")
    assert said.count(" 1 0x") == 6
    assert said == said_by(run, BACKWARD, "")


def test_neither_subclasses_nor_modes_see_what_it_asks_of_a_tensor(run: Run) -> None:
    said = said_by(run, OWN, "none")
    assert said == "['0 grad_output', '0 output', '1 grad_output', '1 output'] {}\n"


def test_what_fails_inside_backward_is_counted_and_told_and_raised_under_strict(run: Run) -> None:
    assert said_by(run, FAILING.format(strict=False), "none") == "{'0 grad_output': ('not today', 1)}\n"
    assert "ValueError: not today" in run(FAILING.format(strict=True), glue="none").err
