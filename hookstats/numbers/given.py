"""Given: what was given to `Monitor.step` with steps that are not measured. Pure numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hookstats.numbers.fields import Counts


class Given(NamedTuple):
    """Scalars, and ids of samples, by the numbers of their steps."""

    scalars: dict[int, dict[str, float]]
    sample_ids: dict[int, Counts]

    def add(self, other: Given, most: int) -> None:
        """Takes what another has, of so many steps at most: the oldest go."""
        _add(self.scalars, {step: named for step, named in other.scalars.items() if named}, most)
        _add(self.sample_ids, other.sample_ids, most)


def _add(kept: dict[int, Any], new: Mapping[int, Any], most: int) -> None:
    kept.update(new)
    while len(kept) > most:
        del kept[next(iter(kept))]
