"""The pages that are no run's: the index, and sentences. Names come from somebody else's folders: they become text."""

from __future__ import annotations

import time
from collections.abc import Iterable
from http import HTTPStatus
from importlib.resources import files

import numpy as np

from hookstats.report.page import asset, escape_html, hash_source
from hookstats.serve.runs import Summary
from hookstats.serve.server import Answer

_ASSETS = files("hookstats.serve") / "assets"
_HTML = "text/html; charset=utf-8"
_WIDE, _TALL = 120, 22  # of a sparkline


def index(directory: str, runs: Iterable[tuple[str, Summary]]) -> Answer:
    """Summaries by the ids of their runs, as a page, the run that changed last first."""
    style = asset("page.css") + (_ASSETS / "index.css").read_text()
    script = (_ASSETS / "index.js").read_text()
    heads = "".join(
        f'<th scope="col" class="{"number" * (each in ("last step", "ranks", "last change"))}">{each}</th>'
        for each in ("run", "state", "model", "last step", "loss", "findings", "ranks", "last change", "beside")
    )
    ordered = sorted(runs, key=lambda each: (-each[1].changed, each[1].name))
    rows = "".join(_row(id, run) for id, run in ordered)
    body = (
        f'<main>\n<header><p class="mark">hookstats serve</p><h1>{escape_html(directory)}</h1></header>\n'
        '<div class="tools"><label for="filter"><span>Filter</span></label>'
        '<input id="filter" type="search" autocomplete="off" spellcheck="false">'
        '<span id="count" class="muted" aria-live="polite"></span><a id="both" hidden>Show both on one page</a></div>\n'
        '<p id="trouble" class="critical" aria-live="polite"></p>\n'
        f'<div class="runs"><table><thead><tr>{heads}</tr></thead>\n<tbody id="rows">'
        f"{rows or _NO_RUN}</tbody></table></div>\n</main>\n<script>{script}</script>\n"
    )
    policy = f"script-src '{hash_source(script)}'; style-src '{hash_source(style)}'; connect-src 'self'"
    found = _page("runs", style, body, policy)
    return found._replace(tag=hash_source(found.body.decode()))


_NO_RUN = '<tr><td colspan="9" class="muted">There is no run yet.</td></tr>'


def _row(id: str, run: Summary) -> str:
    findings = ", ".join(
        f'<span class="{name}">{count} {name}{"s" if name != "critical" and count > 1 else ""}</span>'
        for name, count in run.findings
    )
    kind, sentence = escape_html(run.state.kind), escape_html(run.state.sentence)
    word = escape_html(_WORDS.get(run.state.kind, run.state.kind))
    cells = (
        ("state", f'<span class="state {kind}" title="{sentence}"><i></i>{word}</span>'),
        ("", escape_html(run.model)),
        ("number", "" if run.step is None else f"step {run.step}"),
        ("", _loss(run)),
        ("findings-of", findings),
        ("number", "" if not run.ranks else f"{run.ranks} rank{'s' * (run.ranks > 1)}"),
        ("number muted", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.changed)) if run.changed else ""),
        ("tick", f'<input type="checkbox" value="{id}" aria-label="beside another run: {escape_html(run.name)}">'),
    )
    rest = "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in cells)
    return f'<tr><th scope="row"><a href="/run/{id}/"><bdi>{escape_html(run.name)}</bdi></a></th>{rest}</tr>\n'


_WORDS = {"recording": "alive", "ended": "closed"}


def _loss(run: Summary) -> str:
    """Draw the loss, logarithmic where all of it is positive, with its last value in words."""
    if run.last_loss is None:
        return ""
    found = np.array(run.loss)
    known = np.isfinite(found)
    if found[known].min(initial=np.inf) > 0:
        found = np.log(found)
    low, high = found[known].min(initial=np.inf), found[known].max(initial=-np.inf)
    y = _TALL - 2 - (found - low) / (high - low or 1.0) * (_TALL - 4)
    wide = _WIDE / len(found)
    line, lost = "", ""
    for i in range(len(found)):
        if known[i]:
            line += f"{'L' if i and known[i - 1] else 'M'}{i * wide:.1f} {y[i]:.1f}h{wide:.1f}"
        else:
            lost += f"M{i * wide:.1f} 2h{wide:.1f}"
    paths = f'<path d="{line}"/>' + (f'<path class="nan" d="{lost}"/>' if lost else "")
    shape = f'viewBox="0 0 {_WIDE} {_TALL}" width="{_WIDE}" height="{_TALL}"'
    kind = "" if np.isfinite(run.last_loss) else ' class="critical"'
    return f'<svg class="spark" {shape} aria-hidden="true">{paths}</svg> <span{kind}>{run.last_loss:.4g}</span>'


def render_message(status: HTTPStatus, title: str, sentence: str, kind: str = "", again: int | None = None) -> Answer:
    """A page that says one thing. kind: of the state of a run; again: seconds after which it asks for itself anew."""
    style = asset("page.css")
    refresh = "" if again is None else f'<meta http-equiv="refresh" content="{again}">\n'
    body = (
        f'<main data-state="{kind}">\n<p class="mark"><a href="/">hookstats '
        f"serve</a></p>\n<h1>{escape_html(title)}</h1>\n"
        f'<p class="lead">{escape_html(sentence)}</p>\n<p><a href="/">All runs</a></p>\n</main>\n'
    )
    return _page(title, style, body, f"style-src '{hash_source(style)}'", status, refresh)


def _page(title: str, style: str, body: str, policy: str, status: HTTPStatus = HTTPStatus.OK, more: str = "") -> Answer:
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape_html(title)} · hookstats</title>\n<style>{style}</style>\n"
    )
    whole = f"{head}{more}</head>\n<body>\n{body}</body>\n</html>\n".encode()
    rest = "default-src 'none'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    return Answer(status, whole, _HTML, f"{rest}; {policy}")
