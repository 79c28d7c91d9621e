"""Ranks that hold a model together: what each measured, merged, is what all of them hold."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import hookstats
from tests import ranks
from tests.merged import Kept, check_merged, merged

TENSORS = ("output", "grad_output", "param", "param_grad")
MLP = ["0", "1", "2"]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 7))


def batch(rank: int) -> torch.Tensor:
    """Means 1000 standard deviations apart from rank to rank."""
    return torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(rank)) + 1000.0 * rank


def attached(model: nn.Module) -> hookstats.Monitor:
    return hookstats.attach(model, tensors=TENSORS, every=1, strict=True)


def trained(monitor: Any, model: nn.Module, x: torch.Tensor, kept: Kept) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    model(x).float().square().mean().backward()
    kept.parameters()
    optimizer.step()
    monitor._parameters.measure()


def check_all(model: nn.Module, monitor: Any, kept: Kept, ranks_of: Any, **how: Any) -> Any:
    """ranks_of(site, parts): the ranks that hold it, as `check_merged` wants them; None: it is checked elsewhere."""
    snapshot, told, _ = merged(monitor, model, **how)
    parts = kept.gathered()
    sites = {site for part in parts for site in part}
    assert {(site.name, site.tensor.split("[")[0]) for site in snapshot} == sites
    for site in sorted(sites):
        lines = ranks_of(site)
        if lines is not None:
            is_parameter = "param" in site[1]
            check_merged(snapshot, site, parts, lines, 0 if is_parameter else -1)
    return snapshot, told


def ddp(rank: int, world: int) -> None:
    inner = mlp()
    model = nn.parallel.DistributedDataParallel(inner)
    monitor = attached(model)
    kept = Kept(inner, MLP)
    trained(monitor, model, batch(rank), kept)
    snapshot, told = check_all(
        model, monitor, kept, lambda site: [[0]] if "param" in site[1] else [[r] for r in range(world)]
    )
    assert not told
    assert snapshot["0", "output"].calls == world
    assert snapshot["0.weight", "param"].calls == 1


def fsdp(rank: int, world: int, attach_first: bool, dtype: torch.dtype) -> None:
    model = mlp()
    monitor = attached(model) if attach_first else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for each in (model[0], model[2], model):
        fully_shard(each, mesh=mesh, mp_policy=policy)
    monitor = monitor or attached(model)
    kept = Kept(model, MLP)
    trained(monitor, model, batch(rank), kept)
    everybody = list(range(world))
    snapshot, told = check_all(
        model, monitor, kept, lambda site: [everybody] if is_matrix(site) else [[r] for r in everybody]
    )
    assert not told
    assert snapshot["0", "output"].calls == world
    assert snapshot["2.weight", "param"].calls == 1
    assert snapshot["2.weight", "param_grad"].channels.count.tolist() == [16] * 7  # 2 + 2 + 2 + 1 rows


def is_matrix(site: tuple[str, str]) -> bool:
    return site[0].endswith("weight") and "param" in site[1]


def data_parallel(rank: int, world: int) -> None:
    ddp(rank, world)
    fsdp(rank, world, False, torch.float32)
    fsdp(rank, world, True, torch.bfloat16)


def test_data_parallel_ranks_count_together_and_sharded_parameters_lie_side_by_side() -> None:
    ranks.run(data_parallel, 4)
