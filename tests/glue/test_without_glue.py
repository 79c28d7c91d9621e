"""Where no glue fits this torch: the same numbers, one line about it, and no harm to what is trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import NamedTuple

import torch

import hookstats
from tests.conftest import ROOT

PACKAGE = Path(hookstats.__file__).parent  # an installed one, too
GLUE = f"torch{'_'.join(torch.__version__.split('.')[:2])}"


def python(*words: str, package: Path = ROOT, sent: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    before = {name: value for name, value in os.environ.items() if name != "HOOKSTATS_GLUE"}
    path = os.pathsep.join([str(package), str(ROOT)])
    return subprocess.run(
        [sys.executable, *words],
        input=sent,
        capture_output=True,
        text=True,
        cwd=package,
        env=before | {"PYTHONPATH": path} | environment,
    )


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


def test_a_torch_that_no_glue_is_for_is_measured_beside_and_told_in_one_line(tmp_path: Path) -> None:
    package = other_package(tmp_path)
    (package / "_glue" / GLUE).rename(package / "_glue" / "torch2_1")
    (package / "_glue" / "torch2_1" / f"_C{EXTENSION_SUFFIXES[0]}").touch()
    done = python("-c", MEASURE, package=tmp_path)
    assert done.stdout == "5.0\n", done.stderr
    (told,) = [line for line in done.stderr.splitlines() if "hookstats: " in line]
    assert f"there is none for torch {torch.__version__} and Python 3." in told
    assert "but for torch 2.1. hookstats measures without, which is slower" in told
    assert "--no-build-isolation --force-reinstall" in told
    doctor = python("-m", "hookstats", "doctor", package=tmp_path)
    assert doctor.returncode == 1
    assert "slower" in doctor.stdout


def test_glue_that_does_not_load_is_told_with_its_reason(tmp_path: Path) -> None:
    package = other_package(tmp_path)
    (package / "_glue" / GLUE / f"_C{EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    done = python("-c", MEASURE, package=tmp_path)
    assert done.stdout == "5.0\n", done.stderr
    assert "that does not load (" in done.stderr
    assert "invalid ELF header" in done.stderr or "file too short" in done.stderr


def test_warnings_as_errors_do_not_keep_it_from_being_imported(tmp_path: Path) -> None:
    other_package(tmp_path)
    done = python("-W", "error::UserWarning", "-c", MEASURE, package=tmp_path)
    assert done.stdout == "5.0\n", done.stderr


def test_another_word_than_none_is_refused() -> None:
    done = python("-c", MEASURE, HOOKSTATS_GLUE="2.13")
    assert "HOOKSTATS_GLUE: expected none, or that it is not set, got '2.13'" in done.stderr.splitlines()[-1]


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


PROGRAMS = {
    "training": TRAINING,
    "compiled": COMPILED,
    "backward": BACKWARD,
    "own": OWN,
    "failing": FAILING.format(strict=False),
    "failing under strict": FAILING.format(strict=True),
}
# Each in a process that has imported nothing but what all of them import.
FORKING = """
import json, os, sys, tempfile
import torch._dynamo
import hookstats.attaching
ended = {}
for name, code in json.load(sys.stdin).items():
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            status = 1
            try:
                exec(compile(code, name, "exec"), {"__name__": "__main__"})
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        ended[name] = status, out.read(), err.read()
print(json.dumps(ended))
"""


class Ended(NamedTuple):
    status: int
    out: str
    err: str


def all_ended(programs: dict[str, str], **environment: str) -> dict[str, Ended]:
    done = python("-c", FORKING, sent=json.dumps(programs), **environment)
    assert done.returncode == 0, done.stderr
    return {name: Ended(*each) for name, each in json.loads(done.stdout).items()}


@cache
def without_glue() -> dict[str, Ended]:
    """How each of the programs ended."""
    return all_ended(PROGRAMS, HOOKSTATS_GLUE="none")


@cache
def with_glue() -> dict[str, Ended]:
    """Those that say the same, whether there is glue or not."""
    return all_ended({name: PROGRAMS[name] for name in ("training", "compiled", "backward")})


def said_by(name: str, of: Callable[[], dict[str, Ended]] = without_glue) -> str:
    ended = of()[name]
    assert ended.status == 0, ended.err
    return ended.out


def test_a_training_is_measured_and_trained_to_the_same_bits() -> None:
    said = said_by("training", with_glue)
    assert len(said.splitlines()) > 700
    assert said_by("training").splitlines() == said.splitlines()


def test_what_is_inside_a_compiled_graph_is_measured_to_the_same_numbers() -> None:
    said = said_by("compiled")
    assert said.count("output 1 0x") == 2 * 6  # of three modules, and their gradients
    assert said == said_by("compiled", with_glue)


def test_compiled_autograd_measures_the_same_gradients() -> None:
    said = said_by("backward")
    assert said.count(" 1 0x") == 6
    assert said == said_by("backward", with_glue)


def test_neither_subclasses_nor_modes_see_what_it_asks_of_a_tensor() -> None:
    said = said_by("own")
    assert said == "['0 grad_output', '0 output', '1 grad_output', '1 output'] {}\n"


def test_what_fails_inside_backward_is_counted_and_told_and_raised_under_strict() -> None:
    assert said_by("failing") == "{'0 grad_output': ('not today', 1)}\n"
    assert "ValueError: not today" in without_glue()["failing under strict"].err
