"""Two runs on one page: all sites and steps of both, how far apart they are, and where they part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hookstats.comparing.comparison import Comparison
from hookstats.numbers.fields import Array, Site
from hookstats.report.record import Recorded

_JUDGED = 64  # steps in which the runs may lie apart by rounding before it is given up to look for more


@dataclass
class RunPair:
    """``first`` and ``second`` as runs over the sites and steps of both: NaN where one of them has none.

    The sites of the first run keep their places; behind them are those that only the second has.
    """

    a: Recorded
    b: Recorded

    def __post_init__(self) -> None:
        """ValueError where the runs have no site, or no step, in common."""
        self.steps = np.union1d(self.a.steps, self.b.steps)
        self.sites = list(dict.fromkeys([*self.a.sites, *self.b.sites]))
        self.place = {site: i for i, site in enumerate(self.sites)}
        self.common = np.intersect1d(self.a.steps, self.b.steps)
        self.shared = set(self.a.sites).intersection(self.b.sites)
        if not len(self.common) or not self.shared:
            raise ValueError(f"expected runs with sites and steps in common; {self.a.name} and {self.b.name} have none")
        self.first, self.second = self._over_both(self.a), self._over_both(self.b)

    def _over_both(self, run: Recorded) -> Recorded:
        rows = np.array([self.place[site] for site in run.sites], np.int64)
        where = np.ix_(rows, np.searchsorted(self.steps, run.steps))

        def planes(names: Sequence[str]) -> dict[str, Array]:
            found = {name: np.full((len(self.sites), len(self.steps)), np.nan) for name in names}
            for name, plane in run.planes(names).items():
                found[name][where] = plane
            return found

        return replace(run, sites=self.sites, steps=self.steps, planes=planes)

    def order_sites(self) -> list[Site]:
        """Return all sites in the order of execution: what only the second has stands after what it has before it."""
        ordered, at = list(self.a.sites), -1
        known = {site: i for i, site in enumerate(ordered)}
        for site in self.b.sites:
            if site in self.shared:
                at = ordered.index(site, known[site])
            else:
                at += 1
                ordered.insert(at, site)
        return ordered

    def describe(self) -> dict[str, Any]:
        """Describe the second run: its name, its steps, and the sites that only one of the runs has."""
        alone = [[self.place[site] for site in run.sites if site not in self.shared] for run in (self.a, self.b)]
        ends = [int(self.b.steps[0]), int(self.b.steps[-1]), len(self.b.steps)]
        return {"name": self.b.name, "steps": len(self.common), "ends": ends, "alone": alone}

    def find_parting(self) -> dict[str, Any]:
        """Find where the runs part by more than rounding explains, and whether all their sizes are the same."""
        begin = self._first_difference()
        found, count = None, 1
        while begin is not None and found is None and count <= _JUDGED:
            steps = self.common[begin : begin + count].tolist()
            a, b = (run.snapshots(steps, run.sites) for run in (self.a, self.b))
            found = Comparison(a, b, None).first
            count *= 4
        if found is None:
            return {"parting": None, "is_equal": begin is None}
        sentence = str(found).removeprefix(f"step {found.step}, {found.site}: ")
        return {
            "parting": {"site": self.place[found.site], "step": found.step, "sentence": sentence},
            "is_equal": False,
        }

    def _first_difference(self) -> int | None:
        """Return the place in ``common`` of the first step in which a size differs; None if all are the same."""
        at = np.searchsorted(self.steps, self.common)
        rows = np.array([i for i, site in enumerate(self.sites) if site in self.shared], np.int64)
        parted: list[int] = []
        for name in ("rms", "mean", "abs_max"):
            one, other = (run.statistic(name)[np.ix_(rows, at)] for run in (self.first, self.second))
            is_other = ((one != other) & ~(np.isnan(one) & np.isnan(other))).any(axis=0)
            parted += np.flatnonzero(is_other)[:1].tolist()
        return min(parted, default=None)
