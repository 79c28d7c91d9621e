"""The classes of what hookstats returns, for annotations and isinstance: ``from hookstats.results import SiteStats``.

Each is imported when it is first used. Those that are named most stand in `hookstats` itself.
"""

from typing import TYPE_CHECKING

from hookstats._lazy import getter

if TYPE_CHECKING:
    from hookstats.calibration.inputs import InputStats
    from hookstats.calibration.results import Calibration
    from hookstats.cluster.replicas import Disagreement
    from hookstats.comparing.comparison import Comparison, Divergence
    from hookstats.identities.checking import Checked, Identities
    from hookstats.identities.terms import Break, Identity, Term
    from hookstats.numbers.fields import Skipped, Stats
    from hookstats.numbers.histogram import BlockExponents, Histogram
    from hookstats.numbers.ranks import Drift, Spread
    from hookstats.numbers.site_stats import SiteStats
    from hookstats.numbers.snapshot import ChannelValue
    from hookstats.records.errors import SchemaError
    from hookstats.rules.finding import Finding
    from hookstats.tools.capture import Capture, Captured
    from hookstats.tools.explain import Explanation, HookRow
    from hookstats.tools.gradient import KeptGradient
    from hookstats.tools.leaks import Leak, Probe
    from hookstats.tools.softmax import SoftmaxRows
    from hookstats.watch.overhead import Overhead

__all__ = [
    "BlockExponents",
    "Break",
    "Calibration",
    "Capture",
    "Captured",
    "ChannelValue",
    "Checked",
    "Comparison",
    "Disagreement",
    "Divergence",
    "Drift",
    "Explanation",
    "Finding",
    "Histogram",
    "HookRow",
    "Identities",
    "Identity",
    "InputStats",
    "KeptGradient",
    "Leak",
    "Overhead",
    "Probe",
    "SchemaError",
    "SiteStats",
    "Skipped",
    "SoftmaxRows",
    "Spread",
    "Stats",
    "Term",
]

_HOMES = {
    "hookstats.calibration.inputs": ["InputStats"],
    "hookstats.calibration.results": ["Calibration"],
    "hookstats.cluster.replicas": ["Disagreement"],
    "hookstats.comparing.comparison": ["Comparison", "Divergence"],
    "hookstats.identities.checking": ["Checked", "Identities"],
    "hookstats.identities.terms": ["Break", "Identity", "Term"],
    "hookstats.numbers.fields": ["Skipped", "Stats"],
    "hookstats.numbers.histogram": ["BlockExponents", "Histogram"],
    "hookstats.numbers.ranks": ["Drift", "Spread"],
    "hookstats.numbers.site_stats": ["SiteStats"],
    "hookstats.numbers.snapshot": ["ChannelValue"],
    "hookstats.records.errors": ["SchemaError"],
    "hookstats.rules.finding": ["Finding"],
    "hookstats.tools.capture": ["Capture", "Captured"],
    "hookstats.tools.explain": ["Explanation", "HookRow"],
    "hookstats.tools.gradient": ["KeptGradient"],
    "hookstats.tools.leaks": ["Leak", "Probe"],
    "hookstats.tools.softmax": ["SoftmaxRows"],
    "hookstats.watch.overhead": ["Overhead"],
}
__getattr__ = getter(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
