"""hookstats: what happens inside a PyTorch model while it trains.

monitor = hookstats.attach(model)
for batch in loader:
    ...
    optimizer.step()
    snapshot = monitor.step(loss=loss)

A public name is imported when it is first used: what needs numpy alone does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookstats import report, rules, sinks
    from hookstats._native import build_info
    from hookstats.comparing.comparison import Comparison, Parting, compare
    from hookstats.numbers.fields import ExponentBins, LinearBins, Site, Skipped, Stats
    from hookstats.numbers.histogram import Histogram
    from hookstats.numbers.site_stats import SiteStats
    from hookstats.numbers.snapshot import ChannelValue, Snapshot
    from hookstats.records.recording import record
    from hookstats.records.run import Run, load
    from hookstats.records.writer import recover
    from hookstats.replicas.checking import Disagreement, check_replicas
    from hookstats.tools import edit
    from hookstats.tools.capture import Capture, Captured, capture
    from hookstats.tools.explain import Explanation, HookRow, explain
    from hookstats.tools.gradient import KeptGradient, grad_of
    from hookstats.tools.softmax import SoftmaxRows, softmax_rows
    from hookstats.watch.attaching import attach, measure
    from hookstats.watch.judging import FindingError
    from hookstats.watch.monitor import Monitor
    from hookstats.watch.overhead import Overhead

__version__ = "0.1.0"

_HOMES = {
    "hookstats._native": ["build_info"],
    "hookstats.comparing.comparison": ["Comparison", "Parting", "compare"],
    "hookstats.numbers.fields": ["ExponentBins", "LinearBins", "Site", "Skipped", "Stats"],
    "hookstats.numbers.histogram": ["Histogram"],
    "hookstats.numbers.site_stats": ["SiteStats"],
    "hookstats.numbers.snapshot": ["ChannelValue", "Snapshot"],
    "hookstats.records.recording": ["record"],
    "hookstats.records.writer": ["recover"],
    "hookstats.records.run": ["Run", "load"],
    "hookstats.replicas.checking": ["Disagreement", "check_replicas"],
    "hookstats.tools.capture": ["Capture", "Captured", "capture"],
    "hookstats.tools.explain": ["Explanation", "HookRow", "explain"],
    "hookstats.tools.gradient": ["KeptGradient", "grad_of"],
    "hookstats.tools.softmax": ["SoftmaxRows", "softmax_rows"],
    "hookstats.watch.attaching": ["attach", "measure"],
    "hookstats.watch.judging": ["FindingError"],
    "hookstats.watch.monitor": ["Monitor"],
    "hookstats.watch.overhead": ["Overhead"],
}
_MODULES = {
    "edit": "hookstats.tools.edit",
    "report": "hookstats.report",
    "rules": "hookstats.rules",
    "sinks": "hookstats.sinks",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Capture",
    "Captured",
    "ChannelValue",
    "Comparison",
    "Disagreement",
    "Explanation",
    "ExponentBins",
    "FindingError",
    "Histogram",
    "HookRow",
    "KeptGradient",
    "LinearBins",
    "Monitor",
    "Overhead",
    "Parting",
    "Run",
    "Site",
    "SiteStats",
    "Skipped",
    "Snapshot",
    "SoftmaxRows",
    "Stats",
    "__version__",
    "attach",
    "build_info",
    "capture",
    "check_replicas",
    "compare",
    "edit",
    "explain",
    "grad_of",
    "load",
    "measure",
    "record",
    "recover",
    "report",
    "rules",
    "sinks",
    "softmax_rows",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value: Any = import_module(_MODULES[name])
    elif name in _HOME_OF:
        value = getattr(import_module(_HOME_OF[name]), name)
    else:
        raise AttributeError(f"module 'hookstats' has no attribute {name!r}; expected one of {', '.join(__all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
