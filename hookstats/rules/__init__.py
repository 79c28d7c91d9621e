"""Rules: they report what is wrong with a training when it starts. numpy alone; knows nothing of torch, hooks or files.

findings = hookstats.rules.judge(snapshots)
"""

from hookstats.rules.activations import dead_channels, saturated_channels
from hookstats.rules.answers import initial_loss, no_progress, probabilities_as_logits
from hookstats.rules.arriving import growing_gradients, missing_gradients
from hookstats.rules.attention import attention_entropy, attention_logits, attention_sink
from hookstats.rules.blocks import BLOCK_FORMATS, BlockFit
from hookstats.rules.buffers import runaway_statistics, still_statistics, uninitialised_buffer
from hookstats.rules.clipping import clipped_gradients
from hookstats.rules.collapse import constant_output, equal_channels, posterior_collapse, silent_rows
from hookstats.rules.cross_entropy import cross_entropy_gradient
from hookstats.rules.engine import Ill, Rule, rule
from hookstats.rules.evaluation import evaluation_mode
from hookstats.rules.experts import dead_experts, expert_load
from hookstats.rules.finding import SEVERITIES, Cause, Finding
from hookstats.rules.gradients import exploding_gradients, vanishing_gradients
from hookstats.rules.identities import identity
from hookstats.rules.inputs import constant_input, input_shift, unscaled_input
from hookstats.rules.judging import (
    Function,
    Judge,
    defaults,
    is_ours,
    judge,
    rule_from_json,
    rule_to_json,
    rules_of_laws,
    without_declared,
)
from hookstats.rules.laws import bias_gradient, reduced_gradient, replica_drift
from hookstats.rules.learning import lost_updates, shrinking_weights, unchanged_parameters
from hookstats.rules.memory import Memory
from hookstats.rules.moments import second_moment
from hookstats.rules.nonfinite import nonfinite
from hookstats.rules.optimizer_law import optimizer_formula
from hookstats.rules.outliers import massive_activations, outlier_channels
from hookstats.rules.precision import Fit, fit, low_precision_fit
from hookstats.rules.residual import residual_drift
from hookstats.rules.spikes import gradient_norm_spike, loss_spike
from hookstats.rules.step import Step
from hookstats.rules.step_law import outside_write
from hookstats.rules.story import Chapter, head, story
from hookstats.rules.targets import absent_class, broadcast_target, nll_of_logits, sorted_data
from hookstats.rules.updates import update_ratio

__all__ = [
    "BLOCK_FORMATS",
    "SEVERITIES",
    "BlockFit",
    "Cause",
    "Chapter",
    "Finding",
    "Fit",
    "Function",
    "Ill",
    "Judge",
    "Memory",
    "Rule",
    "Step",
    "absent_class",
    "attention_entropy",
    "attention_logits",
    "attention_sink",
    "bias_gradient",
    "broadcast_target",
    "clipped_gradients",
    "constant_input",
    "constant_output",
    "cross_entropy_gradient",
    "dead_channels",
    "dead_experts",
    "defaults",
    "equal_channels",
    "evaluation_mode",
    "expert_load",
    "exploding_gradients",
    "fit",
    "gradient_norm_spike",
    "growing_gradients",
    "head",
    "identity",
    "initial_loss",
    "input_shift",
    "is_ours",
    "judge",
    "loss_spike",
    "lost_updates",
    "low_precision_fit",
    "massive_activations",
    "missing_gradients",
    "nll_of_logits",
    "no_progress",
    "nonfinite",
    "optimizer_formula",
    "outlier_channels",
    "outside_write",
    "posterior_collapse",
    "probabilities_as_logits",
    "reduced_gradient",
    "replica_drift",
    "residual_drift",
    "rule",
    "rule_from_json",
    "rule_to_json",
    "rules_of_laws",
    "runaway_statistics",
    "saturated_channels",
    "second_moment",
    "shrinking_weights",
    "silent_rows",
    "sorted_data",
    "still_statistics",
    "story",
    "unchanged_parameters",
    "uninitialised_buffer",
    "unscaled_input",
    "update_ratio",
    "vanishing_gradients",
    "without_declared",
]
