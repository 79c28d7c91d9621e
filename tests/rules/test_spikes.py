"""The loss and the norm of the gradients against their past: what is told of a course, step by step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from hookstats import Snapshot
from hookstats.rules import Finding, Rule, gradient_norm_spike, judge, loss_spike
from tests.rules.test_guards import step_of


def found_in(
    values: Iterable[float], rule: Rule | None = None, every: int = 1, moved: Mapping[int, float] | None = None
) -> list[Finding]:
    """Judge a loss's course. every: how often a step is measured. moved: from these steps on, the factor by which an
    output is larger; None: there is no output."""
    snapshots: list[Snapshot] = []
    earlier, size = {}, 1.0
    for number, value in enumerate(values):
        size = size if moved is None else moved.get(number, size)
        if number % every:
            earlier[number] = {"loss": value}
            continue
        tensors = {} if moved is None else {("0", "output"): size * torch.ones(4, 4)}
        snapshots.append(Snapshot(replace(step_of(number, tensors, loss=value).frame, earlier_scalars=earlier)))
        earlier = {}
    return judge(snapshots, [rule or loss_spike])


def losses(rule: loss_spike, values: Iterable[float]) -> list[tuple[int, str]]:
    return [(each.step, each.severity) for each in found_in(values, rule)]


@pytest.fixture
def generator() -> np.random.Generator:
    return np.random.default_rng(0)


def language_model(generator: np.random.Generator, steps: int) -> list[float]:
    """From 4.7 down to 2.5 in 32 steps, as a loss of small batches."""
    level = 2.5 + 2.2 * np.exp(-np.arange(steps) / 8)
    return list(level * (1 + 0.02 * generator.standard_normal(steps)))


@pytest.mark.parametrize("every", [1, 10])
def test_a_jump_above_the_first_loss_that_comes_back_slowly_is_found_in_its_step_measured_or_not(
    generator: np.random.Generator, every: int
) -> None:
    values = [*language_model(generator, 33), *(3.2 + 2.5 * math.exp(-i / 8) for i in range(40))]
    (found,) = found_in(values, every=every)
    assert (found.step, found.severity) == (33, "warning")
    assert found.value == pytest.approx(5.7)
    assert "jumped to 5.7, from 2.5" in found.sentence
    assert found_in(language_model(generator, 80), every=every) == []


def test_a_jump_is_a_warning_where_the_outputs_changed_with_it_and_a_note_where_they_did_not(
    generator: np.random.Generator,
) -> None:
    values = [*language_model(generator, 60), *[4.0] * 3, *[3.5] * 30]
    assert [(each.step, each.severity) for each in found_in(values, moved={})] == [(60, "note")]
    (found,) = found_in(values, moved={60: 2.0})
    assert (found.step, found.severity) == (60, "warning")
    assert "outputs of the model changed at the same time" in found.sentence


def test_a_jump_that_the_outputs_follow_while_the_loss_stays_up_becomes_a_warning(
    generator: np.random.Generator,
) -> None:
    values = [*language_model(generator, 60), *[4.0] * 3, *[3.5] * 30]
    note, warning = found_in(values, moved={60: 1.2, 61: 1.5, 62: 2.2})  # step by step: 0.18, 0.22, 0.38 in logarithms
    assert [(each.step, each.severity) for each in (note, warning)] == [(60, "note"), (62, "warning")]
    assert "is 4, and was 2.51 before step 60. The outputs of the model changed" in warning.sentence
    assert [each.severity for each in found_in(values, moved={70: 5.0})] == ["note"]  # when the jump was over


def test_a_level_that_is_higher_is_no_divergence_and_one_with_other_outputs_is() -> None:
    noise = [0.01 * math.sin(i) for i in range(400)]
    values = [1 + each for each in noise[:100]] + [5 + each for each in noise]
    assert losses(loss_spike, values) == [(100, "warning")]
    assert [(each.step, each.severity) for each in found_in(values, moved={})] == [(100, "note")]
    found = found_in(values, moved={100: 3.0})
    assert [(each.step, each.severity) for each in found] == [(100, "warning"), (105, "critical")]
    assert "jumped in step 100 together with the outputs of the model" in found[1].sentence


@pytest.mark.parametrize("every", [1, 10])
def test_a_loss_that_goes_on_rising_above_the_first_ones_diverges(generator: np.random.Generator, every: int) -> None:
    climbs = 2.5 * np.exp(0.03 * np.arange(60)) * (1 + 0.02 * generator.standard_normal(60))
    found = found_in([*language_model(generator, 80), *climbs], every=every, moved={})
    critical = [each for each in found if each.severity == "critical"]
    assert len(critical) >= 1
    assert 100 < critical[0].step < 135
    assert "has risen for" in critical[0].sentence


def test_a_loss_that_doubles_and_doubles_from_the_start_diverges() -> None:
    assert losses(loss_spike, [0.1 * 2.5**i for i in range(12)])[0] == (8, "critical")
    assert losses(loss_spike, [0.1 * 1.05**i for i in range(100)]) == []


def test_losses_of_a_single_bad_batch_are_a_warning_and_those_of_a_new_target_a_note(
    generator: np.random.Generator,
) -> None:
    before, after = (list(0.3 * np.exp(0.1 * generator.standard_normal(50))) for _ in range(2))
    first = [2.3, 2.3, 2.0, 1.5, 1.0, 0.7, 0.5, 0.4]
    spike = found_in([*first, *before, 6.0, *after], moved={})
    assert [(each.step, each.severity) for each in spike] == [(58, "note"), (58, "warning")]
    assert "came back after 1 step: check the data of step 58" in spike[1].sentence
    new = found_in([*first, *before, *(0.3 + 5.7 * math.exp(-i / 4) for i in range(50))], moved={})
    assert [(each.step, each.severity) for each in new] == [(58, "note")]


def test_heavy_tails_are_no_jumps(generator: np.random.Generator) -> None:
    cauchy, student = np.abs(generator.standard_cauchy((2, 300, 16))), generator.standard_t(2, (2, 300, 16)) ** 2
    for values in [*cauchy.mean(2), *student.mean(2)]:
        assert losses(loss_spike, values) == []


def test_a_jump_of_the_loss_is_told_and_what_undoes_little_of_the_descent_is_not(
    generator: np.random.Generator,
) -> None:
    falling = list(np.exp(-np.arange(100) / 20) * (1 + 0.01 * generator.standard_normal(100)) * 5)
    flat = [0.04 * (1 + 0.01 * generator.standard_normal()) for _ in range(150)]
    assert losses(loss_spike, [*falling, *flat]) == []
    assert losses(loss_spike, [*falling, *flat, 0.2, *flat]) == []
    assert losses(loss_spike, [*falling, *flat, 0.5, *flat]) == [(250, "note")]
    assert losses(loss_spike(undone=0.0), [*falling, *flat, 0.2, *flat]) == [(250, "note")]


def test_losses_of_both_signs_are_judged(generator: np.random.Generator) -> None:
    values = list(0.1 * generator.standard_normal(300))
    assert losses(loss_spike, values) == []
    assert losses(loss_spike, [*values, 2.0]) == [(300, "warning")]
    assert losses(loss_spike, [-0.02, *np.linspace(0.1, 0.2, 20)]) == []


def test_one_jump_does_not_hide_the_next(generator: np.random.Generator) -> None:
    values = np.exp(0.01 * generator.standard_normal(120))
    values[[60, 95]] = math.exp(0.15), math.exp(0.14)
    assert losses(loss_spike, values) == [(60, "warning"), (95, "warning")]


def test_losses_that_vary_by_factors_are_in_order(generator: np.random.Generator) -> None:
    assert losses(loss_spike(undone=0.0), np.exp(generator.standard_normal(500))) == []


def norms(values: Iterable[float]) -> list[tuple[int, str]]:
    steps = [step_of(number, {}, grad_norm=float(value)) for number, value in enumerate(values)]
    return [(each.step, each.severity) for each in judge(steps, [gradient_norm_spike])]


def test_a_jump_of_the_gradients_is_a_note_and_three_are_a_warning(generator: np.random.Generator) -> None:
    values = np.exp(0.1 * generator.standard_normal(100))
    values[[60, 70, 80]] = 30
    assert norms(values) == [(60, "note"), (80, "warning")]
    assert norms(1.0 if number % 90 else 4.0 for number in range(200)) == []


def test_a_new_level_of_the_gradients_is_one_jump(generator: np.random.Generator) -> None:
    values = np.exp(0.1 * generator.standard_normal(200))
    values[100:] *= 50
    assert norms(values) == [(100, "note")]
