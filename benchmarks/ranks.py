"""Requirements on merging over ranks, measured: ``python -m benchmarks.ranks [PART ...]``.

parallel: ranks that hold a model together against one process. faults: ranks that die, freeze, come late, or have
another model. injected: faults of a training. healthy: trainings in which nothing is to be said. speed: 1,000 sites.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hookstats
from benchmarks import bench_cluster
from hookstats import Snapshot
from tests import ranks as processes
from tests.cluster import test_drifts, test_healthy_replicas, test_lost_ranks, test_merging, test_reduced
from tests.cluster.parallel import batch, mlp

TENSORS = ("output", "grad_output", "param", "param_grad")
COUNTED = ("count", "zeros", "nans", "posinfs", "neginfs")


def attached(model: nn.Module, group: Any) -> hookstats.Monitor:
    return hookstats.attach(model, tensors=TENSORS, every=1, process_group=group)


def measured(monitor: hookstats.Monitor, model: nn.Module) -> Snapshot:
    torch.optim.SGD(model.parameters(), lr=1e-6).step()
    (snapshot,) = [each for each in (monitor.step(), *monitor.detach()) if each is not None]
    return snapshot


def whole(model: nn.Module, parts: list[Callable[[], torch.Tensor]]) -> Snapshot:
    """Measure in one process all that the ranks do; its gradients are the mean over them."""
    monitor = attached(model, None)
    for part in parts:
        part().square().mean().backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= len(parts)
    return measured(monitor, model)


def apart(got: Snapshot, want: Snapshot) -> tuple[int, float, float, int]:
    """Return how many sites and unequal counts there are, and the largest distance of means (in rms) and variances."""
    assert set(got) == set(want), set(got) ^ set(want)
    means, moments, counts = [0.0], [0.0], 0
    for site, theirs in want.items():
        for one, other in ((got[site].total, theirs.total), (got[site].channels, theirs.channels)):
            if one is None or other is None or not np.any(other.count):
                continue
            with np.errstate(invalid="ignore", divide="ignore"):
                means.append(float(np.nanmax(np.abs(one.mean - other.mean) / other.rms)))
                moments.append(float(np.nanmax([0.0, *np.ravel(np.abs(one.var - other.var) / other.var)])))
            counts += sum(int(np.sum(getattr(one, name) != getattr(other, name))) for name in COUNTED)
        ours, histogram = got[site].histogram, theirs.histogram
        assert ours is not None
        assert histogram is not None
        counts += int(np.sum(ours.counts != histogram.counts))
    return len(got), max(means), max(moments), counts


def fsdp_and_tensor_parallel(rank: int, world: int) -> tuple[int, float, float, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = mlp()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for each in (model[0], model[2], model):
        fully_shard(each, mesh=mesh["dp"])
    lie = {"1": (Shard(0), Shard(-1)), "2": (Shard(0), Replicate())}
    monitor = attached(model, hookstats.Ranks(mesh, placements=lie))
    model(batch(rank // 2)).square().mean().backward()
    one = mlp()
    return apart(measured(monitor, model), whole(one, [partial(one, batch(r)) for r in range(2)]))


def pipeline(rank: int, world: int) -> tuple[int, float, float, int]:
    stages = (["0", "1"], ["2"])
    of_all = dict(mlp().named_children())
    model = nn.Sequential(OrderedDict((name, of_all[name]) for name in stages[rank]))
    monitor = attached(model, dist.group.WORLD)
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda y, target: (y - target).square().mean())
    for _ in range(2):
        monitor.reset()  # the first time, each stage is run once more, to see shapes
        model.zero_grad()
        if rank == 0:
            schedule.step(batch(1).flatten(0, 1))
        else:
            schedule.step(target=torch.zeros(6, 7).double())
    one = mlp()
    parts = batch(1).flatten(0, 1).chunk(2)
    return apart(measured(monitor, model), whole(one, [partial(one, x) for x in parts]))


class Experts(nn.Module):
    """A router that all ranks have, and experts of which each has its own."""

    def __init__(self, names: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(8, 8).double()
        made = {name: nn.Linear(8, 4).double() for name in "abcd"}
        self.experts = nn.ModuleDict({name: made[name] for name in names})

    def forward(self, x: torch.Tensor, expert: str) -> torch.Tensor:
        return self.experts[expert](self.router(x)[:, ::2])  # type: ignore[no-any-return]


def experts(rank: int, world: int) -> tuple[int, float, float, int]:
    model = Experts(("ab", "cd")[rank])
    monitor = attached(model, dist.group.WORLD)
    model(batch(rank), "ac"[rank]).square().mean().backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= world
    for parameter in model.router.parameters():
        dist.all_reduce(parameter.grad)
    one = Experts("abcd")
    return apart(measured(monitor, model), whole(one, [partial(one, batch(r), "ac"[r]) for r in range(2)]))


def parallel() -> None:
    for world, case in ((4, fsdp_and_tensor_parallel), (2, pipeline), (2, experts)):
        found = processes.run(case, world)
        assert all(each == found[0] for each in found)
        sites, means, moments, counts = found[0]
        text = f"means {means:.1e} of the rms, variances {moments:.1e}, {counts} counts differ"
        print(f"{case.__name__}, {world} ranks, {sites} sites, against one process: {text}")


def faults() -> None:
    def tell(name: str, told: list[Any]) -> None:
        for rank, each in enumerate(told):
            present, warnings = each or ("gone", [])
            print(f"{name}, rank {rank}: steps by {present}, {len(warnings)} warnings: {warnings}")

    ended = processes.outcomes(test_lost_ranks.is_killed, 4, 8)
    print(f"rank 2 is killed: exit codes {[each.code for each in ended]}")
    tell("killed", [each.result for each in ended])
    tell("frozen", processes.run(test_lost_ranks.is_frozen, 3))
    late = processes.run(test_merging.comes_late, 3, 100)
    print(f"rank 1 is late by 100 steps: merged {[len(set(present)) == 1 for present, _ in late]}, {late[0][1]}")
    for rank, (present, counts, warnings) in enumerate(processes.run(test_merging.differs, 3)):
        print(f"another model in step 10, rank {rank}: steps by {present}, counts {counts}, {warnings}")


def injected() -> None:
    for world in (2, 3, 4):
        for name, (findings, _) in processes.run(test_drifts.ill, world)[0].items():
            text = [f"step {each.step}, {each.severity}: {each.sentence}" for each in findings[:1]] or ["NOT FOUND"]
            print(f"{name}: {text[0]}")
    for case, told in processes.run(test_reduced.trained, 3)[0].items():
        print(f"{case}: {[f'step {each.step}, {each.severity}: {each.sentence}' for each in told[:1]]}")


def healthy() -> None:
    found = {**processes.run(test_healthy_replicas.healthy, 2)[0], **processes.run(test_healthy_replicas.healthy, 4)[0]}
    alarmed = [name for name, (findings, drifts) in found.items() if findings or any(drifts)]
    print(f"{len(found)} healthy trainings, alarmed: {alarmed}")


def speed() -> None:
    for world in bench_cluster.RANKS:
        for case, bins in bench_cluster.CASES.items():
            told = processes.run(bench_cluster.merges, world, bins)
            figures = {name: round(max(each[name] for each in told), 2) for name in told[0]}
            print(f"{world} ranks, {bench_cluster.SITES} sites, {case}: {figures}")


PARTS = {each.__name__: each for each in (parallel, faults, injected, healthy, speed)}

if __name__ == "__main__":
    from benchmarks import ranks as here  # ranks look for functions in modules that they can import

    for part in sys.argv[1:] or PARTS:
        here.PARTS[part]()
