"""FSDP2 on two ranks of gloo: every watched site fires, with the numbers of a single process."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hookstats
from hookstats import fields
from tests.models import Residual


def batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(rank))


def worker(rank: int, world: int, folder: str, attach_first: bool) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = Residual()
    mon = hookstats.attach(model, every=1, strict=True) if attach_first else None
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    mon = mon or hookstats.attach(model, every=1, strict=True)
    model(batch(rank)).square().sum().backward()
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
            assert set(seen) == {tuple(site) for site in snapshot.order}
            for site, (calls, moments) in seen.items():
                assert calls == 1
                assert snapshot[site].channels is not None
                # Gradients of outputs are this rank's own: they are not reduced.
                for name in fields.STATISTICS:
                    want = getattr(snapshot[site].channels, name)
                    got = getattr(hookstats.Stats(moments), name)
                    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=1e-6)
