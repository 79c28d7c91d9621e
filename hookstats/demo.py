"""The main job, end to end: a small CNN learns handwritten digits, every layer watched, forward and backward.

Run by `make demo`. On a GPU if there is one. Ends with the accuracy, the table, what hookstats cost, a picture, and
with a weight that is poisoned with one NaN, to see which site shows it first.
"""

from __future__ import annotations

import argparse
import sys
import time
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


class Timer:
    """Seconds of steps with and without hookstats: every fourth step is paused, so both see the same machine."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[bool, list[float]] = {True: [], False: []}

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def share(self) -> float:
        """The part of a measured step that hookstats took, from the medians."""
        with_it, without = median(self.seconds[True]), median(self.seconds[False])
        return 1 - without / with_it


def train(model: nn.Module, monitor: Monitor, data: Any, epochs: int, timer: Timer) -> list[Snapshot]:
    """Trains with Adam and keeps every snapshot."""
    images, labels = data
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    steps = epochs * (len(labels) // BATCH)
    taken: list[Snapshot] = []
    model.train()
    with tqdm(total=steps, unit="step", mininterval=0.5) as bar:
        for step in range(steps):
            chosen = torch.randint(len(labels), (BATCH,), device=labels.device)
            started = timer.now()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            snapshot = monitor.step(loss=loss)
            timer.seconds[step % 4 != 3].append(timer.now() - started)
            if snapshot is not None:
                taken.append(snapshot)
                bar.set_postfix(loss=f"{snapshot.scalars['loss']:.3f}", refresh=False)
            bar.update()
    return taken


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


def first_nan(model: nn.Module, images: torch.Tensor) -> Site | None:
    """The first site in order of execution that holds a NaN."""
    with hookstats.attach(model, tensors="output") as monitor:
        model(images)
        snapshot = monitor.snapshot()
    return next((site for site in snapshot.order if snapshot[site].total.nans), None)


def main() -> None:
    """Runs the demo."""
    parser = argparse.ArgumentParser(prog="python -m hookstats.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder for the picture")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() and hookstats.build_info()["cuda"] else "cpu")
    train_images, train_labels, test_images, test_labels = digits(device)
    model = cnn().to(device)
    timer = Timer(device)
    # Every step, but for every fourth one: it is what the others are compared with.
    with hookstats.attach(model, every=lambda step: step % 4 != 3, histogram=ExponentBins(per_channel=True)) as monitor:
        print(f"{monitor} on {device}; {len(train_labels)} images to train on, {len(test_labels)} held out")
        snapshots = train(model, monitor, (train_images, train_labels), arguments.epochs, timer)

        model.eval()
        with torch.no_grad(), monitor.paused():
            correct = (model(test_images).argmax(1) == test_labels).float().mean().item()
        print(f"\naccuracy on held-out images: {100 * correct:.1f} %\n")
        print(f"step {snapshots[-1].step}, loss {snapshots[-1].scalars['loss']:.4f}:")
        print(snapshots[-1].table())
        milliseconds = 1e3 * median(timer.seconds[False])
        print(f"\na step takes {milliseconds:.2f} ms; measuring adds {100 * timer.share():.1f} % of the measured step")
        path = arguments.output / "digits.png"
        picture(snapshots, path)
        print(f"picture: {path}")

    layer = "conv3"
    with torch.no_grad():
        model.get_submodule(layer).weight[5, 0, 1, 1] = float("nan")  # type: ignore[operator]
        found = first_nan(model, test_images)
    print(f"one weight of {layer} is now NaN; the first site that shows it: {found}")
    if found != Site(layer, "output"):
        sys.exit("hookstats: the demo named the wrong site")


if __name__ == "__main__":
    main()
