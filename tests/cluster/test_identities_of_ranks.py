"""Identities of a model on four ranks: two with other data (FSDP2), each of them two with parts of each layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import hookstats
from hookstats.rules import Finding, identity, judge
from hookstats.rules.identities import compare
from hookstats.rules.step import SiteIds, Step
from tests import ranks
from tests.identities.models import Llama, loss_of

CASES = ("healthy", "an all-reduce is missing", "keys halved", "alone", "sequence parallel", "partial norms")
NORM, KEYS = "layers.1.norm1.weight", "layers.0.attention.k_proj.weight"


def sharded(mesh: Any, in_sequence: bool) -> Any:
    """Cut a model's layers over two ranks, and tokens, too, if `in_sequence`; then over two that share it."""
    model = Llama()
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1) if in_sequence else Replicate())
    plan: dict[str, Any] = {f"attention.{name}_proj": columns for name in "qkv"}
    plan |= {"attention.o_proj": rows, "mlp.down_proj": rows, "mlp.up_proj": columns, "mlp.gate_proj": columns}
    if in_sequence:
        gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        plan |= {name: SequenceParallel() for name in ("norm1", "norm2")}
        plan |= {name: PrepareModuleInput(**gathered) for name in ("attention", "mlp")}
        embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_module(model, mesh["tp"], {"embedding": embedding, "norm": SequenceParallel(), "head": head})
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def lose_all_reduce(module: nn.Module, _: Any) -> None:
    """Let the gradient of a norm's weight, a summand on each rank, pass for the whole."""

    def pass_for_whole(gradient: DTensor) -> DTensor:
        return DTensor.from_local(gradient.to_local(), gradient.device_mesh, [Replicate()])

    module.weight.register_hook(pass_for_whole)


def trained(rank: int, world: int) -> dict[str, tuple[list[Finding], list[float]]]:
    return {case: _trained(rank, case) for case in CASES}


def _trained(rank: int, case: str) -> tuple[list[Finding], list[float]]:
    torch.manual_seed(0)
    whole = Llama()
    batch = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(1))
    found = hookstats.find_identities(whole, lambda: whole(batch))
    torch.manual_seed(0)
    in_sequence = case in ("sequence parallel", "partial norms")
    model = sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), in_sequence)
    if case == "partial norms":
        model.get_submodule(NORM.rpartition(".")[0]).register_forward_pre_hook(lose_all_reduce)
    optimizer, taken = torch.optim.AdamW(model.parameters(), 1e-3), list[hookstats.Snapshot]()
    group = None if case == "alone" else dist.group.WORLD
    options = hookstats.Options(identities=found, strict=True)
    with hookstats.attach(model, every=1, process_group=group, sinks=taken.append, options=options) as monitor:
        for step in range(3):
            data = torch.Generator().manual_seed(10 * (rank // 2) + step)
            loss_of(model, torch.randint(0, 50, (2, 12), generator=data)).backward()
            if case == "an all-reduce is missing":  # each has the gradient of its own tokens
                model.get_parameter(NORM).grad._local_tensor.mul_(0.3 if rank % 2 else 0.7)
            if case == "keys halved":
                model.get_parameter(KEYS).grad._local_tensor.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            monitor.step()
    z = [float(each.z.max()) for one in taken for each in compare(Step(one, SiteIds()))]
    return judge(taken, [identity]), z


@pytest.fixture(scope="module")
def results() -> list[Any]:
    return ranks.run(trained, 4)


def unreduced(rank: int, world: int) -> list[float]:
    """The first layer's gradients are summands, one on each rank; the second one's are reduced."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    x, mesh = torch.randn(6, 8), init_device_mesh("cpu", (world,))
    found = hookstats.find_identities(model, lambda: model(x))
    model(x[3 * rank : 3 * rank + 3]).square().sum().backward()
    dist.all_reduce(model[2].weight.grad)
    for layer, placement in ((model[0], Partial()), (model[2], Replicate())):
        for name, each in list(layer.named_parameters()):
            whole = nn.Parameter(distribute_tensor(each.detach(), mesh, [Replicate()]))
            whole.grad = DTensor.from_local(each.grad, mesh, [placement])
            setattr(layer, name, whole)
    taken: list[hookstats.Snapshot] = []
    options = hookstats.Options(identities=found, strict=True)
    how: dict[str, Any] = {"process_group": dist.group.WORLD, "tensors": ("output",), "options": options}
    with hookstats.attach(model, sinks=taken.append, **how) as monitor:
        monitor.measure_gradients()
        monitor.step()
    return [float(each.z.max()) for one in taken for each in compare(Step(one, SiteIds()))]


def test_partial_gradients_are_summed() -> None:
    (z,) = ranks.run(unreduced, 2)[0]
    assert z < 4


def compressed(rank: int, world: int) -> list[float]:
    """Gradients are summed over the ranks in float16, and are float32 before and after."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))
    found, taken = hookstats.find_identities(model, lambda: model(x)), list[hookstats.Snapshot]()
    ddp = nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), 1e-2)
    options = hookstats.Options(identities=found, strict=True)
    with hookstats.attach(ddp, every=1, sinks=taken.append, options=options) as monitor:
        for _ in range(3):
            ddp(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step()
    return [float(each.z.max()) for one in taken for each in compare(Step(one, SiteIds()))]


def test_gradients_that_are_reduced_in_low_precision_are_judged_by_that() -> None:
    for z in ranks.run(compressed, 2):
        assert len(z) == 3
        assert max(z) < 4


@pytest.mark.parametrize("case", ["healthy", "sequence parallel"])
def test_parts_of_all_ranks_fit_together(results: list[Any], case: str) -> None:
    found, z = results[0][case]
    assert found == []
    assert len(z) == 3 * 11
    assert max(z) < 4


@pytest.mark.parametrize("case", ["an all-reduce is missing", "partial norms"])
def test_a_missing_all_reduce_is_named(results: list[Any], case: str) -> None:
    found, *_ = results[0][case]
    assert found
    assert all(f"gradient of {NORM} looks 0.5 times as large" in each.sentence for each in found), found
    assert all("Its sum over the ranks fits: an all-reduce is missing" in each.sentence for each in found)


def test_a_part_that_is_wrong_is_named(results: list[Any]) -> None:
    found, *_ = results[0]["keys halved"]
    assert found
    assert all(KEYS in each.sentence for each in found), found


def test_a_rank_alone_does_not_judge_sums_whose_parts_lie_elsewhere(results: list[Any]) -> None:
    for each in results:
        assert each["alone"] == ([], [])
