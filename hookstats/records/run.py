"""`load`: what was recorded, as Snapshots and as tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from hookstats.numbers.fields import STATISTICS, Array, Counts, Site
from hookstats.numbers.given import Given
from hookstats.numbers.merge import align, mean, merge
from hookstats.numbers.selection import choose
from hookstats.numbers.snapshot import Snapshot
from hookstats.numbers.tables import html
from hookstats.records import timeline
from hookstats.records.arrays import to_arrow, to_numpy
from hookstats.records.encoding import Taken, encode
from hookstats.records.errors import RunError
from hookstats.records.findings import read_findings
from hookstats.records.places import explain_missing_run
from hookstats.records.reading import Chosen, Reader
from hookstats.records.schema import SCHEMAS, names_of
from hookstats.records.snapshots import Snapshots, lists
from hookstats.rules import Finding, Function, Rule, defaults, drop_declared, head, judge, story

if TYPE_CHECKING:
    import pandas

Sites: TypeAlias = str | Site | Iterable[str | tuple[str, str]] | None
Steps: TypeAlias = slice | Iterable[int] | None
_FAR = 1 << 62  # further than any step


def load(
    path: str | Path,
    *,
    sites: Sites = None,
    steps: Steps = None,
    statistics: Sequence[str] | None = None,
    ranks: int | Literal["merged"] = 0,
) -> Run:
    """Reads a run that `record` keeps in a directory, also while it is being recorded: as it is now.

    Args:
        sites: a glob over names (``"layers.0.*"``), a Site, or a list of globs and of pairs of a glob and a tensor
            (``[("head", "output")]``, which takes "output.0" as well). None: all.
        steps: a slice of step numbers (``slice(1000, 2000)``), or a list of them. None: all.
        statistics: names of `Stats` that the tables have. None: all.
        ranks: the number of a rank, or "merged": all ranks as one, in the steps that all of them recorded.

    Only the selected columns, files and row groups are read. If a run was resumed, later attempts replace earlier ones:
    a step of an earlier attempt counts only if its number is smaller than all that a later attempt recorded. If an
    attempt used a number twice, the later step counts. Does not import torch.

    Raises:
        RunError: a ValueError, if the directory holds no run, or a torn or altered one; also later, when a torn part is
        read. SchemaError: if another version recorded it. ValueError: for a glob, step or statistic that the run does
        not have. ImportError: without pyarrow (``pip install 'hookstats[record]'``).
    """
    folders = sorted(Path(path).glob("rank=*"), key=lambda folder: (len(folder.name), folder.name))
    names = [folder.name for folder in folders]
    if ranks != "merged" and (isinstance(ranks, bool) or not isinstance(ranks, int)):
        raise ValueError(f'load: ranks: expected a number, or "merged", got {ranks!r}')
    needed = f"rank={0 if ranks == 'merged' else ranks}"
    if needed not in names:
        if not names:
            raise RunError(explain_missing_run(Path(path)))
        raise RunError(f"{path}: expected the directory of a run, with {needed} in it; got {names}")
    if ranks == "merged":
        return MergedRun(folders, sites, steps, statistics)
    return Run(folders[names.index(needed)], sites, steps, statistics)


class Run:
    """A recorded run as it was when it was loaded, see `load`.

    ``len(run)`` measured steps; ``run[step]`` is the Snapshot of a step, by its number, and iteration gives all in the
    order of their numbers. They equal those that training had (`Snapshot.equals`).
    """

    def __init__(self, folder: Path, sites: Sites, steps: Steps, statistics: Sequence[str] | None) -> None:
        """folder: of a rank."""
        self._folders = [folder]
        self._reader = Reader(folder)
        self._timeline = timeline.read(self._reader)
        self._statistics = _statistics(statistics)
        self._has_all_steps = steps is None
        self._slice = steps if isinstance(steps, slice) else None
        self._choose(_match_sites(self._reader.sites, sites), _rows(self._timeline.step, steps))

    def _choose(self, sites: set[Site] | None, rows: list[int]) -> None:
        self._chosen_sites, self._rows = sites, rows
        known = self._reader.sites
        self._ids = None if sites is None else np.flatnonzero([site in sites for site in known])
        self._snapshots = Snapshots(self._reader, self._timeline, self._ids)

    @cached_property
    def steps(self) -> list[int]:
        """The numbers of the steps that count, ascending."""
        numbers: list[int] = self._timeline.step[self._rows].tolist()
        return numbers

    @property
    def sites(self) -> list[Site]:
        """The sites of which anything was recorded, in the order in which they came."""
        return [site for site in self._reader.sites if self._chosen_sites is None or site in self._chosen_sites]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, step: int) -> Snapshot:
        """KeyError for a step that was not recorded, or does not count."""
        if step not in self:
            raise KeyError(f"expected a recorded step, such as {self.steps[:5]}; got {step!r}")
        found = next(self._read([self._row_of[step]]), None)
        if found is None:
            raise RunError(f"step {step}: expected rows of totals, but a file with them cannot be read")
        return found

    def __contains__(self, step: object) -> bool:
        return step in self._row_of

    @cached_property
    def _row_of(self) -> dict[object, int]:
        return dict(zip(self.steps, self._rows, strict=True))

    def __iter__(self) -> Iterator[Snapshot]:
        return self._read(self._rows)

    def _read(self, rows: list[int]) -> Iterator[Snapshot]:
        return self._snapshots.read(rows)

    @property
    def totals(self) -> pa.Table:
        """An Arrow table with a row for each step and site, by step and then in the order of the Snapshot.

        ``step``, ``time`` (UTC, without a zone), ``attempt``, ``site`` (its number in this run), ``name``, ``tensor``,
        ``order`` (the place in the order of execution; null where silent), ``calls``, and the statistics, without a
        scaler's scale.
        """
        columns = ["step", "time", "attempt", "site", "place", "order", "calls", *self._statistics]
        found, _ = self._snapshots.read_ordered("totals", columns, self._rows)
        named = names_of(self._reader.sites, to_numpy(found["site"]))
        shown = ["step", "time", "attempt", "site", *named, "order", "calls", *self._statistics]
        return pa.Table.from_arrays([named[name] if name in named else found[name] for name in shown], shown)

    @property
    def scalars(self) -> pa.Table:
        """An Arrow table of what was given with every step, measured or not: ``step``, ``time``, ``attempt``, ``name``,
        ``value``, ``measured``.

        Of a run that was loaded with some steps, those of these steps; with a slice, of all between its ends. The time
        of a step that was not measured is that at which its scalars came: at once, or with the next measured one.
        """
        columns = ["step", "time", "attempt", "record", "name", "value", "measured"]
        found = self._reader.table("scalars", columns, Chosen(self._span, None))
        counting = self._timeline.scalars_that_count(found)
        found = found.take(to_arrow(counting, pa.int64()))
        if not self._has_all_steps and self._slice is None:
            found = found.filter(to_arrow(np.isin(to_numpy(found["step"]), self.steps), pa.bool_()))
        return found.drop_columns(["record"])

    def sample_ids(self, step: int) -> Counts:
        """Return the ids that were given to `Monitor.step` with a step, measured or not: int64 ``[samples]``.

        All ranks' if they were merged, one rank's after the other's; those of a step that was not measured are this
        rank's. KeyError where none were given.
        """
        ids = self._sample_ids(step)
        if ids is None:
            raise KeyError(f"expected a step with which sample_ids were given, got {step!r}")
        return ids

    def _sample_ids(self, step: int) -> Counts | None:
        found = self._reader.table("samples", ["step", "attempt", "record", "ids"], Chosen((step, step), None))
        counting = self._timeline.scalars_that_count(found)
        return lists(found["ids"])[int(counting[0])] if len(counting) else None

    @property
    def _span(self) -> tuple[int, int] | None:
        """The first and the last step of which scalars are wanted."""
        if self._slice is not None:
            first, behind = self._slice.start, self._slice.stop
            return -_FAR if first is None else first, _FAR if behind is None else behind - 1
        if self._has_all_steps:
            return None
        return (self.steps[0], self.steps[-1]) if self.steps else (0, -1)

    def to_pandas(self) -> pandas.DataFrame:
        """`totals` as a DataFrame. ImportError without pandas: ``pip install 'hookstats[pandas]'``."""
        try:
            import pandas  # noqa: F401
        except ImportError:
            raise ImportError("to_pandas needs pandas: pip install 'hookstats[pandas]'") from None
        return self.totals.to_pandas()

    @property
    def findings(self) -> list[Finding]:
        """The findings of the rules in these steps and sites, in the order in which they were made."""
        found = [each for folder in self._folders for each in read_findings(folder)[0]]
        numbers = set(self.steps)
        return [
            finding
            for finding in found
            if not self._timeline.is_replaced(finding.step, finding.attempt)
            and (self._has_all_steps or self._find_judged_step(finding.step) in numbers)
            and (self._chosen_sites is None or finding.site is None or self._chosen_sites.intersection(finding.sites))
        ]

    def judge(self, rules: Iterable[str | Rule | Function] | None = None) -> list[Finding]:
        """Judge these steps again, as `rules.judge` does.

        rules: None: all of `rules.defaults`, but for those of laws that an attempt has declared as broken by design,
        ``Options(laws={"bias": False})``.
        """
        if rules is None:
            laws: dict[str, bool] = {}
            for attempt in self.attempts:
                declared = attempt["settings"].get("options", {}).get("laws", {})
                laws |= {name: False for name, holds in declared.items() if not holds}
            rules = drop_declared(defaults(), laws)
        return judge(self, rules)

    def _find_judged_step(self, step: int) -> int:
        """Return the recorded step with which a step was judged: itself, or the next one that was measured."""
        at = int(np.searchsorted(self._timeline.step, step))
        return int(self._timeline.step[at]) if at < len(self._timeline.step) else step

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """The processes that recorded, ascending: ``attempt``, its number; ``settings``; ``begun``, in seconds since
        the epoch; ``ended``: None, "closed", or how else, such as "died: RuntimeError: ..."; ``records``: how many
        steps it measured; ``dropped``: those for which the ring had no room. Of several ranks those of the first.
        """
        records = self._timeline.recorded
        return [
            {
                "attempt": each.attempt,
                "settings": each.settings,
                "begun": each.begun,
                "ended": each.ended,
                "records": records.get(each.attempt, 0),
                "dropped": each.dropped,
            }
            for each in self._reader.attempts
        ]

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: the attempts, the run in a few sentences, and at most 20 chapters of its story."""
        rows = [["attempt", "model", "begun (UTC)", "ended", "steps recorded", "dropped"]]
        for each in self.attempts:
            begun = datetime.fromtimestamp(each["begun"], timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
            numbers = [str(each[name]) for name in ("records", "dropped")]
            model, ended = str(each["settings"].get("model", "")), each["ended"] or "not yet"
            rows.append([str(each["attempt"]), model, begun, ended, *numbers])
        chapters = story(self.findings)
        more = [f"{len(chapters) - 20} more findings that stand for themselves"] if len(chapters) > 20 else []
        return html(repr(self), rows, 4, [*self.head, *map(str, chapters[:20]), *more])

    @property
    def head(self) -> list[str]:
        """The run in a few sentences."""
        steps, values = self.history("loss")
        return head(self.findings, (int(steps[-1]), float(values[-1])) if len(steps) else None)

    def history(self, name: str) -> tuple[Counts, Array]:
        """Return a scalar's steps, measured or not, and its values."""
        table = self.scalars
        chosen = np.flatnonzero([each == name for each in table["name"].to_pylist()])
        return to_numpy(table["step"])[chosen], to_numpy(table["value"])[chosen]

    def __repr__(self) -> str:
        span = f", {self.steps[0]} to {self.steps[-1]}" if len(self) else ""
        return f"Run({len(self)} steps{span}; {', '.join(str(folder) for folder in self._folders)})"


class MergedRun(Run):
    """All ranks of a run as one: the steps that all of them have recorded, in the same attempt.

    A Snapshot has the calls, counts, extremes and histograms of all ranks, exactly, and moments to rounding; channels
    where all ranks have the same ones; of scalars the mean. Attempts and times are those of the first rank.
    """

    def __init__(self, folders: list[Path], sites: Sites, steps: Steps, statistics: Sequence[str] | None) -> None:
        """folders: of the ranks."""
        self._ranks = [Run(folder, None, None, statistics) for folder in folders]
        first = self._ranks[0]
        self._folders, self._timeline, self._statistics = folders, first._timeline, first._statistics
        self._reader = first._reader
        self._has_all_steps = steps is None
        self._slice = steps if isinstance(steps, slice) else None
        known = list(dict.fromkeys(site for rank in self._ranks for site in rank._reader.sites))
        self._known, self._chosen_sites = known, _match_sites(known, sites)
        numbered = [_list_keys(rank._timeline) for rank in self._ranks]
        common = set.intersection(*map(set, numbered))
        shared = np.array([row for row, key in enumerate(numbered[0]) if key in common], np.int64)
        self._rows = shared[_rows(first._timeline.step[shared], steps)].tolist()
        for rank, keys in zip(self._ranks, numbered, strict=True):
            place = {key: row for row, key in enumerate(keys)}
            rank._choose(self._chosen_sites, [place[numbered[0][row]] for row in self._rows])
            rank._has_all_steps, rank._slice = self._has_all_steps, self._slice

    def _read(self, rows: list[int]) -> Iterator[Snapshot]:
        at = np.searchsorted(self._rows, rows).tolist()
        ranks = [rank._snapshots.read([rank._rows[i] for i in at]) for rank in self._ranks]
        for found in align(ranks):
            frames = [each.frame for each in found if each is not None]
            if len(frames) == len(ranks):  # else one rank has a step that cannot be read of another
                yield Snapshot(merge(frames))

    @property
    def totals(self) -> pa.Table:
        """The table of one rank's form; ``site`` numbers are of this table."""
        names = ["step", "time", "attempt", "site", "name", "tensor", "order", "calls", *self._statistics]
        tables = [pa.Table.from_batches([], pa.schema([SCHEMAS["totals"].field(name) for name in names]))]
        number, first = {site: i for i, site in enumerate(self._known)}, self._timeline
        row = dict(zip(self.steps, self._rows, strict=True))
        for frame in (snapshot.frame for snapshot in self):
            at, ids = row[frame.step], np.array([number[site] for site in frame.sites], np.int64)
            taken = Taken(frame.step, int(first.time[at]), int(first.attempt[at]), -1, Given({}, {}), frame, ids)
            rows = dict(encode([taken], self._known))["totals"]
            place = np.argsort(to_numpy(rows["place"]))
            tables.append(rows.take(to_arrow(place, pa.int64())).select(names).cast(tables[0].schema))
        return pa.concat_tables(tables)

    @property
    def scalars(self) -> pa.Table:
        """The table of one rank's form, with the mean of the ranks that have a scalar, and the first one's time."""
        table = pa.concat_tables([rank.scalars for rank in self._ranks])
        rows = defaultdict[tuple[int, int, str], list[int]](list)
        for row, key in enumerate(zip(*(table[name].to_pylist() for name in ("step", "attempt", "name")), strict=True)):
            rows[key].append(row)
        numbered, measured, values = _list_keys(self._timeline), to_numpy(table["measured"]), to_numpy(table["value"])
        shared = {numbered[row] for row in self._rows}
        chosen = [same for key, same in rows.items() if key[:2] in shared or not measured[same[0]]]
        chosen.sort(key=lambda same: int(table["step"][same[0]].as_py()))
        found = table.take(to_arrow(np.array([same[0] for same in chosen], np.int64), pa.int64()))
        means = np.array([mean(values[same].tolist()) for same in chosen])
        return found.set_column(found.column_names.index("value"), "value", to_arrow(means, pa.float64()))

    def _sample_ids(self, step: int) -> Counts | None:
        found = [ids for rank in self._ranks if (ids := rank._sample_ids(step)) is not None]
        return np.concatenate(found) if found else None


def _list_keys(of: timeline.Timeline) -> list[tuple[int, int]]:
    """Step and attempt, of each."""
    return list(zip(of.step.tolist(), of.attempt.tolist(), strict=True))


def _statistics(names: Sequence[str] | None) -> list[str]:
    unknown = [name for name in names or () if name not in STATISTICS]
    if unknown:
        raise ValueError(f"statistics: expected some of {', '.join(STATISTICS)}; got {', '.join(map(repr, unknown))}")
    return list(STATISTICS if names is None else dict.fromkeys(names))


def _match_sites(known: list[Site], chosen: Sites) -> set[Site] | None:
    if chosen is None:
        return None
    wanted: set[Site] = set()
    for each in [chosen] if isinstance(chosen, str | Site) else chosen:
        name, tensor = (each, None) if isinstance(each, str) else each
        found = choose("sites", known, name, tensor)
        if not found:
            raise ValueError(f"sites: expected a tensor that these names have, got {each!r}")
        wanted |= found
    return wanted


def _rows(recorded: Counts, steps: Steps) -> list[int]:
    """Return the places of the chosen steps."""
    if steps is None:
        chosen = np.arange(len(recorded))
    elif isinstance(steps, slice):
        if steps.step is not None:
            raise ValueError(f"steps: expected a slice from a step to a step, got {steps}")
        first = 0 if steps.start is None else int(np.searchsorted(recorded, steps.start))
        last = len(recorded) if steps.stop is None else int(np.searchsorted(recorded, steps.stop))
        chosen = np.arange(first, last)
    else:
        try:
            numbers = np.unique(np.array(list(steps), np.int64))
        except (TypeError, ValueError):
            raise ValueError(f"steps: expected a slice of step numbers, or a list of them, got {steps!r}") from None
        missing = np.setdiff1d(numbers, recorded)
        if len(missing):
            raise ValueError(f"steps: expected recorded steps, got {missing[:5].tolist()}")
        chosen = np.flatnonzero(np.isin(recorded, numbers))
    result: list[int] = chosen.tolist()
    return result
