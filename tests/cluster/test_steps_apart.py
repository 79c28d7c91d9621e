"""Ranks that close other steps than they train: what they hold at one number is of different moments, and no drift."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import hookstats
from hookstats import Snapshot
from tests import ranks
from tests.cluster.trainings import STEPS, ddp
from tests.plain import hearing


def merged_of(monitor: hookstats.Monitor, taken: list[Snapshot | None], world: int) -> list[Any]:
    arrived = [each for each in [*taken, *monitor.detach()] if each is not None]
    return [each.drifts for each in arrived if len(each.ranks) == world]


def closes_more_steps(rank: int, world: int, by_hand: bool) -> tuple[list[Any], list[str]]:
    """Rank 1 closes three steps in one of its own: from then on it holds what the others held two steps before.

    by_hand: no optimizer tells how many steps were trained.
    """
    case = ddp(rank, world)

    def step_by_hand(step: int) -> bool:
        with torch.no_grad():
            for parameter in case.model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)
        return False

    case = case._replace(fault=step_by_hand) if by_hand else case
    monitor = hookstats.attach(case.model, every=1, process_group=dist.group.WORLD)
    snapshots = []
    with hearing() as told:
        for step in range(STEPS):
            case.train(step)
            for _ in range(3 if rank == 1 and step == 4 else 1):
                snapshots.append(monitor.step())
        merged = merged_of(monitor, snapshots, world)
    assert len(merged) == STEPS
    return merged, told


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_rank_that_has_closed_more_steps_has_not_drifted_and_is_told_of_once(by_hand: bool) -> None:
    for drifts, told in ranks.run(closes_more_steps, 3, by_hand):
        assert drifts == [()] * STEPS
        (behind,) = [each for each in told if "some measured steps before or after" in each]
        assert "rank 1 holds in a step what rank 0 held" in behind


def closes_fewer_steps(rank: int, world: int) -> dict[str, Any]:
    """One rank leaves out a batch's `monitor.step`, as behind a `continue`. In the last cases a rank is ill later."""
    found = {}
    for name, every, who, left_out in (
        ("every step", 1, 1, (4,)),
        ("the first rank, two steps", 1, 0, (4, 5)),
        ("every second step", 2, 1, (5,)),
        ("1 is ill", 1, 1, (4, 5)),
        ("2 is ill", 1, 1, (4,)),
    ):
        case = ddp(rank, world)
        monitor = hookstats.attach(case.model, every=every, process_group=dist.group.WORLD)
        snapshots = []
        with hearing() as told:
            for step in range(2 * STEPS):
                case.train(step)
                if name == f"{rank} is ill" and step == STEPS:
                    case.model.module.up.weight.data[0, 0] += 1e-3
                if rank != who or step not in left_out:
                    snapshots.append(monitor.step())
            dist.barrier()
            merged = merged_of(monitor, snapshots, world)
        found[name] = merged, [each for each in told if "before or after" in each]
        dist.barrier()
    return found


def test_a_rank_that_leaves_out_a_step_has_not_drifted_and_one_that_is_ill_as_well_has() -> None:
    for found in ranks.run(closes_fewer_steps, 3):
        for ill in (1, 2):
            drifts, told = found.pop(f"{ill} is ill")
            assert len(told) == 1
            (first, *_) = (each for each in drifts if each)
            assert drifts.index(first) >= STEPS - 1
            assert {each.ranks for each in first} == {(ill,)}
            assert "up.weight" in {each.site.name for each in first}
        for drifts, told in found.values():
            assert len(drifts) >= STEPS - 1
            assert not any(drifts)
            assert len(told) == 1


def with_uneven_inputs(rank: int, world: int, begins: int) -> list[Any]:
    """Rank 0 has more batches than rank 1 in each epoch; from epoch `begins` on, before it all have as many."""
    case = ddp(rank, world)
    monitor = hookstats.attach(case.model, every=1, process_group=dist.group.WORLD)
    snapshots = []
    for epoch in range(4):
        with case.model.join(enable=epoch >= begins):
            for step in range(6 if rank == 0 and epoch >= begins else 4):
                case.train(10 * epoch + step)
                snapshots.append(monitor.step())
    dist.barrier()
    return merged_of(monitor, snapshots, world)


@pytest.mark.parametrize("begins", [0, 1])
def test_uneven_inputs_under_join_are_no_drift(begins: int) -> None:
    for drifts in ranks.run(with_uneven_inputs, 2, begins):
        assert len(drifts) >= 4
        assert not any(drifts)
