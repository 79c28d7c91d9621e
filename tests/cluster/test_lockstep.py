"""Ranks that are not in lockstep meet again: most of their steps are merged, and each is one step of all ranks."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from hookstats.cluster.merging import Merging
from tests.cluster.sums import Step, Sums, wanted
from tests.plain import hearing
from tests.ranks import run

STEPS, SECONDS = 300, 0.005


def trains(rank: int, world: int, case: str) -> Any:
    """How many steps were merged, and what was told. Every step is delivered once, in order, with the right sums."""
    merging = Merging(range(world), Sums())
    chance = random.Random(rank)
    if case == "one starts late" and rank == 1:
        time.sleep(50 * SECONDS)
    done = []
    with hearing() as told:
        for number in range(STEPS):
            merging.submit(Step(number, rank), number)
            pause = chance.choice([0] * 30 + [20]) if case == "all pause at random" else 0
            time.sleep(((3 if case == "one is slow" and rank == 1 else 1) + pause) * SECONDS)
            done += merging.arrived()
        done += merging.wait(10)
        done += merging.close()
    merged = [number for number, each in enumerate(done) if len(each.ranks) == world]
    for number, each in enumerate(done):
        if number in merged:
            sums = zip(each.step, wanted(number, range(world)), strict=True)
            assert all(part.tolist() == want.tolist() for part, want in sums), number
        else:
            assert each.step.number == number
    return len(done), len(merged), told


@pytest.mark.parametrize("case", ["one starts late", "one is slow", "all pause at random"])
def test_ranks_that_are_not_in_lockstep_meet_again_and_no_step_is_mixed(case: str) -> None:
    """Where ranks give up other steps each, one to thirty are merged."""
    for delivered, merged, told in run(trains, 3, case):
        assert delivered == STEPS
        assert merged >= 60, told


def far_behind(rank: int, world: int) -> Any:
    """Rank 1 comes when the others have given up what it begins with; from then on all go on together."""
    merging = Merging(range(world), Sums(), patience=0.3)
    if rank == 1:
        time.sleep(1.5)
    done = []
    for number in range(100 if rank == 1 else 130):
        merging.submit(Step(number + 30 * (rank == 1), rank), number + 30 * (rank == 1))
        time.sleep(0.05)
        done += merging.arrived()
    done += merging.wait(2) + merging.close()
    return sum(len(each.ranks) == world for each in done)


def test_a_rank_that_comes_when_it_was_given_up_is_waited_for_again() -> None:
    assert min(run(far_behind, 3)) >= 50
