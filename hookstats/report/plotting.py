"""The heatmap of a page as a picture for a notebook or a paper. matplotlib is imported where it is used."""

from __future__ import annotations

from typing import Any

import numpy as np

from hookstats.numbers.fields import Array, Site
from hookstats.numbers.kinds import kind_of
from hookstats.report.planes import BAD, COLUMNS, HEATMAPS, change, read
from hookstats.report.record import Recorded
from hookstats.report.reducing import edges, farthest, largest, marks
from hookstats.report.writing import order_sites

_REACH = {"scale": 3.0, "share": 0.3, "signed": 0.3}  # how far the outermost colour is from a site's past
_LABELS = 40  # rows with a name each; beyond that, every so manieth
_NONFINITE = "#ff0082"


def plot(recorded: Recorded, statistic: str, tensor: str, relative: bool, log: bool, axes: Any) -> Any:
    """See `hookstats.report.plot`."""
    try:
        from matplotlib.colors import ListedColormap, LogNorm, Normalize

        from hookstats._figure import ShownFigure
    except ImportError as error:
        raise ImportError(f"plot needs {error.name}: pip install 'hookstats[report]'") from error
    if statistic not in HEATMAPS:
        raise ValueError(f"plot: expected a statistic of {', '.join(HEATMAPS)}; got {statistic!r}")
    rows = [i for i in order_sites(recorded.sites) if kind_of(recorded.sites[i].tensor).name == tensor]
    if not rows:
        known = ", ".join(dict.fromkeys(site.tensor for site in recorded.sites))
        raise ValueError(f"plot: expected a tensor of {known}; got {tensor!r}")
    title, kind, _ = HEATMAPS[statistic]
    begin = edges(len(recorded.steps), COLUMNS)
    values, bad = (each[rows] for each in read(recorded, statistic, BAD))
    cells, norm, colours, label = _cells(values, kind, title, begin, relative, log, Normalize, LogNorm)
    if axes is None:
        height = min(max(0.17 * len(rows), 1.6), 9.0) + 0.9
        axes = ShownFigure(figsize=(9, height), layout="constrained").subplots()
    axes.set_facecolor("#e4e4e0")
    extent = (recorded.steps[0], recorded.steps[-1] + 1, len(rows) - 0.5, -0.5)
    style = {"aspect": "auto", "interpolation": "nearest", "extent": extent}
    image = axes.imshow(np.ma.masked_invalid(cells), norm=norm, cmap=colours, **style)
    broken = marks(bad, begin)
    axes.imshow(np.ma.masked_equal(broken, 0), cmap=ListedColormap([_NONFINITE]), **style)
    stride = -(-len(rows) // _LABELS)
    names = [_shorten_name(recorded.sites[i]) for i in rows]
    axes.set_yticks(range(0, len(rows), stride), names[::stride], fontsize=7, parse_math=False)
    axes.set_xlabel("step")
    axes.figure.colorbar(image, ax=axes, label=label)
    return axes.figure


def _cells(
    values: Array, kind: str, title: str, begin: Any, relative: bool, log: bool, linear_norm: Any, log_norm: Any
) -> tuple[Array, Any, str, str]:
    """Return the values of cells, their norm, their colours, and the words of the bar beside them."""
    if relative:
        reach = _REACH[kind]
        what = "times its past, in octaves" if kind == "scale" else "against its past"
        return farthest(change(values, kind), begin), linear_norm(-reach, reach), "RdBu_r", f"{title}: {what}"
    cells = farthest(values, begin) if kind == "signed" else largest(values, begin)
    known = cells[np.isfinite(cells)]
    if kind == "signed":
        return cells, linear_norm(-1, 1), "RdBu_r", title
    if kind == "scale" and log and (known > 0).any():
        return np.where(cells > 0, cells, np.nan), log_norm(known[known > 0].min(), known.max()), "viridis", title
    return cells, linear_norm(0, known.max(initial=1e-300)), "viridis", title


def _shorten_name(site: Site) -> str:
    name = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in site.name) or "(model)"
    return name if len(name) <= 40 else f"{name[:12]}…{name[-27:]}"
