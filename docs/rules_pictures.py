"""The pictures of the rules' sections: an ill training for each rule, as the report shows it.

    python docs/rules_pictures.py [NAME ...]    some rules alone; without a name all, in about five minutes

Needs Chromium, and `pip install '.[dev]'`.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import torch

from benchmarks.illnesses import ILL, seed
from hookstats import Site, Snapshot, report
from hookstats.report.record import Recorded
from hookstats.report.writing import kind_of_rule, kinds_of
from hookstats.rules import judge
from tests.cluster import drifting
from tests.identities import test_adjoint as adjoint
from tests.identities import trainings as identities
from tests.language import trainings
from tests.report.browser import Browser
from tests.rules import outside, tokens

PAGE = Path(__file__).with_name("rules.md")
WIDE = 720
# Of each rule a training: of benchmarks/illnesses, or of a room of tests.
SHOWN = {
    "nonfinite": "a_weight_that_becomes_nan.gpt",
    "evaluation-mode": "a_validation_after_which_the_model_stays_in_evaluation_mode.cnn",
    "uninitialised-buffer": "rotary_frequencies_that_nobody_computes.gpt",
    "still-statistics": "batch_norms_without_momentum.resnet",
    "moving-statistics": "a_frozen_body_in_training_mode.resnet",
    "norm-of-few-values": "batches_of_two_before_a_batch_norm.mlp",
    "runaway-statistics": "activations_that_a_norm_hides.resnet",
    "input-shift": "a_batch_a_thousand_times_too_large.cnn",
    "constant-input": "a_loader_that_gives_zeros_from_the_middle_on.cnn",
    "unscaled-input": "an_identifier_among_the_features.tanh",
    "broadcast-target": "one_column_against_a_row.mlp",
    "unscaled-targets": "prices_of_a_hundred_thousand_and_more.mlp",
    "unreachable-targets": "a_sigmoid_before_targets_up_to_nine.mlp",
    "nll-of-logits": "a_negative_log_likelihood_of_logits.gpt",
    "sorted-data": "data_that_are_sorted_by_class.cnn",
    "equal-channels": "kernels_that_are_all_equal.cnn",
    "equal-modules": "a_critic_that_began_as_a_copy_of_the_other.mlp",
    "growing-gradients": "gradients_that_are_never_zeroed_under_adam.gpt",
    "same-data": "ranks_that_draw_the_same",
    "replica-drift": "a_rank_that_clips_alone",
    "reduced-gradient": "gradients_that_are_averaged_twice",
    "outside-write": "averaged_weights_that_are_not_put_back",
    "optimizer-formula": "gradients_that_are_halved_while_an_optimizer_steps",
    "identity": "a_gradient_that_is_counted_twice",
    "wrong-backward": "a_norm_without_its_projection",
    "cross-entropy-gradient": "microbatches_that_are_added_up",
    "bias-gradient": "gradients_of_one_layer_times_eight.mlp",
    "dropped-gradients": "microbatches_each_of_which_is_zeroed.mlp",
    "lost-moments": "an_optimizer_that_is_made_in_each_step.gpt",
    "unchanged-parameters": "a_layer_that_no_optimizer_has.gpt",
    "lost-updates": "bfloat16_weights_whose_updates_are_lost.gpt",
    "shrinking-weights": "weight_decay_that_is_too_strong_in_adamw.gpt",
    "no-gradients": "a_loss_that_is_made_anew.gpt",
    "missing-gradients": "a_detach_in_the_forward.cnn",
    "probabilities-as-logits": "a_softmax_before_the_cross_entropy.tanh",
    "initial-loss": "initial_weights_thirty_times_too_large.gpt",
    "loss-spike": "spike_of_the_learning_rate",
    "gradient-norm-spike": "targets_that_are_ten_thousand_times_too_large_in_one_batch.mlp",
    "exploding-gradients": "a_deep_stack_without_norms_and_with_large_weights.mlp",
    "vanishing-gradients": "a_deep_stack_of_sigmoids.mlp",
    "dead-channels": "relus_that_adam_has_killed",
    "saturated-channels": "tanh_that_is_saturated_from_the_start.tanh",
    "heavy-dropout": "dropouts_that_were_given_the_share_to_keep.mlp",
    "massive-activations": "a_channel_that_is_enormous_in_every_block.gpt",
    "outlier-channels": "a_channel_that_is_enormous_in_every_block.gpt",
    "low-precision-fit": "updates_that_are_too_large",
    "update-ratio": "updates_that_are_too_large",
    "tiny-updates": "a_learning_rate_ten_thousand_times_too_small.gpt",
    "second-moment": "gradients_below_the_epsilon_of_adam",
    "attention-logits": "a_learning_rate_of_queries_and_keys_that_spikes",
    "attention-entropy": "a_learning_rate_of_queries_and_keys_that_spikes",
    "attention-sink": "attention_that_rests_on_the_first_token",
    "expert-load": "a_balancing_loss_of_the_wrong_sign",
    "dead-experts": "an_expert_that_is_never_chosen",
    "residual-drift": "a_residual_stream_that_grows_in_each_block.gpt",
    "absent-class": "a_class_that_no_row_has.mlp",
    "posterior-collapse": "a_posterior_that_collapses.mlp",
    "silent-rows": "heads_that_are_masked.gpt",
    "clipped-gradients": "gradients_that_are_clipped_before_they_are_unscaled.mlp",
    "constant-output": "a_mean_over_the_batch.tanh",
    "impossible-loss": "labels_that_are_not_shifted.gpt",
    "no-progress": "a_learning_rate_ten_thousand_times_too_small.gpt",
}
# What is so from the start shows in absolute values, others in how far a site is from its past; and of what.
ABSOLUTE = {
    "initial-loss": "rms",
    "uninitialised-buffer": "abs_max",
    "still-statistics": "rms",
    "runaway-statistics": "rms",
    "clipped-gradients": "rms",
    "unscaled-input": "rms",
    "exploding-gradients": "rms",
    "vanishing-gradients": "rms",
    "saturated-channels": "rms",
    "massive-activations": "peak",
    "outlier-channels": "abs_max",
    "second-moment": "rms",
    "attention-logits": "abs_max",
    "attention-entropy": "rms",
    "attention-sink": "rms",
    "expert-load": "abs_max",
    "dead-experts": "abs_max",
    "missing-gradients": "rms",
    "no-gradients": "rms",
    "equal-channels": "rms",
    "silent-rows": "rms",
    "posterior-collapse": "rms",
    "constant-output": "rms",
    "norm-of-few-values": "rms",
    "heavy-dropout": "rms",
    "equal-modules": "rms",
    "wrong-backward": "rms",
}


def training(name: str) -> list[Snapshot]:
    seed()
    if name == "averaged_weights_that_are_not_put_back":
        return outside.snapshots()
    if name == "gradients_that_are_halved_while_an_optimizer_steps":
        return outside.snapshots(lambda step, model: None, make_optimizer=outside.halving)
    if name == "a_gradient_that_is_counted_twice":
        return identities.snapshots(identities.times("layers.1.mlp.up_proj.weight", 2.0, begin=12), steps=24)
    if name == "a_norm_without_its_projection":
        return adjoint.snapshots_of_a_wrong_norm()
    if name in tokens.FAULTS:
        return tokens.snapshots(name, steps=24)
    if name in drifting.FAULTS:
        return drifting.snapshots(name)
    if name in trainings.ILL:
        return trainings.ILL[name]()
    return ILL[name].run().snapshots


def picture(rule: str) -> None:
    """The heatmap at the site and the step of the rule's first finding."""
    snapshots = training(SHOWN[rule])
    findings = judge(snapshots)
    found = next(each for each in findings if each.rule == rule)
    to = PAGE.with_name("rules") / f"{rule}.png"
    site = found.sites[0] if found.sites else None
    recorded = Recorded.of(snapshots, rule, findings)
    shot(recorded, site, found.step, ABSOLUTE.get(rule), to, kind_of_rule(rule, kinds_of(recorded.sites)))
    print(f"{rule}: step {found.step}, {found.site}, {to.stat().st_size / 1024:.0f} KB", flush=True)


def shot(
    recorded: Recorded, site: Site | None, step: int, absolute: str | None, to: Path, kind: str | None = None
) -> None:
    """The report's heatmap at a site, or a kind of them, and a step: of a statistic; None: against each one's past."""
    place = f"site={recorded.sites.index(site)}&" if site in recorded.sites else f"kind={kind}&" if kind else ""
    with tempfile.TemporaryDirectory() as folder, Browser(WIDE, 1000) as browser:
        path = Path(folder) / "report.html"
        report.write(recorded, path)
        browser.open(f"{path.as_uri()}#{place}step={step}")
        if absolute is not None:
            seen = "performance.getEntriesByName('switch').length"
            before = browser.run(seen)
            browser.run("document.querySelector('[data-value=absolute]').click()")
            browser.wait(f"{seen} === {before + 1}")
            browser.run(f"document.querySelectorAll('#tools select')[1].value = '{absolute}'")
            browser.run("document.querySelectorAll('#tools select')[1].dispatchEvent(new Event('change'))")
            browser.wait(f"{seen} === {before + 2}")
        top = browser.run("document.querySelector('#heat').getBoundingClientRect().top + scrollY")
        end = browser.run("document.querySelector('.under').getBoundingClientRect().top + scrollY")
        to.parent.mkdir(exist_ok=True)
        browser.picture(to, clip={"x": 16, "y": top - 8, "width": WIDE - 32, "height": end - top + 4})


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for rule in sys.argv[1:] or SHOWN:
        picture(rule)


if __name__ == "__main__":
    main()
