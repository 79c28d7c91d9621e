"""A server of runs in a process of its own, and runs that grow."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hookstats.numbers.fields import Site
from hookstats.records.attempts import end_attempt, machine, read_attempt, read_start_time
from hookstats.records.places import RING
from hookstats.records.store import Store
from hookstats.rules import Finding
from tests.conftest import ROOT


class Clock:
    """`time` for the files of serve/: it passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


def record_of(page: str) -> dict[str, Any]:
    text = page.partition('id="record">')[2].partition("</script>")[0]
    return dict(json.loads(text))


# A page is made anew every 10 seconds at most, for which no test waits.
_SERVE = """
import sys
from hookstats.__main__ import main
from hookstats.serve import routes
routes._EVERY = routes._REST = 0.0
sys.exit(main())
"""


class Served:
    """``hookstats serve``, as a user starts it, but that a page is made anew as often as its run changes."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        command = [sys.executable, "-c", _SERVE, "serve", str(directory), "--port", "0", *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()
        self.address = self.said.split()[-1]
        self.port = int(self.address.split("/")[2].rpartition(":")[2])
        self.token = self.address.partition("token=")[2]

    @property
    def cookie(self) -> str:
        return f"hookstats-{self.port}={self.token}"

    def ask(self, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> Reply:
        """With the token, unless headers say otherwise; unpacked."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, headers={"Cookie": self.cookie} | (headers or {}))
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return Reply(answer.status, found, gzip.decompress(body) if "content-encoding" in found and body else body)

    def runs(self) -> dict[str, str]:
        """Addresses of runs by name, from the index."""
        rows = self.ask("/").text.split("<tr>")[2:]
        return {row.partition("<bdi>")[2].partition("</bdi>")[0]: row.split('href="')[1].split('"')[0] for row in rows}

    def record(self, address: str) -> dict[str, Any]:
        """Return the record in a run's page."""
        return record_of(self.ask(address).text)


@contextmanager
def serving(directory: Path, *arguments: str) -> Iterator[Served]:
    served = Served(directory, *arguments)
    try:
        yield served
        assert served.process.poll() is None
    finally:
        served.process.terminate()
        served.process.wait()
        for stream in (served.process.stdout, served.process.stderr):
            assert stream is not None
            stream.close()


def describe(folder: Path, attempt: int, pid: int) -> None:
    """Describe a training process as it does itself, by which others know whether it is alive."""
    about = {"ring": str(folder / f"{RING}{attempt:04d}"), "pid": pid, "started": read_start_time(pid), **machine()}
    replace(read_attempt(folder, attempt), **about).write(folder)


class Growing:
    """A run that is written step by step, each commit at once, as the process that writes does it."""

    def __init__(self, directory: Path, sites: Sequence[Site] | None = None, attempt: int = 1) -> None:
        from tests.report.runs import sites_of

        self.sites = list(sites or sites_of(2))
        self.folder = directory / "rank=0"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.attempt = attempt
        self._store = Store(self.folder)
        self._store.begin(attempt, {"rank": 0, "model": "GPT", "every": 1})
        self._step = 0
        self.last = -1
        describe(self.folder, self.attempt, os.getpid())

    def add(self, steps: range, size: float = 1.0, loss: float | None = None) -> None:
        """size: of all values; loss: of each step, instead of one that falls."""
        from benchmarks.report_size import sites_of, step_of

        layout = sites_of(self.sites, 1, 0)
        for step in steps:
            scale = size * np.exp(np.random.default_rng(step).normal(size=len(self.sites)))
            measured = step_of(layout, np.random.default_rng(step), step, scale)
            measured.scalars |= {} if loss is None else {"loss": loss}
            self._store.add(measured)
        self._step += len(steps)
        self.last = steps[-1]
        self._store.commit(self._step)

    def find(self, finding: Finding) -> None:
        with (self.folder / "findings.jsonl").open("a") as file:
            file.write(json.dumps(replace(finding, attempt=self.attempt).to_json()) + "\n")

    def end(self, how: str = "closed") -> None:
        self._store.finish(self.attempt, how)
        self._store.close()

    def recover(self) -> None:
        """Recover as the next process to record there does: report that this one died."""
        end_attempt(self.folder, read_attempt(self.folder, self.attempt), "died: without a word", 0, {})

    def die(self) -> None:
        """Leave nothing of the process but what it had committed."""
        ended = subprocess.Popen([sys.executable, "-c", ""])  # where there is no PATH, too
        ended.wait()
        describe(self.folder, self.attempt, ended.pid)
        self._store.close()
