"""A page that opens offline: one HTML file with style, script and numbers in it, and nothing from outside."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

_ASSETS = files("hookstats.report") / "assets"
# uPlot 1.6.32 as npm has it (MIT): dist/uPlot.iife.min.js and dist/uPlot.min.css.
_SHA256 = {
    "uplot/uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot/uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
_STYLES = ("uplot/uPlot.min.css", "page.css")
_SCRIPTS = (
    "uplot/uPlot.iife.min.js",
    "record.js",
    "colours.js",
    "cells.js",
    "heatmap.js",
    "readout.js",
    "charts.js",
    "site.js",
    "tables.js",
    "live.js",
    "page.js",
)
_FIRST = "rms.relative"  # what the first picture shows stands before the script, all else behind it


def asset(name: str) -> str:
    """ValueError where a library is not the one that was pinned."""
    text = (_ASSETS / name).read_bytes()
    found, expected = hashlib.sha256(text).hexdigest(), _SHA256.get(name)
    if expected not in (None, found):
        raise ValueError(f"{name}: expected the file with sha256 {expected}, got {found}")
    return text.decode()


def page(record: Mapping[str, Any], blobs: Mapping[str, bytes], is_live: bool = False) -> str:
    """record: JSON; blobs: bytes by name, which the script finds as ``blob-NAME``.

    is_live: of a run that is served while it grows: the page asks where it came from for bytes, and for what is new.
    """
    style, script = _parts(is_live)
    # ASCII alone, and no "<": nothing of a name is HTML, or turns text around, before the script has it as a string.
    text = json.dumps(record, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return "".join(
        [
            "<!doctype html>\n",
            '<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy(is_live)}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<meta name="color-scheme" content="light dark">\n<title>hookstats report</title>\n',
            f"<style>{style}</style>\n</head>\n",
            asset("page.html").replace("<!-- told -->", _render_story(record)),
            f'<script type="application/json" id="record">{text}</script>\n',
            *(_blob(name, blobs[name]) for name in [_FIRST] if name in blobs),
            f"<script>{script}</script>\n",
            *(_blob(name, blob) for name, blob in blobs.items() if name != _FIRST),
            "</body>\n</html>\n",
        ]
    )


def policy(is_live: bool = False) -> str:
    """The Content-Security-Policy of a page: its own style and script alone; see `page`."""
    style, script = _parts(is_live)
    asks = "connect-src 'self'; " if is_live else ""
    return (
        f"default-src 'none'; script-src '{hash_source(script)}'; style-src '{hash_source(style)}'; img-src data:; "
        f"{asks}"
        "base-uri 'none'; form-action 'none'"
    )


@cache
def _parts(is_live: bool) -> tuple[str, str]:
    """Style and script."""
    style = "\n".join(asset(name) for name in _STYLES)
    notice = "/* uPlot, MIT License\n" + asset("uplot/LICENSE").replace("*/", "* /") + "*/\n"
    parts = "\n".join(asset(name) for name in _SCRIPTS[1:] if is_live or name != "live.js")
    return style, notice + asset(_SCRIPTS[0]) + f'\n(() => {{\n"use strict";\n{parts}\n}})();\n'


def _render_story(record: Mapping[str, Any]) -> str:
    """The run's story for readers without JavaScript: plain text, in ASCII, with nothing that turns text around."""

    def line(finding: Mapping[str, Any]) -> str:
        since = "" if finding["since"] == finding["step"] else f", since step {finding['since']}"
        return escape_html(
            f"step {finding['step']}{since}, {finding['severity']}, {finding['rule']}: {finding['sentence']}"
        )

    runs = [record, record["other"]] if record["other"] else [record]
    names = [f"{run['name']}: " if len(runs) > 1 else "" for run in runs]
    heads = zip(names, runs, strict=True)
    parts = [f"<p>{escape_html(name + sentence)}</p>\n" for name, run in heads for sentence in run["head"]]
    for chapter in record["chapters"]:
        effects = "".join(f"<li>{line(each)}</li>\n" for each in chapter["effects"])
        follows = f"<p>What follows from it:</p>\n<ul>\n{effects}</ul>\n" if effects else ""
        parts.append(f"<hr>\n<p>{line(chapter['finding'])}</p>\n{follows}")
    return "".join(parts)


def escape_html(text: str) -> str:
    """Return text as HTML, in ASCII; controls and marks that turn text around show as escapes."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return escape(shown).encode("ascii", "xmlcharrefreplace").decode()


def _blob(name: str, blob: bytes) -> str:
    packed = base64.b64encode(gzip.compress(blob, 6, mtime=0)).decode()
    return f'<script type="application/octet-stream" id="blob-{name}">{packed}</script>\n'


def hash_source(text: str) -> str:
    """Return the name of a script or a style in a Content-Security-Policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


class Shown:
    """A page as the last value of a notebook's cell: in a frame of its own, without IPython."""

    def __init__(self, page: str, name: str, height: int) -> None:
        self._page = page
        self._name = name
        self._height = height

    def __repr__(self) -> str:
        size = len(self._page) / 1e6
        return f"<the page of {self._name!r}, {size:.1f} MB; notebooks show it, hookstats.report.write keeps it>"

    def _repr_html_(self) -> str:
        """Return a frame that may run the page's script, and may do nothing with the notebook around it."""
        title = f'title="{escape(f"hookstats report: {self._name}")}"'
        where = f'sandbox="allow-scripts" height="{self._height}" style="width: 100%; border: 0"'
        return f'<iframe {title} {where} srcdoc="{escape(self._page)}"></iframe>'
