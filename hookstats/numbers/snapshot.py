"""Snapshot, SiteStats: one measured step as numbers on the host. Pure numpy; finished when they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hookstats.numbers.fields import (
    FIELDS,
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
    histogram_shape,
    octave_edges,
    total,
)

if TYPE_CHECKING:
    import pandas


def _bits(values: Any) -> bytes:
    """Of float64, with one NaN for all."""
    array = np.asarray(values, np.float64)
    return np.where(np.isnan(array), np.nan, array).tobytes()


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


class Density:
    """Where the values of histograms lie: inside the bins, too.

    By exponent, the density in a bin is taken as proportional to |x|^s: s from the densities of the bins beside it, at
    an end of the data from the two before. Linear, it is even. No bin reaches beyond the smallest and largest value,
    and zeros, which are counted, lie at 0.
    """

    def __init__(self, counts: Counts, edges: Array, low: Array, high: Array, zeros: Array | None) -> None:
        """counts: ``[bins]`` or ``[rows, bins]``; low, high, zeros: ``[rows]``, the extremes and how many are 0.

        edges: ``[bins + 1]``; the outermost bins hold what lies beyond them. zeros: None for linear bins.
        """
        many = np.atleast_2d(counts).astype(np.float64)
        with np.errstate(all="ignore"):  # bins that are empty, or that one value fills
            inner = np.concatenate([[-np.inf], edges[1:-1], [np.inf]])
            lower, upper = (np.clip(part, low[:, None], high[:, None]) for part in (inner[:-1], inner[1:]))
            power = np.zeros_like(many)
            if zeros is not None:
                middle = int(np.searchsorted(edges, 0.0, side="right")) - 1
                power = _powers(many, edges, lower, upper, middle)
                rest = np.maximum(many[:, middle] - zeros, 0)  # between 0 and the bins beside
                negative = rest * np.where(low >= 0, 0, np.where(high <= 0, 1, 0.5))
                nothing, left, right = np.zeros_like(rest), lower[:, middle], upper[:, middle]
                many = _with_three(many, middle, negative, zeros, rest - negative)
                lower = _with_three(lower, middle, np.minimum(left, 0), nothing, np.maximum(left, 0))
                upper = _with_three(upper, middle, np.minimum(right, 0), nothing, np.maximum(right, 0))
                power = _with_three(power, middle, nothing, nothing, nothing)
            self._counts, self._lower, self._upper = many, lower, upper
            self._negative = upper <= 0
            self._near, self._far = np.where(self._negative, [-upper, -lower], [lower, upper])
            self._length = np.log(self._far / self._near)
            most = 600 / self._length  # or its exponential overflows
            exponent = np.clip(power + 1, -most, most)
            self._exponent = np.where(exponent == 0, 1e-30, exponent)

    def quantile(self, q: float) -> Array:
        """``[rows]``; NaN where a row is empty."""
        cumulative = np.cumsum(self._counts, axis=1)
        rank = np.maximum(q * cumulative[:, -1:], 1e-300)
        bins = np.minimum((cumulative < rank).sum(1, keepdims=True), cumulative.shape[1] - 1)

        def of_bin(values: Any) -> Any:
            return np.take_along_axis(values, bins, axis=1)

        negative, near, far = of_bin(self._negative), of_bin(self._near), of_bin(self._far)
        exponent, length, count = of_bin(self._exponent), of_bin(self._length), of_bin(self._counts)
        with np.errstate(all="ignore"):
            share = 1 - (of_bin(cumulative) - rank) / count
            share = np.where(negative, 1 - share, share)  # of the bin, from the end near 0
            by_power = near * np.exp(np.log1p(share * np.expm1(exponent * length)) / exponent)
            inside = np.clip(np.where(near > 0, by_power, near + share * (far - near)), near, far)
        inside = np.where((share >= 1) | (near == far), far, inside)
        return np.where(count > 0, np.where(negative, -inside, inside), np.nan)[:, 0]

    def share_below(self, x: float) -> Array:
        """``[rows]``: of the values that are smaller than x; NaN where a row is empty."""
        return self._mean(np.where(self._lower >= x, 0.0, np.where(self._upper <= x, 1.0, self._below(x))))

    def share_above(self, x: float) -> Array:
        """``[rows]``: of the values that are larger than x; NaN where a row is empty."""
        return self._mean(np.where(self._upper <= x, 0.0, np.where(self._lower >= x, 1.0, 1 - self._below(x))))

    def _below(self, x: float) -> Array:
        """Of each bin's values."""
        with np.errstate(all="ignore"):
            at = np.clip(np.where(self._negative, -x, x), self._near, self._far)
            by_power = _grown(self._exponent, np.log(at / self._near)) / _grown(self._exponent, self._length)
            share = np.where(self._near > 0, by_power, (at - self._near) / (self._far - self._near))
        return np.where(self._negative, 1 - share, share)

    def kurtosis(self, mean: Array, var: Array) -> Array:
        """``[rows]``: E[(x - mean)^4] / var^2, from exact moments ``[rows]``; NaN where |mean| > 2 std, see SiteStats.

        The moments inside the bins are those of |x|^s; all are scaled so that the second one is exact.
        """
        with np.errstate(all="ignore"):
            third, fourth = self._moment(3), self._moment(4)
            square = var + mean**2
            grown = np.sqrt(square / self._moment(2))
            central = fourth * grown**4 - 4 * mean * third * grown**3 + 6 * mean**2 * square - 3 * mean**4
            return np.where(mean**2 <= 4 * var, central / var**2, np.nan)

    def _moment(self, k: int) -> Array:
        """``[rows]``: the mean of x^k."""
        ratio = _grown(self._exponent + k, self._length) / _grown(self._exponent, self._length)
        power = self._near**k * np.where(self._far > self._near, ratio, 1)
        around_zero = (self._far ** (k + 1) - self._near ** (k + 1)) / ((k + 1) * (self._far - self._near))
        inside = np.where(self._near > 0, power, np.where(self._far > self._near, around_zero, self._near**k))
        return self._mean(np.where(self._negative, (-1) ** k * inside, inside))

    def _mean(self, values: Array) -> Array:
        """Over all values, of what it is in each bin."""
        with np.errstate(invalid="ignore"):
            mean: Array = np.where(self._counts > 0, self._counts * values, 0).sum(1) / self._counts.sum(1)
        return mean


def _with_three(values: Array, at: int, *columns: Array) -> Array:
    """``[rows, bins]``, three columns in the place of one."""
    return np.concatenate([values[:, :at], np.stack(columns, axis=1), values[:, at + 1 :]], axis=1)


def _grown(exponent: Array, length: Array) -> Array:
    """The integral of exp(exponent * t) from 0 to length."""
    exponent = np.where(exponent == 0, 1e-30, exponent)  # whose integral is the length, to the last bit
    grown: Array = np.expm1(exponent * length) / exponent
    return grown


def _powers(counts: Array, edges: Array, lower: Array, upper: Array, middle: int) -> Array:
    """``[rows, bins]``: s of a density |x|^s in each bin; 0 where no bin beside it tells.

    From both bins beside it, the slope of log density over log |x| between their centres. At an end of the data, the
    slope to the last bin, and as much steeper as it became there: in the tail of a normal distribution four times an
    octave, which is the most that is taken, of an exponential one twice.
    """
    cut = (lower > edges[:-1]) | (upper < edges[1:])  # at the extreme: one value of it says nothing of the density
    near, far = np.minimum(np.abs(lower), np.abs(upper)), np.maximum(np.abs(lower), np.abs(upper))
    usable = (counts - cut > 0) & (upper > lower) & (near > 0)
    usable[:, middle] = False
    beyond, bins = np.full((len(counts), 2), np.nan), counts.shape[1]
    density = np.where(usable, np.log((counts - cut) / (upper - lower)), np.nan)
    density = np.concatenate([beyond, density, beyond], axis=1)
    centre = np.concatenate([beyond, np.log(near * far) / 2, beyond], axis=1)

    def slope(a: int, b: int) -> Any:
        one, other = slice(2 + a, 2 + a + bins), slice(2 + b, 2 + b + bins)
        return (density[:, other] - density[:, one]) / (centre[:, other] - centre[:, one])

    result = slope(-1, 1)
    for side in (-1, 1):
        last, before = slope(side, 0), slope(2 * side, side)
        steeper = np.where(before < 0, np.clip(last / before, 1, 4), np.where(before >= 0, 4, 1))
        at_end = np.where(last < 0, last * np.sqrt(steeper), last)
        result = np.where(np.isnan(result), at_end, result)
    return np.where(np.isnan(result) | ~usable, 0, result)


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
        self._measured = moments
        self._scale = scale
        self._histogram = histogram
        self._per_channel = per_channel
        self._bins = bins or ExponentBins()

    @cached_property
    def total(self) -> Stats[float]:
        """Over all channels."""
        return Stats(_whole([self])[:, 0])

    @cached_property
    def _moments(self) -> Array:
        return self._measured if self._scale == 1 else divided(self._measured, self._scale)

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
            edges = np.linspace(float(self._bins.lo), float(self._bins.hi), self._bins.n + 1)
            return Histogram(counts, edges / self._scale, *outside)
        if self._histogram.ndim == 1:
            counts, edges = exponent_histogram(self._histogram)
            return Histogram(counts, edges / self._scale)
        return Histogram(self._histogram, octave_edges() / self._scale)

    def quantile(self, q: float) -> Any:
        """The q-quantile of the finite values, from the histogram, see `Density`.

        A float; with a per-channel histogram an array ``[channels]``, then, by exponent, of |x|. It and the exact
        quantile lie in the same bin: by exponent they have the same sign, and differ by less than a factor of 2
        (outside float32's subnormals, and inside the histogram's range); linear, by less than a bin's width (inside the
        range; outside, both lie between it and the extreme). By exponent the 0.99-quantile of many normal values is
        within 3 %. NaN where nothing was counted; ValueError without a histogram.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"quantile: expected 0 <= q <= 1, got {q}")
        return self._by_histogram("quantile", lambda density: density.quantile(q))

    def share_above(self, x: float) -> Any:
        """The share of the finite values that are larger than x, from 0 to 1, from the histogram.

        A float; with a per-channel histogram an array ``[channels]``, then, by exponent, the share of |x|. Exact at 0
        and where x is one of ``histogram.edges``, but for values that equal this edge, which count in the bin that
        they belong to (away from 0; linear: upwards). Between edges it is off by less than what x's bin holds. NaN
        where nothing was counted; ValueError without a histogram.
        """
        return self._by_histogram("share_above", lambda density: density.share_above(x))

    def share_below(self, x: float) -> Any:
        """The share of the finite values that are smaller than x; as `share_above`."""
        return self._by_histogram("share_below", lambda density: density.share_below(x))

    def kurtosis(self) -> float:
        """E[(x - mean)^4] / var^2 of the finite values, 3 for a normal: an estimate from the histogram by exponent.

        Of many values, with mean and variance exact and a density inside the bins as in `Density`: within 5 % for
        normal and Laplace data, 12 % for ReLU and GELU; 20 % for lognormal data, whose few largest values decide, 30 %
        where a few outliers do, 25 % where much of the data lies on single values other than 0. NaN for fewer than two
        values, and where |mean| > 2 std: bins of a factor of 2 do not resolve such data. It is no row of Stats, because
        all those follow exactly from the state, also in steps of which totals alone are sent. ValueError unless the
        histogram is ``ExponentBins()``.
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
                "of which totals alone were sent (channels_every), or is of Snapshot.compact()"
            )
        per_channel = self._histogram.ndim == 2
        stats = Stats[Array](self._moments if per_channel else _whole([self]))
        if isinstance(self._bins, LinearBins):
            return Density(self._histogram, np.pad(self.histogram.edges, 1), stats.min, stats.max, None)
        low, high = (np.zeros_like(stats.count), stats.abs_max) if per_channel else (stats.min, stats.max)
        return Density(self.histogram.counts, self.histogram.edges, low, high, stats.zeros)

    def _content(self) -> tuple[Any, ...]:
        histogram = None if self._histogram is None else (self._bins, self._histogram.shape, self._histogram.tobytes())
        state = (self._measured.shape, _bits(self._measured), _bits(self._scale))
        return self.calls, self.channel_dim, self._per_channel, state, histogram

    def _to_dict(self) -> dict[str, Any]:
        histogram = None
        if self._histogram is not None:
            bins = self._bins
            linear = {"lo": float(bins.lo), "hi": float(bins.hi), "n": bins.n} if isinstance(bins, LinearBins) else None
            histogram = {"linear": linear, "per_channel": bins.per_channel, "counts": self._histogram.tolist()}
        return {
            "calls": self.calls,
            "channel_dim": self.channel_dim,
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
            per_channel, linear = of_bins["per_channel"], of_bins["linear"]
            bins = LinearBins(**linear, per_channel=per_channel) if linear else ExponentBins(per_channel)
            counts = np.array(of_bins["counts"], np.int64)
            shape = histogram_shape(bins, measured.shape[1])
            if counts.shape != shape:
                raise ValueError(f"from_dict: {where}: expected counts of shape {shape}, got {counts.shape}")
        return cls(measured, d["calls"], counts, d["keeps_channels"], bins, d["scale"], d["channel_dim"])

    def __repr__(self) -> str:
        return f"SiteStats(calls={self.calls}, total={self.total})"


def _side_by_side(sites: Sequence[SiteStats]) -> tuple[Array, Counts, Array]:
    """States as they were measured, ``[fields, channels of all]``; of each site, how many, and its scale."""
    measured = [np.empty((len(FIELDS), 0)), *(stats._measured for stats in sites)]
    widths = np.array([stats._measured.shape[1] for stats in sites], np.int64)
    return np.concatenate(measured, axis=1), widths, np.array([stats._scale for stats in sites])


def _whole(sites: Sequence[SiteStats]) -> Array:
    """``[fields, sites]``: of each, all channels together."""
    moments, widths, scales = _side_by_side(sites)
    together = total(moments, np.cumsum(widths) - widths)
    return together if (scales == 1).all() else divided(together, scales)


_VERSION = 1  # of what `Snapshot.to_dict` gives


class ChannelValue(NamedTuple):
    """A statistic of one channel, see `Snapshot.top_channels`."""

    site: Site
    channel: int
    value: float


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

    @cached_property
    def totals(self) -> Stats[Array]:
        """The totals of all sites that fired: one Stats whose arrays ``[sites]`` are in the order of ``order``."""
        return Stats(_whole([self._sites[site] for site in self.order]))

    @property
    def first_nonfinite(self) -> Site | None:
        """The first site in ``order`` that holds NaN, Inf or -Inf; None where every value is finite.

        Gradients of parameters count as well. In the step in which a run diverges, this is where it began; one step
        later everything holds NaN.
        """
        bad = self.totals.nans + self.totals.posinfs + self.totals.neginfs > 0
        return self.order[int(bad.argmax())] if bad.any() else None

    @property
    def grad_norm(self) -> float | None:
        """The L2 norm of the watched parameters' gradients together, as ``clip_grad_norm_`` returns it.

        Of the gradients that the optimizer was given, after clipping, where they were clipped; or as they were when
        `Monitor.measure_gradients` was called. Of this process.
        Where an optimizer stepped several times in the step, the root of the mean square over these. Infinite or NaN
        where a gradient is, None where no ``param_grad`` was measured.
        """
        chosen = [i for i, site in enumerate(self.order) if site.tensor == "param_grad"]
        if not chosen:
            return None
        if self.totals.nans[chosen].any():
            return float("nan")
        if (self.totals.posinfs + self.totals.neginfs)[chosen].any():
            return float("inf")
        calls = [self[self.order[i]].calls for i in chosen]
        return float(np.sqrt((self.totals.l2_norm[chosen] ** 2 / calls).sum()))

    def compact(self) -> Snapshot:
        """The totals alone, for keeping: less than a kilobyte for each site, and for each SiteStats kept of it.

        A Snapshot holds the copy of the whole step's state, and so does every SiteStats that is kept of it. Of this
        one ``channels`` and ``histogram`` are None; everything else is the same.
        """
        whole = _whole(list(self.values()))
        sites = {
            site: SiteStats(whole[:, i : i + 1].copy(), stats.calls, None, False)
            for i, (site, stats) in enumerate(self.items())
        }
        compact = Snapshot(self.step, sites, list(self.order), dict(self.scalars), self.grad_scale, self.overflowed)
        compact.skipped = dict(self.skipped)
        return compact

    def select(self, names: str | Iterable[str] = "*", tensors: str | Iterable[str] | None = None) -> Snapshot:
        """The sites whose name matches one of the globs, in the same order; the statistics are not copied.

        ``names``: globs as `attach` has them (``*`` crosses dots, "" is the model). ``tensors``: their tensors, None
        for all: "output" takes "output.0" as well. ``skipped`` is selected, too; what concerns the step stays.
        ValueError for a glob or a tensor that no site of this Snapshot has.
        """
        globs = [names] if isinstance(names, str) else list(names)
        kinds = [tensors] if isinstance(tensors, str) else list(tensors or ())
        known = list(dict.fromkeys([*self, *self.skipped]))

        def is_of(site: Site, kind: str) -> bool:
            return site.tensor == kind or site.tensor.startswith(f"{kind}.")

        for glob in globs:
            if not any(fnmatchcase(site.name, glob) for site in known):
                some = ", ".join(repr(name) for name in list(dict.fromkeys(site.name for site in known))[:8])
                raise ValueError(f"select: the glob {glob!r} matches nothing; the names are {some}, ...")
        for kind in kinds:
            if not any(is_of(site, kind) for site in known):
                some = ", ".join(dict.fromkeys(site.tensor for site in known))
                raise ValueError(f"select: tensors: expected some of {some}; got {kind!r}")
        chosen = {
            site
            for site in known
            if any(fnmatchcase(site.name, glob) for glob in globs)
            and (tensors is None or any(is_of(site, kind) for kind in kinds))
        }
        sites = {site: stats for site, stats in self._sites.items() if site in chosen}
        order = [site for site in self.order if site in chosen]
        part = Snapshot(self.step, sites, order, dict(self.scalars), self.grad_scale, self.overflowed)
        part.skipped = {site: skipped for site, skipped in self.skipped.items() if site in chosen}
        return part

    def to_dict(self) -> dict[str, Any]:
        """Everything in the Snapshot as dicts, lists, strings and numbers, for JSON; `from_dict` reads it.

        ``json.loads(json.dumps(d))`` gives every number back exactly; Infinity and NaN are written as Python's json
        writes them (``allow_nan``). Of a site: ``state``, the rows of `State` as they were measured, a list with one
        number for each channel; ``scale``, by which values are divided when they are read; ``histogram``, with the
        counts of the state (512 by sign and exponent, 64 octaves a channel; ``linear`` ones with those outside before
        and behind them).
        """
        return {
            "version": _VERSION,
            "step": self.step,
            "scalars": dict(self.scalars),
            "grad_scale": self.grad_scale,
            "overflowed": self.overflowed,
            "order": [list(site) for site in self.order],
            "skipped": [{**site._asdict(), **skipped._asdict()} for site, skipped in self.skipped.items()],
            "sites": [{**site._asdict(), **stats._to_dict()} for site, stats in self._sites.items()],
        }

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Snapshot:
        """What `to_dict` gave. ValueError where it is of another version, or a state or histogram has another shape."""
        if d.get("version") != _VERSION:
            raise ValueError(f"from_dict: expected version {_VERSION}, got {d.get('version')!r}")
        snapshot = cls(
            d["step"],
            {Site(each["name"], each["tensor"]): SiteStats._from_dict(each) for each in d["sites"]},
            [Site(*site) for site in d["order"]],
            dict(d["scalars"]),
            d["grad_scale"],
            d["overflowed"],
        )
        snapshot.skipped = {
            Site(each["name"], each["tensor"]): Skipped(each["reason"], each["times"]) for each in d["skipped"]
        }
        return snapshot

    def equals(self, other: Snapshot) -> bool:
        """Whether everything is the same: order, scalars, what was skipped, and every state and histogram to the bit.

        A NaN equals any NaN.
        """
        return self._content() == other._content()

    def _content(self) -> tuple[Any, ...]:
        scale = None if self.grad_scale is None else _bits(self.grad_scale)
        step = (self.step, list(self.scalars), _bits(list(self.scalars.values())), scale, self.overflowed)
        sites = [(site, stats._content()) for site, stats in self._sites.items()]
        return step, self.order, list(self.skipped.items()), sites

    def __repr__(self) -> str:
        return f"Snapshot(step={self.step}, {len(self.order)} of {len(self)} sites fired)"

    def table(self, sort: str | None = None) -> str:
        """A text table, a line for each site: in order of execution, or by a statistic of the totals, largest first.

        ``sort``: a statistic's name (ValueError for another one). ``channels`` says how many are kept apart, ``dim``
        along which dimension. Sites that did not fire come last, and those that are not measured, each with the reason.
        """
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
            stats = self._sites[site]
            channels = str(stats._measured.shape[1]) if stats._per_channel else "-"
            dim = "-" if stats.channel_dim is None else str(stats.channel_dim)
            rows.append([site.name or "(model)", site.tensor, str(stats.calls), channels, dim, *numbers])
        if sort is not None:
            rows = [rows[i] for i in np.argsort(-np.nan_to_num(getattr(totals, sort), nan=-np.inf), kind="stable")]
        rows.insert(0, ["site", "tensor", "calls", "channels", "dim", *shown, "zeros%", "nan", "inf"])
        lines = _aligned(rows, left=2)
        silent = [site for site, stats in self._sites.items() if stats.calls == 0]
        if silent:
            lines.append(f"did not fire: {', '.join(map(str, silent))}")
        lines += [f"not measured: {site}: {skipped}" for site, skipped in self.skipped.items()]
        return "\n".join(lines)

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
        _check_statistics("top_channels", [statistic])
        if k < 1:
            raise ValueError(f"top_channels: expected k >= 1, got {k}")
        sites, widths, stats = self._channels()
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
        sites = [site for site in self.order if self._sites[site]._per_channel]
        moments, widths, scales = _side_by_side([self._sites[site] for site in sites])
        return sites, widths, Stats(moments if (scales == 1).all() else divided(moments, np.repeat(scales, widths)))

    def to_pandas(self, channels: bool = False) -> pandas.DataFrame:
        """A DataFrame of the totals: a row for each site in order of execution, indexed by (name, tensor).

        ``channels=True``: a row for each channel of each site that keeps them, indexed by (name, tensor, channel).
        """
        try:
            import pandas
        except ImportError:
            raise ImportError("to_pandas needs pandas: pip install 'hookstats[pandas]'") from None
        sites, widths, stats = self.order, np.ones(len(self.order), np.int64), self.totals
        if channels:
            sites, widths, stats = self._channels()
        places = np.repeat(np.arange(len(sites)), widths)
        levels = {part: [getattr(site, part) for site in sites] for part in Site._fields}
        index = {part: np.array(level, object)[places] for part, level in levels.items()}
        if channels:
            index["channel"] = np.arange(len(places)) - np.repeat(np.cumsum(widths) - widths, widths)
        calls = np.array([self._sites[site].calls for site in sites], np.int64)[places]
        columns = {"calls": calls} | {name: getattr(stats, name) for name in STATISTICS}
        return pandas.DataFrame(columns, pandas.MultiIndex.from_arrays(list(index.values()), names=list(index)))


def _check_statistics(argument: str, names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in STATISTICS]
    if unknown:
        raise ValueError(f"{argument}: expected one of {', '.join(STATISTICS)}; got {', '.join(map(repr, unknown))}")


def _aligned(rows: list[list[str]], left: int) -> list[str]:
    """Columns under each other: the first `left` to the left, the others to the right; a rule under the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = "  ".join(f"{{:{'<' if i < left else '>'}{width}}}" for i, width in enumerate(widths)).format
    lines = [line(*row) for row in rows]
    lines.insert(1, "-" * (sum(widths) + 2 * len(widths) - 2))
    return lines
