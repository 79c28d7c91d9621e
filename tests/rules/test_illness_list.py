"""The collection of trainings: each can be made, names what is there, and is in one half."""

from __future__ import annotations

import pytest
import torch

from benchmarks.illnesses import HEALTHY, ILL, Training, more
from benchmarks.illnesses.training import healthy
from hookstats.rules import defaults


@pytest.mark.parametrize("each", ILL.values(), ids=lambda each: each.key)
def test_an_illness_trains_two_steps_and_has_the_places_that_are_expected(each: Training) -> None:
    setup = each.make()
    names = {
        name for kind in ("modules", "parameters", "buffers") for name, _ in getattr(setup.model, f"named_{kind}")()
    }
    assert set(each.where or ()) <= names
    for step in range(2):
        assert isinstance(setup.step(step), torch.Tensor)


def test_rules_that_would_be_right_exist() -> None:
    known = {each.name for each in defaults()}
    wanted = set().union(*(each.rules for each in ILL.values()))
    assert wanted <= known, f"no rule has these names: {sorted(wanted - known)}"


def test_no_training_is_in_both_halves_or_registered_twice() -> None:
    halves = [{each.name for each in ILL.values() if each.is_unseen == half} for half in (False, True)]
    assert not halves[0] & halves[1]
    assert {each.name for each in ILL.values() if each.change.__module__ == more.__name__} <= halves[1]
    assert {each.is_unseen for each in HEALTHY.values()} == {False, True}
    with pytest.raises(ValueError, match="expected a new name for a training, got mlp_adam again"):
        healthy("digits")(HEALTHY["mlp_adam"].change)
