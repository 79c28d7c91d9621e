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

from hookstats._lazy import getter, names_in

if TYPE_CHECKING:
    from hookstats import presets as presets
    from hookstats import report as report
    from hookstats import results as results
    from hookstats import rules as rules
    from hookstats import sinks as sinks
    from hookstats._native import build_info as build_info
    from hookstats.attaching import attach as attach
    from hookstats.calibration.gathering import calibrate as calibrate
    from hookstats.cluster.replicas import check_replicas as check_replicas
    from hookstats.comparing.comparison import compare as compare
    from hookstats.identities.finding import find_identities as find_identities
    from hookstats.numbers.fields import ExponentBins as ExponentBins
    from hookstats.numbers.fields import LinearBins as LinearBins
    from hookstats.numbers.fields import Site as Site
    from hookstats.numbers.snapshot import Snapshot as Snapshot
    from hookstats.records.errors import RunError as RunError
    from hookstats.records.recording import record as record
    from hookstats.records.run import Run as Run
    from hookstats.records.run import load as load
    from hookstats.records.writer import recover as recover
    from hookstats.tools.capture import capture as capture
    from hookstats.tools.edit import edit as edit
    from hookstats.tools.explain import explain as explain
    from hookstats.tools.probe import probe as probe
    from hookstats.tools.softmax import softmax_rows as softmax_rows
    from hookstats.watch.arguments import Channels as Channels
    from hookstats.watch.arguments import Options as Options
    from hookstats.watch.arguments import Ranks as Ranks
    from hookstats.watch.judging import FindingError as FindingError
    from hookstats.watch.measuring import measure as measure
    from hookstats.watch.monitor import Monitor as Monitor

__version__ = "0.1.0"

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
    "hookstats.tools.capture": ["capture"],
    "hookstats.tools.edit": ["edit"],
    "hookstats.tools.explain": ["explain"],
    "hookstats.tools.probe": ["probe"],
    "hookstats.tools.softmax": ["softmax_rows"],
    "hookstats.watch.arguments": ["Channels", "Options", "Ranks"],
    "hookstats.attaching": ["attach"],
    "hookstats.calibration.gathering": ["calibrate"],
    "hookstats.watch.judging": ["FindingError"],
    "hookstats.watch.measuring": ["measure"],
    "hookstats.watch.monitor": ["Monitor"],
}
__all__ = ["__version__", *names_in(_HOMES)]
__getattr__ = getter(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
