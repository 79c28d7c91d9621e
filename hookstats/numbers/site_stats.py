"""SiteStats: the statistics of one site in one step, finished when they are read. Pure numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from numbers import Real
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hookstats.numbers.fields import (
    EXPONENT_BINS,
    FIELDS,
    Array,
    Bins,
    Counts,
    ExponentBins,
    LinearBins,
    Stats,
    bins_from_json,
    bins_to_json,
    exponent_histogram,
    fold_channels,
    histogram_shape,
    octave_edges,
    unscale,
)
from hookstats.numbers.histogram import BlockExponents, Density, Histogram

_Number = TypeVar("_Number", bound=np.generic)


class StandardError(NamedTuple):
    """Standard errors of statistics of the rows that were read, as estimates of those of all rows.

    ``mean``, ``rms``: those of the total. ``share``: that of a share of the values, such as ``zeros / count``, at most.
    ``channels``: those of the channels' means, an array; None where channels are not kept.

    All are 0 where every row was read. Rows count as if they were drawn at random, and where channels are kept, values
    of a row as if one told the others, so that those of the total are bounds. What is in few rows alone, such as one
    that is not finite, is not in it. ``rms`` needs a histogram by exponent, else it is NaN.
    """

    mean: float
    rms: float
    share: float
    channels: Array | None


class SiteStats:
    """The statistics of one site in one step.

    ``calls``: tensors folded in (0: the site did not fire). ``total``: over everything. ``channels``: per channel, or
    None where channels are not kept, or were not sent in this step (``Channels.every``). ``channel_dim``: the dimension
    of the tensors that the channels are (-1: the last); None where they are not kept, or nothing has told it yet.
    ``histogram``: or None. ``group_size``: how many channels in a row belong together, such as the ``head_dim`` of
    attention; None where nothing says that they do (``Channels.group_size``). ``rows``: 1, or n where every n-th row
    was read (``attach(rows=n)``): then all is of the rows read, and `standard_error` says how far that may be off.
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
        group_size: int | None = None,
        rows: int = 1,
    ) -> None:
        """moments: ``[fields, channels]``; histogram: as in the state, of these bins (None: by exponent).

        Both are copied where they are views, so that what is kept holds no more than its own numbers. scale: what the
        values were multiplied with before they were measured.
        """
        self.calls = calls
        self.channel_dim = channel_dim
        self.group_size = group_size
        self.rows = rows
        self._measured = _copy_view(moments)
        self._scale = scale
        self._histogram = None if histogram is None else _copy_view(histogram)
        self._per_channel = per_channel
        self._bins = bins or ExponentBins()

    @cached_property
    def total(self) -> Stats[float]:
        """Over all channels."""
        return Stats(self._whole[:, 0])

    @cached_property
    def standard_error(self) -> StandardError:
        """Standard errors, where some rows alone were read."""
        channels, total = Stats[Array](self._moments), self.total
        left_out = 1 - 1 / self.rows
        with np.errstate(invalid="ignore", divide="ignore"):
            means = np.sqrt(np.nan_to_num(channels.var) * left_out / channels.count)
            square_var = self._fourth_moment() - total.rms**4
            of_square = np.sqrt(np.maximum(square_var, 0) * left_out / channels.count.max())
            return StandardError(
                float(np.nansum(means * channels.count) / total.count) if total.count else float("nan"),
                float(of_square / (2 * total.rms)) if total.rms else 0.0,
                float(np.sqrt(0.25 * left_out / channels.count.max())) if total.count else float("nan"),
                means if self._per_channel else None,
            )

    def _fourth_moment(self) -> float:
        """The mean of x**4, from a histogram by exponent, as if values were spread evenly in each bin."""
        histogram = self.histogram
        if histogram is None or histogram.counts.ndim > 1 or isinstance(self._bins, LinearBins):
            return float("nan")
        low, high, counts = histogram.edges[:-1], histogram.edges[1:], histogram.counts
        some = np.flatnonzero(counts)
        low, high = np.maximum(low[some], self.total.min), np.minimum(high[some], self.total.max)
        powers = sum(low**i * high ** (4 - i) for i in range(5)) / 5
        return float((powers * counts[some]).sum() / counts.sum())

    @cached_property
    def _whole(self) -> Array:
        """``[fields, 1]``: all channels together."""
        return unscale(fold_channels(self._measured)[:, None], self._scale)

    @cached_property
    def _moments(self) -> Array:
        return unscale(self._measured, self._scale)

    @cached_property
    def channels(self) -> Stats[Array] | None:
        """Per channel."""
        return Stats(self._moments) if self._per_channel else None

    @cached_property
    def groups(self) -> Stats[Array] | None:
        """Statistics of groups of ``group_size`` channels, such as the heads of attention, ``[groups]``; as `grouped`.

        None where nothing says that channels belong together, and where channels are None.
        """
        size, width = self.group_size, self._measured.shape[1]
        return self.grouped(width // size) if size and self._per_channel and width % size == 0 else None

    def grouped(self, groups: int) -> Stats[Array]:
        """Statistics of so many equal groups of channels in a row, ``[groups]``, such as the heads of a projection.

        Merged from the channels' by Chan's formula, so that means far apart lose nothing.

        Raises:
            TypeError, ValueError: for what is no number of equal groups; without channels.
        """
        if self.channels is None:
            raise ValueError("grouped: expected statistics per channel, got totals alone")
        width = self._measured.shape[1]
        if isinstance(groups, bool) or not isinstance(groups, int):
            raise TypeError(f"grouped: expected an int, got {groups!r}")
        if groups < 1 or width % groups:
            raise ValueError(f"grouped: expected a number that divides the {width} channels, got {groups}")
        return Stats(unscale(fold_channels(self._measured, np.arange(0, width, width // groups)), self._scale))

    @property
    def max_violation(self) -> float:
        """MaxVio of the tokens that each expert got ("router.load"): the largest over the mean, minus 1.

        0 where all get the same, experts - 1 where one gets everything. Wang et al. 2024, arXiv 2408.15664. NaN where
        there are none; ValueError without channels.
        """
        tokens = self._sums("max_violation")
        return float(tokens.max() / tokens.mean() - 1) if tokens.any() else float("nan")

    @property
    def dead_share(self) -> float:
        """The share of the channels whose sum is 0: of "router.load", of the experts that got no token.

        ValueError without channels.
        """
        return float(np.mean(self._sums("dead_share") == 0))

    def _sums(self, what: str) -> Array:
        if self.channels is None:
            raise ValueError(f"{what}: expected statistics per channel, got totals alone")
        sums: Array = np.asarray(self.channels.mean * self.channels.count)
        return sums

    @cached_property
    def histogram(self) -> Histogram | None:
        """The histogram of the finite values."""
        if self._histogram is None:
            return None
        if isinstance(self._bins, LinearBins):
            below, counts, above = np.split(self._histogram, [1, -1], axis=-1)
            outside = (below[..., 0], above[..., 0]) if counts.ndim == 2 else (int(below[0]), int(above[0]))
            edges = np.linspace(float(self._bins.lo), float(self._bins.hi), self._bins.n + 1)
            return Histogram(counts, edges / self._scale, *outside)
        if self._histogram.ndim == 1:
            counts, edges = exponent_histogram(self._histogram[:EXPONENT_BINS])
            return Histogram(counts, edges / self._scale)
        return Histogram(self._histogram, octave_edges() / self._scale)

    @cached_property
    def blocks(self) -> BlockExponents | None:
        """Distances of values below the largest of their block; None without ``ExponentBins(block=...)``."""
        if self._histogram is None or not isinstance(self._bins, ExponentBins) or self._bins.block is None:
            return None
        return BlockExponents(self._bins.block, self._bins.block_dim, self._histogram[EXPONENT_BINS:], self._scale)

    def quantile(self, q: float) -> Any:
        """The q-quantile of the finite values, from the histogram, see `Density`.

        A float; with a per-channel histogram an array ``[channels]``, then, by exponent, of |x|. It and the exact
        quantile lie in the same bin: by exponent they have the same sign, and differ by less than a factor of 2
        (outside float32's subnormals, and inside the histogram's range); linear, by less than a bin's width (inside the
        range; outside, both lie between it and the extreme). By exponent the 0.99-quantile of many normal values is
        within 3 %. NaN where nothing was counted; ValueError without a histogram.
        """
        if not isinstance(q, Real) or not 0 <= q <= 1:
            raise ValueError(f"quantile: expected 0 <= q <= 1, got {q!r}")
        return self._by_histogram("quantile", lambda density: density.quantile(q))

    def share_above(self, x: float) -> Any:
        """The share of the finite values that are larger than x, from 0 to 1, from the histogram.

        A float; with a per-channel histogram an array ``[channels]``, then, by exponent, the share of |x|. Exact at 0
        and where x is one of ``histogram.edges``, but for values that equal this edge, which count in the bin that
        they belong to (away from 0; linear: upwards). Between edges it is off by less than what x's bin holds. NaN
        where nothing was counted; ValueError without a histogram.
        """
        _check_number("share_above", x)
        return self._by_histogram("share_above", lambda density: density.share_above(float(x)))

    def share_below(self, x: float) -> Any:
        """The share of the finite values that are smaller than x; as `share_above`."""
        _check_number("share_below", x)
        return self._by_histogram("share_below", lambda density: density.share_below(float(x)))

    def kurtosis(self) -> float:
        """E[(x - mean)^4] / var^2 of the finite values, 3 for a normal: an estimate from the histogram by exponent.

        Mean, variance and both extremes are exact; inside the bins the density is as in `Density`. Of 10,000 values it
        is within 15 % for normal, logistic, Laplace and uniform data; 30 % for ReLU and GELU, for lognormal data and
        Student's t of 3, whose few largest values decide; 50 % for mixtures of narrow and wide; 45 % where much of the
        data lies on single values other than 0, and no estimate where most of it lies on one. The table in
        docs/numbers.md has fewer and more values. NaN for fewer than two values, and where |mean| > 2 std: bins of a
        factor of 2 do not resolve such data. It is no row of Stats, because all those follow exactly from the state,
        also in steps of which totals alone are sent. ValueError unless the histogram is ``ExponentBins()``.
        """
        if self._histogram is not None and (self._histogram.ndim == 2 or isinstance(self._bins, LinearBins)):
            raise ValueError(f"kurtosis: expected a histogram of ExponentBins(), got one of {self._bins}")
        total = self.total
        var = total.var * (1 - 1 / max(total.count, 1))  # without the correction
        return float(self._density("kurtosis").kurtosis(np.array([total.mean]), np.array([var]))[0])

    def _by_histogram(self, what: str, of: Callable[[Density], Array]) -> Any:
        found = of(self._density(what))
        return found if self._histogram is not None and self._histogram.ndim == 2 else float(found[0])

    def _density(self, what: str) -> Density:
        if self.histogram is None or self._histogram is None:
            raise ValueError(
                f"{what}: expected a site with a histogram; this one was measured with histogram=None, or in a step "
                "of which totals alone were sent (Channels.every), or is of Snapshot.compact()"
            )
        per_channel = self._histogram.ndim == 2
        stats = Stats[Array](self._moments if per_channel else self._whole)
        if isinstance(self._bins, LinearBins):
            return Density(self._histogram, np.pad(self.histogram.edges, 1), stats.min, stats.max, None)
        low, high = (np.zeros_like(stats.count), stats.abs_max) if per_channel else (stats.min, stats.max)
        return Density(self.histogram.counts, self.histogram.edges, low, high, stats.zeros)

    def _to_dict(self) -> dict[str, Any]:
        histogram = None
        if self._histogram is not None:
            histogram = {**bins_to_json(self._bins), "counts": self._histogram.tolist()}
        return {
            "calls": self.calls,
            "channel_dim": self.channel_dim,
            "group_size": self.group_size,
            "rows": self.rows,
            "keeps_channels": self._per_channel,
            "scale": self._scale,
            "state": dict(zip(FIELDS, self._measured.tolist(), strict=True)),
            "histogram": histogram,
        }

    @classmethod
    def _from_dict(cls, d: Mapping[str, Any]) -> SiteStats:
        where = f"{d['name']!r} {d['tensor']}"
        state, of_bins = d["state"], d["histogram"]
        if set(state) != set(FIELDS):
            raise ValueError(f"from_dict: {where}: expected the fields {', '.join(FIELDS)}; got {', '.join(state)}")
        if len({len(row) for row in state.values()}) != 1:
            raise ValueError(f"from_dict: {where}: expected as many channels in each field, got {state}")
        measured = np.array([state[name] for name in FIELDS], np.float64)
        bins: Bins | None = None
        counts = None
        if of_bins is not None:
            bins = bins_from_json(of_bins)
            counts = np.array(of_bins["counts"], np.int64)
            shape = histogram_shape(bins, measured.shape[1])
            if counts.shape != shape:
                raise ValueError(f"from_dict: {where}: expected counts of shape {shape}, got {counts.shape}")
        kept = d["keeps_channels"], bins, d["scale"], d["channel_dim"], d["group_size"], d["rows"]
        return cls(measured, d["calls"], counts, *kept)

    def __repr__(self) -> str:
        return f"SiteStats(calls={self.calls}, total={self.total})"


def _check_number(where: str, x: object) -> None:
    if not isinstance(x, Real):
        raise TypeError(f"{where}: expected a number, got {x!r}")


def _copy_view(array: NDArray[_Number]) -> NDArray[_Number]:
    """The array itself where its memory is its own, else a copy: a view keeps the memory of the whole step alive."""
    return array if array.base is None else array.copy()
