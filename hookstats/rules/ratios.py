"""Laws by which two sums of a layer have one ratio, in each of its channels, and the same one in all layers.

They tell layers that keep to it within what rounding leaves from others, and name channels and the factor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hookstats.numbers.fields import Array, Counts, Stats, unscale
from hookstats.rules.engine import Ill
from hookstats.rules.history import middle
from hookstats.rules.memory import Memory
from hookstats.rules.step import Mask, Step

# What a program rounds to is not in a record: half the distance of bfloat16 from 1 is taken, the coarsest dtype that
# gradients are kept in. The roundings of summands are independent of each other: so many deviations of their sum.
_ROUNDING, _DEVIATIONS = 2.0**-8, 4.0
_LOW_BITS = 0x1FFF  # of a float32, that are 0 in what was rounded to bfloat16, or to float16
# The last of them stay 0 where a few such numbers were added up in float32: of threads, of microbatches under autocast.
_LAST_BITS, _MOST_CHANNELS, _ENOUGH = 0xF, 0.9, 8
TELLS = 8.0  # times what rounding leaves: sums of this size have not cancelled
_LEAST, _LEAST_OF_RIGHT = 0.02, 1e-5  # of an L1 norm: the same of totals over all channels
_EQUAL, _CONSTANT, _EXACT = 0.01, 0.005, 1e-4  # ratios: that agree; from step to step; where layers agree to less
_LITTLE = 0.1  # of what rounding allows
_SOME, _ADDED, _ALONG, _GROWN = 64, 0.05, 0.8, 2.0  # channels that are compared; squares: left of them; a cosine; more
_OF_WHOLE = 2  # measured steps in a row, where a factor is a whole number, or 1 over one

Say = Callable[["Broken"], str]


class Broken(NamedTuple):
    """A layer that breaks a law, for the sentence about it.

    ``factor``: over what it is in ``others`` layers, which is ``common``.
    ``channels``: those that break it, of ``width``; all: none is named, as none is where only totals are known.
    ``is_late``: whether it kept the law before. The factor is NaN where channels have no common one.
    """

    name: str
    factor: float
    common: float
    others: int
    since: int
    is_late: bool
    channels: Counts
    width: int

    @property
    def size(self) -> str:
        """The factor in words."""
        whole = f"{self.factor:.4g}" if abs(self.factor) > 0.95 else f"1/{1 / self.factor:.4g}" if self.factor else "0"
        return whole

    @property
    def where(self) -> str:
        """The channels, for the end of a name; empty: all."""
        if len(self.channels) in (0, self.width):
            return ""
        first, last = int(self.channels[0]), int(self.channels[-1])
        if last - first + 1 == len(self.channels):
            what = f"channels {first} to {last}" if first < last else f"channel {first}"
        else:
            what = f"{len(self.channels)} channels ({', '.join(map(str, self.channels[:3].tolist()))}, ...)"
        return f" in {what} of {self.width}"


class Sides(NamedTuple):
    """Two sums of each layer, those of all of its channels one after another, ``[channels]``.

    ``layers`` ``[layers]``: the ids of the left sides; ``begin``: of each layer's channels; ``widths``: how many. A
    layer of which no channels are known, or not as many on both sides, has one: the total. What rounding may leave of
    ``left - f right`` is f times ``rounding``, plus ``own``.
    """

    layers: Counts
    begin: Counts
    widths: Counts
    left: Array
    right: Array
    rounding: Array
    own: Array

    @classmethod
    def of(cls, step: Step, left: Counts, right: Counts) -> Sides | None:
        """left, right: the ids of both sides of each layer. None: no layer tells anything."""
        states, with_channels, others = [], [], []
        for a, b in zip(left.tolist(), right.tolist(), strict=True):
            one, other = step.state(a), step.state(b)
            if one is not None and other is not None and one.shape == other.shape:
                states.append((unscale(one, float(step.scales[a])), unscale(other, float(step.scales[b]))))
                with_channels.append(a)
            else:
                others.append((a, b))
        totals = _find_telling_totals(step, np.array(others, np.int64).reshape(-1, 2).T)
        widths = np.array([one.shape[1] for one, _ in states] + [1] * totals.shape[1], np.int64)
        if not len(widths):
            return None
        parts = []
        for side in (0, 1):
            stats = [step.totals.entries(totals[side])]
            if states:
                stats.insert(0, Stats(np.concatenate([pair[side] for pair in states], axis=1)))
            parts.append([np.concatenate([getattr(each, name) for each in stats]) for name in _NUMBERS])
        (mean, count, size), (mean_right, rows, size_right) = parts
        begin, now, fresh = np.cumsum(widths) - widths, mean * count, mean_right * rows
        # What is kept in few bits may have been summed in as few, each summand rounded at the size of the sum.
        bits = np.where(count == 1, np.float32(now).view(np.uint32), _LOW_BITS)
        is_there, is_last = np.add.reduceat([bits > 0, (bits > 0) & (bits & _LAST_BITS == 0)], begin, axis=1, dtype=int)
        is_coarse = np.logical_and.reduceat(bits & _LOW_BITS == 0, begin)
        is_coarse |= (is_there >= _ENOUGH) & (is_last > _MOST_CHANNELS * is_there)
        is_coarse = np.repeat(is_coarse, widths)
        spread = _DEVIATIONS * np.where(is_coarse, np.sqrt(rows), 1.0)
        own = np.where(np.arange(len(now)) < len(now) - totals.shape[1], 0.0, _ROUNDING * _DEVIATIONS * size)
        layers = np.concatenate([np.array(with_channels, np.int64), totals[0]])
        return cls(layers, begin, widths, now, fresh, _ROUNDING * (abs(fresh) + spread * size_right), own)

    def spread(self, values: Array) -> Array:
        """Repeat a number of each layer over its channels."""
        return np.repeat(values, self.widths)

    def factors(self, chosen: Mask | None = None) -> tuple[Array, Array]:
        """Return of each layer the factor that fits these channels best, and the right side over its rounding."""
        weight = self.rounding**-2.0 if chosen is None else np.where(chosen, self.rounding**-2.0, 0.0)
        weight[self.rounding == 0] = 0.0
        squares = np.add.reduceat(weight * self.right**2, self.begin)
        return np.add.reduceat(weight * self.left * self.right, self.begin) / squares, np.sqrt(squares)

    def residual(self, factors: Array, at_least: float = 0.0) -> Array:
        """Return how far the left side is off a factor of each layer, ``[channels]``, over what rounding allows."""
        each = self.spread(factors)
        allowed = np.maximum(abs(each), at_least) * self.rounding + self.own
        off = abs(self.left - each * self.right)
        return np.where(off > 0, off / allowed, 0.0)


_NUMBERS = ("mean", "count", "l2_norm")


def _find_telling_totals(step: Step, pairs: Counts) -> Counts:
    """``[2, pairs]``: those whose totals have not cancelled over the channels."""
    sums, sizes = step.sums, step.totals.l1_norm
    left, right = pairs
    known = (abs(sums[left]) > _LEAST * sizes[left]) & (abs(sums[right]) > _LEAST_OF_RIGHT * sizes[right])
    return pairs[:, known]


def residuals(sides: Sides, of_ranks: float) -> tuple[float, Counts, Array]:
    """Return the factor that layers have in common, the places of those that tell, and how far each channel is off it.

    The factor is 1 if any layer has it, unless most have `of_ranks`, that of the other way to reduce gradients over
    ranks; NaN: they have none. ``[channels]``: in parts of what rounding allows.
    """
    factors, tells = sides.factors()
    told = np.flatnonzero((tells > TELLS) & np.isfinite(factors))
    off = sides.residual(np.ones(len(factors)))
    has_one = not len(told) or bool((np.maximum.reduceat(off, sides.begin)[told] <= 1).any())
    common = middle(factors[told]) if len(told) else 0.0
    agree = np.count_nonzero(abs(factors[told] / common - 1) < _EQUAL) if common else 0
    is_common = agree >= 2 and 3 * agree >= 2 * len(told)
    is_of_ranks = of_ranks != 1 and is_common and abs(common / of_ranks - 1) < _EQUAL
    if has_one and not is_of_ranks:
        return 1.0, told, off
    if not is_common:
        return float("nan"), told, off
    return float(common), told, sides.residual(np.full(len(factors), common))


def judge_ratios(
    step: Step,
    memory: Memory,
    key: str,
    sides: Sides,
    calls: Counts,
    factor: float,
    steps: int,
    of_ranks: float,
    say: Say,
) -> list[Ill]:
    """key: of what is remembered. factor: from which on it is critical. of_ranks: see `residuals`.

    calls ``[layers]``: how many tensors the right side of each is of; one of several is judged where another one of
    as many keeps the law: a backward may not have reached the parameters.
    """

    def of(name: str, missing: float) -> Any:
        return memory.keep_by_site(f"{key} {name}", missing)

    common, told, off = residuals(sides, of_ranks)
    lengths, first = of("lengths", 0), of("first", np.nan)
    agreed, known = of("agreed", False), of("known", False)  # in the last judged step; ever
    keeps, worst = np.zeros(len(sides.layers), bool), np.maximum.reduceat(off, sides.begin)
    if common == common:
        keeps[told] = worst[told] <= 1
    several = calls > 1
    if several.any():
        kept = set(calls[keeps].tolist())
        told = told[[count == 1 or count in kept for count in calls[told].tolist()]]
    at, n = sides.layers[told], len(step.sites)
    if common != common or not keeps[told].any():
        return []
    usual = of("usual", 0.0)  # of what rounding allows, how much it has taken at most
    usual[sides.layers[keeps]] = np.maximum(usual[sides.layers[keeps]], worst[keeps])
    if keeps[told].all():
        agreed[at] = known[at] = True
        lengths[at] = 0
        return []
    since, is_whole, late = of("since", 0), of("whole", False), of("late", False)

    deviates = off > 1
    fitted, tells = sides.factors(deviates)
    is_alike = np.maximum.reduceat(np.where(deviates, sides.residual(fitted, abs(common)), 0.0), sides.begin) <= 1
    counts = np.add.reduceat(deviates.astype(np.int64), sides.begin)
    is_all = np.maximum.reduceat(sides.residual(fitted, abs(common)), sides.begin) <= 1
    is_alike &= (tells > TELLS) & (is_all | (counts > 1)) & ~_are_clipped(sides, deviates)
    relative = fitted / common
    is_far = ~((relative < factor) & (relative > 1 / factor))
    exactly = _find_tolerance(memory, f"{key} off", sides, keeps, common)
    # Where a factor is small, only many channels that agree on it, as exactly as other layers do, are no clipping.
    tolerance = np.where(is_far, _CONSTANT, np.minimum(exactly, _CONSTANT))
    # Without a factor it must be more than what rounding may do to this layer once in a while, and to others now.
    is_sudden = (counts > 1) & (usual[sides.layers] < _LITTLE) & (2 * np.count_nonzero(keeps[told]) >= len(told))
    breaks = ~keeps & np.where(is_alike, is_far | (is_all & (counts > 1)), is_sudden)
    breaks &= ~are_added(step, memory, key, sides, ~keeps & ~is_alike)
    relative = np.where(is_alike, relative, np.nan)

    now, value = np.zeros(n, bool), np.full(n, np.nan)
    place = dict(zip(at.tolist(), told.tolist(), strict=True))
    for site, i in place.items():
        goes_on = lengths[site] > 0 and breaks[i]
        if goes_on and (is_alike[i] != (first[site] == first[site])):
            goes_on = False
        if goes_on and is_alike[i]:
            goes_on = abs(relative[i] / first[site] - 1) < tolerance[i] if first[site] else relative[i] == 0
        begins = breaks[i] and not goes_on and lengths[site] == 0
        begins = begins and bool(agreed[site] or (is_alike[i] and not known[site]))
        if begins:
            first[site], since[site], late[site] = relative[i], step.number, agreed[site]
            is_whole[site] = is_alike[i] and is_far[i] and _is_whole(float(relative[i]), float(exactly[i]))
        lengths[site] = lengths[site] + 1 if goes_on or begins else 0
        agreed[site], known[site] = keeps[i], True
        now[site] = lengths[site] >= (_OF_WHOLE if is_whole[site] else steps)
        value[site] = relative[i]

    def sentence(site: int, began: int) -> str:
        i = place[site]
        channels = np.flatnonzero(deviates[sides.begin[i] : sides.begin[i] + sides.widths[i]])
        named = np.empty(0, np.int64) if is_all[i] or sides.widths[i] == 1 else channels
        others = int(np.count_nonzero(keeps[told]))
        name, width = step.sites[site].name, int(sides.widths[i])
        return say(Broken(name, float(value[site]), common, others, began, bool(late[site]), named, width))

    severity = np.where((value <= 1 / factor) | (value >= factor), "critical", "warning")  # warning: without a factor
    return [Ill(now, sentence, value, factor, severity, since=since)]


def _are_clipped(sides: Sides, deviates: Mask) -> Mask:
    """Find the layers ``[layers]`` in which several values of one size, the largest there is, deviate: clipped ones."""
    sizes = abs(sides.left)
    largest = np.maximum.reduceat(sizes, sides.begin)
    least = np.minimum.reduceat(np.where(deviates, sizes, np.inf), sides.begin)
    return (least >= (1 - 1e-3) * largest) & (np.add.reduceat(deviates.astype(np.int64), sides.begin) > 1)


def are_added(step: Step, memory: Memory, key: str, sides: Sides, chosen: Mask) -> Mask:
    """Find the layers ``[layers]`` whose left side is that of the step before and the right one: nobody zeroes it.

    Where steps between were not measured, it is larger than the right side, in the direction of what it was. Rules of
    their own name the reason (`growing_gradients`, `unchanged_parameters`).
    """
    before: dict[int, Array] = memory.get(f"{key} before", {})
    follows, now = memory.get(f"{key} at", -2) + 1 == step.number, {}
    found = np.zeros(len(chosen), bool)
    for i in np.flatnonzero(chosen).tolist():
        some = sides.begin[i] + np.unique(np.linspace(0, sides.widths[i] - 1, _SOME).astype(np.int64))
        left, right = sides.left[some], sides.right[some]
        earlier = before.get(int(sides.layers[i]))
        now[int(sides.layers[i])] = left
        if earlier is None or len(earlier) != len(left):
            continue
        size, gained = float(left @ left), left - earlier - right
        along = float(left @ earlier) > _ALONG * np.sqrt(size * float(earlier @ earlier))
        found[i] = gained @ gained < _ADDED * size if follows else along and size > _GROWN * float(right @ right)
    memory[f"{key} before"], memory[f"{key} at"] = now, step.number
    return found


def _find_tolerance(memory: Memory, key: str, sides: Sides, keeps: Mask, common: float) -> Array:
    """Return how exactly each factor ``[layers]`` is known, by how exactly layers had the common one until now."""
    factors, tells = sides.factors()
    off = np.max(abs(factors[keeps] / common - 1) * tells[keeps], initial=0.0)
    memory[key] = max(float(memory.get(key, 0.0)), float(off))
    exact: Array = np.maximum(4 * memory[key] / np.maximum(tells, 1.0), _EXACT)
    return exact


def _is_whole(factor: float, tolerance: float) -> bool:
    """Say whether a factor is 0, -1, 2, 3, ..., or one over these."""
    for each in (factor, 1 / factor if factor else 0.0):
        if each == 0 or (abs(each) > 0.5 and abs(each / round(each) - 1) < min(tolerance, _EQUAL)):
            return True
    return False
