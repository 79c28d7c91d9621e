"""The pages of addresses. An address chooses among what was found; it is never a path."""

from __future__ import annotations

import gzip
import hashlib
import re
import threading
import time
from collections import OrderedDict
from http import HTTPStatus
from pathlib import Path

from hookstats.records.errors import RunError
from hookstats.report.page import page, policy
from hookstats.report.writing import PageContents
from hookstats.serve import pages
from hookstats.serve.runs import Runs, Watched, find_last_change, merge_states, unreadable
from hookstats.serve.server import Answer, Query, answer_text

_RUN = re.compile(r"/run/([0-9a-f]{16})/(?:([0-9a-f]{16})/)?(blob|)")  # of a run, or of two
_POLICY = policy(is_live=True) + "; frame-ancestors 'none'"
_EVERY = 10.0  # seconds: a page is made anew no more often
_REST = 4.0  # times as long as making it took
_PAGES = 4  # that are kept; one that was not asked for longest goes
_LEVEL = 4  # of gzip


class RunPage:
    """The page of a run, or of two: made anew when they have changed, and somebody asks for it.

    The first to ask waits until it is made, and whoever asks meanwhile waits as well.
    """

    def __init__(self, runs: list[Watched]) -> None:
        self._runs = runs
        self._lock = threading.Lock()
        self._made: PageContents | None = None
        self._version = ""
        self._ended = 0.0  # when it was made
        self._sent: tuple[str, bytes] = ("", b"")  # the last page that was sent, by its tag

    def answer(self) -> Answer:
        state, name = merge_states(self._runs), " and ".join(run.name for run in self._runs)
        if state.kind == "deleted":
            return pages.render_message(HTTPStatus.OK, name, "This run was deleted.", state.kind)
        with self._lock:
            try:
                made = self._renew()
                first = {"rms.relative": made["rms.relative"]}
            except (ValueError, OSError) as error:  # deleted or torn, also while it is read
                return self._render_refusal(name, error)
            tag = f"{self._version}-{hashlib.sha256(repr(state).encode()).hexdigest()[:8]}"
            if self._sent[0] != tag:
                last = max(find_last_change(run.look()[1]) for run in self._runs)
                told = {"version": self._version, "tag": tag, "state": [state.kind, state.sentence, last]}
                whole = page(made.record | told, first, is_live=True)
                self._sent = (tag, gzip.compress(whole.encode(), _LEVEL, mtime=0))
            return Answer(HTTPStatus.OK, self._sent[1], "text/html; charset=utf-8", _POLICY, True, tag)

    def _renew(self) -> PageContents:
        """Return the newest contents. What was asked for of the last ones since then took its time as well."""
        made, marks = self._made, [run.look()[1] for run in self._runs]
        version = hashlib.sha256(repr(marks).encode()).hexdigest()[:16]
        rest = 0.0 if made is None else max(_EVERY, _REST * made.seconds)
        if made is None or (version != self._version and time.monotonic() >= self._ended + rest):
            made = PageContents(*(run.load_recorded() for run in self._runs))
            self._made, self._version, self._ended = made, version, time.monotonic()
        return made

    def _render_refusal(self, name: str, error: Exception) -> Answer:
        torn = unreadable(self._runs[0].path, error)
        if isinstance(error, RunError):
            return pages.render_message(HTTPStatus.OK, name, torn.sentence, torn.kind, 5)
        if len(self._runs) > 1:
            words = f"The two cannot be shown together: {str(error)[:500]}."
            return pages.render_message(HTTPStatus.OK, name, words, "waiting", 5)
        words = "Nothing is recorded yet. This page looks again by itself."
        return pages.render_message(HTTPStatus.OK, name, words, "waiting", 1)

    def blob(self, version: str, name: str) -> Answer:
        made = self._made  # nobody waits for a newer one
        if made is None or version != self._version:
            return answer_text(HTTPStatus.GONE, "The run has grown since; ask for its page.")
        try:
            packed = gzip.compress(made[name], _LEVEL, mtime=0)
        except KeyError:
            return answer_text(HTTPStatus.NOT_FOUND, "There are no such numbers.")
        except (ValueError, OSError):  # files that are merged into others, or gone
            return answer_text(HTTPStatus.GONE, "The run has changed since; ask for its page.")
        return Answer(HTTPStatus.OK, packed, "application/octet-stream", packed=True)


class Routes:
    """Answers for the runs below a directory. ValueError where it is none."""

    def __init__(self, directory: Path) -> None:
        self._runs = Runs(directory)
        self._lock = threading.Lock()
        self._pages: OrderedDict[tuple[str, str | None], RunPage] = OrderedDict()

    def __call__(self, query: Query) -> Answer:
        if query.path == "/":
            return pages.index(
                self._runs.directory.name, [(id, run.summary()) for id, run in self._runs.find().items()]
            )
        match = _RUN.fullmatch(query.path)
        asked = self._page(match[1], match[2]) if match else None
        if match is None or asked is None:
            return pages.render_message(HTTPStatus.NOT_FOUND, "Not found", "There is no such page here.")
        if match[3] == "blob":
            return asked.blob(query.given.get("version", ""), query.given.get("name", ""))
        return asked.answer()

    def _page(self, id: str, other: str | None) -> RunPage | None:
        """Find the page of runs by their ids; None where there are no such runs."""
        runs = [self._runs.get(each) for each in (id, other) if each is not None]
        known = [run for run in runs if run is not None]
        if len(known) < len(runs) or id == other:
            return None
        with self._lock:
            found = self._pages.setdefault((id, other), RunPage(known))
            self._pages.move_to_end((id, other))
            while len(self._pages) > _PAGES:
                self._pages.popitem(last=False)
            return found
