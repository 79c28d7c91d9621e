"""The identities that a measured step reads: all of them at first, later a part in turns."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hookstats
from hookstats import Snapshot
from hookstats.identities.measuring import WHOLE_STEPS
from hookstats.results import Identities
from hookstats.rules import identity, judge
from tests import ranks
from tests.identities.models import Llama, ids, loss_of
from tests.identities.trainings import times
from tests.plain import Operators
from tests.rules.test_judging import Found, Recorder

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCKS, PARTS = 4, 2
ROUND = 2 * PARTS  # measured steps in which all parts come
STEPS = WHOLE_STEPS + 2 * ROUND
Fault = Any


@cache
def proved(blocks: int = BLOCKS) -> Identities:
    torch.manual_seed(0)
    model = Llama(blocks)
    return hookstats.find_identities(model, lambda: model(ids()))


def train(
    fault: Fault = lambda step, model: None, steps: int = STEPS, empty: int = 1, blocks: int = BLOCKS, **attached: Any
) -> list[tuple[Snapshot, int]]:
    """Return each step's snapshot, and how many launches of ours read sums in it.

    fault: what is done after a backward. empty: nothing runs but in every so-many-th step.
    """
    torch.manual_seed(1)
    model: Any = Llama(blocks)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    taken: list[tuple[Snapshot, int]] = []
    options = hookstats.Options(identities=proved(blocks), strict=True)
    with hookstats.attach(model, every=1, options=options, **attached) as monitor:
        for step in range(steps):
            optimizer.zero_grad()
            with Operators() as ran:
                if step % empty == 0:
                    loss_of(model, ids(2 + step)).backward()
                    fault(step, model)
                    optimizer.step()
            snapshot = monitor.step()
            assert snapshot is not None
            taken.append((snapshot, sum("joint_sums" in name for name in ran.names)))
    return taken


def read_in(snapshot: Snapshot) -> set[str]:
    """Return the numbers of the identities of which sums were read."""
    return {site.tensor.split(".")[1] for site in snapshot.order if site.tensor.startswith("identity.")}


def test_all_are_read_at_first_and_then_in_turns() -> None:
    taken = train()
    every = set(map(str, range(len(proved()))))
    for snapshot, _ in taken[:WHOLE_STEPS]:
        assert read_in(snapshot) == every
    later = taken[WHOLE_STEPS:]
    parts = {frozenset(read_in(snapshot)) for snapshot, _ in later}
    assert len(parts) == PARTS
    assert sum(map(len, parts)) == len(set[str]().union(*parts)) == len(every)
    for begin in range(len(later) - ROUND + 1):
        assert set[str]().union(*(read_in(snapshot) for snapshot, _ in later[begin : begin + ROUND])) == every
    assert all(launches < 0.7 * taken[0][1] for _, launches in later)  # modules of the others' identities are not read
    assert judge([snapshot for snapshot, _ in taken], rules=[identity]) == []


@pytest.mark.parametrize("name", ["layers.0.attention.q_proj.weight", f"layers.{BLOCKS - 1}.mlp.up_proj.weight"])
def test_a_fault_that_begins_later_is_found_within_two_of_its_turns(name: str) -> None:
    begin = WHOLE_STEPS + 1
    first, *_ = judge([snapshot for snapshot, _ in train(times(name, 1.01, begin))], rules=[identity])
    assert first.severity == "critical"
    assert first.step is not None
    assert begin <= first.step < begin + 2 * ROUND
    assert name in str(first)


@pytest.mark.parametrize("part", ["norm1.weight", "q_proj.weight"])
def test_a_fault_of_all_layers_that_begins_later_is_told_of_each(part: str) -> None:
    """It breaks one kind of identity in all layers, which are less than half of all."""

    def fault(step: int, model: nn.Module) -> None:
        for name, each in model.named_parameters():
            if name.endswith(part) and step >= WHOLE_STEPS:
                assert each.grad is not None
                each.grad.mul_(2)

    found = judge([snapshot for snapshot, _ in train(fault)], rules=[identity])
    assert all(f"layers.{layer}." in " ".join(map(str, found)) for layer in range(BLOCKS))
    assert not any("changed after backward" in str(each) for each in found)


def test_most_of_a_turn_are_not_most_of_all() -> None:
    """Three blocks have two turns, and the second one is the block in the middle."""

    def fault(step: int, model: nn.Module) -> None:
        for number, (name, each) in enumerate(model.named_parameters()):
            if name.startswith("layers.1.") and step >= WHOLE_STEPS:
                assert each.grad is not None
                each.grad.mul_(2 + number)

    taken = [snapshot for snapshot, _ in train(fault, blocks=3)]
    assert min(len(read_in(snapshot)) for snapshot in taken) < len(proved(3)) / 2
    found = judge(taken, rules=[identity])
    assert found
    assert not any("changed after backward" in str(each) for each in found)


@pytest.mark.parametrize("empty", [2, 4])
def test_trainings_that_alternate_get_all_parts_in_time(empty: int) -> None:
    taken = train(steps=WHOLE_STEPS + empty * 2 * ROUND, empty=empty)
    read = set[str]().union(*(read_in(snapshot) for snapshot, _ in taken[WHOLE_STEPS:]))
    assert len(read) == len(proved())


def test_all_are_read_again_after_a_finding() -> None:
    finds = WHOLE_STEPS + 3
    recorder = Recorder(lambda step: [Found("warning")] if step == finds else [])
    taken = [len(read_in(snapshot)) for snapshot, _ in train(steps=finds + WHOLE_STEPS + 4, sinks=recorder)]
    few, every = len(proved()) * 2 // 3, len(proved())
    assert max(taken[WHOLE_STEPS : finds + 1]) < few
    assert taken[finds + 1 : finds + WHOLE_STEPS + 1] == [every] * WHOLE_STEPS
    assert taken[-1] < few


def trained(rank: int, world: int, found: Identities) -> list[int]:
    model = Llama(BLOCKS)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    options = hookstats.Options(identities=found, strict=True)
    with hookstats.attach(model, every=1, process_group=dist.group.WORLD, options=options) as monitor:
        taken = []
        for step in range(WHOLE_STEPS + 2):
            loss_of(model, ids(2 + step)).backward()
            optimizer.step()
            taken.append(monitor.step())
    return [len(read_in(each)) for each in [*taken, *monitor.detach()] if each is not None]


def test_ranks_whose_numbers_are_merged_read_all() -> None:
    first, _ = ranks.run(trained, 2, proved())
    assert first == [len(proved())] * (WHOLE_STEPS + 2)


def test_gradients_that_are_all_changed_are_one_finding_in_each_turn_too() -> None:
    def clip(step: int, model: nn.Module) -> None:
        for each in model.parameters():
            nn.utils.clip_grad_norm_([each], 1e-3)

    found = judge([snapshot for snapshot, _ in train(clip)], rules=[identity])
    assert len(found) == 1
    assert "changed after backward" in str(found[0])
