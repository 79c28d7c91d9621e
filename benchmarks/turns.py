"""Cost of a measured step where every model has its own process, as in training: python -m benchmarks.turns

In one process, as `make bench` has them, the programs of five watched models belong to the same code, and a compiled
block may first go through the guards of others. Here one process at a time makes steps, in turns. `python -m
benchmarks.turns others` compares with what people use instead, every step measured, in eager mode; `glue`: what it
costs to measure beside a torch that no glue fits, for 400 modules that do next to nothing (0.4 ms are a microsecond for
each) and in a step; `off`: what a step adds that is not measured, behind some that were, in a processor's time, for a
busy machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import hookstats
from benchmarks.interleaved import figures, interleaved
from benchmarks.peers import Peer, nine_by_operators
from benchmarks.steps import ATTACHED, DEFAULT, MODES, NEVER, OF_OUTPUTS, SMALL, Trainer

WITHOUT = "without glue: "
GLUE = ["bare", "totals", "channels", f"{WITHOUT}totals", f"{WITHOUT}channels"]
HOOKS = ["bare", "empty forward hook", "hookstats, paused", "hookstats, measuring", "Python tensor hooks, empty"]
HOOKS += [f"{WITHOUT}hookstats, paused", f"{WITHOUT}hookstats, measuring"]
RECORDED = "hookstats, all defaults, recorded"
NAMES = ["bare", "totals", "+ histogram per tensor"]
ROUNDS = 40


class Hooks:
    """400 modules that do next to nothing, forward and backward."""

    def __init__(self, name: str) -> None:
        from benchmarks.bench_hooks import timed

        self.timed = timed(name)


class Wandb(Trainer):
    """wandb.watch as it is called in most scripts: histograms of parameters' gradients, here at each step, offline."""

    def __init__(self) -> None:
        super().__init__(SMALL, "cpu", None)
        import wandb

        folder = tempfile.mkdtemp()
        self._run = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True))
        self._run.watch(self.model, log="gradients", log_freq=1)

    def step(self) -> None:
        super().step()
        self._run.log({})


class OffStep(Trainer):
    """Time of steps that are not measured: as in training, a few measured steps come before them, without pauses."""

    def __init__(self, attached: dict[str, Any] | None) -> None:
        super().__init__(SMALL, "cpu", attached)
        if self.monitor is not None:
            self.monitor.resume()
        self._left = 4  # steps until none is measured

    def timed(self, every: int = 1, pause: bool = False) -> float:
        self._left -= 1
        self.every = NEVER if self._left <= 0 else every
        begin = time.process_time()
        self.steps(1)
        return time.process_time() - begin


OFF: dict[str, Callable[[], Trainer]] = {
    "bare, none measured": lambda: OffStep(None),
    "off-step": lambda: OffStep(ATTACHED[DEFAULT]),
    "bare, none measured, again": lambda: OffStep(None),
}


def _peer(fold: Callable[..., None]) -> Peer:
    monitor = hookstats.attach(Trainer(SMALL, "cpu", None).model, tensors=OF_OUTPUTS)
    modules = {site.name for site in monitor.sites}
    monitor.detach()
    return Peer(SMALL, "cpu", modules, fold)


OTHERS: dict[str, Callable[[], Trainer]] = {
    "bare": lambda: Trainer(SMALL, "cpu", None),
    "hookstats, outputs and their gradients": lambda: Trainer(SMALL, "cpu", {"tensors": OF_OUTPUTS}),
    RECORDED: lambda: Trainer(SMALL, "cpu", {"sinks": hookstats.record(tempfile.mkdtemp())}),
    f"{RECORDED}, every=10": lambda: Trainer(SMALL, "cpu", {"sinks": hookstats.record(tempfile.mkdtemp())}),
    "wandb.watch": Wandb,
    "Python hooks, torch operators": lambda: _peer(nine_by_operators),
    "Python hooks, compiled operators": lambda: _peer(torch.compile(nine_by_operators, dynamic=True)),
}


def work(compiled: bool, name: str) -> None:
    """Times a step for each line that comes."""
    torch.set_num_threads(1)
    name, hooks, _ = name.removeprefix(WITHOUT).partition(" of 400 modules")
    trainer: Any
    if hooks:
        trainer = Hooks(name)
    elif name in OFF:
        trainer = OFF[name]()
    else:
        trainer = OTHERS[name]() if name in OTHERS else Trainer(SMALL, "cpu", ATTACHED[name])
    if compiled:
        for block in trainer.model.blocks:
            block.compile()
    every = (10,) if name.endswith(", every=10") else ()
    for _ in range(6 if name in OFF else 4):
        trainer.timed(*every)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(trainer.timed(*every), flush=True)


class Worker:
    def __init__(self, compiled: bool, name: str) -> None:
        command = [sys.executable, "-m", "benchmarks.turns", str(int(compiled)), name]
        environment = os.environ | ({"HOOKSTATS_GLUE": "none"} if name.startswith(WITHOUT) else {})
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, text=True, env=environment, stdin=pipe, stdout=pipe)

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
def workers(modes: Iterable[str], names: Iterable[str]) -> Iterator[dict[str, Worker]]:
    """All of them, ready; by mode and name."""
    made = {f"{mode}, {name}": Worker(mode != MODES[0], name) for mode in modes for name in names}
    try:
        for worker in made.values():
            assert worker.read() == "ready"
        yield made
    finally:
        for worker in made.values():
            worker.process.kill()


def main(modes: Iterable[str], names: Iterable[str], rounds: int = ROUNDS) -> None:
    with workers(modes, names) as all_workers:
        times = interleaved({name: worker.step for name, worker in all_workers.items()}, rounds)
    for mode in modes:
        found = figures(
            {name: own for name, own in times.items() if name.startswith(mode)},
            next(name for name in times if name.startswith(f"{mode}, bare")),
        )
        for figure in found:
            added = 100 * figure["added_ms"] / found[0]["median_ms"]
            milliseconds = f"{figure['median_ms']:7.2f} ms {figure['added_ms']:+8.2f} ms"
            print(f"{figure['name']:62} {milliseconds} {added:+7.1f} %")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        work(sys.argv[1] == "1", sys.argv[2])
    elif sys.argv[1:] == ["others"]:
        main(MODES[:1], OTHERS)
    elif sys.argv[1:] == ["off"]:
        main(MODES, OFF, rounds=150)
    elif sys.argv[1:] == ["glue"]:
        main(MODES[:1], [f"{name} of 400 modules" for name in HOOKS], rounds=20)
        main(MODES[:1], GLUE, rounds=20)
    else:
        main(MODES, NAMES)
