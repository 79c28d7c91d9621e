"""A comparison as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hookstats.comparing.pairs import SnapshotPair
from hookstats.numbers.fields import Array, Site
from hookstats.numbers.kinds import kind_of
from hookstats.numbers.tables import align_columns

_ROWS = 40
_STEPS = 9


def growth(steps: Sequence[int], sites: Sequence[Site], distances: Array) -> list[str]:
    """The largest distance of each kind of tensor over the steps."""
    chosen = sorted(set(np.linspace(0, len(steps) - 1, min(len(steps), _STEPS)).round().astype(int).tolist()))
    kinds = [kind_of(site.tensor).name for site in sites]
    rows = [["largest distance at step", *(str(steps[i]) for i in chosen)]]
    for kind in dict.fromkeys(kinds):
        mine = distances[np.ix_(chosen, [i for i, each in enumerate(kinds) if each == kind])]
        rows.append([kind, *(f"{most:.2g}" for most in np.nan_to_num(mine).max(1))])
    return align_columns(rows, left=1)


def table(pair: SnapshotPair, first: int) -> list[str]:
    """A line for each site of a step, in order of execution; where there are many, from shortly before the first one
    that parts."""
    begin = max(0, min(first - 3, len(pair.sites) - _ROWS))
    end = min(begin + _ROWS, len(pair.sites))
    rows = [["", "site", "tensor", "rms a", "rms b", "mean a", "mean b", "distance"]]
    for i in range(begin, end):
        site = pair.sites[i]
        stats = pair.a[site].total, pair.b[site].total
        numbers = [*(f"{each.rms:.5g}" for each in stats), *(f"{each.mean:.5g}" for each in stats)]
        mark = ">" if i == first else ""
        rows.append([mark, site.name or "(model)", site.tensor, *numbers, f"{pair.distances[i]:.2g}"])
    lines = align_columns(rows, left=3)
    if end - begin < len(pair.sites):
        lines.append(f"({begin} sites before these, {len(pair.sites) - end} after them)")
    return lines
