"""Laws of a sharded model: FSDP2 on two ranks, whose microbatches hold different numbers of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hookstats
from hookstats.rules import Finding, cross_entropy_gradient, judge, optimizer_formula, outside_write
from tests import ranks
from tests.rules.tokens import CLASSES, PADDING, summed

RULES = [cross_entropy_gradient, optimizer_formula, outside_write]
TENSORS = ("output", "param_sample", "update_sample", "outside_update", "optimizer_law", "token_weights")
CASES = ("mean over all", "sum of shares", "mean of means", "summed", "one shard", "written between")


def trained(rank: int, world: int) -> dict[str, tuple[list[Finding], set[str]]]:
    return {case: _trained(rank, world, case) for case in CASES}


def _trained(rank: int, world: int, case: str) -> tuple[list[Finding], set[str]]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(CLASSES, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def halve(optimizer: Any, *_: Any) -> None:
        if case == "one shard" and rank == 1:
            model[1].weight.grad._local_tensor.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    taken: list[hookstats.Snapshot] = []
    with hookstats.attach(
        model, tensors=TENSORS, every=1, process_group=dist.group.WORLD, sinks=taken.append
    ) as monitor:
        for step in range(5):
            x = torch.randint(CLASSES, (4, 12), generator=torch.Generator().manual_seed(100 * rank + step))
            y = (x + 1) % CLASSES
            y[:, 12 - 3 * rank :] = PADDING
            own, all_ = 4 * (12 - 3 * rank), sum(4 * (12 - 3 * each) for each in range(world))
            loss = summed(model(x), y)
            by = {"mean over all": all_ / world, "sum of shares": all_, "summed": 1}.get(case, own)
            (loss / by).backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach() / own
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            monitor.step(loss=mean)
            if case == "written between" and step == 2:
                with torch.no_grad():
                    model[3].weight._local_tensor.mul_(1.5)
    last = taken[-1].order if taken else ()  # sinks get steps on the first rank
    return judge(taken, RULES), {site.name for site in last if site.tensor == "optimizer_law"}


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[list[Finding], set[str]]]:
    return ranks.run(trained, 2)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", ["mean over all", "sum of shares"])
def test_a_mean_over_the_tokens_of_all_ranks_is_told_nothing(found: Any, case: str) -> None:
    assert found[case][0] == []


def test_ranks_that_average_by_themselves_weigh_tokens_differently(found: Any) -> None:
    (note,) = found["mean of means"][0]
    assert (note.rule, note.severity, note.value) == ("cross-entropy-gradient", "note", pytest.approx(12 / 9, rel=1e-3))


def test_a_fault_on_ranks_is_found_with_its_place_and_factor(found: Any) -> None:
    (sums,) = found["summed"][0]
    assert (sums.rule, sums.severity, sums.value) == ("cross-entropy-gradient", "critical", pytest.approx(42, rel=1e-3))
    shard = next(each for each in found["one shard"][0] if each.rule == "optimizer-formula")
    assert shard.site.name == "1.weight"
    written = next(each for each in found["written between"][0] if each.rule == "outside-write")
    assert (written.site.name, written.step) == ("3.weight", 3)


def test_sharded_parameters_are_held_against_the_laws_of_optimizers(found: Any) -> None:
    assert found["mean over all"][1] == {"0.weight", "1.weight", "1.bias", "3.weight", "3.bias"}
