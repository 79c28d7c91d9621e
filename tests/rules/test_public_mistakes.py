"""The collection of trainings: each mistake is named, by its rule and in words, and healthy ones are told nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

from benchmarks.illnesses import HEALTHY, ILL, Training, alarms, diagnosis, more, thinned
from benchmarks.illnesses.training import healthy, lines
from hookstats import Snapshot
from hookstats.rules import (
    Finding,
    defaults,
    judge,
    loss_spike,
    nonfinite,
    outlier_channels,
    story,
    vanishing_gradients,
)
from tests.rules.test_guards import step_of
from tests.rules.test_spikes import found_in
from tests.rules.trainings import OnDigits, train

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def found_in_both(name: str) -> dict[int, list[Finding]]:
    """Return what is found where every step is measured, and every tenth."""
    snapshots = (ILL | HEALTHY)[name].run().snapshots
    return {every: judge(thinned(snapshots, every)) for every in (1, 10)}


def found_of(name: str, every: int = 1) -> list[Finding]:
    return found_in_both(name)[every]


def sentences_of(finding: Finding) -> list[str]:
    """Split what a finding says, without the sentence that lists its other sites."""
    said = re.split(r"(?<=[.]) (?=[A-Z])", finding.sentence)
    return [each for each in said if not each.startswith("The same holds at ")]


NAMED = [
    # The most common ones: nothing learns, or the data are wrong.
    ("a_layer_that_no_optimizer_has.mlp", "unchanged-parameters", "warning", "2.weight, 2.bias never changed"),
    ("the_optimizer_of_another_model.mlp", "unchanged-parameters", "critical", "no parameter of the model has ever"),
    ("a_learning_rate_of_zero.mlp", "unchanged-parameters", "critical", "no parameter of the model has ever"),
    ("a_learning_rate_that_becomes_zero.mlp", "unchanged-parameters", "critical", "changed since step 50"),
    ("a_group_whose_learning_rate_becomes_zero.mlp", "unchanged-parameters", "warning", "changed since step 50"),
    ("bfloat16_weights_whose_updates_are_lost.mlp", "lost-updates", "warning", "in bfloat16 a change below 1/512"),
    ("a_detach_in_the_forward.mlp", "missing-gradients", "warning", "ends between model.2 and model.3"),
    ("weights_that_are_all_zero.mlp", "dead-channels", "critical", "all weights of the module are 0"),
    ("a_batch_a_thousand_times_too_large.mlp", "input-shift", "warning", "the batch of step 57 is not"),
    ("one_image_a_thousand_times_too_large.mlp", "input-shift", "warning", "the batch of step 57 is not"),
    ("a_loader_that_gives_zeros_from_the_middle_on.mlp", "constant-input", "warning", "held a single value, 0"),
    ("images_that_were_not_loaded.mlp", "constant-input", "warning", "all rows have had the same values"),
    ("the_same_image_in_every_row.mlp", "constant-input", "warning", "all rows have had the same values"),
    ("pixels_from_0_to_255.mlp", "unscaled-input", "note", "has an rms of"),
    ("gradients_that_are_never_zeroed_under_adam.mlp", "growing-gradients", "warning", "nothing zeroes them"),
    ("one_layer_whose_gradients_are_never_zeroed.mlp", "growing-gradients", "warning", "gradients of 2.bias are"),
    ("weight_decay_that_is_too_strong_in_sgd.mlp", "shrinking-weights", "warning", "stronger than the gradient"),
    ("a_softmax_before_the_cross_entropy.mlp", "probabilities-as-logits", "warning", "cannot fall below 1.46"),
    ("a_sigmoid_before_the_cross_entropy.mlp", "probabilities-as-logits", "warning", "cannot fall below 1.46"),
    ("initial_weights_thirty_times_too_large.mlp", "initial-loss", "note", "among 10 classes would cost 2.3"),
    ("labels_of_other_rows.mlp", "no-progress", "note", "nothing has been learned"),
    ("a_layer_that_dies_in_the_middle.mlp", "dead-channels", "critical", "all channels of the output of 3"),
    ("a_deep_stack_of_sigmoids.mlp", "vanishing-gradients", "warning", "so the layers there"),
    ("a_deep_stack_without_norms_and_with_large_weights.mlp", "exploding-gradients", "warning", "gradients grow"),
    ("tanh_that_is_saturated_from_the_start.tanh", "saturated-channels", "warning", "saturated from the start"),
    ("a_weight_that_becomes_nan.mlp", "nonfinite", "critical", "It began in forward, after the output of 1"),
    ("a_router_that_chooses_one_expert.mlp", "expert-load", "warning", "router of experts has collapsed"),
    ("a_residual_stream_that_grows_in_each_block.gpt", "residual-drift", "warning", "stream through blocks grows"),
    # Those of public threads.
    ("labels_that_are_all_ignored.mlp", "unchanged-parameters", "critical", "ignores every label"),
    ("labels_that_are_all_ignored.gpt", "unchanged-parameters", "critical", "only weight decay changes"),
    ("one_column_against_a_row.mlp", "broadcast-target", "warning", "output.squeeze(-1)"),
    ("prices_of_a_hundred_thousand_and_more.mlp", "unscaled-targets", "warning", "a mean of 5"),
    ("a_relu_before_targets_of_both_signs.mlp", "unreachable-targets", "warning", "never goes below 0"),
    ("a_sigmoid_before_targets_up_to_nine.mlp", "unreachable-targets", "warning", "never goes above 1"),
    ("a_tanh_before_targets_down_to_minus_nine.mlp", "unreachable-targets", "warning", "never goes below -1"),
    ("a_negative_log_likelihood_of_logits.cnn", "nll-of-logits", "warning", "Use cross_entropy"),
    ("a_negative_log_likelihood_of_probabilities.mlp", "nll-of-logits", "warning", "log_softmax"),
    ("data_that_are_sorted_by_class.mlp", "sorted-data", "warning", "Shuffle them"),
    ("a_class_after_another.mlp", "sorted-data", "warning", "a single class each, 2 different ones"),
    ("a_class_that_no_row_has.mlp", "absent-class", "note", "class 7 of the output of 6 has not been the target"),
    ("an_end_of_text_that_is_taken_for_padding.gpt", "absent-class", "note", "must not be the end-of-text token"),
    ("a_posterior_that_collapses.mlp", "posterior-collapse", "warning", "lower the weight of the KL term"),
    ("a_mean_over_the_batch.mlp", "constant-output", "warning", "all rows get the same answer"),
    ("an_input_that_does_not_matter.mlp", "constant-output", "warning", "inputs that are far too small"),
    ("weights_that_are_all_equal.mlp", "equal-channels", "warning", "the weights started from one value"),
    ("kernels_that_are_all_equal.cnn", "equal-channels", "warning", "all 16 channels of the output of 0"),
    ("neurons_that_are_cut_off.mlp", "silent-rows", "note", "of 64 rows of the gradient"),
    (
        "gradients_that_are_clipped_before_they_are_unscaled.mlp", "clipped-gradients", "warning",
        "scaler.unscale_(optimizer) before clipping",
    ),
    ("a_critic_whose_gradients_nobody_zeroes.mlp", "growing-gradients", "warning", "nothing zeroes them"),
    ("workers_whose_random_generators_are_equal.mlp", "constant-input", "note", "random generators start alike"),
    ("microbatches_whose_losses_are_added_up.gpt", "initial-loss", "note", "Divide each loss by 8"),
    ("a_training_that_forgets_all.tanh", "no-progress", "note", "after 200 steps"),
    (
        "rotary_frequencies_that_nobody_computes.gpt", "uninitialised-buffer", "warning",
        "the sample of the buffer inv_freq was never initialised",
    ),
    ("batch_norms_without_momentum.resnet", "still-statistics", "warning", "are still 0 and 1"),
    ("a_branch_whose_gate_is_zero.mlp", "missing-gradients", "warning", "only a gradient that is 0"),
    ("pixels_that_are_divided_by_255_twice.mlp", "unscaled-input", "note", "scaled twice, or not at all"),
    ("a_momentum_above_1.resnet", "runaway-statistics", "warning", "a variance is never below 0"),
    ("batches_of_two_before_a_batch_norm.mlp", "norm-of-few-values", "warning", "1: normalised over only 2 values"),
    ("a_frozen_body_in_training_mode.resnet", "moving-statistics", "note", "Call eval() on that part"),
    ("dropouts_that_were_given_the_share_to_keep.mlp", "heavy-dropout", "note", "a dropout after it keeps only 5"),
    ("a_dropout_after_the_last_layer.mlp", "heavy-dropout", "warning", "Remove the dropout after the last layer"),
    ("a_tanh_before_the_cross_entropy.mlp", "probabilities-as-logits", "warning", "cannot fall below 0.797"),
    (
        "a_sigmoid_before_a_binary_cross_entropy_of_logits.mlp", "probabilities-as-logits", "warning",
        "the loss cannot fall below 0.313",
    ),
    ("a_bottleneck_of_dropout.mlp", "heavy-dropout", "note", "not the share to keep"),
    ("a_critic_that_began_as_a_copy_of_the_other.mlp", "equal-modules", "warning", "one.0.weight and two.0.weight"),
    ("a_loss_that_is_made_anew.mlp", "no-gradients", "critical", "torch.tensor(..., requires_grad=True)"),
    ("a_cross_entropy_over_a_single_class.mlp", "unchanged-parameters", "critical", "has a single class"),
    ("a_layer_that_forward_forgets.mlp", "missing-gradients", "note", "extra: no forward has called it"),
    ("a_decay_for_each_epoch_that_is_taken_at_each_batch.tanh", "tiny-updates", "warning", "must not be stepped"),
    ("a_learning_rate_ten_thousand_times_too_small.mlp", "tiny-updates", "warning", "has changed a weight by more"),
    ("targets_beyond_one_of_a_binary_cross_entropy.mlp", "impossible-loss", "note", "lie between 0 and 1"),
    ("labels_that_are_not_shifted.gpt", "impossible-loss", "note", "labels that are not shifted by one"),
    ("answers_that_the_input_says_nothing_of.mlp", "no-progress", "note", "after half of them, and has stopped"),
    ("pixels_that_are_scaled_in_place.cnn", "input-shift", "note", "has drifted to"),
    ("activations_that_a_norm_hides.resnet", "runaway-statistics", "warning", "1.norm1.running_mean runs away"),
    ("labels_that_are_divided_and_cut_off.cnn", "absent-class", "warning", "class 0 of the output of"),
    ("microbatches_each_of_which_is_zeroed.mlp", "dropped-gradients", "note", "over the 8 forwards of a step"),
    ("an_optimizer_that_is_made_in_each_step.gpt", "lost-moments", "note", "made anew in each step"),
    # Those that jump or diverge.
    ("a_learning_rate_that_jumps.mlp", "loss-spike", "warning", "the loss jumped to 40.7, from 2.11"),
    ("a_learning_rate_that_jumps.mlp", "exploding-gradients", "warning", "more than 100 times its usual size for 3"),
    ("learning_rate_that_diverges_from_the_start", "loss-spike", "critical", "training diverges: the loss has risen"),
    ("jump_of_a_language_model", "loss-spike", "warning", "outputs of the model changed at the same time"),
    ("spike_of_the_learning_rate", "gradient-norm-spike", "note", "the norm of the gradients jumped to 97.7"),
    ("labels_that_are_random_in_one_batch", "loss-spike", "warning", "came back after 1 step: check the data of"),
    ("weights_that_a_bit_has_flipped", "loss-spike", "warning", "the loss jumped to 2.41, from 2.06"),
    ("nan_by_the_loss", "nonfinite", "critical", "It began in the loss, which is not finite while all outputs are"),
    ("updates_that_are_too_large", "update-ratio", "note", "step 0 changed 0.weight by 1.31 times its own size"),
    ("one_feature_ten_thousand_times_the_others.mlp", "low-precision-fit", "note", "in float8_e4m3fn (scale 2^"),
    ("one_feature_ten_thousand_times_the_others.mlp", "massive-activations", "note", "the output of 0"),
    ("a_channel_that_is_enormous_in_every_block.gpt", "outlier-channels", "warning", "channel 3 of the output of"),
]  # fmt: skip
SEEN_AT_EVERY_TENTH = [
    "jump_of_a_language_model", "spike_of_the_learning_rate", "labels_that_are_random_in_one_batch",
    "weights_that_a_bit_has_flipped", "nan_by_the_loss",
]  # fmt: skip


@pytest.mark.parametrize(("name", "rule", "severity", "words"), NAMED, ids=lambda each: str(each)[:40])
def test_a_mistake_is_named(name: str, rule: str, severity: str, words: str) -> None:
    found = [each for each in found_of(name) if each.rule == rule and each.because is None]
    assert found, [str(each) for each in found_of(name)]
    assert found[0].severity == severity
    assert words in found[0].sentence
    assert all(len(sentences_of(each)) <= 3 and each.sentence.endswith(".") for each in found_of(name))
    assert diagnosis(found_of(name), ILL[name])["found"]


@pytest.mark.parametrize("name", SEEN_AT_EVERY_TENTH)
def test_a_mistake_is_named_where_every_tenth_step_is_measured(name: str) -> None:
    assert diagnosis(found_of(name, 10), ILL[name])["found"]


TWINS = {
    "unscaled-targets": [
        "prices_that_are_divided_by_their_size.mlp", "answers_that_begin_at_zero.mlp", "as_it_is.mlp",
        "numbers_that_are_large.mlp",
    ],
    "unreachable-targets": [
        "a_relu_before_targets_that_are_never_negative.mlp", "a_sigmoid_before_targets_of_zero_and_one.mlp",
        "a_tanh_before_targets_of_minus_one_and_one.mlp", "answers_that_begin_at_zero.mlp",
        "answers_that_are_means_over_the_image.cnn",
    ],
    "broadcast-target": [
        "a_column_against_a_column.mlp", "a_whole_data_set_and_a_number.mlp", "numbers_that_are_large.mlp",
    ],
    "nll-of-logits": [
        "a_negative_log_likelihood_of_log_probabilities.mlp", "a_log_softmax_in_the_loss.mlp", "values_of_actions.mlp",
    ],
    "sorted-data": ["batches_of_eight.cnn", "a_class_that_is_nearly_all.mlp", "as_it_is.mlp"],
    "absent-class": ["a_class_that_is_rare.mlp", "as_it_is.mlp", "values_of_actions.mlp"],
    "posterior-collapse": [
        "a_variational_autoencoder.mlp", "small_answers_that_are_learned.mlp", "low_rank_adapters.mlp",
    ],
    "constant-output": ["an_encoder_by_contrast.mlp", "a_class_that_is_nearly_all.mlp", "two_views_of_an_image.mlp"],
    "equal-channels": ["low_rank_adapters.mlp", "as_it_is.mlp"],
    "silent-rows": ["four_heads.gpt"],
    "clipped-gradients": ["two_losses.mlp"],
    "growing-gradients": ["a_gradient_that_is_scaled_from_outside.mlp", "a_generator_and_its_critic.mlp"],
    "initial-loss": ["microbatches.gpt"],
    "lost-updates": ["bfloat16_weights_with_large_steps.mlp", "bfloat16_with_float32_copies.mlp"],
    "unchanged-parameters": [
        "frozen_on_purpose.mlp", "layers_that_are_trained_one_after_another.mlp", "a_minimum_that_is_found.mlp",
    ],
    "uninitialised-buffer": ["rotary_frequencies.gpt"],
    "still-statistics": ["batch_norms_of_a_trained_model_that_are_frozen.resnet"],
    "runaway-statistics": [
        "pixels_up_to_255_behind_batch_norms.resnet", "batch_norms_that_are_frozen_after_a_while.resnet",
    ],
    "vanishing-gradients": ["an_actor_and_a_critic.mlp"],
    "norm-of-few-values": [
        "batches_of_sixteen_before_a_batch_norm.mlp", "batches_of_two_before_a_layer_norm.mlp",
        "batches_of_two_images.resnet", "as_it_is.resnet",
    ],
    "moving-statistics": ["a_frozen_body_in_evaluation_mode.resnet", "as_it_is.resnet"],
    "heavy-dropout": [
        "dropout_of_a_half.mlp", "a_pooling_that_leaves_a_ninth.mlp", "values_of_actions.mlp",
        "a_negative_log_likelihood_of_log_probabilities.mlp", "as_it_is.cnn",
    ],
    "probabilities-as-logits": [
        "a_sigmoid_before_a_binary_cross_entropy.mlp", "answers_that_are_means_over_the_image.cnn",
        "a_sigmoid_for_each_class.mlp", "as_it_is.tanh",
    ],
    "no-gradients": ["a_frozen_model_that_is_looked_at.mlp", "as_it_is.mlp"],
    "equal-modules": ["two_critics_that_began_apart.mlp", "blocks_that_began_as_copies.gpt", "as_it_is.mlp"],
    "tiny-updates": ["stairs_of_epochs.mlp", "a_cosine_that_ends_at_zero.mlp", "warmup_from_zero.gpt", "as_it_is.mlp"],
    "impossible-loss": ["targets_of_a_binary_cross_entropy.mlp", "as_it_is.gpt"],
    "no-progress": ["as_it_is.mlp", "label_smoothing.mlp", "stairs_of_epochs.mlp"],
    "input-shift": ["random_erasing_and_noise.cnn", "images_that_are_standardised.resnet"],
    "missing-gradients": ["a_branch_whose_gate_opens_slowly.mlp"],
    "dropped-gradients": ["microbatches.gpt", "a_derivative_in_the_loss.tanh"],
    "lost-moments": ["one_batch_by_adam.mlp"],
}  # fmt: skip


# Of those that are much alike one is here.
USUAL = [
    "mlp_adam", "as_it_is.gpt", "autoencoder", "logistic_regression_adagrad", "batches_of_four",
    "warm_restarts_of_sgd.mlp", "muon_like", "task_added", "dqn", "curriculum", "policy_gradient",
    "normalising_flow_that_keeps_volumes", "cauchy_losses", "sparse_embeddings",
]  # fmt: skip


# Those that no rule has for its twin: python -m benchmarks.illnesses.
@pytest.mark.parametrize("name", [*sorted({name for names in TWINS.values() for name in names}), *USUAL])
def test_a_healthy_training_sets_off_no_alarm_and_is_told_nothing_of_a_fault_whose_twin_it_is(name: str) -> None:
    assert [str(each) for every in (1, 10) for each in alarms(found_of(name, every))] == []
    assert [str(each) for each in found_of(name) if name in TWINS.get(each.rule, ())] == []


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("gradients_that_are_unscaled_and_then_clipped.mlp", "clipped-gradients"),
        ("a_head_that_is_multiplied_by_zero.mlp", "missing-gradients"),
    ],
)
def test_what_may_be_meant_is_a_note_at_most(name: str, rule: str) -> None:
    assert {each.severity for each in found_of(name) if each.rule == rule} <= {"note"}


def test_the_digits_cnn_is_healthy() -> None:
    torch.manual_seed(0)
    demo = pytest.importorskip("examples.digits")
    images, labels, *_ = demo.digits(torch.device("cpu"))
    model = demo.cnn()
    loss_of = OnDigits(model, shape=(1, 8, 8))
    loss_of.images, loss_of.labels = images, labels
    snapshots = train(model, loss_of, torch.optim.Adam(model.parameters(), lr=2e-3), 200)
    assert snapshots[-1].scalars["loss"] < 0.2
    assert alarms(judge(snapshots)) == []


def test_a_small_llama_in_bfloat16_is_healthy() -> None:
    torch.manual_seed(0)
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=86, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)

    def loss_of(step: int) -> torch.Tensor:
        batch = lines(8, 32)
        return model(input_ids=batch, labels=batch).loss

    snapshots = train(model, loss_of, torch.optim.AdamW(model.parameters(), lr=1e-3), 200)
    assert snapshots[-1].scalars["loss"] < 0.6 * snapshots[0].scalars["loss"]
    assert alarms(judge(snapshots)) == []


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


def test_one_row_that_is_not_finite_is_no_matter_of_weights() -> None:
    def told(bad: Callable[[torch.Tensor], None]) -> str:
        first, second = torch.randn(16, 8), torch.randn(16, 8)
        bad(second)
        steps = [step_of(0, {("0", "output"): first, ("1", "output"): second})]
        (found,) = judge(steps, [nonfinite])
        return found.sentence

    assert "in 1 of 16 rows all channels hold it, which weights cannot" in told(lambda x: x[3].fill_(torch.nan))
    assert "check the weights and the arithmetic of 1" in told(lambda x: x[:, 3].fill_(torch.nan))


def test_a_fine_tuned_model_is_not_told_that_it_has_learned_nothing_yet() -> None:
    model = nn.Linear(8, 10)
    with torch.no_grad():
        model.weight.mul_(100)
    torch.manual_seed(0)
    x, y = torch.randn(64, 8), torch.arange(64) % 10
    snapshots = train(model, lambda step: nn.functional.cross_entropy(model(x), y), [], 1)
    (found,) = [each for each in judge(snapshots) if each.rule == "initial-loss"]
    assert "for a pretrained one, use the labels, tokens and scaling that it was trained with" in found.sentence
    assert "before it has learned" not in found.sentence


def test_a_story_is_as_grave_as_what_followed_and_does_not_say_that_nothing_is_wrong() -> None:
    def finding(rule: str, step: int, severity: str, sentence: str, since: int) -> Finding:
        return Finding(rule, step, None, 2.0, 1.0, severity, sentence, since=since)

    note = finding(
        "update-ratio", 60, "note", "A step is large. The loss fell meanwhile, so nothing needs to be done.", 60
    )
    cause = finding("update-ratio", 62, "warning", "A step is large.", 60)
    effect = Finding("loss-spike", 66, None, 2.0, 1.0, "critical", "It diverges.", since=61, because=note.as_cause)
    for chapter in story([note, cause, effect]):
        assert chapter.finding.severity == "critical"
        assert "nothing needs to be done" not in chapter.finding.sentence
        assert "It led to loss-spike in step 66, which is critical." in chapter.finding.sentence


def test_a_loss_that_rises_by_three_percent_is_no_jump() -> None:
    quiet = [2.0 + 0.001 * (i % 3) for i in range(60)]
    assert found_in([*quiet, 2.06, *quiet[:20]], loss_spike, moved={}) == []
    assert [each.severity for each in found_in([*quiet, 2.2, *quiet[:20]], loss_spike, moved={})] == ["note"]


def test_one_noisy_batch_that_comes_back_is_no_warning_and_a_broken_one_is() -> None:
    falling = [2.3 - 0.01 * i + 0.002 * (i % 3) for i in range(52)]
    assert {each.severity for each in found_in([*falling, 2.46, *falling[-20:]], loss_spike, moved={})} <= {"note"}
    assert "warning" in {each.severity for each in found_in([*falling, 24.6, *falling[-20:]], loss_spike, moved={})}


def test_one_channel_of_a_residual_stream_is_one_problem_however_many_blocks_it_runs_through() -> None:
    def step(number: int) -> Snapshot:
        stream = torch.ones(200, 64)
        tensors = {}
        for block in range(10):
            each = stream.clone()
            if number >= block:
                each[:, 3] = 1e5
            tensors[f"blocks.{block}", "output"] = each
        return step_of(number, tensors)

    found = judge([step(i) for i in range(20)], [outlier_channels])
    assert [each.step for each in found if each.because is None] == [found[0].step]


@pytest.mark.parametrize(("scale", "words"), [(0.0, "All weights of 3 are 0"), (1.0, "Use ReLU or GELU instead")])
def test_gradients_that_vanish_behind_weights_of_zero_want_other_weights_and_no_norm(scale: float, words: str) -> None:
    def tensors() -> dict[tuple[str, str], torch.Tensor]:
        outputs = {(f"{i}", "output"): torch.randn(8, 4) for i in range(8)}
        gradients = {(f"{i}", "grad_output"): 10.0 ** (i - 7) * torch.randn(8, 4) for i in reversed(range(8))}
        return {**outputs, **gradients, ("3.weight", "param_sample"): scale * torch.ones(4, 4)}

    (found,) = judge([step_of(number, tensors()) for number in range(6)], [vanishing_gradients])
    assert words in found.sentence
    assert ("normalise" in found.sentence) == (scale != 0)
