"""Rules: what is wrong with a training, said when it begins. numpy alone; knows nothing of torch, hooks or files.

findings = hookstats.rules.judge(snapshots)
"""

from hookstats.rules.finding import SEVERITIES, Finding
from hookstats.rules.judging import Judge, Rule, defaults, is_ours, judge, rule_from_json, rule_to_json
from hookstats.rules.nonfinite import NonFinite
from hookstats.rules.step import Step

__all__ = [
    "SEVERITIES",
    "Finding",
    "Judge",
    "NonFinite",
    "Rule",
    "Step",
    "defaults",
    "is_ours",
    "judge",
    "rule_from_json",
    "rule_to_json",
]
