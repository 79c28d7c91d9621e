"""The statistics: what a state holds and how each number is finished from it. Pure numpy; knows nothing of torch.

A state is a float64 array ``[fields, ...]``; the trailing shape is that of the channels. What its rows are, how they
merge and how they scale is the table `_FIELDS`; what is finished from them are the rows of `Stats`. Moments, norms and
extremes are over the finite values; NaN, +Inf and -Inf are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Counts: TypeAlias = NDArray[np.int64]


class Site(NamedTuple):
    """A tensor of a module, or a parameter."""

    name: str  # the module's or parameter's clean path, "" for the model itself
    tensor: str  # "output", "grad_output", "input", ..., see attach; "output.0" or "output.logits" inside a container

    def __str__(self) -> str:
        return f"{self.name or '(model)'} {self.tensor}"


class Skipped(NamedTuple):
    """The reason why tensors of a site were not measured, and their number: in a snapshot those of its step."""

    reason: str
    times: int | None  # None: the site was given up, as it can never be measured

    def __str__(self) -> str:
        if self.times is None:
            return f"given up: {self.reason}"
        return f"{self.times} {'tensor' if self.times == 1 else 'tensors'}: {self.reason}"


class State:
    """The rows of a state by name, each an array of the channels' shape."""

    def __init__(self, moments: Array) -> None:
        self.__dict__.update(zip(FIELDS, moments, strict=True))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Array: ...


class _Cut:
    """Channels that stand side by side, of one site after another."""

    def __init__(self, starts: Counts, channels: int) -> None:
        """starts: where each site's channels begin, ascending from 0; no site is without channels."""
        self._starts = starts
        self._widths = np.diff(starts, append=channels)

    def sum(self, row: Array) -> Array:
        """``[channels]`` to ``[sites]``."""
        result: Array = np.add.reduceat(row, self._starts)
        return result

    def min(self, row: Array) -> Array:
        """The same; as integers of the same order, for a thread that flushes subnormals compares them as zeros."""
        result: Array = in_order(np.minimum.reduceat(in_order(row, np.int64), self._starts), np.float64)
        return result

    def spread(self, row: Array) -> Array:
        """``[sites]`` to ``[channels]``."""
        return np.repeat(row, self._widths)


def in_order(values: Any, to: type[np.generic]) -> Any:
    """float64 as int64 of the same order, or back."""
    bits = values.view(np.int64)
    return (bits ^ (bits >> 63 & np.int64(2**63 - 1))).view(to)


class _Field(NamedTuple):
    """A row of a state."""

    name: str
    merge: Callable[[_Cut, State, dict[str, Array]], Array]  # parts, and the rows above of the whole: of the whole
    power: int  # of the factor by which it grows when all values grow by one


def _sum_of(name: str) -> Callable[[_Cut, State, dict[str, Array]], Array]:
    return lambda cut, parts, whole: cut.sum(getattr(parts, name))


def _merge_mean(cut: _Cut, parts: State, whole: dict[str, Array]) -> Array:
    return cut.sum(parts.count * parts.mean) / np.maximum(whole["count"], 1.0)


def _merge_m2(cut: _Cut, parts: State, whole: dict[str, Array]) -> Array:
    """Chan, Golub & LeVeque 1979: each part's own, and what its mean adds."""
    return cut.sum(parts.m2 + parts.count * (parts.mean - cut.spread(whole["mean"])) ** 2)


# In the order of csrc/stats.h; _native refuses an extension that was built with another one.
_FIELDS = (
    _Field("count", _sum_of("count"), 0),
    _Field("mean", _merge_mean, 1),
    _Field("m2", _merge_m2, 2),
    _Field("min", lambda cut, parts, _: cut.min(np.where(parts.count > 0, parts.min, np.inf)), 1),
    _Field("max", lambda cut, parts, _: -cut.min(-np.where(parts.count > 0, parts.max, -np.inf)), 1),
    _Field("abs_sum", _sum_of("abs_sum"), 1),
    _Field("zeros", _sum_of("zeros"), 0),
    _Field("nans", _sum_of("nans"), 0),
    _Field("posinfs", _sum_of("posinfs"), 0),
    _Field("neginfs", _sum_of("neginfs"), 0),
)
FIELDS = tuple(field.name for field in _FIELDS)


def fold_channels(moments: Array, starts: Counts | None = None) -> Array:
    """The state of all channels together: of ``[fields, channels]``, ``[fields]``.

    ``starts``, ascending from 0: where the channels of each of several sites begin; then ``[fields, sites]``. A site of
    one channel is left as it is.
    """
    cut = np.zeros(1, np.int64) if starts is None else starts
    result = moments[:, cut]
    wide = np.diff(cut, append=moments.shape[1]) > 1
    if wide.any():
        result[:, wide] = _merge(_Cut(cut, moments.shape[1]), moments)[:, wide]
    return result if starts is not None else result[:, 0]


def _merge(cut: _Cut, moments: Array) -> Array:
    parts, whole = State(moments), dict[str, Array]()
    with np.errstate(over="ignore", invalid="ignore"):  # float64 data beyond 1e154: infinite or NaN, as documented
        for field in _FIELDS:
            whole[field.name] = field.merge(cut, parts, whole)
    return np.stack(list(whole.values()))


def unscale(moments: Array, by: float | Array) -> Array:
    """The state of the values, each divided by a positive number, or by one for each channel; by 1, the same array."""
    if np.all(np.equal(by, 1)):
        return moments
    result: Array = moments.copy()
    for number, field in enumerate(_FIELDS):  # of one state, rows are numbers
        if field.power:
            result[number] /= by**field.power
    return result


def _nan_where_empty(value: Array, s: State) -> Array:
    """The value where there was one, NaN where there was none."""
    return np.where(s.count > 0, value, np.nan)


def _divide_by_count(value: Array, s: State) -> Array:
    return np.divide(value, s.count, out=np.full_like(s.count, np.nan), where=s.count > 0)


def _var(s: State) -> Array:
    """The variance; 0 of equal values, whatever their mean was rounded to."""
    m2 = np.where(s.min == s.max, 0.0, s.m2)
    return np.divide(m2, s.count - 1, out=np.full_like(s.count, np.nan), where=s.count > 1)


def _square_sum(s: State) -> Array:
    return s.m2 + s.count * s.mean**2


def _abs_max(s: State) -> Array:
    largest: Array = np.maximum(np.abs(s.min).view(np.int64), np.abs(s.max).view(np.int64)).view(np.float64)
    return largest


_T = TypeVar("_T")


class _Statistic:
    """A row of `Stats`: an attribute that is finished from the state when it is first read."""

    def __init__(self, finish: Callable[[State], Array]) -> None:
        self._finish = finish

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, stats: None, owner: type) -> _Statistic: ...

    @overload
    def __get__(self, stats: Stats[_T], owner: type) -> _T: ...

    def __get__(self, stats: Any, owner: type) -> Any:
        if stats is None:
            return self
        with np.errstate(over="ignore", invalid="ignore"):  # float64 data beyond 1e154
            array = self._finish(stats._state)
        value = stats.__dict__[self._name] = array if array.ndim else float(array)
        return value


class Stats(Generic[_T]):
    """The statistics of one set of values, ``Stats[float]``, or of several: float64 arrays, one entry for each.

    Over the finite values: ``count``, ``mean``, ``var`` and ``std`` (correction=1, as torch.var), ``rms``,
    ``abs_mean``, ``l1_norm``, ``l2_norm``, ``abs_max``, ``min``, ``max``, ``zeros``. Left out of them and counted:
    ``nans``, ``posinfs``, ``neginfs``. Where there are too few values for a statistic it is NaN.

    Subnormals are no zeros, also where torch.set_flush_denormal(True) is in force. What a thread of that mode computes
    itself it takes for zero: a float64 mean or norm below 2.3e-308 that is read there, and ``min == 0``.
    """

    count = _Statistic(lambda s: s.count)
    mean = _Statistic(lambda s: _nan_where_empty(s.mean, s))
    var = _Statistic(_var)
    std = _Statistic(lambda s: np.sqrt(_var(s)))
    rms = _Statistic(lambda s: np.sqrt(_divide_by_count(_square_sum(s), s)))
    abs_mean = _Statistic(lambda s: _divide_by_count(s.abs_sum, s))
    l1_norm = _Statistic(lambda s: s.abs_sum)
    l2_norm = _Statistic(lambda s: np.sqrt(_square_sum(s)))
    abs_max = _Statistic(lambda s: _nan_where_empty(_abs_max(s), s))
    min = _Statistic(lambda s: _nan_where_empty(s.min, s))
    max = _Statistic(lambda s: _nan_where_empty(s.max, s))
    zeros = _Statistic(lambda s: s.zeros)
    nans = _Statistic(lambda s: s.nans)
    posinfs = _Statistic(lambda s: s.posinfs)
    neginfs = _Statistic(lambda s: s.neginfs)

    def __init__(self, moments: Array) -> None:
        """moments: ``[fields]`` or ``[fields, entries]``, a state."""
        self._state = State(moments)

    def entries(self, chosen: Counts) -> Stats[_T]:
        """Return the statistics of the entries at these places."""
        return Stats(np.stack([row[chosen] for row in vars(self._state).values()]))

    if not TYPE_CHECKING:  # or every name would be in order

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"expected one of {', '.join(STATISTICS)}; got {name!r}")

    def __repr__(self) -> str:
        if self._state.count.ndim:
            return f"Stats({self._state.count.size} entries)"
        return f"Stats({', '.join(f'{name}={getattr(self, name):.6g}' for name in STATISTICS)})"


STATISTICS = tuple(name for name, row in vars(Stats).items() if isinstance(row, _Statistic))

# Histogram bins, as csrc/bins.h has them.
EXPONENT_BINS = 512
OCTAVE_BINS = 64
FIRST_OCTAVE = -46
DISTANCE_BINS = 40
BLOCK_GROUPS = 8
BLOCK_BINS = BLOCK_GROUPS * DISTANCE_BINS + 256


@dataclass(frozen=True)
class ExponentBins:
    """Histogram by the value's exponent: no range to choose, no value lost, exact to merge.

    Per tensor: one bin for each sign and float32 exponent, zeros and subnormals together in the middle (509 bins).
    ``per_channel=True``: 64 octaves of ``|x|`` for each channel, from below 2^-46 (zeros too) to 2^16 and above; this
    costs 512 bytes of state per channel.

    ``block``: 32 (MX formats) or 16 (NVFP4) neighbouring values that share a scale. It is also counted how many octaves
    values lie below the largest of their block (`SiteStats.blocks`, `hookstats.rules.fit`), at 4.6 KB of state: in
    1,024 blocks of each tensor, evenly spread, or in all of a tensor that has no more.
    ``block_dim``: the dimension along which blocks lie. -1 is the last dimension, over which a linear layer's forward
    sums, of inputs and weights. 0 is all others as one, such as the tokens, over which the gradient of its weight sums,
    of inputs and of gradients of outputs. What is left at the end of the dimension is a block of fewer values; where
    rows are ignored (`Monitor.ignore`), blocks are made of those that count.

    Raises:
        TypeError: for a per_channel that is not True or False. ValueError: for another block or block_dim, and for
            blocks together with ``per_channel=True``.
    """

    per_channel: bool = False
    block: int | None = None
    block_dim: int = -1

    def __post_init__(self) -> None:
        _check_per_channel(self)
        if self.block not in (None, 16, 32) or isinstance(self.block, bool):
            raise ValueError(f"ExponentBins: block: expected 16, 32 or None, got {self.block!r}")
        if self.block_dim not in (-1, 0) or isinstance(self.block_dim, bool):
            raise ValueError(f"ExponentBins: block_dim: expected -1 or 0, got {self.block_dim!r}")
        if self.block and self.per_channel:
            raise ValueError("ExponentBins: expected either block or per_channel=True, got both")

    def __repr__(self) -> str:
        told = ["per_channel=True"] if self.per_channel else []
        if self.block:
            told.append(f"block={self.block}" + (", block_dim=0" if self.block_dim == 0 else ""))
        return f"ExponentBins({', '.join(told)})"


@dataclass(frozen=True)
class LinearBins:
    """Histogram in ``n`` equal bins from ``lo`` to ``hi``, ``hi`` included, as ``torch.histc`` has them.

    Finite values outside are counted in ``Histogram.underflow`` and ``.overflow``. ``per_channel=True``: one for each
    channel, at 8 * (n + 2) bytes of state. ValueError unless lo < hi, and (hi - lo) * n is finite, in float32.
    TypeError for what is no number, and for a per_channel that is not True or False.
    """

    lo: float
    hi: float
    n: int
    per_channel: bool = False

    def __post_init__(self) -> None:
        _check_per_channel(self)
        if not isinstance(self.n, int) or isinstance(self.n, bool) or not 1 <= self.n <= 2**30:
            raise ValueError(f"LinearBins: expected n, the number of bins, from 1 to 2^30; got {self.n!r}")
        if not isinstance(self.lo, Real) or not isinstance(self.hi, Real):
            raise TypeError(f"LinearBins: expected two numbers, lo < hi; got {self.lo!r} and {self.hi!r}")
        with np.errstate(over="ignore", invalid="ignore"):
            lo, hi = np.float32(self.lo), np.float32(self.hi)
            usable = lo < hi and np.isfinite((hi - lo) * np.float32(self.n))
        if not usable:
            raise ValueError(f"LinearBins: expected lo < hi and a finite range, in float32; got {self.lo}, {self.hi}")


Bins: TypeAlias = ExponentBins | LinearBins


def _check_per_channel(bins: Bins) -> None:
    if not isinstance(bins.per_channel, bool):
        raise TypeError(f"{type(bins).__name__}: per_channel: expected True or False, got {bins.per_channel!r}")


def bins_to_json(bins: Bins) -> dict[str, Any]:
    linear = {"lo": float(bins.lo), "hi": float(bins.hi), "n": bins.n} if isinstance(bins, LinearBins) else None
    blocks = {}
    if isinstance(bins, ExponentBins) and bins.block:
        blocks = {"block": bins.block, "block_dim": bins.block_dim}
    return {"linear": linear, "per_channel": bins.per_channel, **blocks}


def bins_from_json(d: Mapping[str, Any]) -> Bins:
    """Read what `bins_to_json` gave. KeyError, TypeError or ValueError for anything else."""
    linear, per_channel = d["linear"], bool(d["per_channel"])
    if linear is not None:
        return LinearBins(**linear, per_channel=per_channel)
    return ExponentBins(per_channel, d.get("block"), d.get("block_dim", -1))


def kernel_block(bins: Bins | None) -> int:
    """The block as kernels are told it: negative along the rows, 0 for none."""
    if not isinstance(bins, ExponentBins) or bins.block is None:
        return 0
    return bins.block if bins.block_dim == -1 else -bins.block


def histogram_shape(bins: Bins | None, channels: int) -> tuple[int, ...]:
    """The shape of a state's histogram; (0,) without one. Linear bins have a counter for what lies below, and above."""
    if bins is None:
        return (0,)
    if isinstance(bins, LinearBins):
        return (channels, bins.n + 2) if bins.per_channel else (bins.n + 2,)
    if bins.per_channel:
        return (channels, OCTAVE_BINS)
    return (EXPONENT_BINS + BLOCK_BINS,) if bins.block else (EXPONENT_BINS,)


def exponent_histogram(state: Counts) -> tuple[Counts, Array]:
    """Counts ``[509]`` and edges ``[510]``, ascending, from the state's 512 bins ``sign << 8 | exponent``."""
    positive, negative = state[1:255], state[257:511]
    counts = np.concatenate([negative[::-1], state[:1], positive])
    magnitudes = 2.0 ** np.arange(-126, 129)
    return counts, np.concatenate([-magnitudes[::-1], magnitudes])


def octave_edges() -> Array:
    """Edges ``[65]`` of the per-channel bins: 0, 2^-46, 2^-45, ..., 2^16, inf."""
    return np.concatenate([[0.0], 2.0 ** np.arange(FIRST_OCTAVE, FIRST_OCTAVE + OCTAVE_BINS - 1), [np.inf]])
