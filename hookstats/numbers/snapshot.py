"""Snapshot, SiteStats: one measured step as numbers on the host. Pure numpy; finished when they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from hookstats.numbers.fields import (
    STATISTICS,
    Array,
    Bins,
    Counts,
    ExponentBins,
    LinearBins,
    Site,
    Skipped,
    Stats,
    divided,
    exponent_histogram,
    octave_edges,
    total,
)

if TYPE_CHECKING:
    import pandas


class Histogram:
    """Counts per bin. ``edges`` ``[bins + 1]`` ascend; ``counts`` are int64 ``[bins]`` or ``[channels, bins]``.

    ``underflow``, ``overflow``: finite values below and above all bins, an int or int64 ``[channels]``.

    By exponent, per channel of |x|: a bin holds the values from its lower edge up to, not including, the upper one; on
    the negative side, the other way round (a value belongs to the bin of its magnitude). No value lies outside; a
    float64 beyond float32's range is in the outermost bin. Linear: the same, and the last bin has its upper edge too.
    """

    def __init__(self, counts: Counts, edges: Array, underflow: Any = 0, overflow: Any = 0) -> None:
        self.counts = counts
        self.edges = edges
        self.underflow = underflow
        self.overflow = overflow

    def __repr__(self) -> str:
        return f"Histogram({self.counts.sum()} values, counts {list(self.counts.shape)})"


class SiteStats:
    """The statistics of one site in one step.

    ``calls``: tensors folded in (0: the site did not fire). ``total``: over everything. ``channels``: per channel, or
    None where channels are not kept, or were not sent in this step (``channels_every``). ``channel_dim``: the dimension
    of the tensors that the channels are (-1: the last); None where they are not kept, or nothing has told it yet.
    ``histogram``: or None.
    """

    def __init__(
        self,
        moments: Array,
        calls: int,
        histogram: Counts | None,
        per_channel: bool,
        bins: Bins | None = None,
        scale: float = 1.0,
        channel_dim: int | None = None,
    ) -> None:
        """moments: ``[fields, channels]``; histogram: as in the state, of these bins (None: by exponent).

        scale: what the values were multiplied with before they were measured.
        """
        self.calls = calls
        self.channel_dim = channel_dim
        self._moments = moments if scale == 1 else divided(moments, scale)
        self._scale = scale
        self._histogram = histogram
        self._per_channel = per_channel
        self._bins = bins or ExponentBins()

    @cached_property
    def total(self) -> Stats[float]:
        """Over all channels."""
        return Stats(self._folded())

    def _folded(self) -> Array:
        return total(self._moments)

    def _compact(self) -> SiteStats:
        return SiteStats(self._folded()[:, None].copy(), self.calls, None, False)

    @cached_property
    def channels(self) -> Stats[Array] | None:
        """Per channel."""
        return Stats(self._moments) if self._per_channel else None

    @cached_property
    def histogram(self) -> Histogram | None:
        """Of the finite values."""
        if self._histogram is None:
            return None
        if isinstance(self._bins, LinearBins):
            below, counts, above = np.split(self._histogram, [1, -1], axis=-1)
            outside = (below[..., 0], above[..., 0]) if counts.ndim == 2 else (int(below[0]), int(above[0]))
            edges = np.linspace(self._bins.lo, self._bins.hi, self._bins.n + 1)
            return Histogram(counts, edges / self._scale, *outside)
        if self._histogram.ndim == 1:
            counts, edges = exponent_histogram(self._histogram)
            return Histogram(counts, edges / self._scale)
        return Histogram(self._histogram, octave_edges() / self._scale)

    def quantile(self, q: float) -> Any:
        """The q-quantile of the finite values, from the histogram by linear interpolation inside its bin.

        A float; with a per-channel histogram an array ``[channels]``, then, by exponent, of |x|. It and the exact
        quantile lie in the same bin. By exponent they have the same sign, and differ by less than a factor of 2
        (outside the bin of zeros and subnormals, and inside the histogram's range); linear, by less than a bin's width
        (inside the range; outside, both lie between it and the extreme). NaN where nothing was counted; ValueError
        without a histogram.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"quantile: expected 0 <= q <= 1, got {q}")
        if self.histogram is None:
            raise ValueError(
                "quantile: expected a site with a histogram; this one was measured with histogram=None, or in a step "
                "of which totals alone were sent (channels_every), or is of Snapshot.compact()"
            )
        counts, edges = self.histogram.counts, self.histogram.edges
        if isinstance(self._bins, LinearBins) and self._histogram is not None:  # with what lies outside
            counts, edges = self._histogram, np.concatenate([[-np.inf], edges, [np.inf]])
        if counts.ndim == 1:
            return _quantile(counts, edges, q, self.total.min, self.total.max)
        channels = Stats[Array](self._moments)
        low, high = (channels.min, channels.max) if isinstance(self._bins, LinearBins) else (0.0, channels.abs_max)
        low, high = (np.broadcast_to(extreme, len(counts)) for extreme in (low, high))
        return np.array([_quantile(*row[:1], edges, q, *row[1:]) for row in zip(counts, low, high, strict=True)])

    def __repr__(self) -> str:
        return f"SiteStats(calls={self.calls}, total={self.total})"


def _quantile(counts: Counts, edges: Array, q: float, low: float, high: float) -> float:
    cumulative = np.cumsum(counts)
    if cumulative[-1] == 0:
        return float("nan")
    rank = q * cumulative[-1]
    bin_ = int(min(np.searchsorted(cumulative, max(rank, 1e-300)), len(counts) - 1))
    below = cumulative[bin_] - counts[bin_]
    lower, upper = max(edges[bin_], low), min(edges[bin_ + 1], high)
    return float(lower + (upper - lower) * (rank - below) / counts[bin_])


class Snapshot(Mapping[Site, SiteStats]):
    """One measured step: ``snapshot["layers.0.mlp", "output"]`` is a SiteStats.

    ``step``: its number. ``scalars``: what was given to `Monitor.step` with it, as floats. ``order``: the sites that
    fired, in order of execution (per device). ``skipped``: sites of which tensors were left out in this step, or that
    are given up, each with the reason and how many tensors.

    With a grad_scaler, else None: ``grad_scale``, a float, by which gradients of outputs and inputs were divided;
    ``overflowed``, whether the scaler has skipped an optimizer's step for an overflow.
    """

    def __init__(
        self,
        step: int,
        sites: Mapping[Site, SiteStats],
        order: list[Site],
        scalars: dict[str, float],
        grad_scale: float | None = None,
        overflowed: bool | None = None,
    ) -> None:
        self.step = step
        self.scalars = scalars
        self.grad_scale = grad_scale
        self.overflowed = overflowed
        self.order = order
        self.skipped: dict[Site, Skipped] = {}
        self._sites = sites

    def __getitem__(self, site: tuple[str, str]) -> SiteStats:
        try:
            return self._sites[Site(*site)]
        except (KeyError, TypeError):
            known = ", ".join(str(tuple(each)) for each in list(self._sites)[:5])
            raise KeyError(f"expected (name, tensor) of a watched site, such as {known}; got {site!r}") from None

    def __iter__(self) -> Iterator[Site]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)

    @property
    def first_nonfinite(self) -> Site | None:
        """The first site in ``order`` that holds NaN, Inf or -Inf; None where every value is finite.

        Gradients of parameters count as well. In the step in which a run diverges, this is where it began; one step
        later everything holds NaN.
        """
        for site in self.order:
            whole = self[site].total
            if whole.nans or whole.posinfs or whole.neginfs:
                return site
        return None

    @property
    def grad_norm(self) -> float | None:
        """The L2 norm of the watched parameters' gradients together, as ``clip_grad_norm_`` returns it.

        Of the gradients that the optimizer was given, after clipping, where they were clipped; or as they were when
        `Monitor.measure_gradients` was called. Of this process.
        Where an optimizer stepped several times in the step, the root of the mean square over these. Infinite or NaN
        where a gradient is, None where no ``param_grad`` was measured.
        """
        gradients = [stats for site, stats in self.items() if site.tensor == "param_grad" and stats.calls]
        if not gradients:
            return None
        if any(stats.total.nans for stats in gradients):
            return float("nan")
        if any(stats.total.posinfs or stats.total.neginfs for stats in gradients):
            return float("inf")
        return float(np.sqrt(sum(stats.total.l2_norm**2 / stats.calls for stats in gradients)))

    def compact(self) -> Snapshot:
        """The totals alone, for keeping: less than a kilobyte for each site, and for each SiteStats kept of it.

        A Snapshot holds the copy of the whole step's state, and so does every SiteStats that is kept of it. Of this
        one ``channels`` and ``histogram`` are None; everything else is the same.
        """
        sites = {site: stats._compact() for site, stats in self.items()}
        compact = Snapshot(self.step, sites, list(self.order), dict(self.scalars), self.grad_scale, self.overflowed)
        compact.skipped = dict(self.skipped)
        return compact

    def __repr__(self) -> str:
        return f"Snapshot(step={self.step}, {len(self.order)} of {len(self)} sites fired)"

    def table(self, sort: str | None = None) -> str:
        """A text table, a line for each site: in order of execution, or by a statistic of the totals, largest first.

        ``sort``: a statistic's name (ValueError for another one). ``channels`` says how many are kept apart, ``dim``
        along which dimension. Sites that did not fire come last, and those that are not measured, each with the reason.
        """
        if sort is not None and sort not in STATISTICS:
            raise ValueError(f"sort: expected one of {', '.join(STATISTICS)}, got {sort!r}")
        fired = list(self.order)
        if sort is not None:
            fired.sort(key=lambda site: -np.nan_to_num(getattr(self[site].total, sort), nan=-np.inf))
        shown = ["mean", "std", "rms", "abs_max"]
        if sort is not None and sort not in (*shown, "count", "zeros", "nans", "posinfs", "neginfs"):
            shown.append(sort)
        rows = [["site", "tensor", "calls", "channels", "dim", *shown, "zeros%", "nan", "inf"]]
        for site in fired:
            stats = self[site]
            all_ = stats.total
            channels = "-" if stats.channels is None else str(len(stats.channels.count))
            dim = "-" if stats.channel_dim is None else str(stats.channel_dim)
            numbers = [f"{getattr(all_, name):.3g}" for name in shown]
            zeros = f"{100 * all_.zeros / all_.count:.1f}" if all_.count else "-"
            counts = [f"{all_.nans:.0f}", f"{all_.posinfs + all_.neginfs:.0f}"]
            rows.append(
                [site.name or "(model)", site.tensor, str(stats.calls), channels, dim, *numbers, zeros, *counts]
            )
        lines = _aligned(rows, left=2)
        silent = [site for site in self if self[site].calls == 0]
        if silent:
            lines.append(f"did not fire: {', '.join(map(str, silent))}")
        lines += [f"not measured: {site}: {skipped}" for site, skipped in self.skipped.items()]
        return "\n".join(lines)

    def flat(self, *statistics: str) -> dict[str, float]:
        """The totals as ``{"name/tensor/statistic": value}``, for loggers. Without arguments, all statistics."""
        unknown = [name for name in statistics if name not in STATISTICS]
        if unknown:
            raise ValueError(f"flat: expected some of {', '.join(STATISTICS)}; got {', '.join(unknown)}")
        return {
            "/".join(filter(None, (*site, name))): getattr(self[site].total, name)
            for site in self.order
            for name in statistics or STATISTICS
        }

    def to_pandas(self) -> pandas.DataFrame:
        """A DataFrame of the totals: a row for each site in order of execution, indexed by (name, tensor)."""
        try:
            import pandas
        except ImportError:
            raise ImportError("to_pandas needs pandas: pip install 'hookstats[pandas]'") from None
        rows = [
            {"calls": self[site].calls} | {name: getattr(self[site].total, name) for name in STATISTICS}
            for site in self.order
        ]
        index = pandas.MultiIndex.from_tuples(self.order, names=["name", "tensor"])
        return pandas.DataFrame(rows, index=index, columns=["calls", *STATISTICS])


def _aligned(rows: list[list[str]], left: int) -> list[str]:
    """Columns under each other: the first `left` to the left, the others to the right; a rule under the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * len("  ".join("-" * w for w in widths)))
    return lines
