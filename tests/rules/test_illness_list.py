"""The benchmark of diagnosis: its trainings can be made, and its halves do not overlap."""

from __future__ import annotations

import pytest
import torch

from benchmarks.illnesses import ill, more
from benchmarks.illnesses.healthy import HEALTHY
from benchmarks.illnesses.more_healthy import MORE
from benchmarks.illnesses.training import ILL, Illness, seeded
from hookstats.rules import defaults


@pytest.mark.parametrize("each", ILL, ids=lambda each: f"{each.name}-{each.kind}")
def test_an_illness_trains_two_steps(each: Illness) -> None:
    seeded()
    setup = each.make()
    setup.prepare()
    for step in range(2):
        assert isinstance(setup.step(step), torch.Tensor)


def test_rules_that_would_be_right_exist() -> None:
    known = {each.name for each in defaults()}
    wanted = set().union(*(each.rules for each in ILL))
    assert wanted <= known, f"no rule has these names: {sorted(wanted - known)}"


def test_a_place_that_is_expected_is_one_of_the_model() -> None:
    for each in ILL:
        setup = each.make()
        names = dict(setup.model.named_modules()) | dict(setup.model.named_parameters())
        names |= dict(setup.model.named_buffers())
        for place in each.where or ():
            assert place in names, f"{each.name} on {each.kind}: the model has no {place!r}"


def test_no_training_is_in_both_halves() -> None:
    halves = [{each.name for each in ILL if each.is_unseen == half} for half in (False, True)]
    assert not halves[0] & halves[1]
    assert len({(each.name, each.kind) for each in ILL}) == len(ILL)
    assert {each.name for each in ILL if each.breaks.__module__ == more.__name__} <= halves[1]
    assert any(each.breaks.__module__ == ill.__name__ for each in ILL)
    assert set(HEALTHY) > MORE
