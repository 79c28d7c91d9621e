"""Tensors that hold their data in others, in compiled blocks: measured in graphs that blocks share, or told why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import hookstats
from hookstats import ExponentBins, LinearBins
from hookstats.watch import graphs
from tests import ranks
from tests.plain import OF_OUTPUTS, hearing

COMPILES = True
DEPTH = 10  # more than the recompile limit


class Norm(nn.Module):
    """A block whose output is a DTensor, or what SequenceParallel makes of one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def blocks(mesh: DeviceMesh, depth: int, compiler: Any, **options: Any) -> nn.Sequential:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Norm() for _ in range(depth)))
    for block in model:
        parallelize_module(block, mesh["tp"], {"norm": SequenceParallel()})
        if compiler is not None:
            block.compile(backend=compiler, **options)
        fully_shard(block, mesh=mesh["dp"])
    return model


def step(model: nn.Module) -> None:
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    model(x).to_local().square().sum().backward()


def smallest(rank: int, world: int) -> None:
    """Many blocks share few graphs, each with its own numbers and placements, also where all numbers are constants."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    for bins in (ExponentBins(True), LinearBins(-4, 4, 16)):
        wanted, held = None, None
        for options in ({}, {"dynamic": None if bins.per_channel else False}):
            counter = CompileCounterWithBackend("aot_eager")
            model = blocks(mesh, DEPTH, counter if options else None, **options)
            monitor = hookstats.attach(model, every=1, histogram=bins, tensors=OF_OUTPUTS)
            with hearing() as told:
                step(model)
                snapshot = monitor.snapshot()
            assert not told
            assert not monitor.skipped
            here = {entry.site: entry.held for entry in monitor._store.entries}
            monitor.detach()
            assert counter.frame_count <= (5 if bins.per_channel else 8)
            if wanted is None:
                wanted, held = snapshot, here
                assert len(wanted) == 2 * DEPTH
                assert all(each.sharding is not None for each in here.values())
                continue
            assert here == held
            assert set(snapshot) == set(wanted)
            for site, stats in wanted.items():
                assert snapshot[site].calls == stats.calls == 1
                assert snapshot[site].total.abs_max == pytest.approx(stats.total.abs_max, rel=1e-6)
                assert snapshot[site].total.rms == pytest.approx(stats.total.rms, rel=1e-6)


def test_many_blocks_whose_outputs_are_dtensors_share_graphs_and_are_measured() -> None:
    ranks.run(smallest, 1, timeout=400)


def failing(rank: int, world: int, where: str) -> None:
    """Whatever fails while a wrapper is traced, training goes on and each site says why it is not measured."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    bare = blocks(mesh, 3, "aot_eager")
    step(bare)
    model = blocks(mesh, 3, "aot_eager")
    monitor = hookstats.attach(model, every=1, tensors=(*OF_OUTPUTS, "param_grad"))

    def broken(*args: Any) -> Any:
        raise NotImplementedError("not in this torch")

    setattr(graphs, where, broken)
    for _ in range(2):
        with hearing() as told:
            model.zero_grad()
            step(model)
            snapshot = monitor.step()
    assert not told  # the second time
    for mine, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), theirs.grad.to_local())
    sites = {(f"{i}.norm", kind) for i in range(3) for kind in OF_OUTPUTS}
    assert {tuple(site) for site in snapshot.skipped} == {tuple(site) for site in monitor.skipped} == sites
    assert all("not in this torch" in each.reason for each in monitor.skipped.values())
    assert all(each.times == 2 for each in monitor.skipped.values())
    assert all(snapshot[site].calls == 1 for site in snapshot if site.tensor == "param_grad")


@pytest.mark.parametrize("where", ["part_here", "_name_of"])
def test_nothing_that_fails_while_a_wrapper_is_traced_ends_the_training(where: str) -> None:
    ranks.run(failing, 1, where, timeout=300)


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * 1.0)


def partial(rank: int, world: int) -> None:
    """Outputs that are yet to be reduced: as in eager mode, left out in each step, in few graphs."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    model = nn.Sequential(*(Rows() for _ in range(DEPTH)))
    counter = CompileCounterWithBackend("aot_eager")
    for block in model:
        block.compile(backend=counter)
    monitor = hookstats.attach(model, [f"{i}.inner" for i in range(DEPTH)], every=1, tensors=["output"])
    from torch.distributed.tensor import Partial

    x = DTensor.from_local(torch.ones(2, 3), mesh, [Partial()])
    for measured in range(1, 6):
        with hearing() as told:
            model(x)
            monitor.step()
        assert bool(told) == (measured == 1)
        assert {each.times for each in monitor.skipped.values()} == {measured}
        assert all("P(sum)" in each.reason for each in monitor.skipped.values())
    assert len(monitor.skipped) == DEPTH
    assert counter.frame_count <= 5


def test_outputs_that_are_yet_to_be_reduced_are_left_out_as_in_eager_mode() -> None:
    ranks.run(partial, 1, timeout=300)


def under_strict(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    model = Rows()
    hookstats.attach(model, ["inner"], every=1, tensors=["output"], options=hookstats.Options(strict=True))
    from torch.distributed.tensor import Partial

    compiled = torch.compile(model, backend="aot_eager")
    compiled(DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]))
    compiled(DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]))
    with pytest.raises(RuntimeError, match="placed as the one before it in this step"):
        compiled(DTensor.from_local(torch.ones(2, 3), mesh, [Replicate()]))
    with pytest.raises(RuntimeError, match="its values are yet to be reduced"):
        compiled(DTensor.from_local(torch.ones(2, 3), mesh, [Partial()]))
    dist.barrier()


def test_under_strict_what_cannot_be_measured_is_an_error_in_graphs_too() -> None:
    ranks.run(under_strict, 1, timeout=300)
