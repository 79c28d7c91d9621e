"""What a measured step adds where every model has a process of its own, as in training: python -m benchmarks.turns

In one process, as `make bench` has them, the programs of five watched models belong to the same code, and a compiled
block may first go through the guards of others. Here one process at a time makes steps, in turns.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.interleaved import figures, interleaved
from benchmarks.steps import ATTACHED, MODES, SMALL, Trainer

NAMES = ["bare", "totals", "+ histogram per tensor"]
ROUNDS = 40


def work(compiled: bool, name: str) -> None:
    """Times a step for each line that comes."""
    torch.set_num_threads(1)
    trainer = Trainer(SMALL, "cpu", ATTACHED[name])
    if compiled:
        for block in trainer.model.blocks:
            block.compile()
    for _ in range(4):
        trainer.timed()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(trainer.timed(), flush=True)


class Worker:
    def __init__(self, compiled: bool, name: str) -> None:
        command = [sys.executable, "-m", "benchmarks.turns", str(int(compiled)), name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def step(self) -> float:
        """Seconds; the shorter of two behind one that finds the caches again."""
        assert self.process.stdin is not None
        times = []
        for _ in range(3):
            print(file=self.process.stdin, flush=True)
            times.append(float(self.read()))
        return min(times[1:])


@contextmanager
def workers() -> Iterator[dict[str, Worker]]:
    """All of them, ready; by mode and name."""
    made = {f"{mode}, {name}": Worker(bool(i), name) for i, mode in enumerate(MODES) for name in NAMES}
    try:
        for worker in made.values():
            assert worker.read() == "ready"
        yield made
    finally:
        for worker in made.values():
            worker.process.kill()


def main() -> None:
    with workers() as all_workers:
        times = interleaved({name: worker.step for name, worker in all_workers.items()}, ROUNDS)
    for mode in MODES:
        found = figures({name: own for name, own in times.items() if name.startswith(mode)}, f"{mode}, {NAMES[0]}")
        for figure in found:
            added = 100 * figure["added_ms"] / found[0]["median_ms"]
            print(f"{figure['name']:40} {figure['median_ms']:6.1f} ms  {added:+5.1f} %")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(sys.argv[1] == "1", sys.argv[2])
    else:
        main()
