"""torch.compile: every watched site fires, with the numbers of eager mode, in one graph, without recompiling."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._inductor.utils import run_and_get_code

import hookstats
from hookstats import ExponentBins, Snapshot
from hookstats.numbers import fields
from tests.conftest import DEVICES
from tests.models import Residual
from tests.plain import OF_OUTPUTS

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*deprecated.*:DeprecationWarning"),
]


def batches(count: int = 4) -> torch.Tensor:
    return torch.randn(count, 8, 5, 16, generator=torch.Generator().manual_seed(1))


def train(
    how: str, every: int = 1, depth: int = 3, compiler: Any = None, device: str = "cpu", **options: Any
) -> list[Snapshot | None]:
    torch.manual_seed(0)
    model = Residual(depth=depth).to(device)
    if how == "attach after":
        compiled = torch.compile(model, fullgraph=True, backend=compiler, **options)
    mon = hookstats.attach(model, tensors=OF_OUTPUTS, every=every, histogram=ExponentBins(True))
    run: Any = model
    if how == "whole":
        run = torch.compile(model, fullgraph=True, backend=compiler, **options)
    elif how == "blocks":
        for block in model.blocks:
            block.compile(fullgraph=True, backend=compiler, **options)
    elif how == "attach after":
        run = compiled
    snapshots = []
    for x in batches().to(device):
        run(x).square().sum().backward()
        measured = mon._measured
        mon.step()
        snapshots.append(mon.snapshot() if measured else None)  # it may still be on its way from a GPU
    assert mon.skipped == {}
    return snapshots


def assert_equal(compiled: list[Snapshot | None], eager: list[Snapshot | None]) -> None:
    assert [s and s.step for s in compiled] == [s and s.step for s in eager]
    for got, want in zip(compiled, eager, strict=True):
        if got is None or want is None:
            continue
        assert set(got.order) == set(want.order)
        for site in want:
            a, b = got[site], want[site]
            assert a.calls == b.calls == 1
            for name in fields.STATISTICS:
                scale = b.total.std if name == "mean" else abs(getattr(b.total, name))
                assert abs(getattr(a.total, name) - getattr(b.total, name)) <= 1e-4 * scale, (site, name)
            torch.testing.assert_close(torch.tensor(a.channels.rms), torch.tensor(b.channels.rms), rtol=1e-4, atol=1e-9)
            assert a.histogram.counts.sum() == a.total.count


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("how", "backend", "options"),
    [
        ("whole", "aot_eager", {"dynamic": True}),
        ("blocks", "aot_eager", {"dynamic": False}),
        ("attach after", "aot_eager", {"dynamic": False}),
        ("whole", "aot_eager", {"dynamic": False, "every": 2}),
        ("whole", "inductor", {"dynamic": False}),
        ("blocks", "inductor", {"dynamic": True}),
        ("blocks", "inductor", {"mode": "reduce-overhead"}),  # on a CPU without CUDA graphs: tests/gpu
    ],
)
def test_compiled_models_give_eagers_numbers_from_every_site(
    how: str, backend: str, options: dict[str, Any], device: str, request: pytest.FixtureRequest
) -> None:
    if how == "blocks" and backend == "inductor":  # what inductor writes itself is compiled once, of the whole
        request.getfixturevalue("without_gpp")
    depth = 2 if how == "blocks" and backend != "inductor" else 1
    compiled = train(how, depth=depth, compiler=backend, device=device, **options)
    assert_equal(compiled, train("eager", every=options.get("every", 1), depth=depth, device=device))


@pytest.mark.parametrize(
    ("between", "backend"),
    [("pause", "aot_eager"), ("step", "aot_eager"), ("detach", "aot_eager"), ("detach", "inductor")],
)
def test_what_happens_between_a_compiled_forward_and_its_backward_is_no_obstacle(
    between: str, backend: str, without_gpp: None
) -> None:
    model = Residual(depth=1)
    mon = hookstats.attach(model, every=2)
    run = torch.compile(model, backend=backend)
    for _ in range(3):
        loss = run(batches()[0]).square().sum()
        if between == "pause":
            with mon.paused():
                pass
        elif between == "step":
            mon.step()
        else:
            mon.detach()
        loss.backward()
        assert model.head.weight.grad is not None
    assert mon.skipped == {}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_an_output_of_a_graph_that_nobody_uses_does_not_break_backward(backend: str, without_gpp: None) -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x), self.b(x)

    block = Block()
    mon = hookstats.attach(block, ["", "a", "b"], every=1)
    block(torch.randn(3, 4))  # an eager pass tells what the container holds
    mon.reset()
    block.compile(fullgraph=True, backend=backend)
    for _ in range(2):
        used, _ = block(torch.randn(3, 4))
        used.sum().backward()  # its hook on the other output is handed None
    snapshot = mon.step()
    assert snapshot["", "output.1"].calls == snapshot["", "grad_output.0"].calls == 2
    assert snapshot["", "grad_output.1"].total.l1_norm == 0
    assert snapshot["b", "grad_output"].total.l1_norm == 0


def test_a_parameter_that_a_compiled_module_returns_collects_no_hooks() -> None:
    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight

    model = torch.nn.Sequential(Table(), torch.nn.Linear(4, 4))
    hookstats.attach(model, every=1)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(3):
        compiled(torch.zeros(1)).sum().backward()
    assert not model[0].weight._backward_hooks


def test_a_copy_of_a_watched_model_compiles() -> None:
    model = Residual()
    mon = hookstats.attach(model)
    twin = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    twin(batches()[0]).sum().backward()
    assert mon.snapshot().order == []


@pytest.mark.parametrize("blocks", [False, True], ids=["whole", "blocks"])
def test_a_twin_that_is_compiled_first_does_not_take_the_measuring_away(blocks: bool) -> None:
    torch.compiler.reset()
    watched, twin = Residual(depth=2), Residual(depth=2)
    mon = hookstats.attach(watched, tensors=OF_OUTPUTS, every=1)
    for model in (watched, twin):
        for part in model.blocks if blocks else [model]:
            part.compile(backend="eager")
    x = torch.randn(2, 5, 16)
    for model in (twin, watched, twin, watched):
        model(x).sum().backward()
    taken = mon.snapshot()
    assert {site: taken[site].calls for site in mon.sites} == dict.fromkeys(mon.sites, 2)


class Passed(torch.nn.Module):
    """Puts out what came in, or made what goes out in a graph that has ended."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.up = torch.nn.Linear(16, 16)
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.breaks:
            x = self.up(x)
            torch._dynamo.graph_break()
        return x


class Twice(torch.nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.first, self.passed, self.head = torch.nn.Linear(16, 16), Passed(breaks), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.passed(self.first(x))
        torch._dynamo.graph_break()
        return self.head(y) + y.sin().mean(-1, keepdim=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("breaks", [False, True])
def test_the_gradient_of_what_comes_into_a_graph_from_outside_is_that_of_all_its_uses(
    breaks: bool, backend: str
) -> None:
    found = []
    for run_compiled in (False, True):
        torch.manual_seed(0)
        model = Twice(breaks)
        mon = hookstats.attach(model, ["first", "passed"], tensors=OF_OUTPUTS, every=1)
        if run_compiled:
            model.passed.compile(backend=backend)
        (torch.compile(model, backend=backend) if run_compiled else model)(batches()[0]).square().sum().backward()
        found.append(mon.snapshot())
        mon.detach()
    eager, compiled = found
    assert set(compiled.order) == set(eager.order) == {(n, t) for n in ("first", "passed") for t in OF_OUTPUTS}
    for site in eager.order:
        assert compiled[site].calls == eager[site].calls
        assert compiled[site].total.l2_norm == pytest.approx(eager[site].total.l2_norm, rel=1e-5)


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="a C++ wrapper of torch 2.11 calls no fallback with a list")
def test_a_cpp_wrapper_calls_the_operators_without_python(without_gpp: None) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Tanh())
    mon = hookstats.attach(model, tensors="output", every=1)
    run = torch.compile(model, fullgraph=True)
    # Of the forward alone, of which a header is not worth to be compiled first: g++ takes most of this test.
    with torch.no_grad(), torch._inductor.config.patch(cpp_wrapper=True, cpp_cache_precompile_headers=False):
        y, (text,) = run_and_get_code(run, batches()[0])
    taken = mon.snapshot()
    assert {taken[site].calls for site in taken.order} == {1}
    assert taken["1", "output"].total.count == y.numel()
    assert taken["1", "output"].total.rms == pytest.approx(y.double().square().mean().sqrt().item(), rel=1e-6)
    assert text.count('aoti_torch_call_dispatcher("hookstats::observe"') == 2
