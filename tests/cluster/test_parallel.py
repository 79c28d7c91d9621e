"""Ranks that hold a model together: what each measured, merged, is what all of them hold."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import hookstats
from tests import ranks
from tests.cluster.parallel import (
    MLP,
    TENSORS,
    Kept,
    batch,
    check_all,
    check_merged,
    check_sites,
    merged,
    mlp,
    of_all_ranks,
    trained,
)
from tests.conftest import check
from tests.plain import hearing


def attached(model: nn.Module, **settings: Any) -> hookstats.Monitor:
    options = hookstats.Options(strict=True)
    settings = {"tensors": TENSORS, "every": 1, "options": options, "process_group": dist.group.WORLD} | settings
    return hookstats.attach(model, **settings)


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
    model, tensors = mlp(), (*TENSORS, "param_update")
    monitor = attached(model, tensors=tensors) if attach_first else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for each in (model[0], model[2], model):
        fully_shard(each, mesh=mesh, mp_policy=policy)
    monitor = monitor or attached(model, tensors=tensors)
    kept = Kept(model, MLP)
    trained(monitor, model, batch(rank), kept)
    everybody = list(range(world))
    snapshot, told = check_all(
        model, monitor, kept, lambda site: [everybody] if "param" in site[1] else [[r] for r in everybody]
    )
    assert not told
    assert snapshot["0", "output"].calls == world
    assert snapshot["2.weight", "param"].calls == 1
    assert snapshot["2.weight", "param_grad"].channels.count.tolist() == [16] * 7  # 2 + 2 + 2 + 1 rows


def flat(rank: int, world: int) -> None:
    """FSDP1: one-dimensional shards of parameters, which begin and end anywhere."""
    inner = mlp()
    model = FullyShardedDataParallel(inner, use_orig_params=True, device_id=torch.device("cpu"))
    monitor, kept = attached(model), Kept(inner, MLP)
    trained(monitor, model, batch(rank), kept)
    everybody = list(range(world))
    snapshot, told = check_all(
        model, monitor, kept, lambda site: [everybody] if "param" in site[1] else [[r] for r in everybody]
    )
    assert not told
    assert snapshot["0.weight", "param"].total.count == 8 * 16
    assert snapshot["0.weight", "param"].calls == 1


def alone(batches: list[torch.Tensor], together: bool) -> hookstats.Snapshot:
    """Measure the whole model in one process; its gradients are the mean over these batches.

    together: in one call, else one for each of them.
    """
    model = mlp()
    monitor = attached(model, process_group=None)
    for x in [torch.cat(batches)] if together else batches:
        outputs = model(x).chunk(len(batches) if together else 1)
        sum(y.square().mean() for y in outputs).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= len(batches)
    torch.optim.SGD(model.parameters(), lr=1e-6).step()
    monitor._parameters.measure()
    (snapshot,) = [each for each in (monitor.step(), *monitor.detach()) if each is not None]
    return snapshot


def data_parallel(rank: int, world: int) -> None:
    ddp(rank, world)
    flat(rank, world)
    fsdp(rank, world, False, torch.float32)
    fsdp(rank, world, True, torch.bfloat16)


def test_data_parallel_ranks_count_together_and_sharded_parameters_lie_side_by_side() -> None:
    ranks.run(data_parallel, 4, timeout=180)


def tensor_parallel(rank: int, world: int) -> None:
    for attach_first in (True, False):
        colwise_and_rowwise(attach_first)
    named_by_the_user()
    sequence_parallel(rank)


def colwise_and_rowwise(attach_first: bool) -> None:
    """Two ranks with the same batch; the widths 16 and 7 over both of them."""
    model = mlp()
    monitor = attached(model, options=hookstats.Options(strict=False)) if attach_first else None
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    monitor = monitor or attached(model)
    kept = Kept(model, MLP)
    with hearing() as told:
        trained(monitor, model, batch(1), kept)
    assert any("P(sum)" in each for each in told) == attach_first  # rowwise outputs before they are reduced
    side_by_side, one = [[0, 1]], [[0]]
    lines = {"0": side_by_side, "0.weight": side_by_side, "0.bias": side_by_side, "2.weight": [[0], [1]], "2.bias": one}
    snapshot, told = check_all(model, monitor, kept, lambda site: lines.get(site[0]))
    assert snapshot["0", "output"].calls == snapshot["2.weight", "param"].calls == 1
    assert len(told) == 1
    assert "different values of 1 output" in told[0]
    assert "1 output as 1 output[tp=0] and 1 output[tp=1]" in told[0]
    assert "placements={glob: Shard(-1)}" in told[0]
    parts = kept.gathered()
    for kind in ("output", "grad_output"):
        for each in range(2):  # kept apart, as they differ
            check_merged(snapshot, ("1", f"{kind}[tp={each}]"), parts, [[each]], like=("1", kind))
        if not attach_first:  # the same on both: counted once
            check_merged(snapshot, ("2", kind), parts, one)
            assert snapshot["2", kind].calls == 1


def named_by_the_user() -> None:
    model = mlp()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    monitor, kept = (
        attached(model, process_group=hookstats.Ranks(dist.group.WORLD, placements={"1": Shard(-1), "2": Replicate()})),
        Kept(model, MLP),
    )
    trained(monitor, model, batch(1), kept)
    lines = {"0": [[0, 1]], "1": [[0, 1]], "2": [[0]]}
    snapshot, told = check_all(model, monitor, kept, lambda site: lines.get(site[0]))
    assert not told
    assert snapshot["1", "output"].channels.count.tolist() == [6] * 16
    assert snapshot["1", "output"].calls == snapshot["2", "grad_output"].calls == 1


def sequence_parallel(rank: int) -> None:
    """Each of two ranks has its part of each sequence; the gradients of the norm are yet to be reduced."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 7), nn.LayerNorm(7)).double()
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "3": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "4": SequenceParallel(),
    }
    parallelize_module(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)
    monitor, kept = attached(model, options=hookstats.Options(strict=False)), Kept(model, list("01234"))
    with hearing() as told:
        even = torch.__version__ < (2, 13)  # torch 2.11 itself, without hookstats, raises where the parts are not equal
        mine, whole = (4, 8) if even else (3 + rank, 7)  # rows of a sequence over two ranks
        x, mesh = torch.randn(2, mine, 8).double() + 1000.0 * rank, model[0].weight.device_mesh
        y = model(DTensor.from_local(x, mesh, [Shard(1)], shape=(2, whole, 8), stride=(8 * whole, 8, 1)))
        y.to_local().square().sum().backward()
        kept.parameters()
        torch.optim.SGD(model.parameters(), lr=1e-6).step()
        monitor._parameters.measure()
    assert {site.name for site in monitor.skipped} == {"0.weight", "0.bias", "4.weight", "4.bias"}
    assert all("P(sum)" in each.reason for each in monitor.skipped.values())
    assert all(each.times == 1 for each in monitor.skipped.values())
    rows, channels = [[0], [1]], [[0, 1]]
    lines = {"0": rows, "1": channels, "2": channels, "3": rows, "4": rows, "3.weight": rows, "3.bias": [[0]]}
    snapshot, told = check_all(model, monitor, kept, lambda site: lines.get(site[0]))
    [of_all] = told
    assert "not measured: 0.weight param_grad and 3 more sites: expected a DTensor that is whole" in of_all
    assert snapshot["0", "output"].calls == 1


def test_tensor_parallel_ranks_lie_as_their_dtensors_weights_or_the_user_say_else_apart() -> None:
    ranks.run(tensor_parallel, 2, timeout=180)


def two_dimensions(rank: int, world: int) -> None:
    """FSDP2 over (0, 2) and (1, 3), tensor parallelism over (0, 1) and (2, 3); then HSDP over the same mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = mlp()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for each in (model[0], model[2], model):
        fully_shard(each, mesh=mesh["dp"])
    placements = {"1": (Shard(0), Shard(-1)), "2": (Shard(0), Replicate())}
    monitor, kept = attached(model, process_group=hookstats.Ranks(mesh, placements=placements)), Kept(model, MLP)
    trained(monitor, model, batch(rank // 2), kept)
    slice_of, _ = merged(monitor, model, mesh["dp"])  # the ranks of one slice of the weights alone
    assert slice_of["0.weight", "param"]._measured.shape[1] == 8
    assert slice_of["2.weight", "param"]._measured.shape[1] == 7
    rows, channels, matrix = [[0], [2]], [[0, 1], [2, 3]], [[0, 2, 1, 3]]
    lines = {
        "0": channels,
        "1": channels,
        "2": rows,
        "0.weight": matrix,
        "0.bias": matrix,
        "2.weight": [[0, 2], [1, 3]],
        "2.bias": [[0, 2]],
    }
    snapshot, told = check_all(model, monitor, kept, lambda site: lines[site[0]])
    assert not told
    assert snapshot["0", "output"].calls == snapshot["1", "output"].calls == 2
    check_sites(snapshot, alone([batch(0), batch(1)], together=True), rtol=1e-12)

    model = mlp()
    for each in (model[0], model[2], model):
        fully_shard(each, mesh=mesh)
    monitor, kept = attached(model), Kept(model, MLP)
    trained(monitor, model, batch(rank), kept)
    everybody = [[r] for r in range(4)]
    snapshot, told = check_all(model, monitor, kept, lambda site: [[0, 1]] if "param" in site[1] else everybody)
    assert not told
    assert snapshot["0.weight", "param_grad"].calls == 1
    assert snapshot["0", "output"].calls == 4


def test_meshes_of_two_dimensions() -> None:
    ranks.run(two_dimensions, 4, timeout=180)


def own_modules(rank: int, world: int) -> None:
    pipeline(rank, world)
    experts_by_name(rank)
    experts_of_one_name(rank)
    experts_as_dtensors(rank, world)


def pipeline(rank: int, world: int) -> None:
    """A stage of the model on each rank; two microbatches."""
    torch.manual_seed(0)
    layers = {"0": nn.Linear(8, 16), "1": nn.GELU(), "2": nn.Linear(16, 7)}
    stages = (["0", "1"], ["2"])
    model = nn.Sequential(OrderedDict((name, layers[name]) for name in stages[rank])).double()
    monitor, kept = attached(model), Kept(model, stages[rank])
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda y, target: (y - target).square().mean())
    for _ in range(2):
        monitor.reset()  # the first time, each stage is run once more, to see shapes
        kept.seen.clear()
        model.zero_grad()
        if rank == 0:
            schedule.step(batch(1).flatten(0, 1))
        else:
            schedule.step(target=torch.zeros(6, 7).double())
    kept.parameters()
    torch.optim.SGD(model.parameters(), lr=1e-6).step()
    monitor._parameters.measure()
    snapshot, told = check_all(model, monitor, kept, lambda site: [[1]] if site[0].startswith("2") else [[0]])
    assert not told
    assert [snapshot[name, "output"].calls for name in "012"] == [2, 2, 2]
    check_sites(snapshot, alone(list(batch(1).flatten(0, 1).chunk(2)), together=False), rtol=1e-12)


class Experts(nn.Module):
    """Every other row of a batch to one of this rank's experts; to the last of them none."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.router = nn.Linear(8, 8)
        self.experts = nn.ModuleDict({name: nn.Linear(8, 4) for name in names})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *_ = self.experts.values()
        return first(self.router(x)[:, ::2])


def experts_by_name(rank: int) -> None:
    torch.manual_seed(rank)
    model = Experts([["a", "b"], ["c", "d"]][rank]).double()
    names = ["router", *(f"experts.{name}" for name in model.experts)]
    monitor, kept = attached(model), Kept(model, names)
    trained(monitor, model, batch(rank), kept)
    owners = {"router": [[0], [1]], "experts.a": [[0]], "experts.c": [[1]]}

    def lines(site: tuple[str, str]) -> Any:
        return [[0]] if site[0].startswith("router.") else owners.get(site[0])

    snapshot, told = of_all_ranks(monitor)
    assert not told
    parts = kept.gathered()
    for site in {site for part in parts for site in part}:
        if lines(site):
            check_merged(snapshot, site, parts, lines(site), 0 if "param" in site[1] else -1)
    assert snapshot["experts.b", "output"].calls == snapshot["experts.d", "output"].total.count == 0
    assert snapshot["experts.d.weight", "param"].channels.count.tolist() == [8] * 4


def experts_of_one_name(rank: int) -> None:
    """Other experts of the same name on each rank: the user says that they are not replicas."""
    torch.manual_seed(rank)
    model = Experts(["0"]).double()
    monitor, kept = (
        attached(model, process_group=hookstats.Ranks(dist.group.WORLD, placements={"experts.*": Shard(0)})),
        Kept(model, ["experts.0"]),
    )
    trained(monitor, model, batch(rank), kept)
    parts = kept.gathered()
    snapshot, told = of_all_ranks(monitor)
    assert not told
    assert snapshot["experts.0.weight", "param"].channels.count.tolist() == [8] * 8
    for kind in ("param", "param_grad"):
        check_merged(snapshot, ("experts.0.weight", kind), parts, [[0, 1]], 0)
        check_merged(snapshot, ("experts.0.bias", kind), parts, [[0, 1]], 0)
    check_merged(snapshot, ("experts.0", "output"), parts, [[0], [1]])


def experts_as_dtensors(rank: int, world: int) -> None:
    """Over ranks that are data parallel for the rest of the model: their batches differ, nothing is apart."""
    torch.manual_seed(0)
    model = Experts(["0"]).double()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    expert = model.experts["0"]
    expert.weight = nn.Parameter(distribute_tensor(expert.weight.detach(), mesh, [Shard(0)]))
    expert.bias = nn.Parameter(distribute_tensor(expert.bias.detach(), mesh, [Shard(0)]))
    expert.forward = lambda x: x @ expert.weight.to_local().mT + expert.bias.to_local()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)), ignored_params=set(expert.parameters()))
    monitor, kept = attached(model), Kept(model, ["router", "experts.0"])
    trained(monitor, model, batch(rank), kept)
    parts = kept.gathered()
    snapshot, told = of_all_ranks(monitor)
    assert not told
    check_merged(snapshot, ("router", "output"), parts, [[0], [1]])
    check_merged(snapshot, ("experts.0", "output"), parts, [[0], [1]])
    check_merged(snapshot, ("experts.0.weight", "param_grad"), parts, [[0, 1]], 0)


def test_stages_of_a_pipeline_and_experts_are_told_by_the_ranks_that_own_them() -> None:
    ranks.run(own_modules, 2, timeout=180)


def changes(rank: int, world: int) -> None:
    """Another placement in a later step is seen; two of them in one step are told apart by leaving out the second."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Tanh()
    monitor = hookstats.attach(model, tensors=["output"], every=1)
    whole = torch.arange(24.0).reshape(4, 6)

    def run(placement: Any) -> None:
        model(distribute_tensor(whole, mesh, [placement], src_data_rank=None))

    run(Shard(1))
    assert merged(monitor, model)[0]["", "output"].channels.count.tolist() == [4] * 6
    monitor.step()
    run(Shard(0))
    snapshot = merged(monitor, model)[0]
    assert snapshot["", "output"].total.count == 24
    run(Replicate())
    (skipped,) = monitor.skipped.values()
    assert skipped.times == 1
    assert "expected a tensor placed as the one before it in this step, (S(0)), got (R)" in skipped.reason
    assert merged(monitor, model)[0]["", "output"].total.count == 24
    monitor.step()
    run(Replicate())
    assert merged(monitor, model)[0]["", "output"].channels.count.tolist() == [4] * 6


def nothing_on_one_rank(rank: int, world: int) -> None:
    """One row of a batch over two ranks, under tensor parallelism: the other rank knows where it would lie."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = distribute_module(nn.Sequential(nn.Linear(6, 4), nn.Identity()), mesh)
    monitor = attached(model, modules=["1"], tensors=["output"])
    model[1](distribute_tensor(torch.arange(6.0).reshape(1, 6), mesh, [Shard(0)], src_data_rank=None))
    snapshot, told = of_all_ranks(monitor)
    assert not told
    assert list(snapshot) == [("1", "output")]
    assert snapshot["1", "output"].channels.count.tolist() == [1] * 6


class Gathers(nn.Module):
    """Its output is still being gathered when the hook gets it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return funcol.all_gather_tensor(x, 0, dist.group.WORLD)


def gathers(rank: int, world: int) -> None:
    model = Gathers()
    monitor = attached(model, tensors=["output"], process_group=None)
    y = model(torch.full((3, 4), float(rank)))
    assert type(y).__name__ == "AsyncCollectiveTensor"
    check(monitor.snapshot()["", "output"], torch.tensor([[0.0] * 4] * 3 + [[1.0] * 4] * 3), -1)


def whatever_changes(rank: int, world: int) -> None:
    changes(rank, world)
    nothing_on_one_rank(rank, world)
    gathers(rank, world)


def test_placements_that_change_are_seen_and_a_rank_that_has_nothing_or_still_waits_is_no_exception() -> None:
    ranks.run(whatever_changes, 2, timeout=180)
