"""Rules: they report what is wrong with a training when it starts. numpy alone; knows nothing of torch, hooks or files.

findings = hookstats.rules.judge(snapshots)
"""

from hookstats.rules.activations import DeadChannels, SaturatedChannels
from hookstats.rules.answers import InitialLoss, NoProgress, ProbabilitiesAsLogits
from hookstats.rules.arriving import GrowingGradients, MissingGradients
from hookstats.rules.attention import AttentionEntropy, AttentionLogits, AttentionSink
from hookstats.rules.blocks import BLOCK_FORMATS, BlockFit
from hookstats.rules.experts import DeadExperts, ExpertLoad
from hookstats.rules.finding import SEVERITIES, Cause, Finding
from hookstats.rules.gradients import ExplodingGradients, VanishingGradients
from hookstats.rules.inputs import ConstantInput, InputShift, UnscaledInput
from hookstats.rules.judging import Judge, Rule, defaults, is_ours, judge, rule_from_json, rule_to_json
from hookstats.rules.laws import BiasGradient, ReducedGradient, ReplicaDrift
from hookstats.rules.learning import LostUpdates, ShrinkingWeights, UnchangedParameters
from hookstats.rules.moments import SecondMoment
from hookstats.rules.nonfinite import NonFinite
from hookstats.rules.outliers import MassiveActivations, OutlierChannels
from hookstats.rules.precision import Fit, LowPrecisionFit, fit
from hookstats.rules.residual import ResidualDrift
from hookstats.rules.spikes import GradientNormSpike, LossSpike
from hookstats.rules.step import Step
from hookstats.rules.story import Chapter, head, story
from hookstats.rules.updates import UpdateRatio

__all__ = [
    "BLOCK_FORMATS",
    "SEVERITIES",
    "AttentionEntropy",
    "AttentionLogits",
    "AttentionSink",
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
    "InitialLoss",
    "InputShift",
    "Judge",
    "LossSpike",
    "LostUpdates",
    "LowPrecisionFit",
    "MassiveActivations",
    "MissingGradients",
    "NoProgress",
    "NonFinite",
    "OutlierChannels",
    "ProbabilitiesAsLogits",
    "ReducedGradient",
    "ReplicaDrift",
    "ResidualDrift",
    "Rule",
    "SaturatedChannels",
    "SecondMoment",
    "ShrinkingWeights",
    "Step",
    "UnchangedParameters",
    "UnscaledInput",
    "UpdateRatio",
    "VanishingGradients",
    "defaults",
    "fit",
    "head",
    "is_ours",
    "judge",
    "rule_from_json",
    "rule_to_json",
    "story",
]
