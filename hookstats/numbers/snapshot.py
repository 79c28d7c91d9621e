"""Snapshot: one measured step as numbers on the host, site by site and as whole tables. Pure numpy."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hookstats.numbers.fields import STATISTICS, Array, Counts, Site, Skipped, Stats
from hookstats.numbers.frame import StepFrame
from hookstats.numbers.ranks import (
    Drift,
    Spread,
    StepRanks,
    drifts_from_json,
    drifts_to_json,
)
from hookstats.numbers.selection import choose
from hookstats.numbers.site_stats import SiteStats
from hookstats.numbers.tables import align_columns, html

if TYPE_CHECKING:
    import pandas


_VERSION = 4  # of what `Snapshot.to_dict` gives


class ChannelValue(NamedTuple):
    """A statistic of one channel, or group of channels, see `Snapshot.top_channels`."""

    site: Site
    channel: int
    value: float


class Snapshot(Mapping[Site, SiteStats]):
    """A measured step: ``snapshot["layers.0.mlp", "output"]`` is a SiteStats.

    ``step``: its number. ``scalars``: the scalars given to `Monitor.step` with it, as floats. ``earlier_scalars``:
    those given with the steps since the previous measured one, by number, ascending. ``sample_ids``: of these steps and
    of this one, by number, the ids given with it, int64 ``[samples]``. ``order``: the sites that fired, in order of
    execution (per device). ``skipped``: the sites whose tensors were left out in this step, and those that
    were given up, each with the reason and the number of tensors.

    With a GradScaler, otherwise None: ``grad_scale``, a float, by which gradients of outputs and inputs were divided;
    ``overflowed``, whether the scaler has skipped an optimizer's step because of an overflow.

    ``ranks``: the ranks whose numbers it holds, ascending, of ``world_size`` ranks of the process group; ``merged``:
    whether they are several. With a process_group, a step in which a rank was missing is each rank's own.
    ``rows``: 1 where all rows of activations and of their gradients were read; n where every n-th was
    (``attach(rows=n)``): then their counts, extremes and histograms are of the rows read, means, rms and shares are
    estimates (`Stats.standard_error`), and what is in no other row was not seen.
    ``drifts``: of a merged step, the parameters and gradients of which ranks hold other values than those that are
    to hold the same, at most 16, each a `Drift`.
    """

    def __init__(self, frame: StepFrame) -> None:
        self.frame = frame

    @property
    def step(self) -> int:
        return self.frame.step

    @property
    def scalars(self) -> dict[str, float]:
        return self.frame.scalars

    @property
    def earlier_scalars(self) -> dict[int, dict[str, float]]:
        return self.frame.earlier_scalars

    @property
    def sample_ids(self) -> dict[int, Counts]:
        return self.frame.sample_ids

    @property
    def grad_scale(self) -> float | None:
        return self.frame.grad_scale

    @property
    def overflowed(self) -> bool | None:
        return self.frame.overflowed

    @property
    def skipped(self) -> dict[Site, Skipped]:
        return self.frame.skipped

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.frame.ranks.present

    @property
    def world_size(self) -> int:
        return self.frame.ranks.world_size

    @property
    def drifts(self) -> tuple[Drift, ...]:
        return self.frame.drifts

    @property
    def rows(self) -> int:
        return self.frame.rows

    @property
    def merged(self) -> bool:
        return len(self.ranks) > 1

    @cached_property
    def order(self) -> list[Site]:
        return [self.frame.sites[i] for i in self.frame.order.tolist()]

    def __getitem__(self, site: tuple[str, str]) -> SiteStats:
        try:
            return self.frame.stats(self.frame.sites.place[Site(*site)])
        except (KeyError, TypeError):
            known = ", ".join(str(tuple(each)) for each in self.frame.sites[:5])
            raise KeyError(f"expected (name, tensor) of a watched site, such as {known}; got {site!r}") from None

    def __iter__(self) -> Iterator[Site]:
        return iter(self.frame.sites)

    def __len__(self) -> int:
        return len(self.frame)

    def __contains__(self, site: object) -> bool:
        """Return whether a site is watched, without reading its numbers."""
        try:
            return Site(*site) in self.frame.sites.place  # type: ignore[misc]
        except TypeError:
            return False

    @cached_property
    def totals(self) -> Stats[Array]:
        """The totals of all sites that fired: one Stats whose arrays ``[sites]`` are in the order of ``order``."""
        return self.frame.totals.entries(self.frame.order)

    @property
    def first_nonfinite(self) -> Site | None:
        """The first site in ``order`` that holds NaN, Inf or -Inf; None if every value is finite.

        Gradients of parameters count as well. In the step in which a run diverges, this is where it began; one step
        later every site holds NaN. Where some rows alone were read (``rows`` > 1), it may have begun earlier, in a row
        that was not.
        """
        bad = self.totals.nans + self.totals.posinfs + self.totals.neginfs > 0
        return self.order[int(bad.argmax())] if bad.any() else None

    @property
    def grad_norm(self) -> float | None:
        """The L2 norm of all watched parameters' gradients together, as ``clip_grad_norm_`` returns it.

        The gradients are those that the optimizer got, clipped if you clip them, or those that
        `Monitor.measure_gradients` read. The norm is over the ranks in `ranks`: without a process_group over this
        process. If an optimizer stepped several times in the step, it is the root of the mean square over these. It is
        infinite or NaN if a gradient is, and None if no ``param_grad`` was measured.
        """
        chosen = [i for i, site in enumerate(self.order) if site.tensor == "param_grad"]
        if not chosen:
            return None
        if self.totals.nans[chosen].any():
            return float("nan")
        if (self.totals.posinfs + self.totals.neginfs)[chosen].any():
            return float("inf")
        calls = self.frame.calls[self.frame.order[chosen]]
        return float(np.sqrt((self.totals.l2_norm[chosen] ** 2 / calls).sum()))

    def compact(self) -> Snapshot:
        """Only the totals, for keeping: less than a kilobyte for each site.

        A Snapshot holds the copy of its step's whole state. In the compact one ``channels`` and ``histogram`` are None;
        everything else is the same.
        """
        return Snapshot(self.frame.compact())

    def select(self, names: str | Iterable[str] = "*", tensors: str | Iterable[str] | None = None) -> Snapshot:
        """The sites whose name matches one of the globs, in the same order; the statistics are not copied.

        ``names``: globs as `attach` has them (``*`` crosses dots, "" is the model). ``tensors``: their tensors, None
        for all: "output" takes "output.0" as well. ``skipped`` is selected, too; what concerns the step stays.
        ValueError for a glob or a tensor that no site of this Snapshot has, TypeError for what is no string.
        """
        chosen = choose("select", [*self, *self.skipped], names, tensors)
        places = np.array([i for i, site in enumerate(self.frame.sites) if site in chosen], np.int64)
        skipped = {site: skipped for site, skipped in self.skipped.items() if site in chosen}
        return Snapshot(replace(self.frame.select(places), skipped=skipped))

    def to_dict(self) -> dict[str, Any]:
        """Everything in the Snapshot as dicts, lists, strings and numbers, for JSON; `from_dict` reads it.

        ``json.loads(json.dumps(d))`` gives every number back exactly; Infinity and NaN are written as Python's json
        writes them (``allow_nan``). A site has ``state``, the rows of `State` as they were measured, a list with one
        number for each channel; ``scale``, by which values are divided when they are read; ``histogram``, with the
        counts of the state (512 by sign and exponent, 64 octaves a channel; ``linear`` ones with those outside before
        and behind them). ``ranks``: "0-7 of 8". What `rank_spread` gives is not in it.
        """
        return {
            "version": _VERSION,
            "step": self.step,
            "scalars": dict(self.scalars),
            "earlier_scalars": [[step, dict(scalars)] for step, scalars in self.earlier_scalars.items()],
            "sample_ids": [[step, ids.tolist()] for step, ids in self.sample_ids.items()],
            "grad_scale": self.grad_scale,
            "overflowed": self.overflowed,
            "ranks": self.frame.ranks.to_text(),
            "order": [list(site) for site in self.order],
            "drifts": drifts_to_json(self.drifts),
            "rows": self.rows,
            "skipped": [{**site._asdict(), **skipped._asdict()} for site, skipped in self.skipped.items()],
            "sites": [{**site._asdict(), **stats._to_dict()} for site, stats in self.items()],
        }

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Snapshot:
        """Read what `to_dict` gave. ValueError for another version, and for a state or histogram of another shape."""
        if not isinstance(d, Mapping):
            raise TypeError(f"from_dict: expected what to_dict gave, got {d!r}")
        if d.get("version") != _VERSION:
            raise ValueError(f"from_dict: expected version {_VERSION}, got {d.get('version')!r}")
        sites = {Site(each["name"], each["tensor"]): SiteStats._from_dict(each) for each in d["sites"]}
        frame = StepFrame.from_stats(
            sites,
            [Site(*site) for site in d["order"]],
            d["step"],
            scalars=dict(d["scalars"]),
            earlier_scalars={step: dict(scalars) for step, scalars in d["earlier_scalars"]},
            sample_ids={step: np.array(each, np.int64) for step, each in d.get("sample_ids", [])},
            grad_scale=d["grad_scale"],
            overflowed=d["overflowed"],
            skipped={Site(of["name"], of["tensor"]): Skipped(of["reason"], of["times"]) for of in d["skipped"]},
            ranks=StepRanks.from_text(d["ranks"]),
            drifts=drifts_from_json(d.get("drifts", [])),
            rows=d["rows"],
        )
        return cls(frame)

    def equals(self, other: Snapshot) -> bool:
        """Return whether all is the same: order, scalars, what was skipped, and each state and histogram to the bit.

        A NaN equals any NaN. TypeError for what is no Snapshot.
        """
        if not isinstance(other, Snapshot):
            raise TypeError(f"equals: expected a Snapshot, got {type(other).__name__}")
        return json.dumps(self.to_dict()) == json.dumps(other.to_dict())

    def rank_spread(self, site: tuple[str, str]) -> dict[str, Spread]:
        """The smallest and the largest value of some statistics of a site among the ranks, and the ranks that have
        them.

        ``snapshot.rank_spread(("layers.0.mlp", "output"))["rms"]`` is a Spread(min, min_rank, max, max_rank) of the
        totals; NaN and -1 if no rank has a value.

        Raises:
            KeyError: for a site that is not watched. ValueError: without ``attach(process_group=Ranks(group,
                spread=True))``, or if the step is this rank's own.
        """
        if not self.frame.spread:
            raise ValueError(
                "rank_spread: expected a step that was merged over ranks, by attach(process_group="
                "hookstats.Ranks(group, spread=True)); got one of ranks "
                f"{self.frame.ranks.to_text()}"
            )
        place = self.frame.sites.place[Site(*site)]
        return {name: spread.at(place) for name, spread in self.frame.spread.items()}

    def __repr__(self) -> str:
        ranks = "" if self.world_size == 1 else f", ranks {self.frame.ranks.to_text()}"
        return f"Snapshot(step={self.step}, {len(self.order)} of {len(self)} sites fired{ranks})"

    def table(self, sort: str | None = None) -> str:
        """A text table, a line for each site: in order of execution, or by a statistic of the totals, largest first.

        ``sort``: a statistic's name (ValueError for another one). ``channels`` says how many are kept apart, 16x64 for
        16 groups of 64, such as heads; ``dim``: along which dimension. Sites that did not fire come last, and those
        that are not measured, each with the reason.
        """
        return "\n".join([*align_columns(self._rows(sort), left=2), *self._list_left_out()])

    def _rows(self, sort: str | None) -> list[list[str]]:
        """Return the rows of the table, the head first."""
        shown = ["mean", "std", "rms", "abs_max"]
        if sort is not None:
            _check_statistics("sort", [sort])
            if sort not in (*shown, "count", "zeros", "nans", "posinfs", "neginfs"):
                shown.append(sort)
        totals = self.totals
        with np.errstate(invalid="ignore"):
            zeros = [f"{share:.1f}" for share in (100 * totals.zeros / totals.count).tolist()]
        columns = [
            *([f"{number:.3g}" for number in getattr(totals, name).tolist()] for name in shown),
            ["-" if share == "nan" else share for share in zeros],
            [f"{number:.0f}" for number in totals.nans.tolist()],
            [f"{number:.0f}" for number in (totals.posinfs + totals.neginfs).tolist()],
        ]
        rows = []
        for site, *numbers in zip(self.order, *columns, strict=True):
            sites, i = self.frame.sites, self.frame.sites.place[site]
            channels = str(sites.widths[i]) if sites.keeps[i] else "-"
            if sites.group_counts[i]:
                channels = f"{sites.group_counts[i]}x{sites.group_sizes[i]}"
            dim = "-" if sites.dims[i] is None else str(sites.dims[i])
            rows.append([site.name or "(model)", site.tensor, str(self.frame.calls[i]), channels, dim, *numbers])
        if sort is not None:
            rows = [rows[i] for i in np.argsort(-np.nan_to_num(getattr(totals, sort), nan=-np.inf), kind="stable")]
        rows.insert(0, ["site", "tensor", "calls", "channels", "dim", *shown, "zeros%", "nan", "inf"])
        return rows

    def _list_left_out(self) -> list[str]:
        """Rows that were not read, sites that did not fire, and those that are not measured, in words."""
        silent = [site for site, calls in zip(self, self.frame.calls.tolist(), strict=True) if calls == 0]
        said = [f"did not fire: {', '.join(map(str, silent))}"] if silent else []
        if self.rows > 1:
            said.insert(
                0, f"of activations and their gradients, one of {self.rows} rows was read: extremes are of these"
            )
        return said + [f"not measured: {site}: {skipped}" for site, skipped in self.skipped.items()]

    def _repr_html_(self) -> str:
        """Return the table for notebooks, of 60 sites at most."""
        scalars = "".join(f", {name} {value:.6g}" for name, value in self.scalars.items())
        return html(f"Step {self.step}{scalars}", self._rows(None), 2, self._list_left_out())

    def flat(self, *statistics: str) -> dict[str, float]:
        """The totals as ``{"tensor/statistic/name": value}``, for loggers. Without arguments, all statistics.

        ``output/rms/layers.0.mlp``: loggers group by what comes first, so that one panel, or section, shows one
        statistic of all sites. The model itself, which has no name, is ``output/rms/whole-model`` there: no module's
        path looks like that, and every logger takes it. ValueError for an unknown statistic.
        """
        _check_statistics("flat", statistics)
        columns = [(name, getattr(self.totals, name).tolist()) for name in statistics or STATISTICS]
        return {
            f"{site.tensor}/{name}/{site.name or 'whole-model'}": column[i]
            for i, site in enumerate(self.order)
            for name, column in columns
        }

    def top_channels(self, statistic: str, k: int) -> list[ChannelValue]:
        """The ``k`` channels with the largest value of a statistic, over all sites that keep channels; largest first.

        ``snapshot.top_channels("abs_max", 10)``: as (site, channel, value). Fewer where there are fewer; channels
        whose value is NaN are left out, and equal ones come in order of execution. ValueError for an unknown statistic.
        """
        return self._largest("top_channels", self._channels(), statistic, k)

    def top_groups(self, statistic: str, k: int) -> list[ChannelValue]:
        """Return the top groups of channels, such as heads, as `top_channels`: ``channel`` is the group's number."""
        return self._largest("top_groups", self._groups(), statistic, k)

    def _largest(
        self, argument: str, of: tuple[list[Site], Counts, Stats[Array]], statistic: str, k: int
    ) -> list[ChannelValue]:
        _check_statistics(argument, [statistic])
        if not isinstance(k, int) or isinstance(k, bool) or k < 1:
            raise ValueError(f"{argument}: expected k, a number of at least 1, got {k!r}")
        sites, widths, stats = of
        values = getattr(stats, statistic)
        known = values[~np.isnan(values)]
        least = np.partition(known, -k)[-k] if k < len(known) else -np.inf
        candidates = np.flatnonzero(values >= least)
        largest = candidates[np.argsort(-values[candidates], kind="stable")[:k]]
        ends = np.cumsum(widths)
        at = np.searchsorted(ends, largest, side="right")
        channels = largest - (ends - widths)[at]
        found = zip(at.tolist(), channels.tolist(), values[largest].tolist(), strict=True)
        return [ChannelValue(sites[i], channel, value) for i, channel, value in found]

    def _channels(self) -> tuple[list[Site], Counts, Stats[Array]]:
        """The sites that fired and keep channels, how many each has, and the statistics of all, side by side."""
        return self._select_fired(self.frame.sites.widths, self.frame.channels)

    def _groups(self) -> tuple[list[Site], Counts, Stats[Array]]:
        """The same of groups of channels."""
        return self._select_fired(self.frame.sites.group_counts, self.frame.groups)

    def _select_fired(self, widths: Counts, stats: Stats[Array]) -> tuple[list[Site], Counts, Stats[Array]]:
        """Select the entries of the sites that fired, in their order, from an array over all sites."""
        order = self.frame.order
        fired = order[widths[order] > 0]
        begins, lengths = (np.cumsum(widths) - widths)[fired], widths[fired]
        places = np.repeat(begins - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
        return [self.frame.sites[i] for i in fired.tolist()], lengths, stats.entries(places)

    def to_pandas(self, channels: bool = False, groups: bool = False) -> pandas.DataFrame:
        """A DataFrame of the totals: a row for each site in order of execution, indexed by (name, tensor).

        ``channels=True``: a row for each channel of each site that keeps them, indexed by (name, tensor, channel).
        ``groups=True``: a row for each group of channels, such as a head, indexed by (name, tensor, group).
        ValueError for both.
        """
        if channels and groups:
            raise ValueError("to_pandas: expected channels=True or groups=True, got both")
        try:
            import pandas
        except ImportError:
            raise ImportError("to_pandas needs pandas: pip install 'hookstats[pandas]'") from None
        sites, widths, stats = self.order, np.ones(len(self.order), np.int64), self.totals
        if channels or groups:
            sites, widths, stats = self._channels() if channels else self._groups()
        places = np.repeat(np.arange(len(sites)), widths)
        levels = {part: [getattr(site, part) for site in sites] for part in Site._fields}
        index = {part: np.array(level, object)[places] for part, level in levels.items()}
        if channels or groups:
            index["channel" if channels else "group"] = np.arange(len(places)) - np.repeat(
                np.cumsum(widths) - widths, widths
            )
        calls = np.array([self.frame.calls[self.frame.sites.place[site]] for site in sites], np.int64)[places]
        columns = {"calls": calls} | {name: getattr(stats, name) for name in STATISTICS}
        return pandas.DataFrame(columns, pandas.MultiIndex.from_arrays(list(index.values()), names=list(index)))


def _check_statistics(argument: str, names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in STATISTICS]
    if unknown:
        raise ValueError(f"{argument}: expected one of {', '.join(STATISTICS)}; got {', '.join(map(repr, unknown))}")
