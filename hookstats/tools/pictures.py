"""Feature maps as a picture. matplotlib is imported where it is used."""

from __future__ import annotations

import math
from typing import Any

import torch

_COLUMNS = 8


def draw_feature_maps(title: str, panels: dict[str, torch.Tensor]) -> Any:
    """A panel for each tensor: a small image per channel of [channels, height, width], else one image of the whole.

    Panels named "gradient" are red for positive and blue for negative values.
    Returns a ``matplotlib.figure.Figure`` that a notebook shows; raises ImportError without matplotlib.
    """
    try:
        from hookstats._figure import ShownFigure
    except ImportError as error:
        raise ImportError(f"plot() needs {error.name}: pip install 'hookstats[report]'") from error
    images = {label: _list_images(tensor.detach().float()) for label, tensor in panels.items()}
    rows = {label: math.ceil(len(found) / _COLUMNS) for label, found in images.items()}
    figure = ShownFigure(figsize=(9, 0.5 + sum(1.1 * count + 0.3 for count in rows.values())), layout="constrained")
    figure.suptitle(title, fontsize=11)
    below = figure.subfigures(len(images), 1, squeeze=False, height_ratios=[count + 0.3 for count in rows.values()])
    for (label, found), part in zip(images.items(), below[:, 0], strict=True):
        part.suptitle(label, fontsize=9, x=0.01, ha="left")
        low, high = _find_scale(panels[label].float())
        largest = max(-low, high)
        style = (
            {"cmap": "RdBu_r", "vmin": -largest, "vmax": largest}
            if label == "gradient"
            else {"cmap": "viridis", "vmin": low, "vmax": high}
        )
        axes = part.subplots(rows[label], min(len(found), _COLUMNS), squeeze=False)
        for place in axes.flat:
            place.set_axis_off()
        for place, pixels in zip(axes.flat, found, strict=False):
            shown = place.imshow(
                pixels.numpy(), interpolation="nearest", aspect="equal" if len(found) > 1 else "auto", **style
            )
        bar = part.colorbar(shown, ax=axes, fraction=0.02, pad=0.01)
        bar.ax.tick_params(labelsize=7)
    return figure


def _list_images(x: torch.Tensor) -> list[torch.Tensor]:
    if x.dim() == 3:
        return list(x)
    return [x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)]


def _find_scale(x: torch.Tensor) -> tuple[float, float]:
    """The finite extremes."""
    finite = x[x.isfinite()]
    if not finite.numel():
        return 0.0, 1.0
    low, high = finite.min().item(), finite.max().item()
    return (low, high) if low < high else (low - 0.5, high + 0.5)
