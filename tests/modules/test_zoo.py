"""Tests of the channels of every site in many models, against a truth that is found without hookstats."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import pytest
import torch

import hookstats
from tests.modules import zoo
from tests.modules.channel_truth import truth

ALLOWED = 0.003  # of all sites
pytestmark = pytest.mark.usefixtures("one_thread")


def wrong_sites(animal: zoo.Animal) -> tuple[int, list[str]]:
    """Return the number of a model's sites, and those whose channels differ from the truth."""
    model, inputs = zoo.made(animal)
    with hookstats.attach(model, tensors="output") as mon:
        names = {site.name for site in mon.sites}
    watched = {name: module for name, module in model.named_modules() if name in names}
    expected, shapes = truth(model, inputs, watched)
    with hookstats.attach(model, tensors="output") as mon, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of widths that change
        torch.default_generator.manual_seed(1)
        model(**inputs)
        snapshot = mon.snapshot()
    wrong = []
    for site, dims in expected.items():
        assert dims, f"nothing says where the channels of {site} lie: {type(watched[site[0]]).__name__} {shapes[site]}"
        stats = snapshot[site[0], f"output{site[1]}"]
        problem = _problem(stats, dims, shapes[site])
        if problem is not None:
            wrong.append(f"{site} ({type(watched[site[0]]).__name__}): {problem}")
    return len(expected), wrong


def _problem(stats: hookstats.results.SiteStats, dims: set[int], shapes: list[torch.Size]) -> str | None:
    if not shapes[0]:
        return None
    widths = {tuple(shape[dim] for dim in sorted(dims)) for shape in shapes}
    if len(widths) > 1:
        return None if stats.channels is None else f"expected totals alone for {shapes}, got dim {stats.channel_dim}"
    got = None if stats.channel_dim is None else stats.channel_dim % len(shapes[0])
    if got not in dims:
        return f"expected channels in dimension {dims} of {shapes}, got {stats.channel_dim}"
    assert len(stats.channels.count) == shapes[0][got]
    return None


def rate(animals: Mapping[str, zoo.Animal]) -> tuple[float, str]:
    total, wrong = 0, []
    for name, animal in animals.items():
        sites, problems = wrong_sites(animal)
        total += sites
        wrong += [f"{name} {problem}" for problem in problems]
    lines = [f"{len(wrong)} of {total} sites of {len(animals)} models have their channels elsewhere", *wrong]
    return len(wrong) / total, "\n".join(lines)


@pytest.mark.parametrize("which", ["TUNED", "OTHERS"])
def test_channels_lie_where_a_change_of_one_of_them_shows(which: str) -> None:
    wrong, report = rate(getattr(zoo, which))
    print(f"\n{which.lower()}: {report}")
    assert wrong <= ALLOWED, report
