"""hookstats: what happens inside a PyTorch model while it trains.

monitor = hookstats.attach(model)
for batch in loader:
    ...
    optimizer.step()
    snapshot = monitor.step(loss=loss)

A public name is imported when it is first used: what needs numpy alone does not load torch. The classes of what is
returned are in `hookstats.results`.
"""

from typing import TYPE_CHECKING

from hookstats._lazy import getter

if TYPE_CHECKING:
    from hookstats import presets, report, results, rules, sinks
    from hookstats._native import build_info
    from hookstats.attaching import attach
    from hookstats.calibration.gathering import calibrate
    from hookstats.cluster.replicas import check_replicas
    from hookstats.comparing.comparison import compare
    from hookstats.identities.finding import find_identities
    from hookstats.numbers.fields import ExponentBins, LinearBins, Site
    from hookstats.numbers.snapshot import Snapshot
    from hookstats.records.errors import RunError
    from hookstats.records.recording import record
    from hookstats.records.run import Run, load
    from hookstats.records.writer import recover
    from hookstats.tools import edit
    from hookstats.tools.capture import capture
    from hookstats.tools.explain import explain
    from hookstats.tools.gradient import grad_of
    from hookstats.tools.probe import probe
    from hookstats.tools.softmax import softmax_rows
    from hookstats.watch.arguments import Channels, Options, Ranks
    from hookstats.watch.judging import FindingError
    from hookstats.watch.measuring import measure
    from hookstats.watch.monitor import Monitor

__version__ = "0.1.0"

__all__ = [
    "Channels",
    "ExponentBins",
    "FindingError",
    "LinearBins",
    "Monitor",
    "Options",
    "Ranks",
    "Run",
    "RunError",
    "Site",
    "Snapshot",
    "__version__",
    "attach",
    "build_info",
    "calibrate",
    "capture",
    "check_replicas",
    "compare",
    "edit",
    "explain",
    "find_identities",
    "grad_of",
    "load",
    "measure",
    "presets",
    "probe",
    "record",
    "recover",
    "report",
    "results",
    "rules",
    "sinks",
    "softmax_rows",
]

_HOMES = {
    "hookstats": ["presets", "report", "results", "rules", "sinks"],
    "hookstats._native": ["build_info"],
    "hookstats.comparing.comparison": ["compare"],
    "hookstats.identities.finding": ["find_identities"],
    "hookstats.numbers.fields": ["ExponentBins", "LinearBins", "Site"],
    "hookstats.numbers.snapshot": ["Snapshot"],
    "hookstats.records.errors": ["RunError"],
    "hookstats.records.recording": ["record"],
    "hookstats.records.run": ["Run", "load"],
    "hookstats.records.writer": ["recover"],
    "hookstats.cluster.replicas": ["check_replicas"],
    "hookstats.tools": ["edit"],
    "hookstats.tools.capture": ["capture"],
    "hookstats.tools.explain": ["explain"],
    "hookstats.tools.gradient": ["grad_of"],
    "hookstats.tools.probe": ["probe"],
    "hookstats.tools.softmax": ["softmax_rows"],
    "hookstats.watch.arguments": ["Channels", "Options", "Ranks"],
    "hookstats.attaching": ["attach"],
    "hookstats.calibration.gathering": ["calibrate"],
    "hookstats.watch.judging": ["FindingError"],
    "hookstats.watch.measuring": ["measure"],
    "hookstats.watch.monitor": ["Monitor"],
}
__getattr__ = getter(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
