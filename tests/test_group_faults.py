"""attach(process_group=...): what a rank's training sees of what goes wrong, or goes slowly, with the others."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

import hookstats
from tests.plain import hearing
from tests.ranks import run
from tests.test_process_group import batch, network


def without_groups(rank: int, world: int) -> Any:
    """The groups of DistributedDataParallel are gone when it is first asked which ranks it has."""
    model = nn.parallel.DistributedDataParallel(network())
    monitor = hookstats.attach(model, every=1, process_group=dist.group.WORLD)
    given = []
    with hearing() as told:
        for step in range(2):
            model.module(batch(rank, step)).mean().backward()
            if step == 0:
                dist.barrier()
                dist.destroy_process_group()
            given.append(monitor.step())
        given += monitor.detach()
    return [(each.step, each.ranks) for each in given if each is not None], [str(each) for each in told]


def test_where_it_cannot_be_said_how_tensors_lie_steps_are_each_ranks_own_and_training_goes_on() -> None:
    for rank, (given, told) in enumerate(run(without_groups, 2)):
        assert given == [(0, (rank,)), (1, (rank,))]
        assert len([each for each in told if "not merged over ranks: step 0: KeyError" in each]) == 1, told
