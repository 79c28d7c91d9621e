"""A matplotlib figure that a notebook shows. It imports matplotlib, and is itself imported where something is drawn."""

from __future__ import annotations

from io import BytesIO

from matplotlib.figure import Figure


class ShownFigure(Figure):
    """Shown as the last value of a cell. IPython knows how to show a Figure only once pyplot was used."""

    def _repr_png_(self) -> bytes:
        picture = BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()
