"""Tests of NaN's reported origin, as far as it was measured: the data, the model, the loss or between."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.illnesses import thinned
from hookstats import Site
from hookstats.rules import Finding, judge, nonfinite
from tests.models import THREE_KINDS
from tests.rules.test_guards import step_of
from tests.rules.trainings import train


def trained(
    batch_of: Callable[[int], torch.Tensor],
    before: Callable[[int, nn.Sequential], object] = lambda step, model: None,
    loss_of: Callable[[int, torch.Tensor], torch.Tensor] = lambda step, out: out.square().mean(),
    every: int = 1,
    **how: Any,
) -> list[Finding]:
    """Train a small model and return the findings."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    taken = train(
        model, lambda step: loss_of(step, model(batch_of(step))), optimizer, 21, lambda step: before(step, model), **how
    )
    return judge(thinned(taken, every), [nonfinite])


def clean(step: int) -> torch.Tensor:
    return torch.randn(32, 8)


def bad_at(number: int, *places: int) -> Callable[[int], torch.Tensor]:
    """Batches, of which one holds NaN at these places."""

    def batch_of(step: int) -> torch.Tensor:
        batch = torch.randn(32, 8)
        if step == number:
            batch[places] = math.nan
        return batch

    return batch_of


def poison(step: int, model: nn.Sequential) -> None:
    """A weight of the first layer."""
    if step == 13:
        with torch.no_grad():
            model[0].weight[5, 2] = math.nan


def division(step: int, out: torch.Tensor) -> torch.Tensor:
    loss = out.square().mean()
    return loss if step != 13 else loss * (loss - loss) / (loss - loss).detach()


def test_nan_in_the_data_is_said_to_be_in_the_data_where_the_input_is_watched() -> None:
    (found,) = trained(bad_at(13, 3, 7), tensors=("input", "output", "grad_output"))
    assert (found.step, found.site, found.severity) == (13, Site("0", "input"), "critical")
    assert "1 of 256 values of the input of 0 are NaN, the first in this step; " in found.sentence
    assert ". It is in the data, because no layer has run yet:" in found.sentence
    assert "check this batch and what loads and prepares it" in found.sentence
    assert "weights" not in found.sentence


def test_nan_behind_a_finite_input_is_the_layers_own() -> None:
    (found,) = trained(clean, poison, tensors=("input", "output", "grad_output"))
    assert (found.step, found.site) == (13, Site("0", "output"))
    assert "after the input of 0, which is finite: check the weights and the arithmetic of 0" in found.sentence


def test_an_input_in_the_middle_may_come_from_the_data_or_from_what_nobody_watched() -> None:
    ok, bad = torch.ones(4, 4), torch.full((4, 4), math.nan)
    given = {("a", "output"): ok, ("b", "input"): bad, ("b", "output"): bad}
    (found,) = judge([step_of(0, given)], [nonfinite])
    assert found.site == Site("b", "input")
    assert "the output of a is finite, as all before it" in found.sentence
    assert "in the data, where these reach b directly, or in what is computed between" in found.sentence


def test_where_the_input_is_not_watched_the_batch_comes_first_if_whole_rows_are_bad_and_else_the_weights() -> None:
    (by_data,) = trained(bad_at(13, 3, 7), tensors=THREE_KINDS)
    (by_weight,) = trained(clean, poison, tensors=THREE_KINDS)
    assert by_data.site == by_weight.site == Site("0", "output")
    assert "check this batch and what loads it, then the weights and the arithmetic of 0;" in by_data.sentence
    assert "all its channels hold equally many" in by_data.sentence
    assert "check the weights and the arithmetic of 0, then this batch" in by_weight.sentence
    assert "some of its channels are finite" in by_weight.sentence
    assert (by_weight.value, by_weight.severity) == (32, "critical")
    assert by_weight.sentence.startswith("32 of 512 values of the output of 0 are NaN, the first in this step; ")
    assert "in step 12 everything was finite." in by_weight.sentence
    for found in (by_data, by_weight):
        assert 'which only tensors=("input", ...) watches' in found.sentence


def test_weights_that_were_finite_a_step_before_are_said_to_have_been() -> None:
    def all_bad(step: int) -> torch.Tensor:
        return torch.full((32, 8), math.nan) if step == 13 else torch.randn(32, 8)

    (found,) = trained(all_bad, tensors=("output", "param"))
    assert "check this batch and what loads it" in found.sentence
    assert "its weights were finite after step 12." in found.sentence


def test_what_began_in_a_step_that_was_not_measured_is_said_to_and_not_where() -> None:
    (found,) = trained(clean, loss_of=division, every=10)
    assert (found.step, found.site, found.severity) == (20, Site("0", "output"), "critical")
    assert "It began in step 13, in which the loss was not finite any more, or just before" in found.sentence
    assert "steps 11 to 19 were not measured" in found.sentence
    assert "with every=1" in found.sentence
    assert "; the loss is not finite, either, since step 13; in step 10 everything was finite." in found.sentence
    assert "began in forward" not in found.sentence


def test_without_losses_between_measured_steps_it_may_have_begun_in_any_of_them() -> None:
    ok, bad = {("0", "output"): torch.ones(4, 4)}, {("0", "output"): torch.full((4, 4), math.nan)}
    (found,) = judge([step_of(0, ok), step_of(10, bad)], [nonfinite])
    assert "It may have begun before this step: steps 1 to 9 were not measured" in found.sentence
    (found,) = judge([step_of(0, ok), step_of(2, bad)], [nonfinite])
    assert "step 1 was not measured" in found.sentence
    (found,) = judge([step_of(0, ok), step_of(1, bad)], [nonfinite])
    assert "not measured" not in found.sentence


def test_nan_that_the_loss_makes_is_said_to_begin_there() -> None:
    (found,) = trained(clean, loss_of=division)
    assert (found.step, found.site) == (13, Site("2", "grad_output"))
    assert "It began in the loss, which is not finite while all outputs are" in found.sentence
    assert "; the loss is not finite, either" in found.sentence


def test_a_loss_that_was_not_finite_between_measured_steps_and_is_again_is_told_in_its_step() -> None:
    snapshots = [step_of(number, {("0", "output"): torch.ones(4, 4)}, loss=1.0) for number in range(21)]
    snapshots[13].scalars["loss"], snapshots[14].scalars["loss"] = math.nan, math.inf
    (found,) = judge(thinned(snapshots, 10), [nonfinite])
    assert (found.step, found.site, found.severity) == (13, None, "warning")
    assert "the loss was nan in step 13, which was not measured, and in 1 more step" in found.sentence
    assert "in step 20 everything is finite again" in found.sentence


@pytest.mark.parametrize("since", [13, 20])
def test_a_loss_that_alone_is_not_finite_is_told_with_its_first_step(since: int) -> None:
    snapshots = [step_of(number, {("0", "output"): torch.ones(4, 4)}, loss=1.0) for number in range(21)]
    for snapshot in snapshots[since:]:
        snapshot.scalars["loss"] = math.nan
    (found,) = judge(thinned(snapshots, 10), [nonfinite])
    assert (found.step, found.site, found.severity) == (since, None, "critical")
    assert "the loss is nan, and every watched tensor is finite" in found.sentence
