"""Forwards that run again, and programs that others make of a model: what hookstats does with each, small.

Graphs of torch.compile in depth: tests/graphs.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookstats
from tests.models import Residual
from tests.plain import OF_OUTPUTS, Plain, check_against
from tests.watch.test_cases import batch, mlp, run

# Recomputation.


def reentrant(block: nn.Module, x: torch.Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=True)


def non_reentrant(block: nn.Module, x: torch.Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=False)


def to_the_end(block: nn.Module, x: torch.Tensor) -> Any:
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        return checkpoint(block, x, use_reentrant=False)


def nested(block: nn.Module, x: torch.Tensor) -> Any:
    return checkpoint(lambda x: checkpoint(block, x, use_reentrant=False), x, use_reentrant=False)


def around_a_compiled_block(block: nn.Module, x: torch.Tensor) -> Any:
    return checkpoint(torch.compile(block, backend="aot_eager"), x, use_reentrant=False)


def inside_compile(block: nn.Module, x: torch.Tensor) -> Any:
    return torch.compile(lambda x: checkpoint(block, x, use_reentrant=False), backend="aot_eager")(x)


@pytest.mark.parametrize("way", [reentrant, non_reentrant, to_the_end, nested])
def test_the_gradient_of_an_input_inside_a_checkpoint_counts_once(way: Callable[..., Any]) -> None:
    """A reentrant one runs without gradients first: its argument has one that is not of what is inside."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    mon = hookstats.attach(model, tensors=("input", "grad_input"))
    gradients: list[torch.Tensor] = []
    x = model[0](torch.randn(3, 4))
    x.register_hook(gradients.append)
    (way(model[1], x).square().sum() + x.sum()).backward()
    stats = mon.snapshot()["1", "grad_input"]
    assert stats.calls == mon.snapshot()["1", "input"].calls == 1
    np.testing.assert_allclose(stats.channels.mean, (gradients[0] - 1).double().mean(0).numpy(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("way", [reentrant, non_reentrant, to_the_end, nested, around_a_compiled_block, inside_compile])
def test_a_recomputed_forward_counts_once_and_so_does_its_gradient(way: Callable[..., Any]) -> None:
    torch.compiler.reset()
    model = Residual()
    mon = hookstats.attach(model, tensors=OF_OUTPUTS)
    x = torch.randn(2, 5, 16, requires_grad=True)
    plain_model = copy.deepcopy(model)
    plain = Plain(plain_model)
    plain_model(x.detach()).square().sum().backward()
    for block in model.blocks:
        x = way(block, x)
    model.head(x).square().sum().backward()
    snapshot = mon.snapshot()
    assert {stats.calls for stats in snapshot.values()} == {1}
    for site in snapshot:
        assert snapshot[site].total.rms == pytest.approx(plain.seen[site][0].square().mean().sqrt().item(), rel=1e-5)


# Compilers.


@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_autograd_gives_eagers_numbers(fullgraph: bool) -> None:
    model = mlp()
    mon = hookstats.attach(model)
    backend = torch.compile(backend="aot_eager", fullgraph=fullgraph)
    with torch._dynamo.compiled_autograd._enable(backend):
        for _ in range(2):
            run(model, batch())
    twin = mlp()
    plain = Plain(twin)
    for _ in range(2):
        run(twin, batch())
    check_against(plain, mon.snapshot())


@pytest.mark.parametrize("histogram", [hookstats.LinearBins(-1, 1, 8), hookstats.ExponentBins(block=32)], ids=str)
def test_compiled_autograd_fills_bins_as_eager_does(histogram: Any) -> None:
    def trained(backward: contextlib.AbstractContextManager[Any]) -> hookstats.Snapshot:
        model = mlp()
        mon = hookstats.attach(model, histogram=histogram)
        with backward:
            run(model, batch())
        return mon.snapshot()

    eager = trained(contextlib.nullcontext())
    compiled = trained(torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)))
    assert set(compiled.order) == set(eager.order)
    for site in eager.order:
        counts = eager[site]._histogram
        assert counts.sum() > 0
        np.testing.assert_array_equal(compiled[site]._histogram, counts, str(site))


def test_a_whole_step_compiled_with_compiled_autograd_is_measured() -> None:
    torch.compiler.reset()
    model = mlp()
    mon = hookstats.attach(model, channels=hookstats.Channels(dim={"*": -1}))
    with torch._dynamo.config.patch(compiled_autograd=True):
        step = torch.compile(lambda: run(model, batch()), backend="aot_eager")
        for _ in range(2):
            step()
    twin = mlp()
    plain = Plain(twin)
    for _ in range(2):
        run(twin, batch())
    check_against(plain, mon.snapshot())


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_holds_nothing_of_hookstats(strict: bool) -> None:
    model = mlp()
    kinds = ("input", "output", "grad_input", "grad_output")
    mon = hookstats.attach(model, tensors=kinds)
    program = torch.export.export(model, (batch(),), strict=strict)
    plain = torch.export.export(mlp(), (batch(),), strict=strict)
    operators = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert operators == [str(node.target) for node in plain.graph.nodes if node.op == "call_function"]
    assert mon.snapshot().order == []
    run(model, batch())
    assert len(mon.snapshot().order) == len(mon.sites) - 1  # the first input needs no gradient


def test_a_traced_program_holds_nothing_of_hookstats() -> None:
    model = mlp()
    mon = hookstats.attach(model, tensors=("input", "output", "grad_input", "grad_output"))
    traced, plain = (torch.jit.trace(each, batch(), check_trace=False) for each in (model, mlp()))
    assert [node.kind() for node in traced.graph.nodes()] == [node.kind() for node in plain.graph.nodes()]
    assert mon.snapshot().order == []
