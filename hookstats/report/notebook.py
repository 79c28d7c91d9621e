"""A page as the last value of a notebook's cell."""

from __future__ import annotations

from html import escape

_SHAPE = "width: 100%; border: 0"


class Shown:
    """A page in a frame of its own. It needs no IPython, and asks for nothing from outside."""

    def __init__(self, page: str, name: str, height: int) -> None:
        self._page = page
        self._name = name
        self._height = height

    def __repr__(self) -> str:
        size = len(self._page) / 1e6
        return f"<the page of {self._name!r}, {size:.1f} MB; notebooks show it, hookstats.report.write keeps it>"

    def _repr_html_(self) -> str:
        """The frame may run the page's script, and may do nothing with the notebook around it."""
        title = f'title="{escape(f"hookstats report: {self._name}")}"'
        where = f'sandbox="allow-scripts" height="{self._height}" style="{_SHAPE}"'
        return f'<iframe {title} {where} srcdoc="{escape(self._page)}"></iframe>'
