"""Two ranks of gloo: FSDP2, DDP and tensor parallelism. Every rank sees what it holds."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hookstats
from hookstats.numbers import fields
from tests.models import Residual
from tests.plain import OF_OUTPUTS, Plain, check_against
from tests.ranks import run

TENSORS = ("output", "grad_output", "param", "param_grad", "param_update")


def batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(rank))


def residual() -> Residual:
    torch.manual_seed(0)
    return Residual()


def is_sharded(rank: int, world: int, attach_first: bool) -> dict[tuple[str, str], tuple[int, Any]]:
    """Return calls and moments for each site."""
    model = residual()
    settings = {"every": 1, "options": hookstats.Options(strict=True), "tensors": TENSORS}
    mon = hookstats.attach(model, **settings) if attach_first else None
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    mon = mon or hookstats.attach(model, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(rank)).square().sum().backward()
    optimizer.step()
    snapshot = mon.step()
    assert snapshot is not None
    return {(site.name, site.tensor): (stats.calls, stats._moments) for site, stats in snapshot.items()}


@pytest.mark.parametrize("attach_first", [True, False])
def test_fsdp2_on_two_ranks_sees_what_one_process_sees(attach_first: bool) -> None:
    for rank, seen in enumerate(run(is_sharded, 2, attach_first)):
        model = residual()
        mon = hookstats.attach(model, tensors=OF_OUTPUTS, every=1)
        model(batch(rank)).square().sum().backward()
        snapshot = mon.step()
        assert snapshot is not None
        modules = {site: found for site, found in seen.items() if "param" not in site[1]}
        assert set(modules) == {tuple(site) for site in snapshot.order}
        for site, (calls, moments) in modules.items():
            assert calls == 1
            assert snapshot[site].channels is not None
            # Gradients of outputs are this rank's own: they are not reduced.
            for name in fields.STATISTICS:
                want = getattr(snapshot[site].channels, name)
                got = getattr(hookstats.results.Stats(moments), name)
                torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=1e-6)

        check_parameters({site: found for site, found in seen.items() if "param" in site[1]}, rank)


def check_parameters(seen: dict[tuple[str, str], tuple[int, Any]], rank: int) -> None:
    """Each rank holds half of the rows, and gradients that are the mean over the ranks."""
    model = residual()
    for each in range(2):
        (model(batch(each)).square().sum() / 2).backward()
    wanted = {(name, "param"): p.detach() for name, p in model.named_parameters()}
    wanted |= {(name, "param_update"): -0.1 * p.grad for name, p in model.named_parameters() if p.grad is not None}
    wanted |= {(name, "param_grad"): p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert set(seen) == set(wanted)
    for site, whole in wanted.items():
        calls, moments = seen[site]
        part = whole.chunk(2)[rank]
        row = hookstats.results.Stats(moments)
        assert calls == 1
        if part.dim() > 1:
            assert len(row.count) == len(part)
        got = torch.tensor(row.count * row.rms**2).sum()
        torch.testing.assert_close(got, part.double().square().sum(), rtol=1e-5, atol=1e-9)


def is_replicated(rank: int, world: int) -> None:
    model = nn.parallel.DistributedDataParallel(residual())
    mon, plain = (
        hookstats.attach(model, tensors=OF_OUTPUTS, every=1, options=hookstats.Options(strict=True)),
        Plain(model),
    )
    names = list(model.state_dict())
    for _ in range(2):
        model(batch(rank)).square().sum().backward()  # a forward broadcasts rank 0's buffers
    seen = {(name.removeprefix("module."), kind): tensors for (name, kind), tensors in plain.seen.items()}
    plain.seen = seen
    plain.by_default = {name.removeprefix("module.") for name in plain.by_default}
    assert list(model.state_dict()) == names
    assert all("blocks" in site.name or site.name == "head" for site in mon.sites)  # clean names
    check_against(plain, mon.snapshot())


def test_under_ddp_each_rank_sees_its_own_batch() -> None:
    run(is_replicated, 2)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 6))


def is_tensor_parallel(rank: int, world: int, attach_first: bool) -> None:
    whole = mlp()
    plain = Plain(whole)
    whole(batch8()).square().sum().backward()
    model = mlp()
    mon = hookstats.attach(model, tensors=OF_OUTPUTS, every=1) if attach_first else None
    mesh = init_device_mesh("cpu", (world,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    mon = mon or hookstats.attach(model, tensors=OF_OUTPUTS, every=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model(batch8()).square().sum().backward()
    snapshot = mon.snapshot()
    for name in ("0", "1"):  # this rank's half of the channels
        for kind in ("output", "grad_output"):
            check_channels(snapshot[name, kind], plain.seen[name, kind][0].chunk(world, dim=-1)[rank])
    texts = [str(each.message) for each in told]
    if attach_first:  # before the reduction: each rank has a summand
        assert {site.name for site in mon.skipped} == {"2"}
        assert any("expected a DTensor that is whole or sharded, got P(sum)" in text for text in texts)
    else:
        assert mon.skipped == {}
        for kind in ("output", "grad_output"):
            check_channels(snapshot["2", kind], plain.seen["2", kind][0])


def batch8() -> torch.Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(3))


def check_channels(stats: hookstats.results.SiteStats, tensor: torch.Tensor) -> None:
    """Against another process's arithmetic: equal to rounding."""
    assert stats.calls == 1
    assert stats.channels is not None
    rows = tensor.double().reshape(-1, tensor.shape[-1])
    torch.testing.assert_close(torch.tensor(stats.channels.mean), rows.mean(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(torch.tensor(stats.channels.rms), rows.square().mean(0).sqrt(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("attach_first", [True, False])
def test_tensor_parallel_layers_show_this_ranks_part_and_what_is_yet_to_be_reduced_is_skipped(
    attach_first: bool,
) -> None:
    run(is_tensor_parallel, 2, attach_first)


class Gathers(nn.Module):
    """Its output is still being gathered when the hook gets it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return funcol.all_gather_tensor(x, 0, dist.group.WORLD)


def gathers(rank: int, world: int) -> None:
    model = Gathers()
    mon = hookstats.attach(model, tensors=OF_OUTPUTS, every=1, options=hookstats.Options(strict=True))
    y = model(torch.full((3, 4), float(rank)))
    assert type(y).__name__ == "AsyncCollectiveTensor"
    check_channels(mon.snapshot()["", "output"], torch.tensor([[0.0] * 4] * 3 + [[1.0] * 4] * 3))


def test_an_asynchronous_collective_is_waited_for_and_measured() -> None:
    run(gathers, 2)
