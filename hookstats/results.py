"""The classes of what hookstats returns, for annotations and isinstance: ``from hookstats.results import SiteStats``.

Each is imported when it is first used. Those that are named most stand in `hookstats` itself.
"""

from typing import TYPE_CHECKING

from hookstats._lazy import getter, names_in

if TYPE_CHECKING:
    from hookstats.calibration.inputs import InputStats as InputStats
    from hookstats.calibration.results import Calibration as Calibration
    from hookstats.cluster.replicas import Disagreement as Disagreement
    from hookstats.comparing.comparison import Comparison as Comparison
    from hookstats.comparing.comparison import Divergence as Divergence
    from hookstats.identities.checking import Checked as Checked
    from hookstats.identities.checking import Identities as Identities
    from hookstats.identities.terms import Break as Break
    from hookstats.identities.terms import Identity as Identity
    from hookstats.identities.terms import Term as Term
    from hookstats.numbers.fields import Skipped as Skipped
    from hookstats.numbers.fields import Stats as Stats
    from hookstats.numbers.histogram import BlockExponents as BlockExponents
    from hookstats.numbers.histogram import Histogram as Histogram
    from hookstats.numbers.ranks import Drift as Drift
    from hookstats.numbers.ranks import Spread as Spread
    from hookstats.numbers.site_stats import SiteStats as SiteStats
    from hookstats.numbers.site_stats import StandardError as StandardError
    from hookstats.numbers.snapshot import ChannelValue as ChannelValue
    from hookstats.records.errors import SchemaError as SchemaError
    from hookstats.rules.finding import Finding as Finding
    from hookstats.tools.capture import Capture as Capture
    from hookstats.tools.capture import Captured as Captured
    from hookstats.tools.edit import Edit as Edit
    from hookstats.tools.explain import Explanation as Explanation
    from hookstats.tools.explain import HookRow as HookRow
    from hookstats.tools.leaks import Leak as Leak
    from hookstats.tools.leaks import Probe as Probe
    from hookstats.tools.softmax import SoftmaxRows as SoftmaxRows
    from hookstats.watch.laws import Law as Law
    from hookstats.watch.laws import Laws as Laws
    from hookstats.watch.overhead import Overhead as Overhead

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
    "hookstats.numbers.site_stats": ["SiteStats", "StandardError"],
    "hookstats.numbers.snapshot": ["ChannelValue"],
    "hookstats.records.errors": ["SchemaError"],
    "hookstats.rules.finding": ["Finding"],
    "hookstats.tools.capture": ["Capture", "Captured"],
    "hookstats.tools.edit": ["Edit"],
    "hookstats.tools.explain": ["Explanation", "HookRow"],
    "hookstats.tools.leaks": ["Leak", "Probe"],
    "hookstats.tools.softmax": ["SoftmaxRows"],
    "hookstats.watch.laws": ["Law", "Laws"],
    "hookstats.watch.overhead": ["Overhead"],
}
__all__ = names_in(_HOMES)
__getattr__ = getter(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
