"""Snapshots made by hand, for what reads them: sinks; and snapshots that are to be the same."""

from __future__ import annotations

from collections.abc import Mapping

import torch

import hookstats
from hookstats import Site, Snapshot
from hookstats.numbers.fields import Bins
from hookstats.numbers.frame import StepFrame

# Names that a service may refuse, or take for one another. The model itself is "".
HOSTILE = [
    "",
    "whole-model",
    "a",
    "a/b",
    "a_b",
    "a b",
    "a[0]",
    "a(0)",
    "a~b",
    "a\nb",
    "слой.层",
    "层" * 100,
    "x" * 300,
    "x" * 299 + "y",
    ".",
    "..",
    "../../etc",
    "/",
    "a//b",
    '"',
    "{}",
    "\x00",
    "\ud800",
    "💥",
    "%s",
    "step",
    "nonfinite",
    "a_b-c14cddc0",  # as "a/b" is spelled
]


def snapshot(
    step: int,
    tensors: Mapping[tuple[str, str] | str, torch.Tensor],
    scalars: Mapping[str, float] | None = None,
    silent: list[Site] | None = None,
    histogram: Bins | None = None,
    scale: float = 1.0,
) -> Snapshot:
    """Make a Snapshot of these sites; a name alone is an output. silent: sites that are watched and did not fire.
    scale: the factor on all values.
    """
    measured = {
        key: hookstats.measure(x, histogram=histogram) for key, x in {id(x): x for x in tensors.values()}.items()
    }
    sites = {Site(*((at, "output") if isinstance(at, str) else at)): measured[id(x)] for at, x in tensors.items()}
    for stats in measured.values():
        stats._scale = scale
    idle = hookstats.measure(torch.zeros(0, 2), histogram=None)
    idle.calls = 0
    given = sites | dict.fromkeys(silent or [], idle)
    return Snapshot(StepFrame.from_stats(given, sites, step, scalars=dict(scalars or {})))


def same(got: list[Snapshot], wanted: list[Snapshot]) -> None:
    """Bit for bit, with their scalars and numbers."""
    assert [snapshot.step for snapshot in got] == [snapshot.step for snapshot in wanted]
    for one, other in zip(got, wanted, strict=True):
        assert one.scalars == other.scalars
        assert one.order == other.order
        assert one.equals(other), one.step
