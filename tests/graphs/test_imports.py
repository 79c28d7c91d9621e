"""A program that compiles nothing does not import the compiler; one that does has it told of hooks before."""

from __future__ import annotations

import subprocess
import sys

import torch
import torch._dynamo

from hookstats.watch.graphs import mark_static_address
from tests.conftest import ROOT

_SCRIPT = """
import sys
import torch
import hookstats
from hookstats.modules.order import on_compiler_import

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()

def step(model, run):
    run(torch.ones(2, 4, requires_grad=True)).sum().backward()

torch.manual_seed(0)
model, bare = Block(), Block()
monitor = hookstats.attach(model, every=1)
step(model, model)
eager = monitor.step()
assert eager["linear", "output"].total.mean != 0
assert "torch._dynamo" not in sys.modules, "the compiler was imported"
on_compiler_import(lambda: [][0])  # what fails breaks no import

# A graph of the bare model would be used for the watched one, if hooks were not guarded.
step(bare, torch.compile(bare, backend="eager"))
assert not torch._dynamo.config.skip_nnmodule_hook_guards
step(model, torch.compile(model, backend="eager"))
seen = monitor.step()
for site in (("linear", "output"), ("linear", "grad_output"), ("", "input")):
    assert seen[site].total.mean == eager[site].total.mean, site
"""


def test_the_compiler_is_told_when_it_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "graphs may be compiled without" in done.stderr


def test_slots_are_marked_as_torch_marks_them() -> None:
    ours, torchs = torch.zeros(1), torch.zeros(1)
    mark_static_address(ours)
    torch._dynamo.mark_static_address(torchs)
    assert vars(ours) == vars(torchs) != {}
