"""Two snapshots of one step as arrays over the sites that both watch, and how far apart these are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hookstats.comparing import rounding
from hookstats.numbers.fields import Array, Counts, Site, Stats
from hookstats.numbers.frame import StepFrame
from hookstats.numbers.kinds import kind_of
from hookstats.numbers.snapshot import Snapshot

COUNTED = ("count", "nonfinite")  # must be the same
MEANS = ("mean", "abs_mean", "rms")
EXTREMES = ("min", "max")
KINKED = 0.01  # share of a gradient that is exactly zero
FAMILIES = {"counts": COUNTED, "means": MEANS, "extremes": EXTREMES, "channels": MEANS}


class Judged(NamedTuple):
    """A family of statistics of each site ``[n]``: that which is furthest apart, in units of what is allowed."""

    statistic: NDArray[np.int64]  # in the family's list
    channel: Counts  # -1 for totals
    a: Array
    b: Array
    distance: Array  # relative to the values' scale
    allowed: Array  # of it, in a first step


class SnapshotPair:
    """Two snapshots of one step.

    ``sites``: n that both watch and that fired in one at least, in order of execution (of `a`, where it fired there).
    ``fired`` ``[2, n]``: in which. ``distances`` ``[n]``: the largest
    difference among mean, abs_mean and rms of the totals, relative to the larger rms: 0 where these are the same, about
    1 where the tensors have nothing in common. NaN where a site was silent in one.

    ``is_bounded`` ``[n]``: whether rounding is small beside the values. Not so of what an optimizer makes of gradients:
    a new weight minus an old one keeps the rounding of the weights, an adaptive optimizer makes a whole update of a
    gradient that is rounding alone, and its states are averages of such gradients, or of their squares. What comes of
    it shows in the next step.

    ``is_of_module`` ``[n]``: whether it is an activation, or its gradient.
    """

    def __init__(self, a: Snapshot, b: Snapshot) -> None:
        self.a, self.b = a, b
        turn = {site: place / len(each.order) for each in (b, a) for place, site in enumerate(each.order)}
        shared = [site for site in turn if site in a and site in b]
        self.sites = sorted(shared, key=turn.__getitem__)
        self._places = [np.array([each.frame.sites.place[site] for site in self.sites], np.int64) for each in (a, b)]
        self.fired = np.stack([each.frame.calls[at] for each, at in zip((a, b), self._places, strict=True)]) > 0
        self.kinds = [kind_of(site.tensor) for site in self.sites]
        self.is_of_module = np.array([kind.of == "module" for kind in self.kinds], bool)
        self.is_bounded = self.fired.all(0) & np.array([not kind.is_update for kind in self.kinds], bool)
        self._totals = [each.frame.totals.entries(at) for each, at in zip((a, b), self._places, strict=True)]
        self._scale = np.fmax(*(np.nan_to_num(stats.rms) for stats in self._totals))
        self._sums = self._sum_gradients()
        self._scale = np.fmax(self._scale, self._sums)
        self.distances = np.where(self.fired.all(0), self._compute_differences(MEANS)[2].max(0, initial=0), np.nan)

    def bits(self) -> Counts:
        """``[2, n]``: significant bits that the extremes need, see `rounding.count_bits_of_sites`."""
        pairs = zip((self.a, self.b), self._places, strict=True)
        return np.stack([rounding.count_bits_of_sites(each.frame)[at] for each, at in pairs])

    def is_equal(self) -> bool:
        """Return whether sites, their order, totals, channels and scalars are the same, bit for bit."""
        a, b = self.a.frame, self.b.frame
        if a.sites.names != b.sites.names:
            return False
        both = np.flatnonzero(a.sites.keeps & b.sites.keeps).tolist()
        return (
            self.a.order == self.b.order
            and self.a.scalars.keys() == self.b.scalars.keys()
            and bits_of(list(self.a.scalars.values())) == bits_of(list(self.b.scalars.values()))
            and np.array_equal(a.calls, b.calls)
            and bits_of(a.wholes) == bits_of(b.wholes)
            and all(bits_of(a.state(i)) == bits_of(b.state(i)) for i in both)
        )

    def judge(self, units: Array, is_alike: bool) -> dict[str, Judged]:
        """Judge differences by family. units: of each site, the unit roundoff; is_alike: see `rounding.errors`."""
        errors = rounding.errors(units, self._read_kinks(), self._read_rows(), is_alike)
        one = np.ones_like(self._scale)
        largest = _find_largest(self._totals)
        count = np.fmax(*(stats.count for stats in self._totals))
        means = errors.bound_means(count, self._read_draws(), _compute_ratio(largest, self._scale))
        found = {
            "counts": self._find_worst(COUNTED, one, 0 * one),
            "means": self._find_worst(MEANS, self._scale, means),
            "extremes": self._find_worst(EXTREMES, np.fmax(largest, self._sums), errors.bound_extremes()),
        }
        channels = self._compare_channels(errors)
        return found if channels is None else found | {"channels": channels}

    def _read_widths(self) -> Counts:
        """``[2, n]``: how many channels are kept."""
        pairs = zip((self.a, self.b), self._places, strict=True)
        return np.stack([each.frame.sites.widths[at] for each, at in pairs])

    def _read_draws(self) -> Array:
        """``[n]``: the fewest channels of an activation, or its gradient, up to each site; 1 where none is known."""
        widths = self._read_widths().max(0)
        fewest = np.minimum.accumulate(np.where((widths > 1) & self.is_of_module, widths, np.inf))
        return np.where(np.isinf(fewest), 1.0, fewest)

    def _read_kinks(self) -> Counts:
        """``[n]``: how many a gradient may have come through: they make some of the values before exactly zero."""
        shares = np.fmax(*(self._count_scattered_zeros(each) for each in (0, 1)))
        is_gradient = np.array([kind.is_gradient for kind in self.kinds], bool)
        of_outputs = is_gradient & self.is_of_module & ~np.array([kind.is_input for kind in self.kinds], bool)
        passed = np.cumsum(of_outputs & (shares > KINKED))
        return np.where(is_gradient, passed, 0)

    def _read_rows(self) -> Array:
        """``[n]``: how many a parameter's gradient may be a sum over: the most that an activation had; else 0."""
        count = np.fmax(*(np.nan_to_num(stats.count) for stats in self._totals))
        most = (count / np.maximum(self._read_widths().max(0), 1))[self.is_of_module].max(initial=1)
        is_sum = np.array([kind.is_gradient and kind.of == "parameter" for kind in self.kinds], bool)
        return np.where(is_sum, most, 0.0)

    def _count_scattered_zeros(self, which: int) -> Array:
        """``[n]``: the share of zeros, without those of rows (padding, the last token) that are zero throughout."""
        frame, places = (self.a, self.b)[which].frame, self._places[which]
        zeros, widths = np.nan_to_num(self._totals[which].zeros), frame.sites.widths[places]
        chosen = np.flatnonzero(widths > 1)
        if chosen.size:
            width = widths[chosen]
            fewest = np.minimum.reduceat(_read_channels(frame, places[chosen], width).zeros, np.cumsum(width) - width)
            zeros[chosen] -= width * fewest
        return _compute_ratio(zeros, np.nan_to_num(self._totals[which].count))

    def _sum_gradients(self) -> Array:
        """``[n]``: of a bias's gradient, the rms that it has if what it is a sum of does not cancel; else 0."""
        place = {site: i for i, site in enumerate(self.sites)}
        count = np.fmax(*(np.nan_to_num(stats.count) for stats in self._totals))
        found = np.zeros(len(self.sites))
        for i, (name, kind) in enumerate(self.sites):
            module, _, parameter = name.rpartition(".")
            terms = place.get(Site(module, "grad_output"))
            if kind == "param_grad" and parameter == "bias" and terms is not None and count[i] > 0:
                found[i] = np.sqrt(count[terms] / count[i]) * self._scale[terms]
        return found

    def _compute_differences(self, names: tuple[str, ...], scale: Array | None = None) -> tuple[Array, Array, Array]:
        """``[names, n]``: of a, of b, and how far apart, relative to a scale."""
        of_a, of_b = (np.stack([_read_statistic(stats, name) for name in names]) for stats in self._totals)
        return of_a, of_b, _compute_relative(of_a, of_b, self._scale if scale is None else scale)

    def _find_worst(self, names: tuple[str, ...], scale: Array, allowed: Array) -> Judged:
        of_a, of_b, apart = self._compute_differences(names, scale)
        if names is not COUNTED:
            apart = np.where(self.is_bounded, apart, 0)
        worst = apart.argmax(0)
        at = (worst, np.arange(len(worst)))
        return Judged(worst, np.full(len(worst), -1), of_a[at], of_b[at], apart[at], allowed)

    def _compare_channels(self, errors: rounding.Errors) -> Judged | None:
        """Sites that keep as many channels in both; None where there is none."""
        widths = self._read_widths()
        chosen = np.flatnonzero((widths[0] == widths[1]) & (widths[0] > 1) & self.is_bounded)
        if not chosen.size:
            return None
        width = widths[0][chosen]
        begin = np.cumsum(width) - width
        site = np.repeat(np.arange(len(chosen)), width)
        stats = [
            _read_channels(each.frame, at[chosen], width)
            for each, at in zip((self.a, self.b), self._places, strict=True)
        ]
        own = np.fmax(*(np.nan_to_num(each.rms) for each in stats))
        scale = np.fmax(own, self._scale[chosen][site])
        count = np.fmax(*(each.count for each in stats))
        allowed = errors.select(chosen[site]).bound_means(
            count, np.ones(len(site)), _compute_ratio(_find_largest(stats), scale)
        )
        of_a, of_b = (np.stack([_read_statistic(each, name) for name in MEANS]) for each in stats)
        apart = _compute_relative(of_a, of_b, scale)
        statistic = apart.argmax(0)
        apart = apart[statistic, np.arange(len(site))]
        excess = apart / allowed
        most = np.maximum.reduceat(excess, begin)
        hits = np.flatnonzero(excess == most[site])
        at = hits[np.unique(site[hits], return_index=True)[1]]  # of each site the first channel that is furthest apart
        n = len(self.sites)
        ints, floats = np.zeros((2, n), np.int64), np.zeros((3, n))
        result = Judged(ints[0], ints[1], floats[0], floats[1], floats[2], np.ones(n))
        result.statistic[chosen], result.channel[chosen] = statistic[at], at - begin
        result.a[chosen], result.b[chosen] = of_a[statistic[at], at], of_b[statistic[at], at]
        result.distance[chosen], result.allowed[chosen] = apart[at], allowed[at]
        return result


def _read_statistic(stats: Stats[Array], name: str) -> Array:
    if name == "nonfinite":
        return stats.nans + stats.posinfs + stats.neginfs
    if name == "count":  # of all values: those that are not finite are another matter
        return stats.count + _read_statistic(stats, "nonfinite")
    result: Array = getattr(stats, name)
    return result


def _find_largest(stats: Sequence[Stats[Array]]) -> Array:
    """The largest magnitude in either."""
    return np.fmax(*(np.nan_to_num(each.abs_max) for each in stats))


def _compute_ratio(a: Array, b: Array) -> Array:
    """0 where there is nothing to divide by."""
    return np.divide(a, b, out=np.zeros_like(a), where=b > 0)


def _compute_relative(a: Array, b: Array, scale: Array) -> Array:
    """0 where both are the same, or there is no value in both; 2, the most, where there is one in one of them alone."""
    with np.errstate(all="ignore"):
        apart = np.abs(a - b) / scale
    apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, apart)
    return np.where(np.isnan(apart), 2.0, apart)


def _read_channels(frame: StepFrame, places: Counts, widths: Counts) -> Stats[Array]:
    """Return the channels of these sites, side by side."""
    begins = np.cumsum(frame.sites.widths) - frame.sites.widths
    at = np.repeat(begins[places] - np.cumsum(widths) + widths, widths) + np.arange(widths.sum())
    return frame.channels.entries(at)


def bits_of(values: Any) -> bytes:
    """The bits of float64, with one NaN for all."""
    array = np.asarray(values, np.float64)
    return np.where(np.isnan(array), np.nan, array).tobytes()
