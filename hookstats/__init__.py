"""hookstats: what happens inside a PyTorch model while it trains.

monitor = hookstats.attach(model)
for batch in loader:
    ...
    optimizer.step()
    snapshot = monitor.step(loss=loss)
"""

from hookstats import edit
from hookstats._native import build_info
from hookstats.capture import Capture, Captured, capture
from hookstats.fields import ExponentBins, Site
from hookstats.gradient import KeptGradient, grad_of
from hookstats.monitor import Monitor, attach, measure
from hookstats.snapshot import Histogram, SiteStats, Snapshot, Stats

__all__ = [
    "Capture",
    "Captured",
    "ExponentBins",
    "Histogram",
    "KeptGradient",
    "Monitor",
    "Site",
    "SiteStats",
    "Snapshot",
    "Stats",
    "attach",
    "build_info",
    "capture",
    "edit",
    "grad_of",
    "measure",
]
