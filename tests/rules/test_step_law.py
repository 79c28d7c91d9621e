"""Tests of the step law: a parameter is the same after a step and at the next, else something else has written it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hookstats.rules import Finding, judge, outside_write
from tests.rules.outside import TENSORS, snapshots
from tests.rules.trainings import train


def findings(*given: Any, **options: Any) -> list[Finding]:
    return judge(snapshots(*given, **options), rules=[outside_write])


def nothing(step: int, model: nn.Module) -> None:
    pass


def evaluated(step: int, model: nn.Module) -> None:
    """With other weights, which are put back."""
    kept = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
        model.eval()
        model(torch.ones(3, 8, dtype=next(model.parameters()).dtype))
        model.train()
    model.load_state_dict(kept)


@pytest.mark.parametrize("between", [nothing, evaluated])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_that_nothing_else_writes_is_silent(
    between: Callable[[int, nn.Module], None], every: int, dtype: torch.dtype
) -> None:
    taken = snapshots(between, every=every, dtype=dtype)
    assert judge(taken, rules=[outside_write]) == []
    assert {each[name, "update_sample"].calls for each in taken for name in ("0.weight", "2.bias")} == {1}
    for snapshot in taken[1:]:
        sites = [site for site in snapshot.order if site.tensor == "outside_update"]
        assert len(sites) == 4
        assert {snapshot[site].total.abs_max for site in sites} == {0.0}
        assert snapshot["0.weight", "outside_update"].total.count == 8 * 32


@pytest.mark.parametrize("every", [1, 3])
def test_averaged_weights_that_stay_are_found_once_with_the_place_and_the_step(every: int) -> None:
    def put_in(step: int, model: nn.Module) -> None:
        if step == 12:
            with torch.no_grad():
                model[2].weight.mul_(0.75)

    (finding,) = findings(put_in, every=every)
    assert (finding.severity, finding.site.name) == ("warning", "2.weight")
    assert finding.value == pytest.approx(1 / 3, rel=0.02)  # of what it is when it is told
    assert (finding.step, finding.since) == (12 + every, 12)
    assert "changed the parameter 2.weight by 33." in finding.sentence
    assert "% of its rms between its step 12 and the next one." in finding.sentence


def test_what_is_written_where_no_step_is_measured_before_or_after_is_not_looked_at() -> None:
    def put_in(step: int, model: nn.Module) -> None:
        if step == 13:
            with torch.no_grad():
                model[2].weight.mul_(0.75)

    assert findings(put_in, every=3) == []


def test_a_checkpoint_and_a_second_writer_are_found() -> None:
    (finding,) = findings()
    assert finding.step == 12
    assert ", and 3 others," in finding.sentence

    def second(step: int, model: nn.Module) -> None:
        if step > 15:
            with torch.no_grad():
                model[0].bias.add_(1e-3)

    found = findings(second)
    assert [(each.site.name, each.severity) for each in found][:1] == [("0.bias", "warning")]


def test_what_is_written_after_every_step_is_a_note_from_the_fourth_time_on() -> None:
    def clamp(step: int, model: nn.Module) -> None:
        with torch.no_grad():
            model[0].weight.clamp_(-0.2, 0.2)

    found = findings(clamp)
    assert {each.severity for each in found if each.step > 3} <= {"note"}
    assert (found[0].step, found[0].since) == (1, 0)


def test_two_optimizers_of_the_same_parameters_are_none_that_write_outside() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    both = [torch.optim.SGD(model.parameters(), 0.1) for _ in range(2)]
    taken = train(model, lambda step: model(torch.randn(3, 4)).square().mean(), both, 8, tensors=TENSORS, every=2)
    assert judge(taken, rules=[outside_write]) == []
    assert taken[-1]["weight", "outside_update"].total.count > 0


def test_parameters_of_several_optimizers_are_all_looked_at() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in model]

    def write(step: int) -> None:
        if step == 5:
            with torch.no_grad():
                model[1].weight.add_(1)

    taken = train(
        model, lambda step: model(torch.randn(3, 4)).square().mean(), optimizers, 8, write, tensors=TENSORS, every=2
    )
    (finding,) = judge(taken, rules=[outside_write])
    assert (finding.site.name, finding.step) == ("1.weight", 6)
