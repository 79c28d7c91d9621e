"""Ranks that are late, dead, or measure something else: the others are told, deliver alone, and end well."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hookstats.cluster import protocol
from hookstats.cluster.gloo import default_store
from hookstats.cluster.merging import Merged, Merging
from tests.cluster.sums import (
    Clock,
    Disturbed,
    Step,
    Sums,
    announced,
    counted_collectives,
    submit,
    summed,
    train,
    wanted,
)
from tests.plain import hearing
from tests.ranks import outcomes, run, until

ALL = (0, 1, 2)


def ranks_of(done: list[Merged[Any]]) -> list[tuple[int, ...]]:
    return [each.ranks for each in done]


def trains_while_one_sleeps(
    merging: Merging[Any], sleeper: int, numbers: Sequence[int], lose_patience: Callable[[], list[Merged[Any]]]
) -> list[Merged[Any]]:
    """One rank until the others have these steps, each alone, because they waited no longer for the first of these."""
    store = default_store()
    if merging.rank == sleeper:
        store.wait([f"alone/{rank}" for rank in merging.ranks if rank != sleeper])
        done = train(merging, numbers)
    else:
        done = submit(merging, numbers[:1]) + lose_patience() + merging.wait(60) + train(merging, numbers[1:])
        store.set(f"alone/{merging.rank}", "")
    dist.barrier()
    return done


def sleeps(rank: int, world: int) -> Any:
    """Rank 1, until the others have lost their patience; and it is not the first one that comes to the step 40."""
    merging, clock, store = Merging(range(world), Sums(), fan=2), Clock(), default_store()

    def lose_patience() -> list[Merged[Any]]:
        if rank:
            return []
        until(lambda: announced(merging, 2) == 20)  # for rank 3, too
        return clock.run_out(merging)

    with hearing() as told:
        done = train(merging, [0, 10])
        dist.barrier()
        done += trains_while_one_sleeps(merging, 1, [20, 30], lose_patience)
        if rank == 1:
            store.wait(["waits"])
        done += submit(merging, [40])
        if rank == 0:
            until(lambda: announced(merging, 2) == 40)
            looks = clock.looks
            until(lambda: clock.looks > looks + 2 or not merging._unsettled())
            store.set("waits", "")
        done += merging.wait(60) + train(merging, [50, 60])
        dist.barrier()
        merging.close()
    return ranks_of(done), told


def test_a_rank_asleep_costs_one_warning_and_the_steps_meanwhile_and_is_merged_again_when_it_is_back() -> None:
    for rank, (ranks, told) in enumerate(run(sleeps, 4)):
        everybody = (0, 1, 2, 3)
        assert ranks == [everybody, everybody, (rank,), (rank,), everybody, everybody, everybody]
        assert len(told) == 1
        assert ("timed out waiting for ranks [1]" if rank != 1 else "without this rank's step 20") in told[0]


def first_rank_sleeps(rank: int, world: int) -> Any:
    merging, clock = Merging(range(world), Sums()), Clock()
    with hearing() as told:
        done = train(merging, [0])
        dist.barrier()
        done += trains_while_one_sleeps(merging, 0, [20, 30], lambda: clock.run_out(merging))
        done += train(merging, [40, 50])
        dist.barrier()
        merging.close()
    return ranks_of(done), told


def test_the_rank_that_writes_the_verdicts_can_be_late_too() -> None:
    for rank, (ranks, told) in enumerate(run(first_rank_sleeps, 3)):
        assert ranks == [ALL, (rank,), (rank,), ALL, ALL]
        assert len(told) == 1
        assert "timed out waiting for rank 0 at step 20" in told[0] or "without this rank's step 20" in told[0]


def hangs(rank: int, world: int) -> Any:
    """Rank 2, until the others have given up the collective in which they wait for it."""
    store, clock = default_store(), Clock()

    class Hanging(Sums):
        def pack(self, step: Step, tables: Any) -> Any:
            if rank == 2 and step.number == 20:
                store.set("hangs", "")
                store.wait(["given up/0", "given up/1"])
            return super().pack(step, tables)

    merging = Merging(range(world), Hanging())
    with hearing() as told:
        done = train(merging, [0, 10])
        dist.barrier()
        done += submit(merging, [20])
        if rank != 2:
            store.wait(["hangs"])
            done += clock.run_out(merging)
            store.set(f"given up/{rank}", "")
        done += merging.wait(60)
        dist.barrier()
        done += train(merging, [30, 40])
        merging.close()
    sums = [[part.tolist() for part in each.step] for each in done[-2:]]
    return ranks_of(done), sums, told, merging._epoch


def test_a_rank_that_hangs_where_the_others_merge_breaks_the_groups_and_new_ones_are_made() -> None:
    for rank, (ranks, sums, told, epoch) in enumerate(run(hangs, 3)):
        assert ranks == [ALL, ALL, (rank,), ALL, ALL]
        assert len(told) == 1
        assert "step 20" in told[0]
        assert epoch == 1
        assert sums == [[part.tolist() for part in wanted(number, ALL)] for number in (30, 40)]


def is_killed(rank: int, world: int, in_collective: bool) -> Any:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    store, clock = default_store(), Clock()
    merging = Merging(range(world), Disturbed(20, die if rank == 2 and in_collective else None), fan=2)
    with hearing() as told:
        done = train(merging, [0, 10])
        if rank == 2 and not in_collective:
            die()
        done += submit(merging, [20])
        if rank == 0 and not in_collective:  # in one it is seen at once
            done += clock.run_out(merging)
        done += merging.wait(60)
        if not in_collective:
            done += train(merging, [30, 40, 50])
        store.set(f"done/{rank}", "")
        store.wait([f"done/{each}" for each in (0, 1, 3)])
    return ranks_of(done), told


@pytest.mark.parametrize("in_collective", [False, True])
def test_when_a_rank_is_killed_the_others_go_on_alone_and_end_well(in_collective: bool) -> None:
    ended = outcomes(is_killed, 4, in_collective)
    assert [each.code for each in ended] == [0, 0, -9, 0], [each.output for each in ended]
    for rank in (0, 1, 3):
        ranks, told = ended[rank].result
        assert ranks == [(0, 1, 2, 3)] * 2 + [(rank,)] * (1 if in_collective else 4)
        assert len(told) == 1


def trains_with_the_dead(rank: int, world: int) -> None:
    merging = Merging(range(world), Sums())
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


def measures_otherwise(rank: int, world: int) -> Any:
    found = []
    numbers = {0: range(0, 50, 10), 1: range(0, 50, 20), 2: range(0, 50, 10)}  # cadences
    for fan in (2, 64):
        for order in (ALL, (1, 0, 2), (2, 0, 1)):  # each of them writes the verdicts of somebody
            merging = Merging(range(world), Sums(), fan=fan)
            with hearing() as told:
                done = train(merging, numbers[order[rank]])
                dist.barrier()
                done += merging.close()
            found.append((order, [(each.ranks, _number(each)) for each in done], told))
    return found


def _number(merged: Merged[Any]) -> int:
    """Of a step that was delivered alone."""
    return -1 if len(merged.ranks) > 1 else merged.step.number


def test_of_other_cadences_the_common_steps_are_merged_and_the_others_are_alone_at_once() -> None:
    for rank, found in enumerate(run(measures_otherwise, 3)):
        for order, done, told in found:
            if order[rank] == 1:
                assert done == [(ALL, -1)] * 3
                assert told == []
            else:
                assert done == [(ALL, -1), ((rank,), 10), (ALL, -1), ((rank,), 30), (ALL, -1)]
                assert len(told) == 1
                assert "without step 10" in told[0]
                assert "measured alike (every=)" in told[0]


def differs(rank: int, world: int) -> Any:
    """In what it has to merge, in its grad_scale, in a step that it alone measures; then nothing is different."""
    called = counted_collectives()
    merging, clock = Merging(range(world), Sums(), fan=2), Clock()
    with hearing() as told:
        done: list[Any] = []
        if rank == 1:  # evaluates
            done += submit(merging, [0])
            until(lambda: clock.looks > 3)  # and others are waited for
            done += merging.arrived()
            assert not done
            assert not called
        dist.barrier()
        done += train(merging, [10], table=("one", "two", "one")[rank])
        before = len(called)
        done += train(merging, [20], scale=(None, 2.0, 2.0)[rank])
        assert len(called) == before
        done += train(merging, [30], scale=2.0)
        dist.barrier()
        done += merging.close()
    if rank == 1:
        assert done.pop(0).ranks == (1,)
    merged = [[part.tolist() for part in each.step] for each in done if len(each.ranks) > 1]
    return ranks_of(done), merged, told


def test_other_tables_are_united_and_another_grad_scale_or_an_evaluation_of_one_rank_hangs_nothing() -> None:
    found = run(differs, 3)
    parts = [
        Sums().pack(Step(10, rank, table), [(0, b"one"), (1, b"two")])
        for rank, table in enumerate(("one", "two", "one"))
    ]
    united = [summed(each).tolist() for each in zip(*parts, strict=True)]
    for rank, (ranks, merged, told) in enumerate(found):
        assert ranks == [ALL, (rank,), ALL]
        assert merged == found[0][1]
        assert merged[0][1] == united[1]
        assert merged[1][1] == wanted(30, ALL)[1].tolist()
        assert len(told) == (2 if rank == 1 else 1)
        assert "the grad_scale of rank 0 was None at step 20, that of rank 1 2.0" in told[-1]


def fills_the_store(rank: int, world: int) -> Any:
    store = default_store()
    merging = Merging(range(world), Sums(), fan=2)
    done: list[Any] = []
    sizes = []
    letters = "abcdefghijklmnopqrstuvwxyz"
    for number in range(300):
        table = letters[number // 24] + letters[number % 24] if number < 200 else "one"
        done += train(merging, [number], table=table)
        if number % 50 == 49:
            dist.barrier()
            sizes.append(store.num_keys())
            dist.barrier()
    merging.close()
    return ranks_of(done), sizes


def test_the_store_does_not_grow_with_steps_nor_without_bound_with_tables() -> None:
    for ranks, sizes in run(fills_the_store, 3, init="env"):
        assert ranks == [ALL] * 300
        assert max(sizes) < 90  # two keys for each of 200 tables would be 400
        assert sizes[4] == sizes[5]


def numbers_go_back(rank: int, world: int) -> Any:
    merging = Merging(range(world), Sums())
    done = train(merging, [0, 10, 20, 0, 10, 20])
    merging.close()
    return ranks_of(done)


def test_steps_that_are_counted_from_the_beginning_again_are_merged_again() -> None:
    assert run(numbers_go_back, 2) == [[(0, 1)] * 6] * 2


def leaves(rank: int, world: int, way: str) -> Any:
    """Rank 0, when the others wait for its next step."""
    merging = Merging(range(world), Sums())
    with hearing() as told:
        done = train(merging, [0, 10])
        if rank == 0:
            until(lambda: announced(merging, 1) == announced(merging, 2) == 20)
            if way == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if way == "interrupted":
                raise KeyboardInterrupt
            if way == "closed":
                merging.close()
                dist.barrier()
            return ranks_of(done), told
        for number in range(20, 120, 10):  # and the rank that has the store is no more
            done += train(merging, [number])
        if way == "closed":
            dist.barrier()
        done += merging.close()
    return ranks_of(done), told


@pytest.mark.parametrize(
    ("way", "code"), [("closed", 0), ("ended", 0), ("interrupted", -signal.SIGINT), ("killed", -signal.SIGKILL)]
)
def test_when_the_rank_with_the_store_leaves_first_the_others_are_alone_for_good_with_one_warning(
    way: str, code: int
) -> None:
    ended = outcomes(leaves, 3, way, init="env")
    assert [each.code for each in ended] == [code, 0, 0], [each.output for each in ended]
    for rank in (1, 2):
        ranks, told = ended[rank].result
        assert ranks == [ALL] * 2 + [(rank,)] * 10
        assert len(told) == 1
        assert "rank 0 stopped merging" in told[0] or ("store failed" in told[0] and way != "closed")


class Large(Sums):
    """Steps of which few may wait."""

    def nbytes(self, step: Step) -> int:
        return 64 << 20


def falls_behind(rank: int, world: int, behind: int) -> Any:
    """One rank measures what the other one does not. The first decides at once, others decide a while later."""
    protocol._FULL_PATIENCE = 0.0 if behind else 3600.0
    merging = Merging(range(world), Large())
    with hearing() as told:
        done = train(merging, [0])
        dist.barrier()
        if rank == behind:

            def has_room() -> bool:
                done.extend(merging.arrived())
                return len(merging._slots) < 20

            done += submit(merging, [10])
            until(merging._queue.empty)  # in hand
            for number in range(20, 410, 10):
                until(has_room)  # the others are given up when the queue is full
                done += submit(merging, [number])
            done += merging.close(timeout=0)
        dist.barrier()
        done += merging.close()
    return [_number(each) for each in done], told


@pytest.mark.parametrize("behind", [0, 1])
def test_a_full_queue_ends_the_waiting_and_everything_is_delivered_in_order(behind: int) -> None:
    done, told = run(falls_behind, 2, behind)[behind]
    assert done == [-1, *range(10, 410, 10)]
    assert 1 <= len(told) <= 3
    assert any("steps were waiting to be merged" in text or "too many steps to merge" in text for text in told)


def ends_in_flight(rank: int, world: int, way: str) -> Any:
    """Rank 1 goes on in the collective when the process of rank 0 has ended, however late that is."""
    store = default_store()
    store.set(f"pid/{rank}", str(os.getpid()))
    first = int(store.get("pid/0"))

    def wait_for_first() -> None:
        store.set("in flight", "")
        until(lambda: not Path(f"/proc/{first}").exists())

    merging = Merging(range(world), Disturbed(0, wait_for_first if rank == 1 else None))
    merging.submit(Step(0, rank), 0)
    store.wait(["in flight"])
    if way == "closed" and rank == 0:
        return ranks_of(merging.close(timeout=0))
    if way == "raised" and rank == 0:
        raise RuntimeError("training's own")
    return ranks_of(merging.close(timeout=60)) if rank else None


@pytest.mark.parametrize(("way", "code"), [("closed", 0), ("raised", 1), ("left", 0)])
def test_the_end_of_a_process_does_not_wait_for_a_merge_in_flight_nor_is_it_aborted(way: str, code: int) -> None:
    ended = outcomes(ends_in_flight, 3, way)
    assert [each.code for each in ended] == [code, 0, 0], [each.output for each in ended]
    assert [each.result for each in ended] == [[(0,)] if way == "closed" else None, [(1,)], [(2,)]]


def is_stuck(rank: int, world: int) -> Any:
    """The thread, in a call that nobody can interrupt: as the store's is while the host that keeps it is frozen."""
    thawed = threading.Event()

    class Stuck(Sums):
        def scale(self, step: Step) -> float | None:
            thawed.wait()
            return super().scale(step)

    merging = Merging(range(world), Stuck())
    done = submit(merging, [0, 10]) + merging.close(timeout=0)
    assert merging._thread.is_alive()
    thawed.set()
    return [(each.ranks, _number(each)) for each in done]


def test_steps_that_a_stuck_thread_has_not_merged_are_delivered_when_merging_ends() -> None:
    assert run(is_stuck, 1) == [[((0,), 0), ((0,), 10)]]


def fails(rank: int, world: int) -> Any:
    class Failing(Sums):
        def pack(self, step: Step, tables: Any) -> Any:
            if rank == 1 and step.number >= 10:
                raise ZeroDivisionError("a fault of ours")
            return super().pack(step, tables)

    merging = Merging(range(world), Failing())
    done: list[Any] = []
    with hearing() as told:
        for number in range(0, 70, 10):
            done += train(merging, [number])
            dist.barrier()
        merging.close()
    return ranks_of(done), told


def test_a_rank_that_fails_again_and_again_leaves_and_says_why() -> None:
    for rank, (ranks, told) in enumerate(run(fails, 3)):
        assert ranks == [ALL] + [(rank,)] * 6
        assert any("a fault of ours" in text for text in told) == (rank == 1)
        assert "3 times in a row" in told[-1]


def forks(rank: int, world: int) -> Any:
    merging = Merging(range(world), Sums())
    done = train(merging, [0])
    with merging._stop._cond:  # as the thread may hold it just then
        child = os.fork()
        if not child:  # as a worker that loads batches
            signal.alarm(60)
            merging.submit(Step(10, rank), 10)
            assert ranks_of(merging.wait(60)) == [(rank,)]
            assert merging.close() == []
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    done += train(merging, [10]) + merging.close()
    return ranks_of(done)


def test_a_forked_process_merges_nothing_and_disturbs_nothing() -> None:
    assert run(forks, 2, init="env") == [[(0, 1)] * 2] * 2


def destroys(rank: int, world: int) -> Any:
    merging = Merging(range(world), Sums())
    with hearing() as told:
        done = train(merging, [0])
        dist.barrier()
        dist.destroy_process_group()
        folder = Path(os.environ["HOOKSTATS_RENDEZVOUS"]).parent
        (folder / f"destroyed-{rank}").touch()
        until(lambda: len(list(folder.glob("destroyed-*"))) == world)
        done += submit(merging, [10]) + merging.close(timeout=3600)
    return ranks_of(done), told


@pytest.mark.parametrize("init", ["file", "env"])
def test_torch_distributed_may_be_destroyed_before_merging_ends(init: str) -> None:
    ended = outcomes(destroys, 2, init=init)
    assert [each.code for each in ended] == [0, 0], [each.output for each in ended]
    for rank, (ranks, told) in enumerate(each.result for each in ended):
        assert ranks == [(0, 1), (0, 1) if init == "file" else (rank,)]
        assert len(told) == (0 if init == "file" else 1)


def test_another_torch_without_a_store_to_give_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist.distributed_c10d, "_get_default_store")
    with pytest.raises(RuntimeError, match=rf"_get_default_store, .* got torch {torch.__version__.split('+')[0]}"):
        default_store()
