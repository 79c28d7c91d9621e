"""Buffers that nobody computed, and running statistics that stand still or run away; what is in order is not named."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest
import torch

from hookstats.rules import (
    Finding,
    Rule,
    judge,
    nonfinite,
    runaway_statistics,
    still_statistics,
    uninitialised_buffer,
)
from tests.rules.test_guards import step_of

Tensors = dict[tuple[str, str], torch.Tensor]


def found_in(steps: Iterable[Tensors], *rules: Rule) -> list[Finding]:
    return judge([step_of(number, each) for number, each in enumerate(steps)], rules)


def buffer(values: list[float] | torch.Tensor, name: str = "table", bad_output: bool = False) -> Tensors:
    out = torch.full((4, 4), math.nan) if bad_output else torch.randn(4, 4)
    return {("0", "output"): out, (name, "buffer_sample"): torch.as_tensor(values)}


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("table", [1.0, 3e30, -2.0], "its values range from -2 to 3e+30"),
        ("table", [0.0, 1e-40, 3e-41], "its values range from 0 to 1e-40"),
        ("rotary.inv_freq", [math.nan, 1.0, 0.5], "1 of its values are NaN"),
        ("inv_freq", [0.0] * 8, "all of its values are 0"),
        ("original_inv_freq", [1.0, -0.3], "its values range from -0.3 to 1"),
        ("inv_freq", [1.0, 700.0], "its values range from 1 to 700"),
    ],
)
def test_a_buffer_that_nobody_computed_is_named_once(name: str, values: list[float], words: str) -> None:
    (found,) = found_in([buffer(values, name)] * 30, uninitialised_buffer)
    assert (found.step, found.severity) == (0, "warning")
    assert words in found.sentence
    assert "initialise them after the weights are loaded" in found.sentence


def test_nan_in_a_buffer_is_the_cause_of_nan_in_outputs_and_alone_is_a_note() -> None:
    found = found_in([buffer([math.nan, 1.0], bad_output=True)], uninitialised_buffer, nonfinite)
    assert [(each.rule, each.severity, each.because is None) for each in found] == [
        ("uninitialised-buffer", "warning", True),
        ("nonfinite", "critical", False),
    ]
    (alone,) = found_in([buffer([math.nan, 1.0])] * 3, uninitialised_buffer, nonfinite)
    assert (alone.rule, alone.severity) == ("uninitialised-buffer", "note")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("inv_freq", (10000 ** -(torch.arange(16) / 16)).tolist()),
        ("mask", [0.0, -math.inf, -math.inf]),
        ("mask", [0.0, torch.finfo(torch.float32).min]),
        ("smallest", [math.inf]),
        ("unknown", [math.nan]),
        ("best", [torch.finfo(torch.float32).max] * 4),
        ("edges", [-math.inf, 0.0, 1.0, math.inf]),
        ("zeros", [0.0] * 8),
        ("seen", [1e12, 3.0]),
    ],
)
def test_what_people_keep_in_buffers_is_no_finding(name: str, values: list[float]) -> None:
    assert found_in([buffer(values, name)] * 5, uninitialised_buffer, nonfinite) == []


def test_a_buffer_that_becomes_nan_in_the_middle_is_a_warning_where_all_else_is_finite() -> None:
    steps = [buffer([1.0, 2.0])] * 3 + [buffer([1.0, math.nan])] * 3
    (found,) = found_in(steps, uninitialised_buffer, nonfinite)
    assert (found.rule, found.step, found.severity) == ("nonfinite", 3, "warning")


def norm(mean: list[float], var: list[float], runs: bool = True, gradient: float = 1.0) -> Tensors:
    outputs = {("0.norm", "output"): torch.randn(4, 2)} if runs else {}
    return {
        **outputs,
        ("0.norm.weight", "param_grad"): torch.full((2,), gradient if runs else 0.0),
        ("1.weight", "param_grad"): torch.full((2,), gradient),
        ("0.norm.running_mean", "buffer_sample"): torch.tensor(mean),
        ("0.norm.running_var", "buffer_sample"): torch.tensor(var),
    }


def still(make: Callable[[int], Tensors], steps: int = 40) -> list[tuple[int, str]]:
    return [(each.step, each.severity) for each in found_in(map(make, range(steps)), still_statistics)]


def test_statistics_that_stand_still_are_named_and_those_that_were_loaded_or_are_not_used_are_not() -> None:
    assert still(lambda step: norm([0.0, 0.0], [1.0, 1.0])) == [(10, "warning")]
    assert still(lambda step: norm([0.0, 0.0], [1.0, 1.0]), 10) == []
    assert still(lambda step: norm([min(step, 9.0), 0.0], [1.0, 2.0])) == [(19, "note")]  # they moved until step 9
    assert still(lambda step: norm([0.3, 0.0], [1.0, 2.0])) == []  # loaded
    assert still(lambda step: norm([0.0, 0.0], [1.0, 1.0], runs=False)) == []
    assert still(lambda step: norm([0.0, 0.0], [1.0, 1.0], gradient=0.0)) == []  # nothing is trained
    assert still(lambda step: norm([0.0, 0.0], [1.0, 1.0 + step])) == []
    assert still(lambda step: norm([0.0, 0.0], [0.0, 0.0])) == []  # of an input that is dead


def runaway(make: Callable[[int], Tensors], steps: int = 40) -> list[tuple[int, str]]:
    found = found_in(map(make, range(steps)), runaway_statistics)
    return [(each.step, each.site.name if each.site else "") for each in found]


def test_statistics_that_grow_ever_faster_run_away_and_those_on_the_way_to_a_level_do_not() -> None:
    assert runaway(lambda step: norm([0.0, 0.1], [2.0**step, 1.0]), 24)[0] == (20, "0.norm.running_var")
    assert runaway(lambda step: norm([0.0, (-1.5) ** step], [1.0, 1.0]), 24)[0] == (20, "0.norm.running_mean")
    assert runaway(lambda step: norm([0.0, 0.1], [1.1**step, 1.0])) == []
    assert runaway(lambda step: norm([0.0, 0.1], [1e4 - 1e4 * 0.9**step, 1.0])) == []
    assert runaway(lambda step: norm([0.0, 0.1], [2.0 ** min(step, 18), 1.0])) == []  # so it settled
    assert runaway(lambda step: norm([0.0, 0.1], [4.0 ** (step // 8), 1.0])) == []


def test_a_variance_below_zero_is_named_at_once() -> None:
    (found,) = found_in([norm([0.0, -1.0], [1.0, -0.1 if step else 0.5]) for step in range(5)], runaway_statistics)
    assert (found.step, found.site) == (1, ("0.norm.running_var", "buffer_sample"))
    assert "a variance is never below 0" in found.sentence
