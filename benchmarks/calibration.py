"""Time that gathering the inputs of a Llama's layers adds to running it, in turns in one process:

python -m benchmarks.calibration [ROUNDS]

All see the same batches on one CPU thread, and each begins anew in every round. `calibrate` gathers everything that
`hookstats.results.InputStats` has. Beside it are the same numbers by torch's operators in Python hooks, torchao's two
observers for SmoothQuant (the largest |x| of each channel; one keeps every input until the end), and a hook that takes
nothing but that maximum.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torchao.prototype.smoothquant import core

import hookstats
from benchmarks.interleaved import figures, interleaved, seconds
from benchmarks.llama import Llama, Shape

SHAPE = Shape(width=256, hidden=688, heads=4, blocks=4, vocabulary=1024, batch=4, length=128)
BATCHES, ROUNDS = 20, 12
PLAIN, OURS = "the model alone", "hookstats.calibrate"


class Observer(Protocol):
    """A contender that observes one layer's inputs."""

    def __call__(self, x: torch.Tensor) -> object: ...

    def finish(self) -> torch.Tensor:
        """``[C]``: the largest |x| of each channel."""


class Maximum:
    """The largest |x| of each channel alone."""

    def __init__(self, layer: nn.Linear) -> None:
        self.abs_max = torch.zeros(layer.in_features)

    def __call__(self, x: torch.Tensor) -> None:
        torch.maximum(self.abs_max, x.flatten(0, -2).abs().amax(0), out=self.abs_max)

    def finish(self) -> torch.Tensor:
        return self.abs_max


class Everything(Maximum):
    """All statistics of `InputStats`, by torch's operators."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        self.sums = torch.zeros(3, layer.in_features, dtype=torch.float64)
        self.counts = torch.zeros(3, dtype=torch.int64)  # tokens, values that are not finite, zeros
        self.magnitudes = torch.zeros(255, dtype=torch.int64)

    def __call__(self, x: torch.Tensor) -> None:
        x = x.flatten(0, -2)
        finite = x.isfinite()
        kept = torch.where(finite, x, 0)
        size = kept.abs()
        torch.maximum(self.abs_max, size.amax(0), out=self.abs_max)
        self.sums += torch.stack([kept.sum(0), size.sum(0), kept.square().sum(0)])
        self.counts += torch.stack([torch.tensor(len(x)), (~finite).sum(), (x == 0).sum()])
        exponents = (size.view(torch.int32) >> 23).flatten()
        self.magnitudes += torch.bincount(exponents, minlength=255)


class Running:
    """torchao's, with a maximum that is kept."""

    def __init__(self, layer: nn.Linear) -> None:
        self.observer = core.RunningAbsMaxSmoothQuantObserver(layer.weight.detach())

    def __call__(self, x: torch.Tensor) -> None:
        self.observer(x)

    def finish(self) -> torch.Tensor:
        found: torch.Tensor = self.observer.x_abs_max
        return found


class Keeping:
    """torchao's, with all inputs kept. Its factor is made into the maximum, so that they can be compared."""

    def __init__(self, layer: nn.Linear) -> None:
        self.weight = layer.weight.detach()
        self.observer = core.SmoothQuantObserver(self.weight)

    def __call__(self, x: torch.Tensor) -> None:
        self.observer(x)

    def finish(self) -> torch.Tensor:
        factor: torch.Tensor = self.observer.calculate_qparams()[0]
        return factor.square() * self.weight.abs().amax(0)


OTHERS: dict[str, Callable[[nn.Linear], Observer]] = {
    "the same numbers, torch operators in hooks": Everything,
    "torchao, running maximum and range": Running,
    "torchao, inputs kept": Keeping,
    "the maximum alone, in hooks": Maximum,
}


class Work:
    """A model and its batches."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Llama(SHAPE).eval()
        self.layers = {name: each for name, each in self.model.named_modules() if isinstance(each, nn.Linear)}
        self.batches = [torch.randint(SHAPE.vocabulary, (SHAPE.batch, SHAPE.length)) for _ in range(BATCHES)]

    def plain(self) -> None:
        with torch.no_grad():
            for batch in self.batches:
                self.model(batch)

    def calibrated(self) -> dict[str, torch.Tensor]:
        found = hookstats.calibrate(self.model, self.batches)
        return {name: torch.from_numpy(stats.abs_max) for name, stats in found.items()}

    def observed(self, make: Callable[[nn.Linear], Observer]) -> dict[str, torch.Tensor]:
        observers = {name: make(layer) for name, layer in self.layers.items()}

        def hook(observer: Observer) -> Any:
            def observe(module: nn.Module, args: Any) -> None:
                observer(args[0].detach())

            return observe

        handles = [layer.register_forward_pre_hook(hook(observers[name])) for name, layer in self.layers.items()]
        self.plain()
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            return {name: observer.finish().double() for name, observer in observers.items()}

    def check(self) -> None:
        """Raises unless all have found the same maxima, over the same batches."""
        expected = self.calibrated()
        for name, make in OTHERS.items():
            found = self.observed(make)
            assert list(found) == list(expected), name
            for layer, abs_max in expected.items():
                close = 1e-4 if make is Keeping else 0  # its factor has an epsilon
                torch.testing.assert_close(found[layer], abs_max, rtol=close, atol=0)


def main(rounds: int = ROUNDS) -> None:
    torch.set_num_threads(1)
    work = Work()
    work.check()
    contenders: dict[str, Callable[[], float]] = {
        PLAIN: lambda: seconds(work.plain),
        OURS: lambda: seconds(work.calibrated),
    }
    for name, make in OTHERS.items():
        contenders[name] = lambda make=make: seconds(lambda: work.observed(make))  # type: ignore[misc]
    found = figures(interleaved(contenders, rounds), PLAIN)
    ours = next(figure for figure in found if figure["name"] == OURS)["added_ms"]
    plain = found[0]["median_ms"]
    print(f"{BATCHES} batches of {SHAPE.batch * SHAPE.length} tokens, {len(work.layers)} layers, {rounds} rounds")
    for figure in found:
        added = figure["added_ms"]
        line = f"{figure['name']:44} {figure['median_ms']:8.1f} ms {added:+8.1f} ms {100 * added / plain:+7.1f} %"
        print(line if figure["name"] == PLAIN else f"{line}  {added / ours:5.1f} times calibrate's")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
