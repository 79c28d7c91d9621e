"""Rules: they report what is wrong with a training when it starts. numpy alone; knows nothing of torch, hooks or files.

findings = hookstats.rules.judge(snapshots)
"""

from hookstats.rules.activations import DeadChannels, SaturatedChannels
from hookstats.rules.answers import InitialLoss, NoProgress, ProbabilitiesAsLogits
from hookstats.rules.arriving import GrowingGradients, MissingGradients
from hookstats.rules.attention import attention_entropy, attention_logits, attention_sink
from hookstats.rules.blocks import BLOCK_FORMATS, BlockFit
from hookstats.rules.engine import Ill, Rule, rule
from hookstats.rules.experts import DeadExperts, ExpertLoad
from hookstats.rules.finding import SEVERITIES, Cause, Finding
from hookstats.rules.gradients import ExplodingGradients, VanishingGradients
from hookstats.rules.inputs import ConstantInput, InputShift, UnscaledInput
from hookstats.rules.judging import Judge, defaults, is_ours, judge, rule_from_json, rule_to_json
from hookstats.rules.laws import BiasGradient, ReducedGradient, ReplicaDrift
from hookstats.rules.learning import LostUpdates, ShrinkingWeights, UnchangedParameters
from hookstats.rules.memory import Memory
from hookstats.rules.moments import second_moment
from hookstats.rules.nonfinite import NonFinite
from hookstats.rules.outliers import massive_activations, outlier_channels
from hookstats.rules.precision import Fit, LowPrecisionFit, fit
from hookstats.rules.residual import ResidualDrift
from hookstats.rules.spikes import GradientNormSpike, LossSpike
from hookstats.rules.step import Step
from hookstats.rules.story import Chapter, head, story
from hookstats.rules.updates import UpdateRatio

__all__ = [
    "BLOCK_FORMATS",
    "SEVERITIES",
    "BiasGradient",
    "BlockFit",
    "Cause",
    "Chapter",
    "ConstantInput",
    "DeadChannels",
    "DeadExperts",
    "ExpertLoad",
    "ExplodingGradients",
    "Finding",
    "Fit",
    "GradientNormSpike",
    "GrowingGradients",
    "Ill",
    "InitialLoss",
    "InputShift",
    "Judge",
    "LossSpike",
    "LostUpdates",
    "LowPrecisionFit",
    "Memory",
    "MissingGradients",
    "NoProgress",
    "NonFinite",
    "ProbabilitiesAsLogits",
    "ReducedGradient",
    "ReplicaDrift",
    "ResidualDrift",
    "Rule",
    "SaturatedChannels",
    "ShrinkingWeights",
    "Step",
    "UnchangedParameters",
    "UnscaledInput",
    "UpdateRatio",
    "VanishingGradients",
    "attention_entropy",
    "attention_logits",
    "attention_sink",
    "defaults",
    "fit",
    "head",
    "is_ours",
    "judge",
    "massive_activations",
    "outlier_channels",
    "rule",
    "rule_from_json",
    "rule_to_json",
    "second_moment",
    "story",
]
