"""Which address is which page. An address chooses among what was found; it is never a path."""

from __future__ import annotations

import re
from http import HTTPStatus
from pathlib import Path

from hookstats.records.errors import RunError
from hookstats.report.page import policy
from hookstats.serve import pages
from hookstats.serve.growing import Growing, GrowingPair, Kept, Version, as_json
from hookstats.serve.runs import Both, Runs, unreadable
from hookstats.serve.server import Answer, Query, said

_RUN = re.compile(r"/run/([0-9a-f]{16})/(?:([0-9a-f]{16})/)?(update|blob|)")  # of a run, or of two
_PATIENCE = 2.0  # seconds that the first page of a run is waited for, before another one says that it is being read
_POLICY = policy(is_live=True) + "; frame-ancestors 'none'"
_JSON = "application/json"
_BYTES = "application/octet-stream"


class Routes:
    """Answers for the runs below a directory. ValueError where it is none."""

    def __init__(self, directory: Path) -> None:
        self._runs = Runs(directory)
        self._kept = Kept()

    def __call__(self, query: Query) -> Answer:
        if query.path in ("/", "/rows"):
            found = [(id, run.summary()) for id, run in self._runs.find().items()]
            if query.path == "/":
                return pages.index(self._runs.directory.name, found)
            return Answer(HTTPStatus.OK, pages.rows(found).encode(), "text/html; charset=utf-8")
        match = _RUN.fullmatch(query.path)
        growing = self._growing(match[1], match[2]) if match else None
        if match is None or growing is None:
            return pages.told(HTTPStatus.NOT_FOUND, "Not found", "There is no such page here.")
        growing.watched.watch()
        if match[3] == "update":
            return self._update(growing, query)
        if match[3] == "blob":
            return _blob(growing, query)
        return self._page(growing)

    def _growing(self, id: str, other: str | None) -> Growing | None:
        """None where there are no such runs."""
        watched = self._runs.get(id)
        second = self._runs.get(other) if other else None
        if watched is None or (other and (second is None or other == id)):
            return None
        if second is None:
            return self._kept.get(id, lambda: Growing(watched))
        return self._kept.get(f"{id}/{other}", lambda: GrowingPair(Both(watched, second)))

    def _page(self, growing: Growing) -> Answer:
        version = growing.look(_PATIENCE)
        name, (state, _) = growing.watched.name, growing.watched.told()
        if state.kind == "deleted":
            return pages.told(HTTPStatus.GONE, name, "This run was deleted.")
        if version is not None:
            return Answer(HTTPStatus.OK, version.page, "text/html; charset=utf-8", _POLICY, True)
        if isinstance(growing.error, RunError):
            torn = unreadable(growing.watched.path, growing.error)
            return pages.told(HTTPStatus.OK, name, torn.sentence, 5)
        if isinstance(growing, GrowingPair) and growing.error:
            return pages.told(HTTPStatus.OK, name, f"The two cannot be shown together: {str(growing.error)[:500]}.", 5)
        sentence = "Nothing is recorded yet." if growing.error else "The record is being read."
        return pages.told(HTTPStatus.OK, name, f"{sentence} This page looks again by itself.", 1)

    def _update(self, growing: Growing, query: Query) -> Answer:
        newest = growing.look()
        state, changed = growing.watched.told()
        told = {"state": state.kind, "sentence": state.sentence, "changed": changed}
        old = _version(growing, query, "version")
        if newest is not None and query.given.get("version") != str(newest.number):
            told |= {"since": 0 if old is None else old.number, "record": newest.changes(old)}
        return Answer(HTTPStatus.OK, as_json(told), _JSON, packed=True)


def _blob(growing: Growing, query: Query) -> Answer:
    version = _version(growing, query, "version")
    if version is None:
        return said(HTTPStatus.GONE, "The run has grown since; ask for what is new.")
    try:
        packed = version.packed(query.given.get("name", ""), _version(growing, query, "since"))
    except KeyError:
        return said(HTTPStatus.NOT_FOUND, "There are no such numbers.")
    return Answer(HTTPStatus.OK, packed, _BYTES, packed=True)


def _version(growing: Growing, query: Query, name: str) -> Version | None:
    number = query.given.get(name, "")
    return growing.get(int(number)) if re.fullmatch(r"[0-9]{1,18}", number) else None
