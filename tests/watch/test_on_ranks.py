"""Tests of measurements by ranks: gradients that are clipped, buffers, optimizers' states, blocks.

In one file, so that one process imports for all of them what ranks need.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # which each rank would import for its optimizer
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import hookstats
from hookstats import Options, Site, Snapshot
from tests import ranks
from tests.kernels.test_blocks import counted
from tests.reference import Array
from tests.watch.test_block_exponents import BINS, batch, blocks_of, matrix
from tests.watch.test_block_exponents import model as model_of_blocks
from tests.watch.test_buffers import Counting
from tests.watch.test_optimizer_states import model_of, step


def clips_on_one_rank_by_hookstats(rank: int, world: int) -> tuple[float, list[float]]:
    """The norm, and the gradients of this rank."""
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    for number, module in enumerate(model):
        for name, parameter in list(module.named_parameters()):
            gradient = torch.randn_like(parameter) + number
            placements = [Shard(0)] if name == "weight" else [Replicate()]
            distributed = nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements))
            distributed.grad = distribute_tensor(gradient, mesh, placements)
            setattr(module, name, distributed)
    if rank == 0:  # the others clip by torch
        monitor = hookstats.attach(model, tensors="param_grad", every=1)
        total: Any = monitor.clip_grad_norm_(model.parameters(), 0.5)
        assert monitor.snapshot().order
    else:
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
    return float(total.full_tensor()), torch.cat([each.full_tensor().flatten() for each in gradients]).tolist()


def test_dtensors_have_torchs_norm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    for number, module in enumerate(model):
        for _, parameter in list(module.named_parameters()):
            parameter.grad = torch.randn_like(parameter) + number
    wanted = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])  # type: ignore[union-attr]
    for norm, found in ranks.run(clips_on_one_rank_by_hookstats, 2):
        assert norm == pytest.approx(wanted, rel=1e-5)
        torch.testing.assert_close(torch.tensor(found), gradients)


def counts_tokens(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    model = Counting()
    with hookstats.attach(model, tensors=("buffer",), process_group=dist.group.WORLD) as monitor:
        model(torch.randn(50, 4))
        mine = model.tokens_per_expert.clone()
        found = [monitor.step(), *monitor.detach()]
    (snapshot,) = (each for each in found if each is not None)
    dist.all_reduce(mine)
    channels = snapshot["tokens_per_expert", "buffer"].channels
    assert (channels.mean * channels.count).tolist() == pytest.approx(mine.tolist())
    assert channels.count.tolist() == [world] * 4


def test_each_rank_has_counts_of_its_own() -> None:
    ranks.run(counts_tokens, 2)


def keeps_states(rank: int, world: int) -> None:
    model = model_of()
    for each in (model[0], model[2], model):
        fully_shard(each, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = hookstats.attach(
        model, tensors=("optimizer",), every=1, process_group=dist.group.WORLD, options=Options(strict=True)
    )
    step(model, optimizer, rank)
    monitor.step()
    (snapshot,) = monitor.detach()
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            value = optimizer.state[parameter][key].full_tensor().double()
            stats = snapshot[name, f"optimizer.{key}"]
            assert stats.total.count == value.numel()
            assert abs(stats.total.mean - value.mean()) <= 1e-6 * value.abs().max()
            if value.dim() > 1:
                assert abs(stats.channels.mean - value.mean(1).numpy()).max() <= 1e-6 * value.abs().max()


def test_states_of_sharded_parameters_lie_as_these_do() -> None:
    ranks.run(keeps_states, 2, timeout=180)


def counts_blocks(rank: int, world: int) -> tuple[list[Snapshot], Array]:
    net, group = model_of_blocks(), dist.group.WORLD
    steps: list[Snapshot] = []
    with hookstats.attach(
        net, every=1, histogram=BINS["blocks of 32"], process_group=group, sinks=[steps.append]
    ) as mon:
        output = net[0](batch(rank))
        mon.step()
    return steps, counted(matrix(output), "blocks of 32")


def test_blocks_of_ranks_are_merged_exactly() -> None:
    ([first], one), (_, two) = ranks.run(counts_blocks, 2)
    np.testing.assert_array_equal(blocks_of(first, Site("0", "output")), one + two)
