"""Steps of ranks that are merged beside training; ranks that are late, dead, or measure something else."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hookstats import ExponentBins, Site
from hookstats.cluster import merging as room
from hookstats.cluster.exchange import Exchange, default_store
from hookstats.cluster.merging import LocalStep, Merging
from hookstats.cluster.union import Tables
from hookstats.numbers.fields import FIELDS, Bins
from hookstats.numbers.frame import StepFrame
from tests.cluster.steps import BUDGET, Here, job_of, measured
from tests.frames import snapshot_of
from tests.plain import hearing
from tests.ranks import outcomes, run, until

ALL = (0, 1, 2)
FEW = 32  # steps that may wait: merging 512 of them takes seconds
A = Site("a", "output")


def merging_of(world: int, timeout: float = 600.0, fan: int = 64, spread: bool = False) -> Merging:
    return Merging(range(world), Tables(BUDGET, spread), timeout, fan)


def step_of(number: int, rank: int, site: Site = A, **fields: Any) -> LocalStep:
    """Of one site, whose only value says which rank and step it is."""
    values = torch.full((1, 1), 1000.0 * rank + number, dtype=torch.float64)
    return LocalStep(measured({site: Here(values)}, step=number, **fields))


def submit(merging: Merging, numbers: Iterable[int], **fields: Any) -> list[StepFrame]:
    """A training that measures these steps, and waits for none."""
    for number in numbers:
        merging.submit(step_of(number, dist.get_rank(), **fields))
    return merging.arrived()


def train(merging: Merging, numbers: Iterable[int], **fields: Any) -> list[StepFrame]:
    """A training that measures these steps, and in the end waits for all of them."""
    return submit(merging, numbers, **fields) + merging.wait(60)


def ranks_of(done: list[StepFrame]) -> list[tuple[int, ...]]:
    """Each with the numbers of its own step: those of other steps or ranks are not among them."""
    for each in done:
        for stats in snapshot_of(each).values():
            if stats.calls:
                assert stats.total.count == len(each.ranks.present)
                want = each.step + 1000.0 * np.mean(each.ranks.present)
                assert abs(stats.total.mean - want) < 1e-9, (each.step, each.ranks)
    return [each.ranks.present for each in done]


def sites_of(rank: int, step: int) -> dict[Site, Here]:
    random = torch.Generator().manual_seed(100 * rank + step)
    sites = {
        A: Here(torch.randn(6, 20, generator=random, dtype=torch.float64) + 1e3 * rank),
        Site("a", "grad_output"): Here(torch.randn(6, 20, generator=random, dtype=torch.float64)),
    }
    if rank == 1:
        sites[Site("b", "output")] = Here(torch.randn(3, 5, generator=random, dtype=torch.float64))
    return sites


def merges_real_steps(rank: int, world: int, fan: int) -> Any:
    merging = merging_of(world, fan=fan, spread=True)
    for step in (0, 1):
        made = measured(sites_of(rank, step), ExponentBins(), step=step, scalars={"loss": float(rank)})
        merging.submit(LocalStep(made))
    done = merging.wait(60)
    merging.close()
    return [(each.ranks.present, each.step, each.scalars, each.memory, list(each.sites)) for each in done]


@pytest.mark.parametrize("fan", [2, 64])
def test_the_steps_of_monitors_are_what_merging_without_communication_gives(fan: int) -> None:
    found = run(merges_real_steps, 4, fan)
    for step in (0, 1):
        want = job_of([sites_of(rank, step) for rank in range(4)], ExponentBins(), spread=True).merged()
        for each in found:
            ranks, number, scalars, blocks, sites = each[step]
            assert (ranks, number, scalars) == ((0, 1, 2, 3), step, {"loss": 1.5})
            assert sites == list(want.sites)
            assert [block.tobytes() for block in blocks] == [block.tobytes() for block in found[0][step][3]]
            for begin, channels, counters in want.sites.places[[1, 2, 5]].T.tolist():
                size = len(FIELDS) * channels
                mine, theirs = (block[begin : begin + size + counters] for block in (blocks[0], want.memory[0]))
                np.testing.assert_allclose(mine[:size].view(float), theirs[:size].view(float), rtol=1e-12, atol=1e-9)
                np.testing.assert_array_equal(mine[size:], theirs[size:])


def all_reduces(rank: int, world: int) -> list[int]:
    """Of a step of one site, then of 500, after the first of each."""
    counts = []
    for sites in (1, 500):
        merging, made = merging_of(world), []
        for number in range(2):
            values = {Site(str(i), "output"): Here(torch.full((1, 1), float(i))) for i in range(sites)}
            made.append(LocalStep(measured(values, step=number)))
        merging.submit(made[0])
        merging.wait(60)
        called, reduce = [0], Exchange._reduce

        def counted(self: Any, *args: Any, of: Any = reduce, called: list[int] = called) -> Any:
            called[0] += 1
            return of(self, *args)

        Exchange._reduce = counted  # type: ignore[method-assign]
        merging.submit(made[1])
        merging.wait(60)
        Exchange._reduce = reduce  # type: ignore[method-assign]
        counts.append(called[0])
        merging.close()
    return counts


def test_the_number_of_all_reduces_does_not_depend_on_the_number_of_sites() -> None:
    # Which step it is; sums, and extremes at once; second moments; who has the extremes.
    assert run(all_reduces, 2) == [[4, 4]] * 2


def comes_late(rank: int, world: int, steps: int) -> Any:
    """Rank 1 begins when the others have measured all their steps, which cost them no time."""
    merging, store = merging_of(world), default_store()
    with hearing() as told:
        if rank == 1:
            store.wait(["ahead/0", "ahead/2"])
        done = submit(merging, range(steps))
        store.set(f"ahead/{rank}", "")
        done += merging.wait(60) + train(merging, [steps])
        dist.barrier()
        merging.close()
    return ranks_of(done), told


def comes_late_with_less_room(rank: int, world: int) -> Any:
    room._MANY = FEW
    return comes_late(rank, world, 2 * FEW)


def test_a_rank_that_is_late_is_waited_for_beside_training() -> None:
    assert run(comes_late, 3, 100) == [([ALL] * 101, [])] * 3


def test_of_more_steps_than_may_wait_the_oldest_are_each_ranks_own_and_all_go_on_together() -> None:
    for rank, (ranks, told) in enumerate(run(comes_late_with_less_room, 3)):
        assert len(ranks) == 2 * FEW + 1
        assert set(ranks) == {(rank,), ALL}
        assert ranks[-1] == ALL
        assert ranks.count((rank,)) >= FEW - 2
        assert 1 <= len(told) <= 2


def pauses_at_random(rank: int, world: int) -> Any:
    merging, chance = merging_of(world), np.random.default_rng(rank)
    done = []
    with hearing() as told:
        for number in range(100):
            time.sleep(chance.choice([0] * 30 + [0.05]))
            done += submit(merging, [number])
        done += merging.wait(60)
        dist.barrier()
        merging.close()
    return ranks_of(done), told


def test_ranks_that_are_not_in_lockstep_merge_every_step_and_mix_none() -> None:
    assert run(pauses_at_random, 3) == [([ALL] * 100, [])] * 3


def is_killed(rank: int, world: int, fan: int) -> Any:
    merging, store = merging_of(world, fan=fan), default_store()
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


@pytest.mark.parametrize("fan", [2, 64])
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
    merging, store = merging_of(world), default_store()
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


def measures_otherwise(rank: int, world: int) -> Any:
    found = []
    cadences = {0: range(0, 50, 10), 1: range(0, 50, 20), 2: range(0, 50, 10)}
    for order in (ALL, (1, 0, 2)):
        merging = merging_of(world)
        with hearing() as told:
            done = train(merging, cadences[order[rank]])
            dist.barrier()
            done += merging.close()
        found.append((order, list(zip((each.step for each in done), ranks_of(done), strict=True)), told))
    return found


def test_of_other_cadences_the_common_steps_are_merged_and_the_others_are_alone() -> None:
    for rank, found in enumerate(run(measures_otherwise, 3)):
        for order, done, told in found:
            if order[rank] == 1:
                assert done == [(0, ALL), (20, ALL), (40, ALL)]
                assert told == []
            else:
                assert done == [(0, ALL), (10, (rank,)), (20, ALL), (30, (rank,)), (40, ALL)]
                assert len(told) == 1
                assert "another rank is at step 20 without step 10: measured alike (every=)" in told[0]


def differs(rank: int, world: int) -> Any:
    """In what it has to merge, and in its grad_scale; then nothing is different."""
    merging, site = merging_of(world), Site("b", "output")
    with hearing() as told:
        done = train(merging, [0])
        done += train(merging, [10], site=site if rank == 1 else A)
        for scale in ((None, 2.0, 2.0)[rank], 2.0):
            done += train(merging, [20], grad_scale=scale)
        done += train(merging, [30])
        dist.barrier()
        merging.close()
    two = {each.name: stats.total.count for each, stats in snapshot_of(done[1]).items()}
    return [each.ranks.present for each in done], two, told


def test_other_sites_are_united_and_with_another_grad_scale_each_rank_is_alone_with_that_step() -> None:
    for rank, (ranks, two, told) in enumerate(run(differs, 3)):
        assert ranks == [ALL, ALL, (rank,), ALL, ALL]
        assert two == {"a": 2.0, "b": 1.0}
        assert len(told) == 1
        assert "the grad_scale is not the same on all ranks at step 20" in told[0]


def alternates(rank: int, world: int) -> Any:
    """Whole states every third step, else totals alone, as channels_every has it; then one rank has another site."""
    merging = merging_of(world)
    texts, gather = [0], Exchange.gather_texts

    def counted(self: Any, *args: Any) -> Any:
        texts[0] += 1
        return gather(self, *args)

    Exchange.gather_texts = counted  # type: ignore[method-assign]
    rows: dict[bool, StepFrame] = {}
    counts = []
    for number in range(9):
        whole = number % 3 == 0
        bins: Bins | None = ExponentBins() if whole else None
        made = measured({A: Here(torch.ones(2, 3), keeps=whole)}, bins, step=number)
        made.sites = rows.setdefault(whole, made).sites
        merging.submit(LocalStep(made))
        (done,) = merging.wait(60)
        counts.append((len(done.ranks.present), snapshot_of(done)[A].total.count, texts[0]))
    merging.close()
    return counts


def test_tables_cross_the_network_once_for_each_kind_of_step() -> None:
    assert run(alternates, 2) == [[(2, 12.0, 1)] + [(2, 12.0, 2)] * 8] * 2


def numbers_go_back(rank: int, world: int) -> Any:
    merging = merging_of(world)
    done = train(merging, [0, 10, 20, 0, 10, 20])
    merging.close()
    return ranks_of(done)


def test_steps_that_are_counted_from_the_beginning_again_are_merged_again() -> None:
    assert run(numbers_go_back, 2) == [[(0, 1)] * 6] * 2


def begins_anew(rank: int, world: int) -> Any:
    """Rank 0 has not measured the last step before."""
    merging = merging_of(world)
    done = train(merging, [0, 10, 0, 10] if rank == 0 else [0, 10, 20, 0, 10])
    dist.barrier()
    merging.close()
    return list(zip((each.step for each in done), ranks_of(done), strict=True))


def test_steps_that_begin_anew_are_later_than_all_before() -> None:
    first, second = run(begins_anew, 2)
    assert first == [(0, (0, 1)), (10, (0, 1)), (0, (0, 1)), (10, (0, 1))]
    assert second == [*first[:2], (20, (1,)), *first[2:]]


def repeats(rank: int, world: int) -> Any:
    """All go back to step 3, which rank 1 had not measured before; to it numbers have not begun anew."""
    merging = merging_of(world)
    done = []
    for number in [0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 9] if rank == 0 else [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]:
        done += submit(merging, [number])
    done += merging.wait(60)
    dist.barrier()
    merging.close()
    return ranks_of(done)


def test_ranks_that_count_attempts_otherwise_come_together_again() -> None:
    for ranks in run(repeats, 2):
        assert ranks[:3] == [(0, 1)] * 3
        assert ranks[-2:] == [(0, 1)] * 2


def leaves(rank: int, world: int, way: str) -> Any:
    """Rank 0, when the others wait for its next step."""
    merging, store = merging_of(world), default_store()
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


def fails(rank: int, world: int, where: str) -> Any:
    """Rank 1, in step 20 alone; before the ranks have agreed on it, or when the others count on it."""
    merging = merging_of(world)

    def fault(*args: Any) -> Any:
        raise ZeroDivisionError("a fault of ours")

    with hearing() as told:
        done = train(merging, [0, 10])
        if rank == 1 and where == "before":
            merging.submit(step_of(20, rank)._replace(placing=fault))
        else:
            if rank == 1:
                part = merging._packers[1]._part[1]
                part.first = fault  # type: ignore[method-assign]
                merging._packers[1].part = lambda *args: part  # type: ignore[method-assign]
            submit(merging, [20])
        done += merging.wait(60)
        if rank == 1 and where == "after":
            merging._packers.clear()
            merging._known.clear()
        done += train(merging, [30])
        dist.barrier()
        merging.close()
    return ranks_of(done), told


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_step_that_one_rank_cannot_bring_is_each_ranks_own_and_the_next_is_merged(where: str) -> None:
    for rank, (ranks, told) in enumerate(run(fails, 3, where)):
        assert ranks == [ALL, ALL, (rank,), ALL]
        assert len(told) == 1
        assert ("step 20: ZeroDivisionError('a fault of ours')" in told[0]) == (rank == 1)
        assert rank == 1 or "step 20: another rank could not bring its part" in told[0]


def fails_in_the_middle(rank: int, world: int) -> Any:
    """Rank 1, when all have added up what they have: nobody waits for it until the time is over."""
    merging = merging_of(world)
    with hearing() as told:
        done = train(merging, [0, 10])
        if rank == 1:
            merging._tell_of = None  # type: ignore[assignment, method-assign]
        done += train(merging, [20, 30])
        dist.barrier()
        merging.close()
    return ranks_of(done), told


def test_a_fault_of_ours_in_the_middle_of_a_step_leaves_everybody_alone() -> None:
    for rank, (ranks, told) in enumerate(run(fails_in_the_middle, 3)):
        assert ranks[:2] == [ALL, ALL]
        assert ranks[3] == (rank,)
        assert len(told) == 1
        assert "nothing is merged from now on" in told[0]


def ends_in_flight(rank: int, world: int, way: str) -> Any:
    """Rank 0 ends while it waits for rank 1, which goes on when its process is no more."""
    store = default_store()
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
