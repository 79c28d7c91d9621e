"""Tests of each rule's guards: healthy steps that look ill, as a model of one tensor puts them out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

import hookstats
from hookstats import ExponentBins, Site, Snapshot
from hookstats.numbers.frame import StepFrame
from hookstats.rules import (
    dead_channels,
    equal_modules,
    expert_load,
    exploding_gradients,
    heavy_dropout,
    impossible_loss,
    input_shift,
    judge,
    low_precision_fit,
    massive_activations,
    no_gradients,
    nonfinite,
    norm_of_few_values,
    outlier_channels,
    probabilities_as_logits,
    residual_drift,
    saturated_channels,
    tiny_updates,
    update_ratio,
    vanishing_gradients,
)
from hookstats.rules.history import Streak


def step_of(number: int, tensors: dict[tuple[str, str], torch.Tensor], **scalars: float) -> Snapshot:
    """A Snapshot of these tensors, in this order."""
    stats = {Site(*site): hookstats.measure(tensor, -1, ExponentBins()) for site, tensor in tensors.items()}
    return Snapshot(StepFrame.from_stats(stats, stats, number, scalars=dict(scalars)))


def told(rule: Any, tensors: Iterable[dict[tuple[str, str], torch.Tensor]]) -> list[tuple[int, str]]:
    found = judge([step_of(number, each) for number, each in enumerate(tensors)], [rule])
    return [(each.step, each.rule) for each in found]


def relu(share: float, count: int = 200) -> torch.Tensor:
    """16 channels, of which the first ones are dead."""
    tensor = torch.randn(count, 16).clamp(min=0)
    tensor[:, : int(16 * share)] = 0
    return tensor


def test_half_of_the_channels_may_be_dead_and_more_may_not() -> None:
    assert told(dead_channels, ({("a", "output"): relu(0.5)} for _ in range(10))) == []
    assert told(dead_channels, ({("a", "output"): relu(0.6)} for _ in range(19))) == []
    assert told(dead_channels, ({("a", "output"): relu(0.6)} for _ in range(20))) == [(19, "dead-channels")]
    assert told(dead_channels, ({("a", "output"): relu(1.0)} for _ in range(5))) == [(4, "dead-channels")]
    assert told(dead_channels, ({("a", "output"): relu(0.6, count=4)} for _ in range(20))) == []
    assert told(dead_channels, ({("a", "output"): relu(0.6) - 1e-3} for _ in range(20))) == []
    assert told(dead_channels, ({("a", "output"): -relu(0.6)} for _ in range(20))) == []


def test_an_output_that_always_has_as_many_zeros_is_sparse_by_design() -> None:
    def routed(seed: int) -> torch.Tensor:
        """One of three experts a token; 13 others get none."""
        chosen = torch.randint(3, (300,), generator=torch.Generator().manual_seed(seed))
        return torch.nn.functional.one_hot(chosen, 16).float()

    assert told(dead_channels, ({("a", "output"): routed(i)} for i in range(25))) == []


def test_zeros_that_no_gradient_comes_back_to_are_a_mask_where_others_get_theirs() -> None:
    zeros = {("a", "output"): torch.zeros(200, 16)}
    assert told(dead_channels, [zeros] * 5) == [(4, "dead-channels")]
    others = zeros | {("b", "output"): torch.randn(4, 4), ("b", "grad_output"): torch.randn(4, 4)}
    assert told(dead_channels, [others] * 5) == []
    assert told(dead_channels, [others | {("a", "grad_output"): torch.randn(200, 16)}] * 5) == [(4, "dead-channels")]


def test_minus_infinity_in_an_input_from_the_first_step_on_is_a_mask_of_attention() -> None:
    scores = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf)
    given = {("attention", "input.attn_mask"): scores, ("attention", "output"): torch.ones(4, 4)}
    assert told(nonfinite, [given] * 3) == []
    assert told(nonfinite, [given, given | {("attention", "input.attn_mask"): -scores}]) == [(1, "nonfinite")]
    finite = given | {("attention", "input.attn_mask"): torch.ones(4, 4)}
    assert told(nonfinite, [finite, given]) == [(1, "nonfinite")]


def test_of_dead_outputs_that_follow_each_other_the_first_is_told() -> None:
    outputs = [{("relu", "output"): relu(0.8), ("pool", "output"): relu(0.8)} for _ in range(20)]
    found = judge([step_of(number, each) for number, each in enumerate(outputs)], [dead_channels])
    assert [each.site for each in found] == [Site("relu", "output")]


def bounded(of: torch.Tensor, count: int = 3) -> list[dict[tuple[str, str], torch.Tensor]]:
    """Steps of an output with a gradient, and another one behind it."""
    each = {("a", "output"): of, ("head", "output"): torch.randn(4, 4), ("a", "grad_output"): torch.ones_like(of)}
    return [each] * count


def test_tanh_and_sigmoid_are_saturated_at_their_ends() -> None:
    wide, narrow = 1000 * torch.randn(200, 16), torch.randn(200, 16)
    for ill in (wide.tanh(), wide.clamp(-80, 80).sigmoid(), (wide.abs() + 30).sigmoid()):
        assert told(saturated_channels(consecutive_steps=3), bounded(ill)) == [(2, "saturated-channels")]
        assert told(saturated_channels(consecutive_steps=4), bounded(ill)) == []
    initial = (3 * narrow + torch.where(narrow > 0, 1.0, -1.0)).tanh()
    assert told(saturated_channels, bounded(initial, 20)) == [(19, "saturated-channels")]
    assert told(saturated_channels, bounded(narrow.tanh()) + bounded(initial, 30)) == []
    for healthy in (narrow.tanh(), (3 * narrow).sigmoid(), (1000 * narrow).softmax(-1).clamp(min=1e-30), narrow / 10):
        assert told(saturated_channels(consecutive_steps=3), bounded(healthy)) == []


def test_what_has_no_gradient_is_not_saturated_and_neither_is_the_answer() -> None:
    ill = (1000 * torch.randn(200, 16)).tanh()
    without = [{("a", "output"): ill, ("head", "output"): torch.randn(4, 4)}] * 3
    assert told(saturated_channels(consecutive_steps=3), without) == []
    last = [{("a", "output"): ill, ("a", "grad_output"): torch.ones_like(ill)}] * 3
    assert told(saturated_channels(consecutive_steps=3), last) == []


def test_massive_values_are_compared_with_the_median_of_those_that_are_not_zero() -> None:
    half = torch.randn(1000, 32).clamp(min=0) * 30
    assert told(massive_activations, [{("a", "output"): half}] * 3) == []
    one = half.clone()
    one[0, 0] = 1e5
    assert told(massive_activations, [{("a", "output"): one}] * 3) == [(2, "massive-activations")]
    assert told(massive_activations, [{("a", "output"): one / 2000}] * 3) == []


def test_values_over_many_orders_do_not_fit_into_float8_and_others_do() -> None:
    wide, narrow = (8 * torch.randn(200, 16) - 20).exp(), torch.randn(200, 16)
    steps = [step_of(number, {("a", "output"): narrow, ("b", "output"): wide}) for number in range(8)]
    found, beyond = judge(steps, [low_precision_fit(turns=1)])
    for each in (found, beyond):
        assert (each.step, each.since, each.sites, each.severity) == (4, 0, (Site("b", "output"),), "note")
    assert 0.3 < found.value < 1
    assert "float8_e4m3fn (scale 2^" in found.sentence
    assert "beyond float16's largest number, 65504" in beyond.sentence


def test_an_outlier_channel_is_large_itself_and_dead_ones_do_not_make_one() -> None:
    tensor = torch.randn(200, 64)
    tensor[:, 3] *= 1e4
    assert told(outlier_channels, [{("a", "output"): tensor}] * 3) == [(2, "outlier-channels")]
    assert told(outlier_channels, [{("a", "output"): tensor / 1e4}] * 3) == []
    assert told(outlier_channels, [{("a", "output"): tensor[:, :16]}] * 3) == []
    tensor[:, 3], tensor[:, 4:] = 10, 0  # of 64, 60 are dead
    assert told(outlier_channels, [{("a", "output"): tensor}] * 3) == []
    many = torch.randn(200, 128)
    many[:, :11] *= 300
    assert told(outlier_channels, [{("a", "output"): many}] * 3) == [(2, "outlier-channels")]
    many[:, 0] = 1
    assert told(outlier_channels, [{("a", "output"): many}] * 3) == []


def test_outlier_channels_that_wander_are_no_finding_until_they_stay() -> None:
    def step(*channels: int) -> dict[tuple[str, str], torch.Tensor]:
        tensor = torch.ones(200, 64)
        tensor[:, list(channels)] *= 1e4
        return {("a", "output"): tensor}

    assert told(outlier_channels, [step(3), step(4), step(3), step(4), step(5)] * 3) == []
    steps = [step(3), step(4), step(5), step(6), step(7, 8), step(9, 7), step(7)]
    assert told(outlier_channels, steps) == [(6, "outlier-channels")]
    (finding,) = judge(
        [step_of(number, each) for number, each in enumerate([step(3, 4), step(3, 5)] * 2)], [outlier_channels]
    )
    lasting = "since step 0, with 2 channels above 100 times the median, 1 of them always the same."
    assert lasting in finding.sentence


def updates(weight: torch.Tensor, ratio: float, name: str = "weight") -> dict[tuple[str, str], torch.Tensor]:
    return {(name, "param"): weight, (name, "param_update"): ratio * torch.ones_like(weight)}


def test_biases_and_few_numbers_have_no_size_that_an_update_could_exceed() -> None:
    weight = torch.ones(8, 16) + 1e-3 * torch.randn(8, 16)
    assert told(update_ratio, [updates(weight, 0.2)] * 10) == [(9, "update-ratio")]
    assert told(update_ratio, [updates(weight, 0.05)] * 20) == []
    assert told(update_ratio, [updates(weight, 0.2, "a.bias")] * 20) == []
    assert told(update_ratio, [updates(weight[0], 0.2)] * 20) == []


def test_what_began_with_almost_nothing_has_no_size_either() -> None:
    tokens = torch.randn(4, 192, generator=torch.Generator().manual_seed(0))
    assert told(update_ratio, [updates(1e-6 * tokens, 1e-5)] * 20) == []
    assert told(update_ratio, [updates(1e-4 * tokens, 1e-5)] * 20) == [(9, "update-ratio")]
    for value in (0.0, 1e-3):
        assert told(update_ratio, [updates(torch.full((4, 192), value), 1e-3)] * 20) == []


@pytest.mark.parametrize("lr", [1e-5, 3e-6])
def test_updates_of_bfloat16_parameters_with_float32_masters_are_not_overstated(lr: float) -> None:
    generator = torch.Generator().manual_seed(0)
    master = 0.02 * torch.randn(400_000, generator=generator)
    update = lr * torch.randn(400_000, generator=generator)
    seen = (master + update).bfloat16() - master.bfloat16()
    step = {("weight", "param"): master.bfloat16()[None], ("weight", "param_update"): seen[None]}
    (found,) = judge([step_of(0, step)], [update_ratio(ratio=0.0, consecutive_steps=1)])
    true = (update.abs().mean() / master.abs().mean()).item()
    assert found.value == pytest.approx(true, rel=0.02)
    assert seen.float().square().mean().sqrt() > 2 * update.square().mean().sqrt()  # as the rms would have it


def experts(counts: list[int], inside: str = "") -> dict[tuple[str, str], torch.Tensor]:
    return {(f"moe.experts.{i}{inside}", "output"): torch.ones(count, 4) for i, count in enumerate(counts)}


@pytest.mark.parametrize("inside", ["", ".down"])
def test_the_load_of_experts_may_be_uneven_but_not_collapse(inside: str) -> None:
    assert told(expert_load, [experts([40, 5, 5, 5, 5, 5, 5, 0], inside)] * 10) == []
    assert told(expert_load, [experts([98, 1, 1, 0, 0, 0, 0, 0], inside)] * 10) == [(9, "expert-load")]
    turns = [experts([100 if i == step % 8 else 0 for i in range(8)], inside) for step in range(10)]
    assert told(expert_load, turns) == []


def stream(sizes: list[float], inside: str = ".linear") -> dict[tuple[str, str], torch.Tensor]:
    found = {}
    for number, size in enumerate(sizes):
        found[f"blocks.{number}{inside}", "output"] = torch.ones(4, 4)
        found[f"blocks.{number}", "output"] = size * torch.ones(4, 4)
    return found


def test_a_stream_is_judged_behind_its_first_block_and_only_where_blocks_hold_others() -> None:
    assert told(residual_drift, [stream([0.001, 1, 2, 3])] * 5) == [(4, "residual-drift")]
    assert told(residual_drift, [stream([1, 1, 2, 3])] * 5) == []
    assert told(residual_drift, [stream([0.001, 1, 2])] * 5) == []
    alone = {(f"{i}", "output"): 10.0**i * torch.ones(4, 4) for i in range(6)}
    assert told(residual_drift, [alone] * 5) == []
    backwards = dict(reversed(stream([0.001, 1, 2, 3]).items()))
    assert told(residual_drift, [backwards] * 5) == []


def test_gradients_that_all_fall_together_do_not_vanish() -> None:
    def gradients(step: int, one: float = 1.0) -> dict[tuple[str, str], torch.Tensor]:
        sizes = [math.exp(-step / 2)] * 4
        sizes[1] *= one
        return {(f"{i}", "grad_output"): size * torch.ones(4, 4) for i, size in enumerate(sizes)}

    assert told(vanishing_gradients, [gradients(step) for step in range(60)]) == []
    cut = [gradients(step, one=1.0 if step < 40 else 1e-6) for step in range(60)]
    assert told(vanishing_gradients, cut) == [(44, "vanishing-gradients")]


def test_a_streak_grows_while_a_site_is_ill_and_waits_while_it_is_not_judged() -> None:
    streak = Streak()
    assert streak.push(3, np.array([True, False]), steps=2).tolist() == [False, False]
    assert streak.push(5, np.array([True, True, True]), np.array([False, True, True]), 2).tolist() == [False] * 3
    assert streak.lengths.tolist() == [1, 1, 1]
    assert streak.push(7, np.array([True, False, True]), steps=2).tolist() == [True, False, True]
    assert streak.lengths.tolist() == [2, 0, 2]
    assert streak.since[[0, 2]].tolist() == [3, 5]


def test_a_gradient_that_was_negligible_and_finds_its_size_does_not_explode() -> None:
    def gradients(step: int, grown: float) -> dict[tuple[str, str], torch.Tensor]:
        sizes = [1.0, 1e-3 if step < 30 else grown, 1.0]
        return {(f"{i}", "grad_output"): size * torch.ones(4, 4) for i, size in enumerate(sizes)}

    assert told(exploding_gradients, [gradients(step, 1.0) for step in range(40)]) == []
    assert told(exploding_gradients, [gradients(step, 20.0) for step in range(40)]) == [(32, "exploding-gradients")]


def test_gradients_that_grow_ten_thousandfold_from_end_to_end_explode_and_one_odd_layer_does_not() -> None:
    def gradients(sizes: list[float]) -> dict[tuple[str, str], torch.Tensor]:
        backward = list(enumerate(sizes))  # that of the last module comes first
        return {(f"{len(sizes) - 1 - i}", "grad_output"): size * torch.ones(4, 4) for i, size in backward}

    growing = [1.9e5 ** (i / 8) for i in range(9)]
    (found,) = judge([step_of(number, gradients(growing)) for number in range(5)], [exploding_gradients])
    assert found.value == pytest.approx(1.9e5)
    assert "190,000 times from end to end, from the output of 8 back to that of 0" in found.sentence
    (found,) = judge([step_of(number, gradients(growing[::-1])) for number in range(5)], [vanishing_gradients])
    assert found.value == pytest.approx(1 / 1.9e5)
    assert "5.26e-06 from end to end, from the output of 8 back to that of 0" in found.sentence
    odd = [1e-6, *[1.0] * 8]
    assert told(exploding_gradients, [gradients(odd)] * 5) == []
    assert told(vanishing_gradients, [gradients(odd[::-1])] * 5) == []


def test_gradients_of_a_few_numbers_may_be_zero_by_chance() -> None:
    def gradients(size: int, step: int) -> dict[tuple[str, str], torch.Tensor]:
        one = torch.ones(size) if step < 40 else torch.zeros(size)
        return {("a", "param_grad"): one, ("b", "param_grad"): torch.ones(64), ("c", "param_grad"): torch.ones(64)}

    assert told(vanishing_gradients, [gradients(1, step) for step in range(60)]) == []
    assert told(vanishing_gradients, [gradients(16, step) for step in range(60)]) == [(44, "vanishing-gradients")]


def test_an_output_of_zeros_beside_another_is_no_relu() -> None:
    zeros, others = torch.zeros(200, 16), torch.randn(200, 16)
    given = {("flow", "output.0"): others, ("flow", "output.1"): zeros}
    assert told(dead_channels, [given] * 25) == []
    assert told(dead_channels, [{("flow", "output.0"): zeros}] * 5) == [(4, "dead-channels")]


def test_channels_through_which_gradients_come_are_masked_and_not_dead() -> None:
    def given(is_relu: bool) -> dict[tuple[str, str], torch.Tensor]:
        half, gradient = relu(0.75), torch.randn(200, 16)
        return {
            ("linear", "output"): torch.randn(200, 16),
            ("relu", "output"): half,
            ("relu", "grad_output"): gradient,
            ("linear", "grad_output"): gradient * (half > 0) if is_relu else gradient,
        }

    assert told(dead_channels, [given(is_relu=False) for _ in range(25)]) == []
    assert told(dead_channels, [given(is_relu=True) for _ in range(25)]) == [(19, "dead-channels")]


def with_loss(steps: list[dict[tuple[str, str], torch.Tensor]], losses: list[float]) -> list[tuple[int, str]]:
    snapshots = [step_of(number, each, loss=losses[number]) for number, each in enumerate(steps)]
    return [(each.step, each.severity) for each in judge(snapshots, [update_ratio])]


def test_a_weight_may_be_rewritten_where_the_loss_does_not_suffer() -> None:
    weight = torch.ones(8, 16) + 1e-3 * torch.randn(8, 16)
    once = [updates(weight, 2.0 if step == 3 else 0.01) for step in range(20)]
    assert with_loss(once, [2.0 - 0.01 * step for step in range(20)]) == [(3, "note")]
    assert with_loss(once, [2.0 + (step > 3) for step in range(20)]) == [(3, "note"), (3, "warning")]
    assert with_loss(once, [2.0 + (step > 14) for step in range(20)]) == [(3, "note")]
    assert told(update_ratio, once) == [(3, "update-ratio")]


def test_updates_may_stay_large_as_long_as_the_loss_comes_down() -> None:
    weight = torch.ones(8, 16) + 1e-3 * torch.randn(8, 16)
    large = [updates(weight, 0.2)] * 10
    assert with_loss(large, [2.0 - 0.01 * step for step in range(10)]) == [(9, "note")]
    assert with_loss(large, [2.0] * 10) == [(9, "warning")]


def test_a_norm_over_few_values_is_told_where_its_statistics_move() -> None:
    def norm(rows: int, step: int) -> dict[tuple[str, str], torch.Tensor]:
        moved = {(f"a.running_{name}", "buffer_sample"): torch.rand(16) + step for name in ("mean", "var")}
        return {("a", "output"): torch.randn(rows, 16), **moved}

    assert told(norm_of_few_values, (norm(4, step) for step in range(11))) == [(10, "norm-of-few-values")]
    assert told(norm_of_few_values, (norm(5, step) for step in range(11))) == []
    assert told(norm_of_few_values, (norm(4 if step % 10 else 64, step) for step in range(50))) == []
    still = norm(2, 0)  # in evaluation mode
    assert told(norm_of_few_values, [still] * 20) == []


def test_zeros_that_are_no_throws_of_a_coin_are_no_dropout() -> None:
    def gradients(zeros: Any) -> list[dict[tuple[str, str], torch.Tensor]]:
        torch.manual_seed(0)
        masks = [zeros() for _ in range(12)]
        return [{("b", "grad_output"): torch.randn(64, 16) * ~each, ("a", "grad_output"): each + 1.0} for each in masks]

    slopes = torch.linspace(0.7, 0.99, 16)
    assert told(heavy_dropout, gradients(lambda: torch.rand(64, 16) < 0.9)) == [(9, "heavy-dropout")]
    assert told(heavy_dropout, gradients(lambda: torch.rand(64, 16) < slopes)) == []
    assert told(heavy_dropout, gradients(lambda: (torch.rand(64, 1) < 0.9).expand(64, 16))) == []
    assert told(heavy_dropout, gradients(lambda: torch.rand(64, 16).argsort(1) < 14)) == []
    answers = {("b", "output"): torch.randn(64, 16)}
    sure = gradients(lambda: (torch.rand(64, 16).argsort(1) < 1) & (torch.rand(64, 1) < 0.7))  # one in some rows
    assert told(heavy_dropout, (answers | each for each in sure)) == []
    dropped = gradients(lambda: torch.rand(64, 16) < 0.15)
    assert told(heavy_dropout, (answers | each for each in dropped)) == [(9, "heavy-dropout")]


def test_weights_that_are_equal_are_copies_only_where_their_gradients_are_equal_too() -> None:
    def both(weights: list[torch.Tensor], gradients: list[torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
        return {
            (f"{name}.weight", kind): each
            for kind, tensors in (("param_sample", weights), ("param_grad", gradients))
            for name, each in zip("ab", tensors, strict=True)
        }

    one, two = torch.randn(8, 16), torch.randn(8, 16)
    assert told(equal_modules, [both([one, one], [two, two])] * 6) == [(4, "equal-modules")]
    assert told(equal_modules, [both([one, one], [two, one])] * 6) == []
    assert told(equal_modules, [both([one, two], [two, two])] * 6) == []
    assert told(equal_modules, [both([torch.ones(8, 16)] * 2, [two, two])] * 6) == []
    of_outputs = {("a", "grad_output"): one, ("b", "grad_output"): two}  # and averaged afterwards
    assert told(equal_modules, [both([one, one], [two, two]) | of_outputs] * 6) == []
    assert told(equal_modules, [both([one, one], [two, two]) | dict.fromkeys(of_outputs, one)] * 6) != []


def test_updates_that_grow_as_in_a_warmup_or_shrink_with_the_gradients_are_not_too_small() -> None:
    def said(scales: list[float], gradients: float | None = None, losses: float = 0.0) -> list[int]:
        weight, change, steps = torch.randn(8, 16), torch.randn(8, 16), []
        for number, scale in enumerate(scales):
            size = 1.0 if gradients is None else scale * gradients
            tensors = {("a.weight", "param_sample"): weight, ("a.weight", "update_sample"): scale * change}
            steps.append(
                step_of(number, tensors | {("a.weight", "param_grad"): size * change}, loss=2 - losses * number)
            )
        return [each.step for each in judge(steps, [tiny_updates])]

    assert said([1e-7] * 40) == [28]
    assert said([1e-7] * 40, losses=0.05) == []
    assert said([1e-8 * (1 + number) for number in range(40)]) == []
    falling = [1e-3] * 30 + [1e-8] * 30
    assert said(falling) == [49]
    assert said(falling, gradients=1e3) == []
    assert said([1e-3] * 300 + [1e-8] * 30) == []  # the end of a schedule


def test_a_loss_that_began_below_0_or_is_not_yet_below_it_may_be_so() -> None:
    def said(losses: list[float]) -> list[int]:
        return [
            each.step for each in judge([step_of(i, {}, loss=loss) for i, loss in enumerate(losses)], [impossible_loss])
        ]

    assert said([1.0] * 5 + [-0.5] * 10) == [14]
    assert said([1.0] * 5 + [-0.5, 0.1] * 10) == []
    assert said([-1.0] * 30) == []


def test_an_input_that_drifts_is_a_note_and_one_that_varies_is_none() -> None:
    torch.manual_seed(0)
    drifting = [{("", "input"): torch.randn(64, 8) * 1.02**step} for step in range(70)]
    assert told(input_shift, drifting)[0][0] in range(40, 60)
    assert told(input_shift, ({("", "input"): torch.randn(64, 8) * 1.3 ** (step % 3)} for step in range(70))) == []
    assert told(input_shift, ({("", "input.1"): each["", "input"]} for each in drifting)) == []  # a state


def test_a_model_without_gradients_may_be_without_losses_or_be_changed_in_another_way() -> None:
    def said(grows: float = 0.0, arrives: int = -1, **scalars: float) -> list[int]:
        found = []
        for number in range(40):
            given = {
                ("a", "output"): torch.randn(8, 4),
                ("a.weight", "param_sample"): torch.ones(4, 4) + grows * number,
            }
            given |= {("a.weight", "param_grad"): torch.ones(4, 4)} if number == arrives else {}
            stats = {Site(*site): hookstats.measure(each, -1) for site, each in given.items()}
            order = list(stats)
            stats.setdefault(Site("a.weight", "param_grad"), hookstats.measure(torch.empty(0, 4), -1))
            frame = StepFrame.from_stats(stats, order, number, scalars=dict(scalars))
            found.append(Snapshot(frame))
        return [each.step for each in judge(found, [no_gradients])]

    assert said(loss=1.0) == [29]
    assert said() == []
    assert said(grows=1e-3, loss=1.0) == []
    assert said(arrives=3, loss=1.0) == []


def test_a_loss_far_below_zero_is_no_cross_entropy_and_stops_no_rule() -> None:
    output = torch.rand(64, 4)
    tensors = {("", "output"): output / output.sum(1, keepdim=True), ("", "grad_output"): torch.randn(64, 4)}
    steps = [step_of(number, tensors, loss=-1e6 * (number + 1)) for number in range(12)]
    assert [str(each) for each in judge(steps, [probabilities_as_logits])] == []
