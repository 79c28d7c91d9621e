"""Ranks that die, freeze, leave, fork or fail while steps are merged: the others go on alone, and end well."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hookstats import Site
from hookstats.cluster import exchange
from hookstats.cluster import merging as merging_room
from hookstats.cluster.exchange import find_default_store
from hookstats.cluster.packing import Packer
from tests.cluster.merging import ALL, A, merging_of, ranks_of, step_of, submit, train
from tests.plain import hearing
from tests.ranks import outcomes, run, until

B = Site("b", "output")


def is_killed(rank: int, world: int, fan: int) -> Any:
    exchange.FAN = fan
    merging, store = merging_of(world), find_default_store()
    with hearing() as told:
        done = train(merging, [0, 10])
        dist.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        done += train(merging, [20]) + train(merging, [30, 40, 50])
        done += merging.close()
        store.set(f"done/{rank}", "")
        store.wait([f"done/{each}" for each in (0, 1, 3)])
    return ranks_of(done), told


@pytest.mark.parametrize("fan", [2, 8])
def test_when_a_rank_is_killed_the_others_go_on_alone_and_end_well(fan: int) -> None:
    ended = outcomes(is_killed, 4, fan)
    assert [each.code for each in ended] == [0, 0, -9, 0], [each.output for each in ended]
    for rank in (0, 1, 3):
        ranks, told = ended[rank].result
        assert ranks == [(0, 1, 2, 3)] * 2 + [(rank,)] * 4
        assert len(told) == 1
        assert "nothing is merged from now on" in told[0]


def is_frozen(rank: int, world: int) -> Any:
    """Rank 1 does not come within the time that the others wait."""
    merging, store = merging_of(world), find_default_store()
    with hearing() as told:
        done = train(merging, [0])
        dist.barrier()
        merging._exchange.timeout = 1.0
        if rank == 1:
            store.wait(["alone/0", "alone/2"])
        done += train(merging, [10, 20])
        store.set(f"alone/{rank}", "")
        store.wait(["alone/1"])
        done += merging.close()
    return ranks_of(done), told


def test_a_rank_that_does_not_come_in_time_leaves_everybody_alone_for_good_which_is_said_once() -> None:
    for rank, (ranks, told) in enumerate(run(is_frozen, 3)):
        assert ranks == [ALL, (rank,), (rank,)]
        assert len(told) == 1
        assert "nothing is merged from now on" in told[0]


def trains_with_the_dead(rank: int, world: int) -> None:
    merging = merging_of(world)
    for number in range(6):
        if rank == 2 and number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        submit(merging, [number])  # one is waited for in the end
        dist.all_reduce(torch.ones(1))  # training's own
    raise AssertionError("expected training's own error")


def test_a_training_that_dies_of_another_ranks_death_dies_of_its_own_error_and_at_once() -> None:
    ended = outcomes(trains_with_the_dead, 3)
    assert [each.code for each in ended] == [1, 1, -9], [each.output for each in ended]
    for rank in (0, 1):
        last = [line for line in ended[rank].output.splitlines() if "Error" in line][-1]
        assert "onnection" in last, ended[rank].output
        assert "AssertionError" not in ended[rank].output


def leaves(rank: int, world: int, way: str) -> Any:
    """Rank 0, when the others wait for its next step."""
    merging, store = merging_of(world), find_default_store()
    with hearing() as told:
        done = train(merging, [0, 10])
        dist.barrier()
        if rank == 0:
            store.wait(["waits/1", "waits/2"])
            if way == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if way == "interrupted":
                raise KeyboardInterrupt
            if way == "closed":
                merging.close()
                dist.barrier()
            return ranks_of(done), told
        submit(merging, [20])
        store.set(f"waits/{rank}", "")
        done += merging.wait(60)
        for number in range(30, 120, 10):  # and the rank that has the store is no more
            done += train(merging, [number])
        if way == "closed":
            dist.barrier()
        done += merging.close()
    return ranks_of(done), told


@pytest.mark.parametrize(
    ("way", "code"), [("closed", 0), ("ended", 0), ("interrupted", -signal.SIGINT), ("killed", -signal.SIGKILL)]
)
def test_when_a_rank_leaves_first_the_others_are_alone_for_good_with_one_warning(way: str, code: int) -> None:
    ended = outcomes(leaves, 3, way, init="env")
    assert [each.code for each in ended] == [code, 0, 0], [each.output for each in ended]
    for rank in (1, 2):
        ranks, told = ended[rank].result
        assert ranks == [ALL] * 2 + [(rank,)] * 10
        assert len(told) == 1
        assert "a rank was detached, or has ended" in told[0] or ("merging has failed" in told[0] and way != "closed")


def fails(rank: int, world: int) -> Any:
    """Rank 1, in step 20 alone, before the ranks have agreed on it."""
    merging = merging_of(world)

    def fault(*args: Any) -> Any:
        raise ZeroDivisionError("a fault of ours")

    with hearing() as told:
        done = train(merging, [0, 10])
        if rank == 1:
            merging.submit(step_of(20, rank), fault)
        else:
            submit(merging, [20])
        done += merging.wait(60)
        done += train(merging, [30])
        dist.barrier()
        merging.close()
    return ranks_of(done), told


def test_a_step_that_one_rank_cannot_bring_is_each_ranks_own_and_the_next_is_merged() -> None:
    for rank, (ranks, told) in enumerate(run(fails, 3)):
        assert ranks == [ALL, ALL, (rank,), ALL]
        assert len(told) == 1
        assert ("step 20: ZeroDivisionError('a fault of ours')" in told[0]) == (rank == 1)
        assert rank == 1 or "step 20: another rank could not bring its part" in told[0]


FAULTS: dict[str, tuple[Any, str]] = {
    "when it makes its part": (Packer, "pack"),
    "when others have what they need of it": (Packer, "unpack"),
    "when ranks have other sites than before": (merging_room, "Union"),
}


def fails_in_the_middle(rank: int, world: int) -> Any:
    """Rank 1, in steps 10 and 20."""

    def fault(*args: Any) -> Any:
        raise ZeroDivisionError("a fault of ours")

    found = {}
    for where, (owner, name) in FAULTS.items():
        merging, sound = merging_of(world), getattr(owner, name)
        with hearing() as told:
            others = B if name == "Union" else A
            done = train(merging, [0])
            if rank == 1:
                setattr(owner, name, fault)
            done += train(merging, [10, 20], site=others)
            setattr(owner, name, sound)
            done += train(merging, [30], site=others)
            dist.barrier()
            merging.close()
        found[where] = [each.ranks.present for each in done], told
    return found


def test_a_fault_of_ours_leaves_all_alone_with_that_step_and_the_next_is_merged_which_is_said_once_and_counted() -> (
    None
):
    for rank, found in enumerate(run(fails_in_the_middle, 3)):
        for where, (_, name) in FAULTS.items():
            ranks, told = found[where]
            is_alone = rank == 1 or name != "unpack"
            assert ranks == [ALL, *[(rank,) if is_alone else ALL] * 2, ALL], where
            assert len(told) == 2 * is_alone, told
            if is_alone:
                first, count = told
                assert ("step 10: ZeroDivisionError('a fault of ours')" in first) == (rank == 1)
                assert rank == 1 or "step 10: another rank could not bring its part" in first
                assert "2 steps were not merged over ranks" in count


def ends_in_flight(rank: int, world: int, way: str) -> Any:
    """Rank 0 ends while it waits for rank 1, which goes on when its process is no more."""
    store = find_default_store()
    store.set(f"pid/{rank}", str(os.getpid()))
    first = int(store.get("pid/0"))
    merging = merging_of(world)
    assert ranks_of(train(merging, [0])) == [ALL]
    if rank == 1:
        until(lambda: not Path(f"/proc/{first}").exists())
    merging.submit(step_of(10, rank))
    if rank == 0:
        until(merging._queue.empty)  # the thread has it in hand
        if way == "closed":
            return ranks_of(merging.close(timeout=0))
        if way == "raised":
            raise RuntimeError("training's own")
        return None
    return ranks_of(merging.wait(60) + merging.close(timeout=0))


@pytest.mark.parametrize(("way", "code"), [("closed", 0), ("raised", 1), ("left", 0)])
def test_the_end_of_a_process_does_not_wait_for_a_merge_in_flight_nor_is_it_aborted(way: str, code: int) -> None:
    ended = outcomes(ends_in_flight, 3, way)
    assert [each.code for each in ended] == [code, 0, 0], [each.output for each in ended]
    assert [each.result for each in ended] == [[(0,)] if way == "closed" else None, [(1,)], [(2,)]]


def forks(rank: int, world: int) -> Any:
    merging = merging_of(world)
    done = train(merging, [0])
    child = os.fork()
    if not child:  # as a worker that loads batches
        signal.alarm(60)
        merging.submit(step_of(10, rank))
        assert ranks_of(merging.wait(60)) == [(rank,)]
        assert merging.close() == []
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    done += train(merging, [10]) + merging.close()
    return ranks_of(done)


def test_a_forked_process_merges_nothing_and_disturbs_nothing() -> None:
    assert run(forks, 2, init="env") == [[(0, 1)] * 2] * 2


def destroys(rank: int, world: int) -> Any:
    merging = merging_of(world)
    with hearing() as told:
        done = train(merging, [0])
        dist.barrier()
        dist.destroy_process_group()
        folder = Path(os.environ["HOOKSTATS_RENDEZVOUS"]).parent
        (folder / f"destroyed-{rank}").touch()
        until(lambda: len(list(folder.glob("destroyed-*"))) == world)
        merging.submit(step_of(10, rank))
        done += merging.wait(60)
        merging.close()
    return ranks_of(done), told


@pytest.mark.parametrize("init", ["file", "env"])
def test_torch_distributed_may_be_destroyed_before_merging_ends(init: str) -> None:
    ended = outcomes(destroys, 2, init=init)
    assert [each.code for each in ended] == [0, 0], [each.output for each in ended]
    assert [each.result for each in ended] == [([(0, 1)] * 2, [])] * 2
