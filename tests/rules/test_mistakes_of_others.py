"""Trainings that others wrote down as mistakes, and healthy ones that caused an alarm: what is said of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.illnesses.models import layers
from hookstats.rules import (
    Finding,
    constant_input,
    input_shift,
    judge,
    loss_spike,
    nonfinite,
    second_moment,
    unscaled_input,
)
from tests.rules.test_guards import step_of, told
from tests.rules.test_spikes import found_in
from tests.rules.trainings import OnDigits, train

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_loss_of_both_signs_ends_no_rule_and_began_in_no_step_before_the_first() -> None:
    assert found_in([-1.0, *[0.5 + 0.1 * i for i in range(60)]], loss_spike) == []
    (found, *_) = found_in([0.1 * 1.6**i for i in range(12)], loss_spike)
    assert found.severity == "critical"
    assert found.since is not None
    assert found.since >= 0


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.body, self.head = nn.Embedding(32, 32), nn.LSTM(32, 32, batch_first=True), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(self.inside(x))[0])
        return logits


def test_the_biases_of_recurrent_layers_are_biases() -> None:
    torch.manual_seed(0)
    model = Words()
    with torch.no_grad():
        model.body.bias_ih_l0.mul_(1e-3)
        model.body.bias_hh_l0.mul_(1e-3)
    generator = torch.Generator().manual_seed(0)

    def loss_of(step: int) -> torch.Tensor:
        words = torch.randint(32, (8, 17), generator=generator)
        return cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

    found = judge(train(model, loss_of, torch.optim.Adam(model.parameters(), 1e-2), 40))
    assert [each for each in found if each.rule == "update-ratio" and "bias" in str(each.site)] == []


def test_a_softmax_over_two_classes_before_the_cross_entropy_is_found() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*layers(64, 64, 64, 64, 10)[:-1], nn.Linear(64, 2), nn.Softmax(-1))
    loss = OnDigits(model)
    loss.labels = loss.labels % 2
    found = judge(train(model, loss, torch.optim.Adam(model.parameters(), 1e-4), 12))
    assert [(each.step, each.site) for each in found if each.rule == "probabilities-as-logits"] == [
        (9, ("7", "output"))
    ]


def test_a_bias_whose_gradient_cancels_is_not_said_to_learn_slowly() -> None:
    def moments(of_weight: float) -> dict[tuple[str, str], torch.Tensor]:
        kind = "optimizer.exp_avg_sq"
        return {("k.weight", kind): torch.full((64, 64), of_weight), ("k.bias", kind): torch.full((64,), 1e-20)}

    assert told(second_moment, [moments(1e-8)] * 20) == []
    assert told(second_moment, [moments(1e-13)] * 20) == [(19, "second-moment")]


def test_a_logarithm_of_0_in_an_output_is_looked_for_there_where_the_loss_is_infinite() -> None:
    logits = torch.tensor([[0.5, 0.0], [0.25, 1.0]]).log()
    steps = [step_of(0, {("0", "output"): torch.ones(2, 2), ("1", "output"): logits}, loss=math.inf)]
    (found,) = judge(steps, [nonfinite])
    assert found.severity == "critical"
    assert "began after the model" not in found.sentence
    assert "the output of 1 holds -Inf" in found.sentence


def of_input(rule: Any, inputs: list[torch.Tensor]) -> list[Finding]:
    """Return the findings about the model's input, a tensor a step."""
    return judge([step_of(i, {("", "input"): x, ("0", "output"): x + i}) for i, x in enumerate(inputs)], [rule])


def batches(count: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [scale * torch.randn(16, 8, generator=generator) for _ in range(count)]


def test_a_batch_of_zeros_is_not_like_those_before_it() -> None:
    (found,) = of_input(input_shift, [*batches(12), torch.zeros(16, 8), torch.zeros(16, 8), *batches(3)])
    assert (found.step, found.since, found.severity) == (14, 12, "warning")
    assert "the batch of step 12 was all zeros" in found.sentence
    assert of_input(input_shift, [torch.zeros(16, 8), *batches(12)]) == []


def test_the_state_of_a_recurrent_model_may_begin_at_zero_and_a_mask_may_be_the_same() -> None:
    def judged(rule: Any, kind: str, inputs: list[torch.Tensor]) -> list[Finding]:
        return judge([step_of(i, {("", kind): x}) for i, x in enumerate(inputs)], [rule])

    states = [torch.zeros(16, 8) if i % 15 == 0 else x for i, x in enumerate(batches(40))]
    assert judged(input_shift, "input.1", states) == []
    masks = [torch.full((8, 8), -1e9).triu(i % 3) for i in range(40)]
    masks[20] = torch.zeros(8, 8)  # of a batch without padding
    assert judged(input_shift, "input", masks) == []
    for kind in ("input", "input.1"):
        assert judged(constant_input, kind, masks[:1] * 40) == []


def test_the_same_batch_in_every_step_is_a_note() -> None:
    first, *others = batches(30)
    (found,) = of_input(constant_input, [*others[:5], *[first] * 40])
    assert (found.step, found.since, found.severity) == (25, 5, "note")
    assert "the same batch, to the bit, since step 5" in found.sentence
    every_tenth = [step_of(10 * i, {("", "input"): first, ("0", "output"): first + i}) for i in range(25)]
    assert [(each.step, each.since) for each in judge(every_tenth, [constant_input])] == [(200, 0)]
    assert of_input(constant_input, [first, others[0]] * 30) == []  # two in turn
    assert of_input(constant_input, others * 2) == []


def test_pixels_that_were_divided_by_255_twice_are_too_small() -> None:
    pixels = [x.abs() for x in batches(8, scale=0.3)]
    (found,) = of_input(unscaled_input, [x / 255 for x in pixels])
    assert "scaled twice, or not at all" in found.sentence
    black = [torch.where(x > 0.3, x.clamp(max=1), 0) for x in pixels]  # most of them are
    assert len(of_input(unscaled_input, [x / 255 for x in black])) == 1
    assert of_input(unscaled_input, pixels) == []
    assert of_input(unscaled_input, black) == []
    sparse = [torch.where(x > 2, x, 0) / 200 for x in batches(8)]  # counts of words
    assert of_input(unscaled_input, sparse) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_mask_that_is_added_to_logits_is_no_data_that_was_not_scaled(dtype: torch.dtype) -> None:
    mask = torch.full((8, 8), torch.finfo(dtype).min, dtype=dtype).triu(1)
    assert of_input(unscaled_input, [mask] * 8) == []
