"""Size of a page of a long run, the time to build it, and its speed in headless Chromium.

python -m benchmarks.report_size [--sites 1000] [--steps 10000] [--keep DIRECTORY]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from hookstats.numbers.fields import EXPONENT_BINS, FIELDS, ExponentBins, Site
from hookstats.numbers.frame import Sites, StepFrame
from tests.report.browser import Browser

CHANNELS = 64  # in every hundredth step, with a histogram
DETAILED_EVERY = 100
BUILD = """
import sys, time, resource
from hookstats.report import write
began = time.perf_counter()
write(sys.argv[1], sys.argv[2])
print(time.perf_counter() - began, time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def sites_of(sites: list[Site], channels: int, bins: int) -> Sites:
    n = len(sites)
    return Sites.side_by_side(sites, [channels > 1] * n, [-1] * n, None, ExponentBins(), [channels] * n, [bins] * n)


def step_of(sites: Sites, rng: np.random.Generator, step: int, scale: np.ndarray) -> StepFrame:
    """Make a step of normal values whose spread wanders, as in a model that trains."""
    n, channels, counters = len(sites), int(sites.channels[0]), int(sites.counters[0])
    block = np.zeros((n, len(FIELDS) * channels + counters), np.int64)
    state = block[:, : len(FIELDS) * channels].view(np.float64).reshape(-1, len(FIELDS), channels)
    std = scale[:, None] * np.exp(0.05 * rng.normal(size=(len(scale), channels)))
    mean, count = 0.1 * std * rng.normal(size=std.shape), np.full_like(std, 1 << 16)
    top = 4 * std * np.exp(0.1 * rng.normal(size=std.shape))
    fields = [count, mean, count * std**2, mean - top, mean + top, 0.8 * count * std, np.round(0.01 * count)]
    state[:, : len(fields)] = np.stack(fields, axis=1)
    if counters:
        exponents = np.log2(scale).astype(int)[:, None] + 127 - np.arange(20)
        shares = (1 << 16) * CHANNELS * 0.5 ** np.arange(1, 21)
        np.put_along_axis(block[:, len(FIELDS) * channels :], exponents, shares[None].astype(np.int64), axis=1)
    loss = {"loss": float(2 + 8 * np.exp(-step / 20000) + 0.05 * rng.normal())}
    ones = np.ones(n, np.int64)
    return StepFrame(sites, [block.reshape(-1)], ones, np.arange(n), np.ones(n), step, 1.7e9 + step, loss)


def record(directory: Path, sites: int, steps: int) -> None:
    """A run as the writer process leaves it, merged."""
    from hookstats.records.store import Store
    from hookstats.rules import Finding

    rng = np.random.default_rng(0)
    names = [f"layers.{i // 10}.{('attention', 'mlp')[i // 5 % 2]}.part{i % 5}" for i in range(sites // 2)]
    named = [*(Site(name, "output") for name in names), *(Site(name, "grad_output") for name in reversed(names))]
    totals, detailed = sites_of(named, 1, 0), sites_of(named, CHANNELS, EXPONENT_BINS)
    scale = np.exp(rng.normal(size=len(named)))
    folder = directory / "rank=0"
    folder.mkdir(parents=True)
    store = Store(folder)
    store.begin(1, {"model": "synthetic", "sites": sites})
    for t in range(steps):
        scale *= np.exp(0.02 * rng.normal(size=len(named)))
        spike = np.where(np.arange(len(named)) % 100 < 10, 6.0, 1.0) if 6000 <= t < 6004 else 1.0
        store.add(step_of(detailed if t % DETAILED_EVERY == 0 else totals, rng, 10 * t, scale * spike))
        if store.size > 64 << 20:
            store.commit(t)
    store.commit(steps)
    while store.merge():
        pass
    store.close()
    sentence = "A spike that was put in."
    found = [Finding("spike", 60_000, named[i], 6.0, 3.0, "warning", sentence, 0, 1) for i in range(0, len(named), 100)]
    with (folder / "findings.jsonl").open("w") as file:
        file.writelines(json.dumps(finding.to_json()) + "\n" for finding in found)


def browse(page: Path) -> dict[str, float]:
    """Milliseconds: until the first picture, and the slowest switch, the first time and again."""
    figures: dict[str, float] = {}
    with Browser() as browser:
        browser.open(page)
        figures["first picture ms"] = browser.run("performance.getEntriesByName('first picture')[0].startTime")
        figures["ready ms"] = browser.run("performance.now()")
        views = ["absolute", "relative"]
        for turn in ("first", "again"):
            browser.run("performance.clearMeasures()")
            for statistic in ("rms", "abs_max", "peak", "centre", "zeros"):
                for view in views:
                    before = browser.run("performance.getEntriesByName('switch').length")
                    browser.run(
                        f"(() => {{ const select = document.querySelectorAll('#tools select')[1];"
                        f"if (select.value !== '{statistic}') {{ select.value = '{statistic}';"
                        "select.dispatchEvent(new Event('change')); return }"
                        f"document.querySelector('[data-value={view}]').click() }})()"
                    )
                    browser.wait(f"performance.getEntriesByName('switch').length > {before}")
            durations = "performance.getEntriesByName('switch').map((entry) => entry.duration)"
            figures[f"slowest switch, {turn} time, ms"] = max(browser.run(durations))
        figures["memory MB"] = browser.run("performance.memory.usedJSHeapSize") / 2**20
        assert not browser.errors, browser.errors
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report_size", description=__doc__.splitlines()[0])
    parser.add_argument("--sites", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--keep", type=Path, help="folder for the run and its page; a run that is there is used again")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        run, page = folder / "run", folder / "report.html"
        if not run.exists():
            began = time.perf_counter()
            record(run, arguments.sites, arguments.steps)
            print(f"recorded in {time.perf_counter() - began:.0f} s")
        command = [sys.executable, "-c", BUILD, str(run), str(page)]
        built = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        seconds, processor, megabytes = map(float, built.stdout.split())
        print(f"built in {seconds:.1f} s ({processor:.1f} s of a processor), at most {megabytes:.0f} MB")
        print(f"the page is {page.stat().st_size / 1e6:.2f} MB")
        for name, value in browse(page).items():
            print(f"{name}: {value:.0f}")


if __name__ == "__main__":
    main()
