"""hookstats: what happens inside a PyTorch model while it trains.

monitor = hookstats.attach(model)
for batch in loader:
    ...
    optimizer.step()
    snapshot = monitor.step(loss=loss)
"""

from hookstats import edit
from hookstats._native import build_info
from hookstats.attaching import attach, measure
from hookstats.capture import Capture, Captured, capture
from hookstats.explain import Explanation, HookRow, explain
from hookstats.fields import ExponentBins, LinearBins, Site
from hookstats.gradient import KeptGradient, grad_of
from hookstats.monitor import Monitor
from hookstats.overhead import Overhead
from hookstats.snapshot import Histogram, SiteStats, Snapshot, Stats

__all__ = [
    "Capture",
    "Captured",
    "Explanation",
    "ExponentBins",
    "Histogram",
    "HookRow",
    "KeptGradient",
    "LinearBins",
    "Monitor",
    "Overhead",
    "Site",
    "SiteStats",
    "Snapshot",
    "Stats",
    "attach",
    "build_info",
    "capture",
    "edit",
    "explain",
    "grad_of",
    "measure",
]
