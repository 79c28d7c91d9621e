"""Steps of ranks that are merged beside training; ranks that are late, or measure something else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hookstats import ExponentBins, Site
from hookstats.cluster import exchange
from hookstats.cluster import merging as room
from hookstats.cluster.exchange import Exchange, find_default_store
from hookstats.numbers.fields import Bins
from hookstats.numbers.frame import StepFrame
from tests.cluster.merging import ALL, A, merging_of, ranks_of, submit, train
from tests.cluster.steps import Here, job_of, measured
from tests.frames import snapshot_of
from tests.plain import hearing
from tests.ranks import run

FEW = 32  # steps that may wait: merging 512 of them takes seconds


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
    exchange.FAN = fan
    merging = merging_of(world, spread=True)
    for step in (0, 1):
        made = measured(sites_of(rank, step), ExponentBins(), step=step, scalars={"loss": float(rank)})
        merging.submit(made)
    done = merging.wait(60)
    merging.close()
    return [(each.ranks.present, each.step, each.scalars, *numbers_of(each), list(each.sites)) for each in done]


def numbers_of(frame: StepFrame) -> tuple[list[Any], list[Any]]:
    n = range(len(frame.sites))
    return [frame.state(i) for i in n], [frame.histogram(i) for i in n]


@pytest.mark.parametrize("fan", [2, 8])
def test_the_steps_of_monitors_are_what_merging_without_communication_gives(fan: int) -> None:
    found = run(merges_real_steps, 4, fan)
    for step in (0, 1):
        want = job_of([sites_of(rank, step) for rank in range(4)], ExponentBins(), spread=True).merged()
        for each in found:
            ranks, number, scalars, states, histograms, sites = each[step]
            assert (ranks, number, scalars) == ((0, 1, 2, 3), step, {"loss": 1.5})
            assert sites == list(want.sites)
            assert [state.tobytes() for state in states] == [state.tobytes() for state in found[0][step][3]]
            for mine, theirs in zip(states, numbers_of(want)[0], strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-9)
            for mine, theirs in zip(histograms, numbers_of(want)[1], strict=True):
                np.testing.assert_array_equal(mine, theirs)


def all_reduces(rank: int, world: int) -> list[int]:
    """Count the all-reduces of a step with one site, then with 500, after the first of each."""
    counts = []
    for sites in (1, 500):
        merging, made = merging_of(world), []
        for number in range(2):
            values = {Site(str(i), "output"): Here(torch.full((1, 1), float(i))) for i in range(sites)}
            made.append(measured(values, step=number))
        merging.submit(made[0])
        merging.wait(60)
        called, reduce = [0], Exchange.reduce

        def counted(self: Any, *args: Any, of: Any = reduce, called: list[int] = called) -> Any:
            called[0] += 1
            return of(self, *args)

        Exchange.reduce = counted  # type: ignore[method-assign]
        merging.submit(made[1])
        merging.wait(60)
        Exchange.reduce = reduce  # type: ignore[method-assign]
        counts.append(called[0])
        merging.close()
    return counts


def test_the_number_of_all_reduces_does_not_depend_on_the_number_of_sites() -> None:
    assert run(all_reduces, 2) == [[2, 2]] * 2  # which step it is, and the step


def comes_late(rank: int, world: int, steps: int) -> Any:
    """Rank 1 begins when the others have measured all their steps, which cost them no time."""
    merging, store = merging_of(world), find_default_store()
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
        merging.submit(made)
        (done,) = merging.wait(60)
        counts.append((len(done.ranks.present), snapshot_of(done)[A].total.count, texts[0]))
    merging.close()
    return counts


def test_tables_cross_the_network_once_for_each_kind_of_step() -> None:
    assert run(alternates, 2) == [[(2, 12.0, 1)] + [(2, 12.0, 2)] * 8] * 2


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
