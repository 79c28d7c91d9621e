"""FSDP2 on two ranks of gloo: every site fires, with the numbers of one process; of parameters, those of its part."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hookstats
from hookstats import fields
from tests.models import Residual

TENSORS = ("output", "grad_output", "param", "param_grad", "param_update")


def batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(rank))


def worker(rank: int, world: int, folder: str, attach_first: bool) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = Residual()
    settings = {"every": 1, "strict": True, "tensors": TENSORS}
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
    torch.save({tuple(site): (s.calls, s._moments) for site, s in snapshot.items()}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("attach_first", [True, False])
def test_fsdp2_on_two_ranks_sees_what_one_process_sees(attach_first: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (2, folder, attach_first), nprocs=2)
        for rank in range(2):
            torch.manual_seed(0)
            model = Residual()
            mon = hookstats.attach(model, every=1)
            model(batch(rank)).square().sum().backward()
            snapshot = mon.step()
            assert snapshot is not None
            seen = torch.load(Path(folder, f"{rank}.pt"), weights_only=False)
            modules = {site: found for site, found in seen.items() if "param" not in site[1]}
            assert set(modules) == {tuple(site) for site in snapshot.order}
            for site, (calls, moments) in modules.items():
                assert calls == 1
                assert snapshot[site].channels is not None
                # Gradients of outputs are this rank's own: they are not reduced.
                for name in fields.STATISTICS:
                    want = getattr(snapshot[site].channels, name)
                    got = getattr(hookstats.Stats(moments), name)
                    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=1e-6)

            check_parameters({site: found for site, found in seen.items() if "param" in site[1]}, rank)


def check_parameters(seen: dict[tuple[str, str], tuple[int, Any]], rank: int) -> None:
    """Each rank holds half of the rows, and gradients that are the mean over the ranks."""
    torch.manual_seed(0)
    model = Residual()
    for each in range(2):
        (model(batch(each)).square().sum() / 2).backward()
    wanted = {(name, "param"): p.detach() for name, p in model.named_parameters()}
    wanted |= {(name, "param_update"): -0.1 * p.grad for name, p in model.named_parameters() if p.grad is not None}
    wanted |= {(name, "param_grad"): p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert set(seen) == set(wanted)
    for site, whole in wanted.items():
        calls, moments = seen[site]
        part = whole.chunk(2)[rank]
        row = hookstats.Stats(moments)
        assert calls == 1
        if part.dim() > 1:
            assert len(row.count) == len(part)
        got = torch.tensor(row.count * row.rms**2).sum()
        torch.testing.assert_close(got, part.double().square().sum(), rtol=1e-5, atol=1e-9)
