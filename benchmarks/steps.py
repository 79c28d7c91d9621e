"""Training steps that are compared: bare, and with hookstats measuring more and more, or nothing. On a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

import hookstats
from benchmarks.interleaved import figures, interleaved, seconds
from benchmarks.llama import Llama, Shape
from hookstats import ExponentBins

SMALL = Shape(width=256, hidden=688, heads=4, blocks=4, vocabulary=2048, batch=1, length=128)  # 4.2 M parameters
TINY = Shape(width=32, hidden=64, heads=2, blocks=2, vocabulary=64, batch=1, length=16)  # for trying things out
LARGE = Shape(width=2048, hidden=5632, heads=16, blocks=18, vocabulary=32000, batch=4, length=2048)  # 1.06 G

OF_OUTPUTS = ("output", "grad_output")
DEFAULT = "+ histogram per tensor, gradients of parameters (default)"
ATTACHED: dict[str, dict[str, Any] | None] = {
    "bare": None,
    "totals": {"tensors": OF_OUTPUTS, "channels": False, "histogram": None},
    "channels": {"tensors": OF_OUTPUTS, "histogram": None},
    "+ histogram per tensor": {"tensors": OF_OUTPUTS},
    DEFAULT: {},
    "+ histogram per channel": {
        "tensors": OF_OUTPUTS,
        "histogram": ExponentBins(per_channel=True),
        "options": hookstats.Options(memory_budget=4 << 30),
    },
}
MODES = ["eager", "blocks compiled"]  # by `compiled`
NEVER, PERIOD = 0, 10


class Trainer:
    """A model in training, watched or (attached=None) not."""

    def __init__(self, shape: Shape, device: str, attached: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        self.device = device
        self.every = 1  # or NEVER
        with torch.device(device):
            self.model = Llama(shape).to(torch.bfloat16 if device == "cuda" else torch.float32)
        self.ids = torch.randint(shape.vocabulary, (shape.batch, shape.length), device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.monitor = None if attached is None else hookstats.attach(self.model, every=self._is_due, **attached)
        if self.monitor is not None:
            self.monitor.pause()

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """All monitors of a process share the decision which program runs, so the other trainers' are paused."""
        if self.monitor is not None:
            self.monitor.resume()
        yield
        if self.monitor is not None:
            self.monitor.pause()

    def _is_due(self, step: int) -> bool:
        return self.every != NEVER and step % self.every == 0

    def step(self) -> None:
        self.model(self.ids).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.monitor is not None:
            self.monitor.step()

    def steps(self, count: int) -> None:
        """Train so many steps, and wait until the GPU has done them."""
        for _ in range(count):
            self.step()
        if self.device == "cuda":
            torch.cuda.synchronize()

    def timed(self, every: int = 1, pause: bool = False) -> float:
        """Seconds of a step; of a measured one and those around it, the mean."""
        if every != self.every:
            self.every = every
            self.steps(1)  # whether a step is measured was decided when the one before it ended
        count = max(every, 1)
        with nullcontext() if pause else self.resumed():
            return seconds(lambda: self.steps(count)) / count

    def memory(self) -> dict[str, int]:
        """Bytes: what is measured in a step, hookstats' state, and (CUDA) what a step adds to what is there before."""
        found = {}
        if self.monitor is not None:
            self.timed()
            sites = self.monitor.snapshot().values()
            size = next(self.model.parameters()).element_size()
            found = {
                "hooked_bytes": int(sum(site.total.count for site in sites)) * size,
                "state_bytes": self.monitor.state_bytes,
            }
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with self.resumed():
                self.steps(1)
            found["step_bytes"] = torch.cuda.max_memory_allocated() - before
        return found


def training_figures(
    shape: Shape,
    device: str,
    compiled: bool,
    rounds: int,
    names: Iterable[str] = ATTACHED,
    write: Callable[[dict[str, Any]], None] = lambda figure: None,
) -> list[dict[str, Any]]:
    """A figure for each contender, all timed in turns; what they add is compared with the bare step.

    names: some of ATTACHED, "bare" and DEFAULT among them. write: is given each figure as it is after each round.

    Compiled is each block, as one does with a deep model. All contenders' blocks have the same code: torch would run
    what was compiled for one of them, with its hooks or without, for all. Hence the guards.
    """
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False, recompile_limit=64):
        return _training_figures(shape, device, compiled, rounds, names, write)


def _training_figures(
    shape: Shape,
    device: str,
    compiled: bool,
    rounds: int,
    names: Iterable[str],
    write: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    trainers = {name: Trainer(shape, device, ATTACHED[name]) for name in names}
    for trainer in trainers.values():
        if compiled:
            for block in trainer.model.blocks:
                block.compile()
        trainer.timed()
    default = trainers[DEFAULT]
    contenders: dict[str, Callable[[], float]] = {name: trainer.timed for name, trainer in trainers.items()}
    contenders |= {
        f"every={PERIOD}, mean of {PERIOD} steps": lambda: default.timed(PERIOD),
        "off-step": lambda: default.timed(NEVER),
        "paused": lambda: default.timed(pause=True),
    }
    interleaved(contenders, 1)  # warms up

    def write_all(times: dict[str, list[float]]) -> None:
        for figure in figures(times, "bare"):
            write(figure)

    found = figures(interleaved(contenders, rounds, write_all), "bare")
    for figure in found:
        figure |= {"parameters": sum(p.numel() for p in default.model.parameters()), "tokens": default.ids.numel()}
        if figure["name"] in trainers:
            figure |= trainers[figure["name"]].memory()
    return found
