"""Ranks that are not in lockstep: steps wait for those behind, and all go on together where they are given up."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from hookstats.cluster import protocol
from hookstats.cluster.gloo import default_store
from hookstats.cluster.merging import Merging
from tests.cluster.sums import Step, Sums, submit, train, wanted
from tests.plain import hearing
from tests.ranks import run, until

STEPS, AHEAD = 200, 100  # more, and fewer, than may wait before ranks go on to newer steps


def trains(rank: int, world: int, case: str) -> Any:
    """How many steps were merged, and what was told. Every step is delivered once, in order, with the right sums."""
    merging = Merging(range(world), Sums())
    store, chance = default_store(), random.Random(rank)
    done = []

    def has_room() -> bool:
        done.extend(merging.arrived())
        return len(merging._slots) < AHEAD

    with hearing() as told:
        for number in range(STEPS):
            if case == "one starts late":
                if rank == 1 and number == 0:
                    store.wait(["ahead/0", "ahead/2"])
                if number == AHEAD - 1:
                    store.set(f"ahead/{rank}", "")
            else:
                time.sleep(chance.choice([0] * 30 + [0.05]))
            until(has_room)
            merging.submit(Step(number, rank), number)
        done += merging.wait(60)
        done += merging.close()
    for number, each in enumerate(done):
        sums = zip(each.step, wanted(number, range(world)), strict=True)
        assert all(part.tolist() == want.tolist() for part, want in sums), number
    return [len(each.ranks) for each in done], told


@pytest.mark.parametrize("case", ["one starts late", "all pause at random"])
def test_ranks_that_are_not_in_lockstep_merge_every_step_and_mix_none(case: str) -> None:
    assert run(trains, 3, case) == [([3] * STEPS, [])] * 3


def comes_late(rank: int, world: int) -> Any:
    """Rank 1 begins with a step that the others have given up, because too many were waiting; then all go on."""
    protocol._FULL_PATIENCE = 3600.0  # the first rank decides
    merging = Merging(range(world), Sums())
    store = default_store()
    if rank == 1:
        store.wait(["gone on/0", "gone on/2"])
        done = train(merging, [0])
    else:
        done = submit(merging, range(STEPS))
        until(lambda: done.extend(merging.arrived()) or done)
        store.set(f"gone on/{rank}", "")
    for number in range(STEPS, 2 * STEPS, 10):
        done += train(merging, [number])
    merging.close()
    return [each.ranks for each in done]


def test_a_rank_that_comes_when_its_step_was_given_up_is_waited_for_from_then_on() -> None:
    for rank, ranks in enumerate(run(comes_late, 3)):
        assert ranks == [(rank,)] * (1 if rank == 1 else STEPS) + [(0, 1, 2)] * (STEPS // 10)
