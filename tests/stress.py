"""The whole suite beside processes that only compute: a test that can lose a race on a busy machine loses it here.

    python -m tests.stress                          # three times, beside four busy loops
    python -m tests.stress --runs 1 tests/cluster   # what follows is pytest's

Not a part of CI. Returns 1 where a run failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from tests.conftest import ROOT

# It ends with the process that began it, whichever way that ends.
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    sum(range(1_000_000))"


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--loops", type=int, default=4, help="processes that only compute")
    parser.add_argument("--workers", type=int, default=min(16, 3 * len(os.sched_getaffinity(0))))
    options, given = parser.parse_known_args(words)
    suite = ["-q", "-n", str(options.workers), "--dist", "worksteal", "-p", "no:benchmark", *given]
    loops = [subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())]) for _ in range(options.loops)]
    ended = []
    try:
        for run in range(options.runs):
            begin = time.monotonic()
            ended.append(subprocess.run([sys.executable, "-m", "pytest", *suite], cwd=ROOT).returncode)
            took = time.monotonic() - begin
            print(f"run {run + 1} of {options.runs}: exit code {ended[-1]}, {took:.0f} s", flush=True)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    return int(any(ended))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
