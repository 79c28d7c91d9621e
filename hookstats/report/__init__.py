"""A recorded run as an HTML page that opens offline: `write`, in a notebook `show`; or a picture: `plot`. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hookstats.numbers.snapshot import Snapshot
from hookstats.records.files import write_whole
from hookstats.report import plotting
from hookstats.report.page import Shown, page
from hookstats.report.record import Recorded
from hookstats.report.writing import PageContents

if TYPE_CHECKING:
    from hookstats.records.run import Run

__all__ = ["Recorded", "plot", "show", "write"]


Shows: TypeAlias = "Run | str | Path | Sequence[Snapshot] | Recorded | Any"  # or a monitor


def write(
    run: Shows,
    output: str | Path,
    other: Shows | None = None,
) -> Path:
    """Writes the page of a run, and returns where it is.

    run: the directory of a recorded run, what `hookstats.load` gives, a monitor that records (its steps so far; waits
    up to 3 seconds until they are written), or Snapshots of ascending steps, that were collected. other: a second run,
    whose distance from this one, site by site and step by step, is a view of the heatmap, and whose lines stand beside
    those of this one. The page is one file without anything from outside; an older one is replaced as a whole.
    TypeError for what is none of these; ValueError where nothing was measured, the two have no sites and steps in
    common, or a monitor does not record; RunError for a directory that is no recorded run; OSError where it cannot be
    written.
    """
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, _html(to_recorded(run), other).encode())
    return path


def show(
    run: Shows,
    other: Shows | None = None,
    *,
    height: int = 800,
) -> Shown:
    """Shows the page that `write` makes in a cell of a notebook (Jupyter, VS Code, Colab), whose last line this is.

    run, other: as for `write`; of a run that is being recorded, give the directory or the monitor, and run the cell
    again for what is new. height: of the frame, in pixels; it is as wide as the cell. The page is part of the
    notebook's file.
    ValueError for a height of less than 200; else as `write`.
    """
    if not isinstance(height, int) or height < 200:
        raise ValueError(f"show: expected a height of at least 200 pixels, got {height!r}")
    recorded = to_recorded(run)
    return Shown(_html(recorded, other), recorded.name, height)


def plot(
    run: Shows,
    statistic: str = "rms",
    tensor: str = "output",
    *,
    relative: bool = True,
    log: bool = True,
    axes: Any = None,
) -> Any:
    """Draws the heatmap of the page, layers x steps, by matplotlib; returns a ``Figure``, which a notebook shows.

    run: as for `write`. statistic: "rms", "abs_max", "peak" (the largest |x| over rms), "centre" (mean over rms) or
    "zeros" (the share of them). tensor: "output", "grad_output", ... relative: how far each site is from the median of
    its own past, else the value itself, with logarithmic colours unless ``log=False``. axes: where to draw; None: in a
    new figure. What is not finite is magenta, what was silent grey. ValueError for an unknown statistic or tensor;
    ImportError without matplotlib.
    """
    return plotting.plot(to_recorded(run), statistic, tensor, relative, log, axes)


def _html(recorded: Recorded, other: Shows | None) -> str:
    return page(*PageContents(recorded, None if other is None else to_recorded(other)).render_all())


def to_recorded(run: Any) -> Recorded:
    """A run, as `Shows` has it, as arrays over sites and steps."""
    if isinstance(run, Recorded):
        return run
    if isinstance(run, Sequence) and not isinstance(run, str) and all(isinstance(each, Snapshot) for each in run):
        return Recorded.of(run)
    from hookstats.report.loading import load_recorded  # needs pyarrow, which Snapshots do not

    return load_recorded(run.recorded() if hasattr(run, "recorded") else run)
