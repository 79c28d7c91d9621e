"""The pictures of docs/recipes: each page is run, and what it recorded is shown by the report.

python docs/recipes_pictures.py    needs Chromium, and `pip install '.[dev]'`
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

import hookstats
from docs.rules_pictures import shot
from hookstats import rules
from hookstats.report.record import Recorded
from hookstats.rules.precision import FORMATS
from tests.docs import test_pages

FOLDER = Path(__file__).resolve().with_name("recipes")


def of_run(folder: str, name: str, step: int, site: tuple[str, str]) -> None:
    """The report at a site and a step."""
    run = hookstats.load(folder)
    snapshots = list(run)
    recorded = Recorded.of(snapshots, name, run.findings)
    shot(recorded, hookstats.Site(*site), step, None, FOLDER / f"{name}.png")


def coordinates(found: dict[str, np.ndarray], widths: list[int], layers: list[str]) -> None:
    figure, grid = plt.subplots(2, len(layers), figsize=(9, 5), sharex=True, sharey=True, layout="constrained")
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.9, 6))
    for row, (kind, sizes) in zip(grid, found.items(), strict=True):
        for layer, (axes, name) in enumerate(zip(row, layers, strict=True)):
            for step in range(6):
                shown = np.where(sizes[:, step, layer] > 0, sizes[:, step, layer], np.nan)
                axes.loglog(widths, shown, ".-", color=colours[step], label=f"step {step}")
            axes.set_title(f"{kind}, layer {name}", fontsize=10)
            axes.set_xticks(widths, [str(width) for width in widths])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        row[0].set_ylabel("mean |output|")
    for axes in grid[1]:
        axes.set_xlabel("width")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(FOLDER / "mup.png", dpi=90)


def massive(snapshot: hookstats.Snapshot) -> None:
    peaks = np.array([stats.channels.abs_max for stats in snapshot.values()])
    figure, axes = plt.subplots(figsize=(9, 2.8), layout="constrained")
    image = axes.pcolormesh(np.log10(peaks), cmap="viridis", edgecolors="white", linewidth=0.2)
    axes.set(xlabel="channel", yticks=np.arange(len(peaks)) + 0.5, yticklabels=[name for name, _ in snapshot])
    axes.set_xticks(np.arange(0, 64, 8) + 0.5, range(0, 64, 8))
    axes.invert_yaxis()
    bar = figure.colorbar(image, ax=axes, label="largest |value|", ticks=[0, 1, 2, 3])
    bar.set_ticklabels(["1", "10", "100", "1,000"])
    figure.savefig(FOLDER / "massive.png", dpi=90)


def formats(snapshot: hookstats.Snapshot) -> None:
    site = hookstats.Site("first", "grad_output")
    histogram, blocks = snapshot[site].histogram, snapshot[site].blocks
    assert histogram is not None
    assert blocks is not None
    figure, (above, below) = plt.subplots(2, figsize=(9, 5.6), layout="constrained")
    zero = len(histogram.counts) // 2
    octaves = histogram.counts[zero + 1 :] + histogram.counts[:zero][::-1]
    exponents = np.log2(histogram.edges[zero + 1 : -1])
    above.bar(exponents, 100 * octaves / octaves.sum(), 0.9, align="edge", color="0.75")
    for row, name in enumerate(("float8_e4m3fn", "float8_e5m2")):
        (fit,) = (each for each in rules.fit(snapshot, name) if each.site == site)
        low, high = FORMATS[name].tiniest - 1 - fit.exponent, np.log2(FORMATS[name].largest) - fit.exponent
        _kept(above, row, low, high, f"{name}, one scale: {100 * fit.scaled_underflow:.0f} % become 0")
    above.set(xlim=(-36, 6), ylim=(0, 10), ylabel="% of the values", xlabel="|gradient|")
    above.set_xticks(range(-30, 1, 10), [f"$2^{{{each}}}$" for each in range(-30, 1, 10)])
    distances = blocks.distances[:32]
    below.bar(-np.arange(len(distances)), 100 * distances / distances.sum(), -0.9, align="edge", color="0.75")
    for row, name in enumerate(("mxfp4", "mxfp8_e4m3")):
        (fit,) = (each for each in rules.fit(snapshot, name) if each.site == site)
        _kept(below, row, -rules.BLOCK_FORMATS[name].lost, 0, f"{name}: {100 * fit.lost[0]:.0f} % become 0")
    below.set(xlim=(-30, 0.5), ylim=(0, 28), ylabel="% of the values", xlabel="octaves below the block's largest value")
    below.set_xticks(range(-30, 1, 5), range(30, -1, -5))
    figure.savefig(FOLDER / "formats.png", dpi=90)


def _kept(axes: Axes, row: int, low: float, high: float, text: str) -> None:
    """Draw the part of a histogram that a format keeps, as a line above it."""
    height, place = (0.72, 0.88)[row], axes.get_xaxis_transform()  # heights: shares of the axes
    axes.plot([low, high], [height] * 2, color=f"C{row}", lw=4, solid_capstyle="butt", transform=place)
    axes.text(high, height + 0.03, text, color=f"C{row}", ha="right", transform=place)


def experts(before: list[hookstats.Snapshot], fixed: list[hookstats.Snapshot]) -> None:
    figure, grid = plt.subplots(1, 2, figsize=(9, 2.8), sharey=True, layout="constrained")
    for axes, snapshots, title in zip(grid, (before, fixed), ("as it was grown", "fixed"), strict=True):
        channels = [snapshot["gate", "router.load"].channels for snapshot in snapshots]
        tokens = np.array([each.mean * each.count for each in channels if each is not None])
        image = axes.pcolormesh(100 * (tokens / tokens.sum(1, keepdims=True)).T, cmap="viridis", vmin=0, vmax=30)
        axes.set(title=title, xlabel="step", yticks=np.arange(8) + 0.5, yticklabels=range(8))
    grid[0].set_ylabel("expert")
    grid[0].invert_yaxis()
    figure.colorbar(image, ax=grid, label="% of the tokens")
    figure.savefig(FOLDER / "experts.png", dpi=90)


def frameworks(comparisons: dict[str, hookstats.results.Comparison]) -> None:
    figure, axes = plt.subplots(figsize=(9, 3.8), layout="constrained")
    for name, comparison in comparisons.items():
        distances = dict(zip(comparison.sites, comparison.distances[0], strict=True))
        outputs = {site.name: distance for site, distance in distances.items() if site.tensor == "output"}
        places = range(len(outputs))
        axes.semilogy(places, np.maximum(list(outputs.values()), 1e-9), ".-", label=name)
    axes.set_xticks(places, [each.replace("model.", "").replace("layers.", "") for each in outputs], rotation=90)
    axes.tick_params("x", labelsize=7)
    axes.set_ylabel("distance of the outputs")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(FOLDER / "frameworks.png", dpi=90)


def rank(known: dict[str, Any]) -> None:
    """The page's script again, which now writes what its picture shows."""
    sites = {"rms": ("", "input"), "abs_max": ("2.weight", "param")}
    told = f"[[each.rank_spread(site)[kind] for each in snapshots] for kind, site in {sites}.items()]"
    dump = f"if rank == 0:\n    import json; json.dump({told}, open('spread.json', 'w'))\n"
    Path("train.py").write_text(known["SCRIPT"].replace("dist.destroy", dump + "dist.destroy"))
    subprocess.run([*known["torchrun"], "train.py"], check=True, stdout=subprocess.DEVNULL)
    figure, grid = plt.subplots(2, figsize=(9, 4.4), sharex=True, layout="constrained")
    titles = ("rms of the input", "largest |2.weight|")
    spreads = [np.array(each) for each in json.loads(Path("spread.json").read_text())]
    for axes, title, (low, low_rank, high, high_rank) in zip(grid, titles, np.moveaxis(spreads, 2, 1), strict=True):
        axes.plot(low, label="smallest of the ranks")
        axes.plot(high, label="largest of the ranks")
        far, of, step = (low, low_rank, 20) if axes is grid[0] else (high, high_rank, 37)
        axes.annotate(f"rank {of[step]:.0f}", (step, far[step]), xytext=(0, 6), textcoords="offset points")
        axes.set_ylabel(title)
        axes.set_ylim(0, 1.2 * max(high))
    grid[0].legend()
    grid[1].set_xlabel("step")
    figure.savefig(FOLDER / "rank.png", dpi=90)


def main() -> None:
    os.chdir(tempfile.mkdtemp())
    test_pages.run(FOLDER / "spike.md")
    of_run("runs/data", "spike_data", 137, ("4", "output"))
    of_run("runs/model", "spike_model", 137, ("4", "output"))
    test_pages.run(FOLDER / "nan.md")
    of_run("runs/nan", "nan", 113, ("0.attention.softmax", "output"))
    known = dict[str, Any]()
    test_pages.run(FOLDER / "mup.md", known)
    coordinates(known["found"], known["WIDTHS"], known["LAYERS"])
    test_pages.run(FOLDER / "massive.md", known)
    massive(known["snapshot"])
    test_pages.run(FOLDER / "formats.md", known)
    formats(known["last"])
    test_pages.run(FOLDER / "experts.md", known)
    experts(known["snapshots"], known["after"])
    test_pages.run(FOLDER / "frameworks.md", known)
    frameworks({"as written": known["found"], "its eps fixed": known["second"], "both fixed": known["last"]})
    test_pages.run(FOLDER / "rank.md", known)
    rank(known)


if __name__ == "__main__":
    main()
