"""Recorded: a run as arrays over sites and steps, which is all that a page or a plot is made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hookstats.numbers.fields import Array, Counts, Site, Skipped
from hookstats.numbers.snapshot import Snapshot
from hookstats.rules import Finding


@dataclass
class Recorded:
    """A run, read as far as it is asked for.

    ``sites``: n of them, in order of execution. ``steps`` ``[t]``: those that were measured, ascending. ``scalars``:
    by name, steps ``[m]``, measured or not, and values ``[m]``. ``planes``: by the names of rows of `Stats`, or of
    sums ("nans+posinfs"), their totals ``[n, t]``, NaN where a site was silent; several are read at once.
    ``snapshots``: those of some steps, with these sites at least, channels and histograms where they were kept;
    ``detailed``: the steps in which they were. ``skipped``: of a site, the reason, how many tensors in all (None: given
    up), since which step.
    """

    name: str
    sites: list[Site]
    steps: Counts
    planes: Callable[[Sequence[str]], dict[str, Array]]
    snapshots: Callable[[Sequence[int], Sequence[Site]], Iterable[Snapshot]]
    detailed: Counts
    times: Array | None = None
    scalars: Mapping[str, tuple[Counts, Array]] = field(default_factory=dict)
    findings: Sequence[Finding] = ()
    skipped: Sequence[tuple[Site, Skipped, int]] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def statistic(self, name: str) -> Array:
        """Return one of ``planes``."""
        return self.planes([name])[name]

    @classmethod
    def of(cls, snapshots: Sequence[Snapshot], name: str = "snapshots", findings: Sequence[Finding] = ()) -> Recorded:
        """Snapshots that are in memory, of ascending steps. ValueError where there are none, or they do not ascend."""
        steps = np.array([snapshot.step for snapshot in snapshots], np.int64)
        if not len(steps) or (np.diff(steps) <= 0).any():
            raise ValueError(f"expected snapshots of ascending steps, got those of {steps.tolist()[:8]}")
        sites = merge_orders(snapshot.order for snapshot in reversed(snapshots))
        sites = merge_orders([sites, *snapshots])
        row = {site: i for i, site in enumerate(sites)}

        def planes(wanted: Sequence[str]) -> dict[str, Array]:
            found = {name: np.full((len(sites), len(steps)), np.nan) for name in wanted}
            for t, snapshot in enumerate(snapshots):
                rows = [row[site] for site in snapshot.order]
                for name, plane in found.items():
                    plane[rows, t] = sum(getattr(snapshot.totals, each) for each in name.split("+"))
            return found

        def chosen(wanted: Sequence[int], _: Sequence[Site]) -> Iterator[Snapshot]:
            asked = set(wanted)
            return (snapshot for snapshot in snapshots if snapshot.step in asked)

        given = {
            step: each
            for snapshot in snapshots
            for step, each in [*snapshot.earlier_scalars.items(), (snapshot.step, snapshot.scalars)]
        }
        scalars = by_name((step, name, value) for step, each in given.items() for name, value in each.items())
        skipped = merge_skipped((site, why, each.step) for each in snapshots for site, why in each.skipped.items())
        detailed = steps[[_is_detailed(snapshot) for snapshot in snapshots]]
        return cls(name, sites, steps, planes, chosen, detailed, None, scalars, findings, skipped)


def by_name(rows: Iterable[tuple[int, str, float]]) -> dict[str, tuple[Counts, Array]]:
    """Scalars by their names: step, name, value of each, as `Recorded` has them."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for step, name, value in rows:
        steps, values = found.setdefault(name, ([], []))
        steps.append(step)
        values.append(value)
    return {name: (np.array(steps, np.int64), np.array(values)) for name, (steps, values) in found.items()}


def merge_skipped(skipped: Iterable[tuple[Site, Skipped, int]]) -> list[tuple[Site, Skipped, int]]:
    """Merge what was skipped in some steps, or since them: one for each site and reason, as `Recorded` has it."""
    found: dict[tuple[Site, str], tuple[int | None, int]] = {}
    for site, (reason, times), step in skipped:
        known, since = found.get((site, reason), (0, step))
        both = None if known is None or times is None else known + times
        found[site, reason] = both, min(since, step)
    return [(site, Skipped(reason, times), since) for (site, reason), (times, since) in found.items()]


def _is_detailed(snapshot: Snapshot) -> bool:
    sites, fired = snapshot.frame.sites, snapshot.frame.order
    return bool((sites.widths[fired] > 1).any() or sites.counters[fired].any())


def merge_orders(orders: Iterable[Iterable[Site]]) -> list[Site]:
    """Return all sites of several orders of execution: those of the first, then what the others have more."""
    return list(dict.fromkeys(site for order in orders for site in order))
