"""Speed of a served run in headless Chromium, and the cost to training while someone looks at it.

python -m benchmarks.serve [--sites 1000] [--steps 10000] [--keep DIRECTORY] [--rounds 14]
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.interleaved import interleaved
from benchmarks.report_size import record, sites_of, step_of
from hookstats.records.attempts import path_of
from hookstats.records.parts import list_parts
from hookstats.records.reading import read_sites
from hookstats.records.store import Store
from tests.report.browser import Browser
from tests.serve.served import Served, describe, serving

NEW = 20  # steps that a writer adds at once
UPDATES = 4
TRAINER = """
import sys, time
import torch
import hookstats
from benchmarks.steps import SMALL, Trainer
torch.set_num_threads(1)
attached = {"sinks": [hookstats.record(sys.argv[1])]}
trainer = Trainer(SMALL, "cpu", attached)
print("ready", flush=True)
for line in sys.stdin:
    began, used, every, times = time.monotonic(), time.process_time(), int(sys.argv[2]), []
    while time.monotonic() < began + 3:
        times.append(trainer.timed(every))
    print(sorted(times)[len(times) // 2], (time.process_time() - used) / len(times) / every, flush=True)
trainer.monitor.detach()
"""


def add(run: Path, steps: int) -> None:
    """Steps more, as the process that writes commits them."""
    folder = run / "rank=0"
    sites = read_sites(folder)
    last = list_parts(folder).counting["steps"][-1].last
    store, rng, where = Store(folder), np.random.default_rng(1), sites_of(sites, 1, 0)
    store.begin(1, {})
    for i in range(steps):
        store.add(step_of(where, rng, last + 10 * (i + 1), np.exp(rng.normal(size=len(sites)))))
    store.commit(last)
    store.close()


def transferred(served: Served, path: str) -> tuple[float, int, bytes]:
    """Milliseconds, bytes on the wire, and what they hold."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=120)
    began = time.perf_counter()
    connection.request("GET", path, headers={"Cookie": served.cookie})
    body = connection.getresponse().read()
    took = 1e3 * (time.perf_counter() - began)
    connection.close()
    return took, len(body), gzip.decompress(body)


def processor(pid: int) -> float:
    """Seconds that a process has used."""
    told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(told[11]) + int(told[12])) / os.sysconf("SC_CLK_TCK")


def browse(folder: Path) -> None:
    describe(folder / "run" / "rank=0", 1, os.getpid())  # it is alive
    with serving(folder) as served, Browser() as browser:
        [address] = served.runs().values()
        browser.call("Page.navigate", url=served.address)
        browser.wait("document.documentElement?.dataset.ready === 'true'")
        picture = "performance.getEntriesByName('first picture').length"
        for turn in ("nothing read before", "again"):
            began = time.perf_counter()
            browser.call("Page.navigate", url=f"http://127.0.0.1:{served.port}{address}")
            browser.wait(f"location.pathname === {address!r} && {picture} === 1", 300)
            print(f"first picture, {turn}: {time.perf_counter() - began:.2f} s")
            browser.wait("document.documentElement.dataset.ready === 'true'", 300)
            print(f"all of the page, {turn}: {time.perf_counter() - began:.2f} s")
        took, size, _ = transferred(served, address)
        print(f"the page that has the first picture: {size / 1e3:.0f} KB on the wire, in {took:.0f} ms")
        sizes = "performance.getEntriesByType('resource').map((each) => [each.name, each.encodedBodySize])"
        for name, size in browser.run(sizes):
            if "blob" in name:
                print(f"  then {name.partition('name=')[2].partition('&')[0]}: {size / 1e3:.0f} KB")
        measures = "performance.getEntriesByName('update')"
        seen, drawn, busy = [], [], []
        for _ in range(UPDATES):
            facts = browser.run("document.querySelector('#facts').innerText")
            browser.run("performance.clearMeasures('update')")
            add(folder / "run", NEW)
            began, used = time.perf_counter(), processor(served.process.pid)
            browser.wait(f"document.querySelector('#facts').innerText !== {facts!r}", 300)
            seen.append(time.perf_counter() - began)
            browser.wait(f"{measures}.length > 0", 300)
            drawn.append(browser.run(f"{measures}[0].duration"))
            busy.append(1e3 * (processor(served.process.pid) - used))
        print(f"{NEW} new steps, {UPDATES} times, without a rest between them: median, and the most")
        for name, own, unit in (
            ("until an open page shows them", seen, "s"),
            ("drawn, all of it, in", drawn, "ms"),
            ("the server's processor", busy, "ms"),
        ):
            print(f"  {name}: {np.median(own):.1f} {unit}, {max(own):.1f}")
        status = Path(f"/proc/{served.process.pid}/status").read_text()
        peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        print(f"memory of the server, at most: {int(peak.split()[1]) / 1024:.0f} MB")
        assert not browser.errors, browser.errors
    path_of(folder / "run" / "rank=0", 1).unlink()


def settle(pids: Sequence[int]) -> None:
    """Until processes have done what they had to, at most 5 s: a burst does not pay for the one before it."""
    for _ in range(10):
        before = [processor(pid) for pid in pids]
        time.sleep(0.5)
        if [processor(pid) for pid in pids] == before:
            return


class Burst(NamedTuple):
    """Three seconds of training. Seconds of a step: the median, and of a processor; of others' while it lasted."""

    median: float
    own: float
    server: float
    writer: float
    asking: float


def train(folder: Path, rounds: int, every: int) -> None:
    """A trainer on one thread, looked at by somebody each second, and not, in turns. every: which steps it records."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", TRAINER, str(folder / "run"), str(every)]
    trainer = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    stdin, stdout = trainer.stdin, trainer.stdout
    bursts: dict[str, list[Burst]] = {"alone": [], "looked at": []}
    try:
        assert stdout.readline() == "ready\n"
        print(file=stdin, flush=True)  # its writer begins
        stdout.readline()
        [writer] = map(int, Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children").read_text().split())
        with serving(folder) as served:

            def burst(name: str) -> float:
                used = processor(served.process.pid), processor(writer), time.process_time()
                print(file=stdin, flush=True)
                median, own = map(float, stdout.readline().split())
                server, written = processor(served.process.pid) - used[0], processor(writer) - used[1]
                bursts[name].append(Burst(median, own, server, written, time.process_time() - used[2]))
                return median

            def looked_at() -> float:
                is_over = threading.Event()
                settle([served.process.pid, writer])

                def look() -> None:
                    [address] = served.runs().values()
                    while not is_over.wait(1.0):
                        for path in (address, "/"):
                            served.ask(path)

                looker = threading.Thread(target=look)
                looker.start()
                try:
                    return burst("looked at")
                finally:
                    is_over.set()
                    looker.join()

            def alone() -> float:
                settle([served.process.pid, writer])
                return burst("alone")

            interleaved({"alone": alone, "looked at": looked_at}, rounds)
    finally:
        stdin.close()
        trainer.wait(120)
    tell(bursts)


def tell(bursts: Mapping[str, Sequence[Burst]]) -> None:
    found = {name: np.array(own) for name, own in bursts.items()}
    for name, own in found.items():
        median, trainer, *used = np.median(own, axis=0).tolist()
        server, writer, asking = (f"{seconds / 0.03:.0f} %" for seconds in used)
        print(
            f"a step, {name}: median {1e3 * median:.2f} ms, {1e3 * trainer:.2f} ms of a processor; of one, the server "
            f"takes {server}, who asks it {asking}, the writer of the run {writer}"
        )
    for number, what in enumerate(("median step", "processor time of a step")):
        ratios = found["looked at"][:, number] / found["alone"][:, number]
        low, middle, high = np.percentile(ratios, [25, 50, 75]).tolist()
        print(
            f"{what}, looked at / alone: {middle:.3f} in the median of {len(ratios)} pairs, half of which lie from "
            f"{low:.3f} to {high:.3f}, all from {ratios.min():.3f} to {ratios.max():.3f}"
        )
    print(
        f"On {os.cpu_count()} processors run the trainer with one thread, the writer of its run, the server, and this\n"
        "process, which asks."
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__.splitlines()[0])
    parser.add_argument("--sites", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--keep", type=Path, help="folder for the run; a run that is there is used again, and grows")
    parser.add_argument("--rounds", type=int, default=14, help="pairs of a trainer looked at and alone, 8 s each")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary) / "large"
        if not (folder / "run").exists():
            record(folder / "run", arguments.sites, arguments.steps)
        browse(folder)
        for every in (10, 1):
            print(f"\nA trainer that records each step of {every}:")
            trained = Path(temporary) / f"every {every}"
            trained.mkdir()
            train(trained, arguments.rounds, every)


if __name__ == "__main__":
    main()
