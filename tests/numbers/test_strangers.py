"""Comparisons with strangers: == says no and never raises; `Snapshot.equals` says what it expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats import Snapshot
from hookstats.rules import defaults
from hookstats.rules.finding import Finding
from hookstats.rules.step import SiteIds, Step


class Stranger:
    pass


def measured() -> Snapshot:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    with hookstats.attach(model, every=1, tensors="output") as monitor:
        model(torch.ones(2, 4))
        monitor.step(loss=1.0)
        return monitor.snapshot()


def objects() -> dict[str, Any]:
    snapshot, model = measured(), nn.Sequential(nn.Linear(4, 3))
    stats = snapshot["0", "output"]
    with hookstats.capture(model, "0") as captured:
        model(torch.ones(2, 4))
    found: list[Any] = [snapshot, stats, stats.total, stats.channels, stats.histogram, snapshot.frame, captured]
    found += [hookstats.explain(model), hookstats.compare([snapshot], [snapshot]), Step(snapshot, SiteIds())]
    found += [hookstats.ExponentBins(), hookstats.LinearBins(0, 1, 4), Finding("x", 0, None, 0, 0, "note", "said")]
    return {type(each).__name__: each for each in [*found, *defaults()]}


OBJECTS = objects()


@pytest.mark.parametrize("each", OBJECTS.values(), ids=OBJECTS)
def test_nothing_equals_a_stranger_and_everything_itself(each: Any) -> None:
    for stranger in (Stranger(), None, 7, "0", []):
        assert not each == stranger  # noqa: SIM201
        assert not stranger == each  # noqa: SIM201
        assert each != stranger
    assert each == each
    assert each in [Stranger(), each]


@pytest.mark.parametrize("stranger", [None, {}, Stranger(), 7])
def test_equals_says_that_a_snapshot_was_expected(stranger: Any) -> None:
    with pytest.raises(TypeError, match=f"equals: expected a Snapshot, got {type(stranger).__name__}"):
        measured().equals(stranger)
