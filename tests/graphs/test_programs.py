"""Compiled models have two programs: one that measures, and the bare one for all that is not measured."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import hookstats
from hookstats import ExponentBins, LinearBins, Monitor
from tests.models import Residual
from tests.plain import OF_OUTPUTS

ALL = ("input", "output", "grad_input", "grad_output")
# What backward needs is chosen as inductor does, and its compiler is not run.
SAVES_AS_INDUCTOR = "aot_eager_decomp_partition"
# Inductor with torch's own kernels: its graphs, buffers and wrappers, and no g++, which takes a second for each kernel.
INDUCTOR = {"backend": "inductor", "options": {"fallback_by_default": True}}
DEPTH = 10  # more blocks than a frame may have graphs
BARE_OF_BLOCKS = 2  # programs of equal blocks: the input of the first one requires no grad
LIMIT = 8  # torch._dynamo.config.recompile_limit by default


@pytest.fixture(autouse=True)
def fresh_compiler(only_monitors: None) -> Iterator[None]:
    """In which a frame that would run eagerly for good raises instead."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=LIMIT, fail_on_recompile_limit_hit=True):
        yield


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(seed))


def short(depth: int) -> Residual:
    """Make a program of few kernels that compiles quickly."""
    model = Residual(depth=0)
    model.blocks.extend(nn.Sequential(nn.Linear(16, 16, bias=False), nn.GELU()) for _ in range(depth))
    model.head = nn.Linear(16, 4, bias=False)
    return model


def compiled_blocks(model: nn.Module, **how: Any) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(fullgraph=True, **how)
    return model


def compiled(how: str, model: nn.Module, backend: Any) -> Any:
    whole = how == "whole"
    return torch.compile(model, backend=backend, fullgraph=True) if whole else compiled_blocks(model, backend=backend)


def train(run: Callable[..., torch.Tensor], *monitors: Monitor, seed: int = 0) -> None:
    run(batch(seed)).square().sum().backward()
    for mon in monitors:
        mon.step()


def calls(mon: Monitor) -> dict[str, set[int]]:
    """Count the calls of each kind's sites, without the silent ones."""
    taken = mon.snapshot()
    return {kind: {taken[s].calls for s in taken.order if s.tensor == kind} for kind in OF_OUTPUTS} if taken else {}


def test_under_inductor_20_steps_that_are_not_measured_are_bit_identical_to_the_bare_model() -> None:
    """In bfloat16: what the first of two fused activations puts out is rounded only in the program that measures it."""

    def twenty_steps(off: str | None) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        first, last = (nn.Linear(16, 16, bias=False) for _ in range(2))
        model = nn.Sequential(first, nn.Tanh(), nn.Tanh(), last).bfloat16()
        if off is not None:
            mon = hookstats.attach(model, every=lambda step: False, histogram=ExponentBins(True), tensors=ALL)
        run = torch.compile(model, backend="inductor", fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if off == "step":
            mon.step()  # the first step is always measured
        found = []
        with mon.paused() if off == "paused" else nullcontext():
            for seed in range(20):
                y = run(batch(seed).bfloat16())
                y.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(y.detach())
                if off is not None:
                    mon.step()
        return [*found, *(p.detach() for p in model.parameters())]

    bare = twenty_steps(None)
    for off in ("step", "paused"):
        assert all(map(torch.equal, twenty_steps(off), bare)), off


class Recorder:
    """A backend that keeps the operators of the graphs that it is given."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        self.graphs.append([f"{node.op} {node.target}" for node in graph.graph.nodes if node.op != "placeholder"])
        return graph.forward


def test_the_graph_of_a_step_that_is_not_measured_is_that_of_the_bare_model() -> None:
    bare, watched = Recorder(), Recorder()
    train(torch.compile(Residual(depth=1), backend=bare, fullgraph=True))
    model = Residual(depth=1)
    mon = hookstats.attach(model, every=2, tensors=ALL)
    run = torch.compile(model, backend=watched, fullgraph=True)
    for _ in range(4):
        train(run, mon)
    assert len(watched.graphs) == 2
    assert bare.graphs == watched.graphs[1:]
    assert {call for call in watched.graphs[0] if "hookstats" in call} == {"call_function hookstats.observe.default"}


@pytest.mark.parametrize("bins", [None, ExponentBins(), ExponentBins(per_channel=True), LinearBins(-2, 2, 8)])
def test_graphs_count_every_kind_of_bins_as_eager_mode_does(bins: Any) -> None:
    found = []
    for run_compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8))  # of 8 channels octaves are 512 bins, too
        mon = hookstats.attach(model, every=1, tensors=OF_OUTPUTS, histogram=bins)
        train(torch.compile(model, backend="aot_eager", fullgraph=True) if run_compiled else model)
        taken = mon.snapshot()
        assert {taken[site].calls for site in mon.sites} == {1}
        found.append({s: None if bins is None else taken[s].histogram.counts.tolist() for s in mon.sites})
    assert found[0] == found[1]


def test_many_blocks_compiled_apart_stay_under_the_recompile_limit_whatever_two_monitors_do() -> None:
    counter = CompileCounterWithBackend("eager")
    model = Residual(depth=DEPTH)
    first = hookstats.attach(model, every=2, channels=hookstats.Channels(every=2), tensors=OF_OUTPUTS)
    second = hookstats.attach(model, every=3, tensors="output")
    run = compiled_blocks(model, backend=counter)

    def masked(seed: int) -> None:
        with first.ignore(torch.rand(2, 5, generator=torch.Generator().manual_seed(seed)) > 0.5):
            loss = run(batch(seed)).square().sum()
        loss.backward()
        first.step()
        second.step()

    def evaluated(grad: bool) -> None:
        model.eval()
        with torch.set_grad_enabled(grad):
            run(batch())
        model.train()

    def all_of_it() -> None:
        for seed in range(6):
            train(run, first, second, seed=seed)
            with first.paused():
                train(run, second)
                with second.paused():
                    train(run)
        for seed in range(6):
            masked(seed)
            evaluated(grad=True)
            evaluated(grad=False)

    train(run, first, second)
    assert counter.frame_count == BARE_OF_BLOCKS  # measured
    train(run, first, second)
    assert counter.frame_count == 2 * BARE_OF_BLOCKS  # and bare
    all_of_it()
    assert counter.frame_count == 3 * BARE_OF_BLOCKS + 1  # measured with ignored rows; without grad
    with torch.compiler.set_stance("fail_on_recompile"):
        all_of_it()
    third = hookstats.attach(model, every=5, tensors="output")  # other hooks: other programs, as many
    counter.clear()
    for seed in range(10):
        train(run, first, second, third, seed=seed)
    all_of_it()
    assert counter.frame_count == 3 * BARE_OF_BLOCKS + 1
    counter.clear()
    for mon in (first, second, third):
        mon.detach()
    train(run)
    evaluated(grad=False)
    assert counter.frame_count == BARE_OF_BLOCKS + 1


class Learned(nn.Module):
    """Widths that no type tells, and a container."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x, y = block(x)
            x = x + y.mean(-1, keepdim=True)
        return x


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.act(self.up(x))
        return self.down(y), y


@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_a_model_that_is_first_traced_while_nothing_is_measured_is_measured_whole_later(how: str) -> None:
    model = Learned()
    mon = hookstats.attach(model, every=1, tensors=OF_OUTPUTS)
    run = compiled(how, model, "eager")
    with mon.paused():
        train(run)
    assert mon.snapshot().order == []
    run(batch()).square().sum().backward()
    taken = mon.snapshot()
    assert {site for site in taken.order if taken[site].channels is None} == set()
    assert {taken[site].calls for site in taken.order} == {1}
    assert {site for site in taken.order if site.name == "blocks.1"} == {
        ("blocks.1", kind) for kind in ("output.0", "output.1", "grad_output.0", "grad_output.1")
    }
    assert len(taken["blocks.1.act", "grad_output"].channels.count) == 24  # type: ignore[union-attr]


def test_a_monitor_of_another_model_compiles_no_more_than_the_two_programs() -> None:
    counter = CompileCounterWithBackend("eager")
    model, other = Residual(), Residual()
    mon = hookstats.attach(model, every=2, tensors=OF_OUTPUTS)
    hookstats.attach(other, every=1, tensors=OF_OUTPUTS)
    run = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(2):
        for training in (True, False):
            other.train(training)
            for _ in range(2):
                train(run, mon)
    assert counter.frame_count == 2
    run(batch()).sum().backward()
    assert calls(mon) == {"output": {1}, "grad_output": {1}}


def test_where_one_monitor_measures_evaluation_and_another_does_not_each_has_its_own() -> None:
    model = Residual()
    only, always = (
        hookstats.attach(model, every=1, tensors=OF_OUTPUTS, options=hookstats.Options(training_only=it))
        for it in (True, False)
    )
    run = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        model.eval()
        run(batch()).sum().backward()
        model.train()
        run(batch()).sum().backward()
    assert calls(only) == {"output": {2}, "grad_output": {2}}
    assert calls(always) == {"output": {4}, "grad_output": {4}}


def test_a_step_that_another_thread_closes_between_forward_and_backward_is_no_obstacle() -> None:
    model = compiled_blocks(short(2), backend="aot_eager")
    mon = hookstats.attach(model, every=2, tensors=OF_OUTPUTS)
    for _ in range(4):
        loss = model(batch()).square().sum()
        thread = threading.Thread(target=mon.step)
        thread.start()
        thread.join()
        loss.backward()
    assert model.head.weight.grad is not None  # type: ignore[union-attr]


def between_pause(model: nn.Module, mon: Monitor, forward: Callable[[], torch.Tensor]) -> None:
    with mon.paused():
        loss = forward()
    loss.backward()


def between_resume(model: nn.Module, mon: Monitor, forward: Callable[[], torch.Tensor]) -> None:
    loss = forward()
    with mon.paused():
        loss.backward()


def between_step(model: nn.Module, mon: Monitor, forward: Callable[[], torch.Tensor]) -> None:
    loss = forward()
    mon.step()
    with torch.no_grad():
        forward()
    loss.backward()


def between_evaluation(model: nn.Module, mon: Monitor, forward: Callable[[], torch.Tensor]) -> None:
    loss = forward()
    model.eval()
    with torch.no_grad():
        forward()
    loss.backward()
    loss = forward()
    model.train()
    loss.backward()


def between_rows(model: nn.Module, mon: Monitor, forward: Callable[[], torch.Tensor]) -> None:
    with mon.ignore(torch.arange(10).view(2, 5) > 6):
        loss = forward()
    forward().backward()
    loss.backward()


def between_forwards(model: nn.Module, mon: Monitor, forward: Callable[[], torch.Tensor]) -> None:
    first = forward()
    with mon.paused():
        second = forward()
    third = forward()
    for loss in (second, first, third):
        loss.backward()


def save_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = operator is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = partial(create_selective_checkpoint_contexts, save_products)
CHECKPOINTS = {
    "plain": {"use_reentrant": False},
    "no early stop": {"use_reentrant": False, "early_stop": False},
    "reentrant": {"use_reentrant": True},
}
BETWEEN = [
    between_pause,
    between_resume,
    between_step,
    between_evaluation,
    between_rows,
    between_forwards,
]


# Whether a recomputation ends early matters to nothing but which of its hooks run.
@pytest.mark.parametrize(
    ("options", "between"),
    [("plain", each) for each in BETWEEN]
    + [("reentrant", each) for each in (between_pause, between_step, between_rows)]
    + [("no early stop", between_rows)],
)
def test_a_recomputation_runs_the_program_of_its_forward(options: str, between: Callable[..., None]) -> None:
    how: dict[str, Any] = CHECKPOINTS[options]
    if torch.__version__ < (2, 12) and not how["use_reentrant"]:
        pytest.skip("torch 2.11 compiles frames of its own checkpoints until it fails, also without hooks")
    model = short(2)
    mon = hookstats.attach(model, every=2, tensors=OF_OUTPUTS)
    compiled_blocks(model, backend=SAVES_AS_INDUCTOR)

    def forward() -> torch.Tensor:
        x = batch().requires_grad_()
        for block in model.blocks:
            x = checkpoint(block, x, **how)
        return model.head(x).square().sum()

    for _ in range(4):
        between(model, mon, forward)  # a CheckpointError, where the recomputation saves other tensors
        mon.step()
    assert all(p.grad is not None for p in model.parameters())


# Two forwards before a backward: with the backend that only chooses as inductor, autograd finds a site's state changed.
# What a selective one saves is chosen when a graph is made, whatever happens between its forward and its backward.
@pytest.mark.parametrize(
    ("selective", "between"), [*((False, each) for each in BETWEEN if each is not between_resume), (True, between_step)]
)
def test_a_checkpoint_inside_of_a_graph_is_no_obstacle(selective: bool, between: Callable[..., None]) -> None:
    model = short(2)
    mon = hookstats.attach(model, every=2, tensors=OF_OUTPUTS)
    options: dict[str, Any] = {"context_fn": SELECTIVE} if selective else {}
    backend = "inductor" if between in (between_rows, between_forwards) else SAVES_AS_INDUCTOR

    @torch.compile(fullgraph=True, backend=backend)
    def run(x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False, **options)
        return model.head(x)

    for _ in range(4):
        between(model, mon, lambda: run(batch().requires_grad_()).square().sum())
        mon.step()
    mon.reset()
    if not mon._measured:
        mon.step()
    run(batch().requires_grad_()).square().sum().backward()
    assert calls(mon) == {"output": {1}, "grad_output": {1}}


@pytest.mark.parametrize("selective", [False, True])
def test_the_gradients_of_a_recomputation_are_counted_once_and_with_the_rows_of_its_forward(selective: bool) -> None:
    model = Residual(depth=2)
    mon = hookstats.attach(model, every=1, tensors=OF_OUTPUTS)
    compiled_blocks(model, **INDUCTOR)
    options: dict[str, Any] = {"context_fn": SELECTIVE} if selective else {}
    x = batch().requires_grad_()
    with mon.ignore(torch.arange(10).view(2, 5) > 6):
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False, **options)
        loss = model.head(x).square().sum()
    with mon.paused(), torch.no_grad():
        model(batch())
    loss.backward()
    taken = mon.snapshot()
    assert {taken[site].calls for site in mon.sites} == {1}
    assert {taken[site].total.count for site in mon.sites} == {7 * 16, 7 * 32, 7 * 4}
