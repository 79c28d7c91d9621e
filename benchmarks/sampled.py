"""``python -m benchmarks.sampled [errors | bytes | cost | laws | compiled] [model ...]``: what rows=8 costs, and errs.

errors: 500 tensors of tokens, of five kinds, each read by every 8th row from each of the first eight on, beside float64
of the whole. bytes: of a step of a model of 1 B parameters, by the counts of what is hooked. cost: four models with the
default, every step, every step with rows=8, and budget=0.01; ten steps of each by turns, in a processor's time, which
other work on the machine changes least. All in one process: the same model is up to 25 % slower in one process than in
another. laws: the same of what laws measure beside the defaults, of the GPT. compiled: each model compiled as a whole,
which is done once, so a process for each way. A model is told by a part of its name; none: all of them.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

import hookstats
from benchmarks.llama import Llama, Shape
from benchmarks.steps import LARGE, SMALL
from hookstats.watch.arguments import DEFAULT_TENSORS

_ROWS, _WIDTH, _TENSORS, _WHOLE = 2048, 32, 100, 10  # of each kind


def tensors() -> Iterator[tuple[str, torch.Tensor]]:
    for seed in range(_TENSORS):
        random = torch.Generator().manual_seed(seed)
        x = torch.randn(_ROWS, _WIDTH, generator=random) * torch.rand(_WIDTH, generator=random).mul(3).exp()
        x += torch.randn(_WIDTH, generator=random)
        yield "independent rows", x
        yield "sorted rows", x[x[:, 0].argsort()]
        padded = x.clone().view(16, -1, _WIDTH)
        lengths = torch.randint(16, 129, (16,), generator=random)
        padded[torch.arange(128) >= lengths[:, None]] = 0
        yield "padded to 128", padded
        first = x.clone().view(16, -1, _WIDTH)
        first[:, 0] *= 30
        yield "first tokens 30 times as large", first
        one = x.clone()
        one[int(torch.randint(_ROWS, (1,), generator=random))] *= 100
        yield "one row 100 times as large", one


def errors(rows: int = 8) -> None:
    """The largest and the middle error over all phases, beside the standard error that is told."""
    found: dict[str, list[list[float]]] = {}
    model = nn.Sequential(nn.Identity())
    read: list[hookstats.Snapshot] = []
    with hookstats.attach(model, ["0"], tensors="output", every=1, rows=rows, sinks=read.append) as monitor:
        for _ in range(_WHOLE):
            model(torch.zeros(8, 16))
            monitor.step()
        for kind, x in tensors():
            wide = x.double().flatten(0, -2)
            std, mean, square = float(wide.std()), float(wide.mean()), float(wide.square().mean())
            for _ in range(rows):
                read.clear()
                model(x)
                monitor.step()
                stats = read[0]["0", "output"]
                error, total, channels = stats.standard_error, stats.total, stats.channels
                assert channels is not None
                assert error.channels is not None
                off = np.abs(channels.mean - wide.mean(0).numpy())
                found.setdefault(kind, []).append(
                    [
                        abs(total.mean - mean) / std,
                        error.mean / std,
                        abs(total.rms / square**0.5 - 1),
                        error.rms / square**0.5,
                        float(np.sqrt(np.mean((off / error.channels) ** 2))),
                        abs(total.zeros / total.count - float((wide == 0).double().mean())),
                        float(total.abs_max == float(x.abs().max())),
                    ]
                )
    head = ["mean / std", "told", "rms", "told", "channels' means / told", "share of zeros", "extreme is the whole's"]
    print("|", " | ".join(["of every phase, 95 % are below", *head]), "|")
    print("|---" * (len(head) + 1) + "|")
    for kind, all_of_kind in found.items():
        *numbers, seen = np.array(all_of_kind).T
        cells = [f"{np.quantile(each, 0.95):.2g}" for each in numbers]
        print(f"| {kind} | {' | '.join(cells)} | {seen.mean():.0%} |")


def bytes_read() -> None:
    """Count the bytes read by default of benchmarks/steps.py's model, with 4 x 4,096 tokens in bfloat16."""
    width, hidden, blocks, vocabulary = LARGE.width, LARGE.hidden, LARGE.blocks, LARGE.vocabulary
    block = 8 * width + 2 * hidden  # two norms, q, k, v, out, down, the block itself; gate and up
    outputs = 4 * 4096 * (blocks * block + 2 * width + vocabulary)
    parameters = blocks * (4 * width**2 + 3 * width * hidden + 2 * width) + (2 * vocabulary + 1) * width
    print("| rows | outputs and their gradients | gradients of parameters | together |\n|---|---|---|---|")
    for rows in (1, 8):
        activations, gradients = 2 * 2 * outputs / rows / 1e9, 2 * parameters / 1e9
        print(f"| {rows} | {activations:.1f} GB | {gradients:.1f} GB | {activations + gradients:.1f} GB |")


class _Residual(nn.Module):
    """A basic block of ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.down = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        found: torch.Tensor = self.relu(y + self.down(x))
        return found


def _resnet18() -> nn.Module:
    widths = [64, 64, 128, 128, 256, 256, 512, 512]
    blocks = [
        _Residual(before, width, 1 + (width > before)) for before, width in zip([64, *widths], widths, strict=False)
    ]
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def _demo() -> nn.Module:
    """The CNN of examples/digits.py."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(2)] if outputs == 64 and inputs == 32 else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def _of_images(model: nn.Module, batch: int, *shape: int) -> Made:
    x, labels = torch.randn(batch, *shape), torch.randint(10, (batch,))
    return model, lambda: nn.functional.cross_entropy(model(x), labels)


def _of_tokens(shape: Shape) -> Made:
    model, ids = Llama(shape), torch.randint(shape.vocabulary, (shape.batch, shape.length))
    return model, lambda: model(ids)


Made = tuple[nn.Module, Callable[[], torch.Tensor]]
_GPT = Shape(width=256, hidden=1024, heads=4, blocks=6, vocabulary=512, batch=1, length=512)
_MODELS: dict[str, Callable[[], Made]] = {
    "GPT, 512 tokens": lambda: _of_tokens(_GPT),
    "small Llama, 128 tokens": lambda: _of_tokens(SMALL),
    "CNN of the demo": lambda: _of_images(_demo(), 128, 1, 8, 8),
    "ResNet-18, 32 images of 32 x 32": lambda: _of_images(_resnet18(), 32, 3, 32, 32),
}
Ways: TypeAlias = dict[str, dict[str, Any] | None]
_WAYS: Ways = {
    "bare": None,
    "default, every=10": {},
    "every=1": {"every": 1},
    "every=1, rows=8": {"every": 1, "rows": 8},
    "budget=0.01": {"budget": 0.01},
}


def _beside_the_defaults(*kinds: str) -> dict[str, Any]:
    return {"every": 1, "tensors": (*DEFAULT_TENSORS, *kinds)}


_OF_LAWS: Ways = {
    "bare": None,
    "every=1": {"every": 1},
    "token weights": _beside_the_defaults("token_weights"),
    "optimizer law": _beside_the_defaults("optimizer_law"),
    "step law": _beside_the_defaults("outside_update"),
    "reduction": _beside_the_defaults("reduction"),
    "all of these": _beside_the_defaults("token_weights", "optimizer_law", "outside_update", "reduction"),
    "param_grad_local": _beside_the_defaults("param_grad_local"),
}


def work(name: str, way: str) -> None:
    """Times ten steps of a compiled model for each line that comes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss_of = _MODELS[name]()
    optimizer, given = torch.optim.AdamW(model.parameters(), fused=True), _WAYS[way]
    monitor = None if given is None else hookstats.attach(model, **given)
    model.compile()
    timed(loss_of, optimizer, monitor, 40 if way.startswith("budget") else 20)
    print(choice(monitor), flush=True)
    for _ in sys.stdin:
        print(timed(loss_of, optimizer, monitor, 10), flush=True)


def timed(loss_of: Callable[[], torch.Tensor], optimizer: Any, monitor: hookstats.Monitor | None, count: int) -> float:
    """Return the processor's seconds of a step."""
    begin = time.process_time()
    for _ in range(count):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        if monitor is not None:
            monitor.step(loss=loss)
    return (time.process_time() - begin) / count


def choice(monitor: hookstats.Monitor | None) -> str:
    """Return what a budget has chosen."""
    if monitor is None:
        return ""
    overhead = monitor.overhead()
    return f"every={overhead.every:g}, rows={overhead.rows:g}"


def in_turns(name: str, ways: Ways, seconds: float = 120.0) -> tuple[list[list[float]], list[str]]:
    """Return the times of each way, at least three, and what each has chosen."""
    torch.manual_seed(0)
    model, loss_of = _MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    times: list[list[float]] = [[] for _ in ways]
    chosen = [""] * len(ways)
    timed(loss_of, optimizer, None, 5)
    end = time.monotonic() + seconds
    while len(times[0]) < 3 or (len(times[0]) < 12 and time.monotonic() < end):
        for i, (way, given) in enumerate(ways.items()):
            monitor = None if given is None else hookstats.attach(model, **given)
            timed(loss_of, optimizer, monitor, 40 if way.startswith("budget") else 5)
            times[i].append(timed(loss_of, optimizer, monitor, 10))
            chosen[i] = choice(monitor)
            if monitor is not None:
                monitor.detach()
    return times, chosen


def in_processes(name: str, ways: Ways, seconds: float = 120.0) -> tuple[list[list[float]], list[str]]:
    """Return the same of compiled models, a process for each way."""
    pipe = subprocess.PIPE
    commands = [[sys.executable, "-m", "benchmarks.sampled", "work", name, way] for way in ways]
    workers = [subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) for command in commands]
    chosen = [worker.stdout.readline().strip() for worker in workers]  # type: ignore[union-attr]
    times: list[list[float]] = [[] for _ in workers]
    end = time.monotonic() + seconds
    while len(times[0]) < 3 or (len(times[0]) < 12 and time.monotonic() < end):
        for worker, own in zip(workers, times, strict=True):
            print(file=worker.stdin, flush=True)
            own.append(float(worker.stdout.readline()))  # type: ignore[union-attr]
    for worker in workers:
        worker.kill()
    return times, chosen


def cost(
    measured: Callable[[str, Ways], tuple[list[list[float]], list[str]]],
    ways: Ways,
    models: Iterable[str],
) -> None:
    print("| |", " | ".join(ways), "|\n|---" + "|---" * len(ways) + "|")
    for name in models:
        times, chosen = measured(name, ways)
        cells = [f"{1e3 * statistics.median(times[0]):.1f} ms"]
        for own, what in zip(times[1:], chosen[1:], strict=True):
            added = sorted(100 * (one / bare - 1) for one, bare in zip(own, times[0], strict=True))
            spread = f"{added[len(added) // 4]:.1f} to {added[-1 - len(added) // 4]:.1f}"
            note = f"; {what}" if "budget=0.01" in ways and what == chosen[-1] else ""
            cells.append(f"+{statistics.median(added):.1f} % ({spread}){note}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["work"]:
        return work(*sys.argv[2:4])
    words = sys.argv[2:]
    models = [name for name in _MODELS if not words or any(word in name for word in words)]
    for what in sys.argv[1:2] or ["errors", "bytes"]:
        if what == "laws":
            cost(in_turns, _OF_LAWS, ["GPT, 512 tokens"])
        elif what in ("cost", "compiled"):
            cost(in_processes if what == "compiled" else in_turns, _WAYS, models)
        else:
            {"errors": errors, "bytes": bytes_read}[what]()


if __name__ == "__main__":
    main()
