"""Two runs on one page: all sites and steps of both, how far apart they are, and where they part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hookstats.comparing.comparison import Comparison, Divergence
from hookstats.numbers.fields import Array, Counts, Site
from hookstats.report import planes
from hookstats.report.record import Recorded
from hookstats.report.reducing import farthest, logarithm, marks, relative_codes

_JUDGED = 64  # steps in which the runs may lie apart by rounding before it is given up to look for more


@dataclass
class Pair:
    """``first`` and ``second`` as runs over the sites and steps of both: NaN where one of them has none.

    The sites of the first run keep their places; behind them are those that only the second has.
    """

    a: Recorded
    b: Recorded

    def __post_init__(self) -> None:
        """ValueError where the runs have no site, or no step, in common."""
        self.steps = np.union1d(self.a.steps, self.b.steps)
        known = set(self.a.sites)
        self.sites = [*self.a.sites, *(site for site in self.b.sites if site not in known)]
        self.common = np.intersect1d(self.a.steps, self.b.steps)
        self.shared = known.intersection(self.b.sites)
        if not len(self.common) or not self.shared:
            raise ValueError(f"expected runs with sites and steps in common; {self.a.name} and {self.b.name} have none")
        self.first, self.second = self._over_both(self.a), self._over_both(self.b)

    def _over_both(self, run: Recorded) -> Recorded:
        place = {site: i for i, site in enumerate(self.sites)}
        rows = np.array([place[site] for site in run.sites], np.int64)
        where = np.ix_(rows, np.searchsorted(self.steps, run.steps))

        def statistic(name: str) -> Array:
            plane = np.full((len(self.sites), len(self.steps)), np.nan)
            plane[where] = run.statistic(name)
            return plane

        return replace(run, sites=self.sites, steps=self.steps, statistic=statistic, row=None)

    def rows(self) -> list[Site]:
        """All sites in the order of execution: what only the second has stands behind what it has before it."""
        ordered, at = list(self.a.sites), -1
        known = {site: i for i, site in enumerate(ordered)}
        for site in self.b.sites:
            if site in self.shared:
                at = ordered.index(site, known[site])
            else:
                at += 1
                ordered.insert(at, site)
        return ordered

    def blobs(self, bad: tuple[Array, Array]) -> dict[str, bytes]:
        """Those of the second run, and of how far it is from the first. bad: of both, see `planes.bad_of`."""
        blobs: dict[str, bytes] = {}
        begin = self.first.begin(planes.COLUMNS)
        for key, (_, kind) in planes.STATISTICS.items():
            made = planes.heatmap(self.second, key, bad[1])
            blobs |= {f"other.{name}": blob for name, blob in made.items()}
            one, other = (planes.numbers_of(run.statistic, key) for run in (self.first, self.second))
            apart = logarithm(other) - logarithm(one) if kind == "scale" else other - one
            broken = np.where(np.isnan(apart), 0.0, np.nan_to_num(bad[0]) + np.nan_to_num(bad[1]))
            codes = relative_codes(farthest(apart, begin), marks(broken, begin), planes.DIFFERENCE[kind])
            blobs[f"{key}.difference"] = codes.tobytes()
        lines = planes.lines(self.second, ("rms", "abs_max"))
        return blobs | {name.replace("line.", "line.other_"): blob for name, blob in lines.items()}

    def _parting(self, begin: int) -> Divergence | None:
        """Where the runs part by more than rounding explains. begin: the first common step in which they differ."""
        count = 1
        while True:
            steps = self.common[begin : begin + count].tolist()
            a, b = (run.snapshots(steps, run.sites) for run in (self.a, self.b))
            found = Comparison(a, b, None).first
            if found is not None or count >= min(_JUDGED, len(self.common) - begin):
                return found
            count *= 4

    def _first_difference(self) -> int | None:
        """The place in ``common`` of the first step in which a size is another one; None where all are the same."""
        at = np.searchsorted(self.steps, self.common)
        rows = np.array([i for i, site in enumerate(self.sites) if site in self.shared], np.int64)
        parted: Counts = np.array([], np.int64)
        for name in ("rms", "mean", "abs_max"):
            one, other = (run.statistic(name)[np.ix_(rows, at)] for run in (self.first, self.second))
            is_other = ((one != other) & ~(np.isnan(one) & np.isnan(other))).any(axis=0)
            parted = np.append(parted, np.flatnonzero(is_other)[:1])
        return int(parted.min()) if len(parted) else None

    def told(self) -> dict[str, Any]:
        """What the page says of the second run, but for its findings."""
        place = {site: i for i, site in enumerate(self.sites)}
        alone = [[place[site] for site in run.sites if site not in self.shared] for run in (self.a, self.b)]
        begin = self._first_difference()
        parting = None if begin is None else self._parting(begin)
        fired = ~np.isnan(self.second.statistic("count"))
        return {
            "name": self.b.name,
            "steps": len(self.common),
            "ends": [int(self.b.steps[0]), int(self.b.steps[-1]), len(self.b.steps)],
            "fired": fired.sum(axis=1).tolist(),
            "alone": alone,
            "scalars": planes.scalars(self.second),
            "parting": None
            if parting is None
            else {
                "site": place[parting.site],
                "step": parting.step,
                "sentence": str(parting).removeprefix(f"step {parting.step}, {parting.site}: "),
            },
            "is_equal": begin is None,
        }
