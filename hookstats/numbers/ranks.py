"""Origin of a step's numbers: one process, or several together. Pure numpy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from hookstats.numbers.fields import Site

_MOST = 1 << 24  # ranks of a group
SAME_DATA = "ranks.same_data"  # scalar of a merged step, 1.0 where all ranks had one input, or one output, to the bit


class StepRanks(NamedTuple):
    """The ranks that are in the numbers, ascending, as torch.distributed counts them; and how many the group has."""

    present: tuple[int, ...] = (0,)
    world_size: int = 1

    def to_text(self) -> str:
        """``"0-7,9 of 16"``."""
        runs: list[list[int]] = []
        for rank in self.present:
            if runs and runs[-1][1] == rank - 1:
                runs[-1][1] = rank
            else:
                runs.append([rank, rank])
        said = (str(begin) if begin == end else f"{begin}-{end}" for begin, end in runs)
        return f"{','.join(said)} of {self.world_size}"

    @classmethod
    def from_text(cls, text: str) -> StepRanks:
        """Read what `to_text` gave. ValueError for anything else."""
        present: list[int] = []
        runs, of, size = text.partition(" of ")
        for run in runs.split(","):
            begin, dash, end = run.partition("-")
            first, last = int(begin), int(end) if dash else int(begin)
            if not (present[-1] if present else -1) < first <= last < _MOST:
                raise ValueError(f"expected ascending ranks below {_MOST}, got {text[:100]!r}")
            present += range(first, last + 1)
        world_size = int(size) if of else 0
        if not len(present) <= world_size <= _MOST:
            raise ValueError(f"expected ranks and of how many they are, got {text[:100]!r}")
        return cls(tuple(present), world_size)


ALONE = StepRanks()


class Spread(NamedTuple):
    """Extremes over the ranks of a group of a statistic of a site, and which rank has each.

    They are numbers for one site, arrays ``[sites]`` for all sites of a step. The lowest of several ranks is named that
    have the same extreme; NaN and -1 stand where no rank has a value.
    """

    min: Any
    min_rank: Any
    max: Any
    max_rank: Any

    def at(self, i: int) -> Spread:
        """The spread of the i-th site."""
        return Spread(float(self.min[i]), int(self.min_rank[i]), float(self.max[i]), int(self.max_rank[i]))


class Drift(NamedTuple):
    """Ranks that hold other bits of a parameter, or of its gradient, than those that are to hold the same."""

    site: Site
    ranks: tuple[int, ...]
    """The ranks that differ from the reference, ascending, as `torch.distributed.get_rank` numbers them."""
    reference_rank: int
    """The lowest of the ranks that agree with each other, where these are more than half; else the lowest rank."""
    agree: int
    """The number of ranks that have what the reference has, the reference included."""
    has_majority: bool
    """True: they are more than half of those compared; else nobody knows which are wrong."""
    is_certain: bool
    """True: a mesh, placements or DistributedDataParallel says so; else they held the same in earlier steps."""


def drifts_to_json(drifts: Iterable[Drift]) -> list[Any]:
    """Return drifts in JSON's types."""
    return [[*each.site, list(each.ranks), *each[2:]] for each in drifts]


def drifts_from_json(told: Any) -> tuple[Drift, ...]:
    """Read what `drifts_to_json` gave. ValueError or TypeError for anything else."""
    found = []
    for name, tensor, ranks, reference, agree, has_majority, is_certain in told:
        is_site, numbers = isinstance(name, str) and isinstance(tensor, str), [*ranks, reference, agree]
        if not is_site or not all(isinstance(each, int) and each >= 0 for each in numbers):
            raise ValueError(f"expected a site and ranks, got {name!r}, {tensor!r}, {numbers}")
        found.append(Drift(Site(name, tensor), tuple(ranks), reference, agree, bool(has_majority), bool(is_certain)))
    return tuple(found)
