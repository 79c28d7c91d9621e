"""The main job, end to end: a small CNN learns handwritten digits, every layer watched, forward and backward.

Run by `make demo`. On a GPU if there is one. The run is recorded. Ends with the accuracy, ten rows of the table, what
hookstats costs, a weight that is poisoned with one NaN, to see what the rules say of it, a picture, and the report.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from itertools import chain, count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

import hookstats
from hookstats import ExponentBins, Monitor, Site, Snapshot

try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm
    from sklearn.datasets import load_digits
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"hookstats: the demo needs {error.name}: pip install 'hookstats[demo]'")

BATCH = 128


def digits(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """1,797 images of 8 x 8 pixels: float32 [n, 1, 8, 8] and int64 labels [n]; 80 % for training, 20 % held out."""
    data = load_digits()
    images = torch.tensor(data.images / 16.0, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order].to(device), labels[order].to(device)
    held_out = len(labels) // 5
    return images[held_out:], labels[held_out:], images[:held_out], labels[:held_out]


def cnn() -> nn.Module:
    """Three convolutions with BatchNorm and ReLU, and a linear head: 10 classes."""

    model = nn.Sequential()
    for number, (inputs, outputs) in enumerate([(1, 32), (32, 64), (64, 64)], start=1):
        model.add_module(f"conv{number}", nn.Conv2d(inputs, outputs, 3, padding=1, bias=False))
        model.add_module(f"norm{number}", nn.BatchNorm2d(outputs))
        model.add_module(f"relu{number}", nn.ReLU(inplace=True))
        if number == 2:
            model.add_module("pool", nn.MaxPool2d(2))
    model.add_module("average", nn.AdaptiveAvgPool2d(1))
    model.add_module("flatten", nn.Flatten())
    model.add_module("head", nn.Linear(64, 10))
    return model


class Trainer:
    """Adam on random batches, one step at a time."""

    def __init__(self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.model = model
        self.images = images
        self.labels = labels
        self.optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(self) -> torch.Tensor:
        """One training step; the loss."""
        chosen = torch.randint(len(self.labels), (BATCH,), device=self.labels.device)
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(self.images[chosen]), self.labels[chosen])
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def train(trainer: Trainer, monitor: Monitor, epochs: int) -> None:
    """Every step is measured."""
    steps = epochs * (len(trainer.labels) // BATCH)
    with tqdm(total=steps, unit="step", mininterval=0.5) as bar:
        for _ in range(steps):
            snapshot = monitor.step(loss=trainer.step())
            if snapshot is not None:
                bar.set_postfix(loss=f"{snapshot.scalars['loss']:.3f}", refresh=False)
            bar.update()


def seconds_per_step(trainer: Trainer, monitor: Monitor, turns: int = 9, steps: int = 10) -> dict[str, float]:
    """Medians of bare steps, of steps with the defaults, and of those that are measured here; in turns on one machine.

    A turn has ten steps, of which the defaults measure one. It begins when what was recorded before is written.
    """

    def timed(step: Callable[[], object]) -> float:
        synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize()
        return (time.perf_counter() - began) / steps

    def synchronize() -> None:
        if trainer.images.is_cuda:
            torch.cuda.synchronize()

    taken: dict[str, list[float]] = {"bare": [], "default": [], "measured": []}
    with hookstats.attach(trainer.model) as default:
        for _ in range(turns):
            monitor.check()  # waits for the process that writes
            with monitor.paused():
                taken["default"].append(timed(lambda: default.step(loss=trainer.step())))
                with default.paused():
                    taken["bare"].append(timed(trainer.step))
            with default.paused():
                taken["measured"].append(timed(lambda: monitor.step(loss=trainer.step())))
    return {name: median(seconds) for name, seconds in taken.items()}


def added(seconds: float, bare: float) -> str:
    """Return what a step takes longer, in words: on a busy machine the difference is lost in its noise."""
    return f"{seconds / bare - 1:+.0%}" if seconds > bare else "less than this machine's noise is added"


def heatmap(axes: Any, snapshots: list[Snapshot], sites: list[Site], title: str, of: Any, log: bool) -> None:
    """One row per site, one column per step."""
    values = np.array([[of(snapshot[site].total) for snapshot in snapshots] for site in sites])
    norm = LogNorm(*np.nanquantile(values[values > 0], [0.01, 1])) if log else None
    steps = [snapshots[0].step, snapshots[-1].step]
    extent = (steps[0], steps[1], len(sites) - 0.5, -0.5)
    image = axes.imshow(
        values, aspect="auto", interpolation="nearest", norm=norm, extent=extent, cmap="viridis" if log else "magma"
    )
    axes.set_yticks(range(len(sites)), [site.name for site in sites], fontsize=8)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("step")
    axes.figure.colorbar(image, ax=axes)


def channel_histogram(axes: Any, snapshot: Snapshot, site: Site) -> None:
    """Share of a channel's values in each octave of |x|, a column per channel; zeros and dust are the bottom row."""
    histogram = snapshot[site].histogram
    assert histogram is not None
    counts = histogram.counts / np.maximum(histogram.counts.sum(1, keepdims=True), 1)
    used = np.flatnonzero(counts.mean(0) > 1e-3)
    low, high = max(used[used > 0].min(), 1), used.max() + 1
    shown = np.concatenate([counts[:, :1], counts[:, low:high]], axis=1).T
    image = axes.imshow(shown, aspect="auto", origin="lower", interpolation="nearest", cmap="magma", norm=LogNorm(1e-3))
    axes.set_facecolor("black")
    exponents = np.log2(histogram.edges[low:high]).astype(int)
    labels = ["0"] + [f"$2^{{{e}}}$" for e in exponents]
    ticks = [*range(0, len(labels), 2)]
    axes.set_yticks(ticks, [labels[i] for i in ticks], fontsize=8)
    axes.set_title(f"layer {site.name}: share of each channel's values per octave of |x|", fontsize=10)
    axes.set_xlabel("channel")
    axes.set_ylabel("|x| from")
    axes.figure.colorbar(image, ax=axes)


def picture(snapshots: list[Snapshot], path: Path) -> None:
    """Layer x step heatmaps and one layer's channels."""
    order = snapshots[-1].order
    outputs = [site for site in order if site.tensor == "output"]
    gradients = [site for site in order if site.tensor == "grad_output"][::-1]
    figure, axes = plt.subplots(2, 2, figsize=(13, 8), layout="constrained")
    heatmap(axes[0, 0], snapshots, outputs, "rms of activations", lambda t: t.rms, log=True)
    heatmap(axes[0, 1], snapshots, gradients, "rms of their gradients", lambda t: t.rms, log=True)
    heatmap(axes[1, 0], snapshots, outputs, "share of zeros", lambda t: t.zeros / t.count, log=False)
    channel_histogram(axes[1, 1], snapshots[-1], Site("relu3", "output"))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Train, and print and draw what happened."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder for the picture")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() and hookstats.build_info()["cuda"] else "cpu")
    train_images, train_labels, test_images, test_labels = digits(device)
    model = cnn().to(device)
    snapshots: list[Snapshot] = []
    trainer = Trainer(model, train_images, train_labels)
    bins = ExponentBins(per_channel=True)
    numbered = (arguments.output / f"run.{number}" for number in count(2))
    run = next(path for path in chain([arguments.output / "run"], numbered) if not path.exists())  # one of its own
    recording = hookstats.record(run, on_finding=None)
    with hookstats.attach(model, every=1, histogram=bins, sinks=[snapshots.append, recording]) as monitor:
        print(f"{monitor} on {device}; {len(train_labels)} images to train on, {len(test_labels)} held out")
        train(trainer, monitor, arguments.epochs)
        last = monitor.snapshot()  # waits for those that are still on their way
        trained = list(snapshots)

        model.eval()
        with torch.no_grad(), monitor.paused():
            correct = (model(test_images).argmax(1) == test_labels).float().mean().item()
        model.train()
        print(f"\naccuracy on held-out images: {100 * correct:.1f} %\n")
        rows = last.table().splitlines()
        print(f"step {last.step}, loss {last.scalars['loss']:.4f}, the first ten rows of the table:")
        print("\n".join(rows[:12]))
        print(f"... and {len(last) - 10} more: outputs, their gradients, parameters, their gradients and updates")
        seconds = seconds_per_step(trainer, monitor)
        bare = seconds["bare"]
        print(f"\nwhat it costs: a step of this model takes {1e3 * bare:.2f} ms on {os.cpu_count()} processors, and")
        print(
            f"  {added(seconds['default'], bare)} by default, where hookstats.attach(model) measures every tenth step;"
        )
        print(
            f"  {added(seconds['measured'], bare)} as here: every step, a histogram of each channel, recorded, judged"
        )
        print(f"\nwhat the rules have found so far: {'; '.join(map(str, monitor.check())) or 'nothing'}")

        layer = "conv3"
        with torch.no_grad():
            model.get_submodule(layer).weight[5, 0, 1, 1] = float("nan")  # type: ignore[operator]
        monitor.step(loss=trainer.step())
        print(f"Now one weight of {layer} is set to NaN. One step later:")
        found = [finding for finding in monitor.check() if finding.rule == "nonfinite"]
        print("\n".join(map(str, found)))

    path, page = arguments.output / "digits.png", arguments.output / "report.html"
    picture(trained, path)
    hookstats.report.write(run, page)
    print("\nwhere to look:")
    print(f"  {page}: the report of the run, for a browser")
    print(f"  {path}: the layers over the steps, as a picture")
    print(f"  hookstats.load({str(run)!r}): the {len(hookstats.load(run))} recorded steps, in Python")
    if [finding.site for finding in found] != [Site(layer, "output")]:
        sys.exit("hookstats: the demo named the wrong site")


if __name__ == "__main__":
    main()
