"""The identities that a measured step reads: all of them at first, later a part in turns."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats import Snapshot
from hookstats.identities.measuring import WHOLE_STEPS
from hookstats.results import Identities
from hookstats.rules import identity, judge
from tests.identities.models import Llama, ids, loss_of
from tests.plain import Operators

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCKS, PARTS = 4, 2
STEPS = WHOLE_STEPS + 3 * PARTS
Fault = Any


@cache
def proved() -> Identities:
    torch.manual_seed(0)
    model = Llama(BLOCKS)
    return hookstats.find_identities(model, lambda: model(ids()))


def train(fault: Fault = lambda step, model: None) -> list[tuple[Snapshot, int]]:
    """Return each step's snapshot, and how many launches of ours read sums in it."""
    torch.manual_seed(1)
    model: Any = Llama(BLOCKS)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    taken: list[tuple[Snapshot, int]] = []
    options = hookstats.Options(identities=proved(), strict=True)
    with hookstats.attach(model, every=1, options=options) as monitor:
        for step in range(STEPS):
            optimizer.zero_grad()
            with Operators() as ran:
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
    for (one, first), (other, second) in zip(taken[WHOLE_STEPS::PARTS], taken[WHOLE_STEPS + 1 :: PARTS], strict=True):
        assert not read_in(one) & read_in(other)
        assert read_in(one) | read_in(other) == every
        assert first + second < 0.8 * PARTS * taken[0][1]  # modules of the others' identities are not read
    assert judge([snapshot for snapshot, _ in taken], rules=[identity]) == []


@pytest.mark.parametrize("name", ["layers.0.attention.q_proj.weight", f"layers.{BLOCKS - 1}.mlp.up_proj.weight"])
def test_a_fault_that_begins_later_is_found_within_two_of_its_turns(name: str) -> None:
    begin = WHOLE_STEPS + 1

    def fault(step: int, model: nn.Module) -> None:
        if step >= begin:
            gradient = model.get_parameter(name).grad
            assert gradient is not None
            gradient.mul_(1.01)

    first, *_ = judge([snapshot for snapshot, _ in train(fault)], rules=[identity])
    assert first.severity == "critical"
    assert first.step is not None
    assert begin <= first.step < begin + 2 * PARTS
    assert name in str(first)


def test_gradients_that_are_all_changed_are_one_finding_in_each_turn_too() -> None:
    def clip(step: int, model: nn.Module) -> None:
        for each in model.parameters():
            nn.utils.clip_grad_norm_([each], 1e-3)

    found = judge([snapshot for snapshot, _ in train(clip)], rules=[identity])
    assert len(found) == 1
    assert "changed after backward" in str(found[0])
