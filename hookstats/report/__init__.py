"""A recorded run as one HTML page that opens offline: `write`; or as a picture of its heatmap: `plot`. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hookstats.numbers.snapshot import Snapshot
from hookstats.report import loading
from hookstats.report.page import put
from hookstats.report.record import Recorded
from hookstats.report.writing import html

if TYPE_CHECKING:
    from hookstats.records.run import Run

__all__ = ["Recorded", "write"]


def write(run: Run | str | Path | Sequence[Snapshot] | Recorded, output: str | Path) -> Path:
    """Writes the page of a run, and returns where it is.

    run: what `hookstats.load` gives, the directory of a recorded run, or Snapshots of ascending steps, that were
    collected. The page is one file without anything from outside; an older one is replaced as a whole. ValueError where
    nothing was measured; RunError for a directory that is no recorded run; OSError where it cannot be written.
    """
    path = Path(output)
    put(html(of(run)), path)
    return path


def of(run: Run | str | Path | Sequence[Snapshot] | Recorded) -> Recorded:
    """A run as arrays over sites and steps."""
    if isinstance(run, Recorded):
        return run
    if isinstance(run, Sequence) and not isinstance(run, str):
        return Recorded.of(run)
    return loading.recorded(run)
