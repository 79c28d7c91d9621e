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
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hookstats.numbers.fields import Site
from hookstats.records.places import RING, machine, started_at
from hookstats.records.store import Store
from hookstats.rules import Finding
from tests.conftest import ROOT


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


# After a look it rests for a multiple of what the look took, which is long on a busy machine.
_SERVE = """
import sys
from hookstats.__main__ import main
from hookstats.serve import growing, runs
growing._REST = growing._REST_DETAILS = runs._REST = 0.0
sys.exit(main())
"""


class Served:
    """``hookstats serve``, as a user starts it, but that it rests no longer after a look that took long."""

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

    def json(self, path: str) -> Any:
        return json.loads(self.ask(path).body)


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


def describe(folder: Path, attempt: int, pid: int) -> Path:
    """As a training process leaves it, by which others know whether it is alive."""
    told = {"attempt": attempt, "ring": str(folder / f"{RING}{attempt:04d}"), **machine()}
    told |= {"pid": pid, "started": started_at(pid), "settings": {"rank": 0}, "rules": []}
    path = folder / f"{RING}{attempt:04d}.json"
    path.write_text(json.dumps(told))
    return path


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
        self._describe(os.getpid())

    def _describe(self, pid: int) -> None:
        self._description = describe(self.folder, self.attempt, pid)

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
        self._description.unlink()

    def die(self) -> None:
        """Of its process nothing is left but what it had committed."""
        ended = subprocess.Popen(["true"])
        ended.wait()
        self._describe(ended.pid)
        self._store.close()


def restored(told: bytes, old: bytes, sites: int, columns: tuple[int, int], planes: int) -> bytes:
    """A blob as a page makes it of an older one and of what it was sent. columns: before, and now."""
    if not told[0]:
        return told[1:]
    first, many, size = np.frombuffer(told, "<u4", 3, 1)
    rows = np.frombuffer(told, "<u4", many, 13)
    rest = told[13 + 4 * many :]
    new, again = planes * sites * (columns[1] - first), planes * many * first
    before = np.frombuffer(old, np.uint8)[: planes * sites * columns[0]].reshape(planes, sites, -1)
    made = np.empty((planes, sites, columns[1]), np.uint8)
    made[:, :, :first] = before[..., :first]
    made[:, :, first:] = np.frombuffer(rest[:new], np.uint8).reshape(planes, sites, -1)
    made[:, rows, :first] = np.frombuffer(rest[new : new + again], np.uint8).reshape(planes, many, first)
    bits = iter(np.unpackbits(np.frombuffer(rest[new + again : new + again + size], np.uint8)).tolist())
    end = rest[new + again + size :]
    if end:
        scales = [np.frombuffer(each, "<f8").reshape(2, sites).tolist() for each in (old[-16 * sites :], end)]
        for row in sorted(set(range(sites)) - set(rows.tolist())):
            (low, step), (now, wide) = ([Fraction(plane[row]) for plane in each] for each in scales)
            for column in range(first) if (low, step) != (now, wide) else ():
                code = int.from_bytes(made[:, row, column].tobytes(), "big")
                if not 2 <= code <= (253 if planes == 1 else 4095):
                    continue
                place = (low + (code - 2) * step - now) / wide  # exactly, in steps of the new scale
                whole, over = divmod(place, 1)
                whole += next(bits) if over == Fraction(1, 2) else over > Fraction(1, 2)
                made[:, row, column] = list(int(whole + 2).to_bytes(planes, "big"))
    assert all(bit == 0 for bit in bits)
    return made.tobytes() + end
