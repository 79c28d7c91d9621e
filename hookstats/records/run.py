"""`load`: what was recorded, as Snapshots and as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hookstats.numbers.fields import STATISTICS, Counts, Site
from hookstats.numbers.snapshot import Snapshot
from hookstats.records import timeline
from hookstats.records.errors import RunError
from hookstats.records.reading import Reader
from hookstats.records.snapshots import Snapshots

if TYPE_CHECKING:
    pass


class Run:
    """A recorded run as it was when it was loaded; see `load`. ``run[step]`` is a Snapshot, and iteration gives all."""

    def __init__(self, directory: Path, sites: Any, steps: Any, statistics: Sequence[str] | None) -> None:
        self._reader = Reader(directory)
        self._timeline = timeline.read(self._reader)
        self._statistics = _statistics(statistics)
        self._sites = _sites(self._reader.manifest.sites, sites)
        self._rows = _rows(self._timeline.step, steps)
        self._snapshots = Snapshots(self._reader, self._timeline, self._sites)

    @cached_property
    def steps(self) -> list[int]:
        """The numbers of the steps that count, ascending."""
        numbers: list[int] = self._timeline.step[self._rows].tolist()
        return numbers

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, step: int) -> Snapshot:
        """KeyError for a step that was not recorded, or does not count."""
        at = int(np.searchsorted(self.steps, step))
        if at == len(self) or self.steps[at] != step:
            raise KeyError(f"expected a recorded step, such as {self.steps[:5]}; got {step!r}")
        return next(self._snapshots.read([self._rows[at]]))

    def __iter__(self) -> Iterator[Snapshot]:
        return self._snapshots.read(self._rows)

    @property
    def manifest(self) -> dict[str, Any]:
        """What stands in manifest.json."""
        return self._reader.manifest.to_json()


def load(
    path: str | Path,
    *,
    sites: str | Iterable[str | tuple[str, str]] | None = None,
    steps: slice | Iterable[int] | None = None,
    statistics: Sequence[str] | None = None,
    ranks: int = 0,
) -> Run:
    """A recorded run."""
    directory = Path(path) / f"rank={ranks}"
    if not (directory / "manifest.json").exists():
        raise RunError(f"{path}: expected a recorded run with {directory.name}/manifest.json, got none")
    return Run(directory, sites, steps, statistics)


def _statistics(names: Sequence[str] | None) -> list[str]:
    unknown = [name for name in names or () if name not in STATISTICS]
    if unknown:
        raise ValueError(f"statistics: expected some of {', '.join(STATISTICS)}; got {', '.join(map(repr, unknown))}")
    return list(STATISTICS if names is None else names)


def _sites(known: list[Site], chosen: Any) -> Counts | None:
    if chosen is None:
        return None
    wanted = np.zeros(len(known), bool)
    for each in [chosen] if isinstance(chosen, str) else chosen:
        name, tensor = (each, None) if isinstance(each, str) else each
        found = [
            fnmatchcase(site.name, name)
            and (tensor is None or site.tensor == tensor or site.tensor.startswith(f"{tensor}."))
            for site in known
        ]
        if not any(found):
            some = ", ".join(repr(tuple(site)) for site in known[:8])
            raise ValueError(f"sites: {each!r} matches nothing; expected some of {some}, ...")
        wanted |= found
    return np.flatnonzero(wanted)


def _rows(recorded: Counts, steps: Any) -> list[int]:
    if steps is None:
        chosen = np.arange(len(recorded))
    elif isinstance(steps, slice):
        if steps.step is not None:
            raise ValueError(f"steps: expected a slice from a step to a step, got {steps}")
        first = 0 if steps.start is None else np.searchsorted(recorded, steps.start)
        last = len(recorded) if steps.stop is None else np.searchsorted(recorded, steps.stop)
        chosen = np.arange(first, last)
    else:
        numbers = np.unique(np.array(list(steps), np.int64))
        chosen = np.flatnonzero(np.isin(recorded, numbers))
        missing = np.setdiff1d(numbers, recorded)
        if len(missing):
            raise ValueError(f"steps: expected recorded steps, got {missing[:5].tolist()}")
    result: list[int] = chosen.tolist()
    return result
