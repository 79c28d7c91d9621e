"""Low precisions, and what tensors would lose in them: from the histogram by exponent, while they are still wider."""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import numpy as np

from hookstats.numbers.fields import Array, Counts, ExponentBins, Site
from hookstats.numbers.frame import StepFrame
from hookstats.numbers.kinds import KINDS
from hookstats.numbers.snapshot import Snapshot
from hookstats.rules.blocks import BLOCK_FORMATS, BlockFit, block_fits
from hookstats.rules.engine import rule
from hookstats.rules.finding import Finding
from hookstats.rules.formatting import percent, tensor_of
from hookstats.rules.memory import Memory
from hookstats.rules.step import Mask, SiteIds, Step


class _Format(NamedTuple):
    largest: float
    tiniest: int  # its exponent: the smallest value that is not 0 is 2^tiniest


FORMATS = {
    "float16": _Format(65504.0, -24),
    "float8_e4m3fn": _Format(448.0, -9),
    "float8_e5m2": _Format(57344.0, -16),
}


class Fit(NamedTuple):
    """The effect of casting a tensor to a format: shares of the values that are not 0."""

    site: Site
    format: str
    underflow: float  # that become 0, as the tensor is
    overflow: tuple[float, float]  # that become infinite or the largest value: at least, and at most
    exponent: int  # of the best scale 2^exponent: the largest with which nothing overflows
    scaled_underflow: float  # that become 0 with that scale


class _Fits(NamedTuple):
    """The effect on many tensors, arrays ``[k]``."""

    ids: Counts
    underflow: Array
    least_overflow: Array
    most_overflow: Array
    exponent: Counts
    scaled_underflow: Array


@overload
def fit(measured: Snapshot | StepFrame, format: Literal["float16", "float8_e4m3fn", "float8_e5m2"]) -> list[Fit]: ...
@overload
def fit(
    measured: Snapshot | StepFrame, format: Literal["mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "nvfp4"]
) -> list[BlockFit]: ...
@overload
def fit(measured: Snapshot | StepFrame, format: str) -> list[Fit] | list[BlockFit]: ...
def fit(measured: Snapshot | StepFrame, format: str) -> list[Fit] | list[BlockFit]:
    """Return what this format would do to each site with a histogram ``ExponentBins()``, in the order of their making.

    format: "float16", "float8_e4m3fn" or "float8_e5m2". Underflow is exact, rounding to nearest even included, except
    for values of exactly half the smallest one, which count as kept. Overflow is a bound, because the largest value of
    a format lies inside a bin; it is 0 where the tensor's largest value fits. Values are judged as they were in
    training: gradients without the scale of a GradScaler, which must be a power of 2, as it is by default.

    Or, of sites with ``ExponentBins(block=32)``, "mxfp8_e4m3", "mxfp8_e5m2" and "mxfp4" (OCP Microscaling Formats 1.0:
    blocks of 32 with a power of two as their scale), and with ``block=16`` "nvfp4" (blocks of 16 with a scale in e4m3,
    and one in float32 for the tensor; arXiv 2509.25149). What becomes 0 of a block follows exactly for MX, ties
    included, so both bounds of `BlockFit.lost` are the same number, except for values below 2^-126. The scale of NVFP4
    is rounded, so its bounds differ: what lies between 1/32 and 1/8 of the power of two below the largest of its block
    may become 0. In each of these formats, values that are too large become the largest that it has.

    Of a tensor, 1,024 blocks are counted, evenly spread; `BlockFit.standard_error` is that of both bounds then, and 0
    where all are counted. Two of them hold the share of all blocks in 9 of 10 tensors (it is known from 8 groups of
    blocks, so it has Student's t of 7 degrees of freedom). Where tensors of several calls come together, each counts by
    the blocks that are counted of it.

    Raises:
        ValueError: for another format, and for one of blocks where the histogram has none of its size.
    """
    if format not in FORMATS and format not in BLOCK_FORMATS:
        raise ValueError(f"format: expected one of {', '.join([*FORMATS, *BLOCK_FORMATS])}; got {format!r}")
    step = Step(measured, SiteIds())
    if format in BLOCK_FORMATS:
        size = BLOCK_FORMATS[format].block
        if not isinstance(step.bins, ExponentBins) or step.bins.block != size:
            raise ValueError(f"{format}: expected sites measured with ExponentBins(block={size}), got {step.bins}")
        found = block_fits(step, step.calls > 0, format)
        lists = (column.tolist() for column in found)
        rows = zip(*lists, strict=True)
        return [BlockFit(step.sites[i], format, (least, most), bad, off) for i, least, most, bad, off in rows]
    fits = _fits(_Magnitudes(step, step.calls > 0), FORMATS[format])
    rows = zip(*(column.tolist() for column in fits), strict=True)
    return [Fit(step.sites[i], format, under, (low, high), scale, best) for i, under, low, high, scale, best in rows]


class _Magnitudes:
    """Return the effect on those among some sites that have a histogram by exponent and values that are not 0."""

    def __init__(self, step: Step, chosen: Mask) -> None:
        ids, counts = step.exponents(chosen)
        zeros = step.totals.zeros[ids].astype(np.int64)
        below = np.cumsum(counts[:, :256] + counts[:, 256:], axis=1) - zeros[:, None]
        some = below[:, -1] > 0
        self.ids = ids[some]
        self.below = below[some]  # [k, 256]: values that are not 0, up to this exponent + 127
        self.abs_max = step.totals.abs_max[self.ids]
        self.scaler = np.rint(np.log2(step.scales[self.ids])).astype(np.int64)

    def up_to(self, exponent: Counts | int) -> Array:
        """The share of values that are not 0 whose exponent is at most this one, ``[k]``."""
        share: Array = self._counted(exponent) / self.below[:, -1]
        return share

    def from_on(self, exponent: int) -> Array:
        """The share of those whose exponent is at least this one."""
        share: Array = (self.below[:, -1] - self._counted(exponent - 1)) / self.below[:, -1]
        return share

    def _counted(self, exponent: Counts | int) -> Counts:
        at = np.minimum(np.maximum(exponent + self.scaler + 127, -1), 255)
        counts: Counts = self.below[np.arange(len(at)), np.maximum(at, 0)]
        return np.where(at < 0, 0, counts)


def _fits(values: _Magnitudes, format: _Format) -> _Fits:
    mantissa, exponent = np.frexp(values.abs_max)
    most, top = np.frexp(format.largest)  # top: values from 2^top on are too large, some from 2^(top - 1) on
    best = top - exponent - (mantissa > most)
    most_overflow = np.where(values.abs_max > format.largest, values.from_on(int(top) - 1), 0.0)
    flushed = format.tiniest - 2  # an exponent below half the smallest value
    return _Fits(
        values.ids,
        values.up_to(flushed),
        values.from_on(int(top)),
        most_overflow,
        best.astype(np.int64),
        values.up_to(flushed - best),
    )


@rule(depth=7, is_cause=False)
def low_precision_fit(
    step: Step, memory: Memory, lost: float = 0.01, consecutive_steps: int = 5, turns: int = 4
) -> list[Finding] | None:
    """A tensor that would not survive a low precision, while the run still has a higher one (a note).

    Outputs, inputs and parameters are judged in float8_e4m3fn, gradients of outputs and inputs in float8_e5m2 (the
    hybrid recipe of TransformerEngine), and all of these in float16. A tensor does not fit where more than ``lost`` =
    0.01 of its values that are not 0 would become 0 at the best power of two as its scale, the largest with which
    nothing overflows; and an output where it would overflow in float16 as it is, because autocast has no scale for
    outputs. There is no agreed share: this one is ours (FP8-LM, arXiv 2310.18313, adapts its scale at 0.001 %
    overflow). One finding speaks of all outputs, one of all gradients of outputs, and so on; `fit` gives the numbers of
    each.

    Where blocks are counted (``ExponentBins(block=32)`` or 16), the finding says what the formats with a scale for each
    block would lose of it (`fit`).

    What else looks like it: sparse tensors whose few values span many orders of magnitude. What to do: leave the layer
    out where you quantise, or scale it per channel or block; where float16 overflows, keep the layer in bfloat16 or
    float32.

    False-positive guards: in ``consecutive_steps`` = 5 verdicts in a row, from 1,000 values on that are not
    0. Of the steps with histograms by exponent one in ``turns`` = 4 is judged: reading histograms is what costs most of
    all rules, and nobody chooses a precision within four steps.
    """
    if not step.has_histograms:
        return None
    memory["turn"] = (memory.get("turn", 0) + 1) % max(turns, 1)
    if memory["turn"]:
        return []
    outputs = step.is_kind("output") | step.is_kind("input")
    gradients, n = step.is_kind("grad_output") | step.is_kind("grad_input"), len(step.sites)
    values = _Magnitudes(step, (outputs | gradients | step.is_kind("param")) & (step.calls > 0))
    ids = values.ids
    is_gradient, enough = gradients[ids], values.below[:, -1] >= 1000
    losing = _scaled_underflow(values, is_gradient)
    overflows = outputs[ids] & (values.abs_max > FORMATS["float16"].largest)
    ill, judged = np.zeros(n, bool), np.zeros(n, bool)
    ill[ids], judged[ids] = enough & ((losing > lost) | overflows), enough
    shares, reached = memory.of_sites("shares", 0.0), memory.of_sites("reached", 0.0)
    shares[ids] = np.where(losing > lost, losing, 0.0)  # that are lost; and the largest values of those that overflow
    reached[ids] = np.where(overflows, values.abs_max, 0.0)
    if np.count_nonzero(ill):
        texts = memory.setdefault("texts", {})
        fits = {name: _fits(values, format) for name, format in FORMATS.items()}
        for place in np.flatnonzero(ill[ids]).tolist():
            each_format = (
                f"{percent(each.scaled_underflow[place])} in {name} (scale 2^{each.exponent[place]})"
                for name, each in fits.items()
            )
            texts[int(ids[place])] = f"{', '.join(each_format)}."
        for site, text in _with_blocks(step, ill).items():
            texts[site] += text
    streak = memory.streak()
    streak.push(step.number, ill, judged)
    if not streak.goes_on:
        return []
    lasting, texts = (streak.lengths >= consecutive_steps) & (step.calls > 0), memory["texts"]
    told = [(kind.several, lasting & (shares > 0) & step.is_kind(name), shares, lost) for name, kind in KINDS.items()]
    found = list[Finding]()
    for several, chosen, numbers, threshold in [*told, ("outputs", lasting & (reached > 0), reached, 65504.0)]:
        sites = step.in_order(chosen)
        if sites:  # one finding, at the site that is worst
            worst = max(sites, key=lambda site: numbers[site])
            listed = [worst, *(site for site in sites if site != worst)]
            where, since = tensor_of(step.sites[worst]), streak.since[listed].min()
            say = _overflowing if numbers is reached else _losing
            sentence = say(where, len(sites), several, numbers[worst], texts[worst])
            numbers_of = numbers[worst], threshold, "note", sentence
            found.append(step.finding("low-precision-fit", worst, *numbers_of, since=since, sites=listed))
    return found


def _scaled_underflow(values: _Magnitudes, is_gradient: Mask) -> Array:
    """``[k]``: the share that becomes 0 at the best scale, of gradients in float8_e5m2, of others in float8_e4m3fn."""
    both = [FORMATS["float8_e4m3fn"], FORMATS["float8_e5m2"]]
    most, top = np.frexp([each.largest for each in both])
    tiniest = np.array([each.tiniest for each in both])
    mantissa, exponent = np.frexp(values.abs_max)
    which = is_gradient.astype(np.int64)
    best = top[which] - exponent - (mantissa > most[which])
    return values.up_to(tiniest[which] - 2 - best)


def _losing(where: str, sites: int, several: str, share: float, text: str) -> str:
    return (
        f"cast to a lower precision at its best scale, {where} would lose to 0 of its values: {text}"
        f"{_of_others(sites - 1, several)} Leave {'this layer' if sites == 1 else 'these layers'} out where you "
        f"quantise, or give {'it' if sites == 1 else 'them'} a scale per channel or block."
    )


def _overflowing(where: str, sites: int, several: str, reached: float, text: str) -> str:
    return (
        f"{where} reaches {reached:.3g}, beyond float16's 65504: in float16 it would be infinite."
        f"{_of_others(sites - 1, several)} Keep {'this layer' if sites == 1 else 'these layers'} in bfloat16 or "
        "float32."
    )


def _with_blocks(step: Step, chosen: Mask) -> dict[int, str]:
    """Return what would be lost with a scale for each block, by the ids of sites that have blocks."""
    if not isinstance(step.bins, ExponentBins) or not step.bins.block:
        return {}
    told: dict[int, list[str]] = {}
    for name, format in BLOCK_FORMATS.items():
        if format.block == step.bins.block:
            found = block_fits(step, chosen, name)
            for i, least, most, _, error in zip(*(column.tolist() for column in found), strict=True):
                share = percent(least) if least == most else f"{percent(least)} to {percent(most)}"
                told.setdefault(i, []).append(f"{share}{f' ± {percent(error)}' if error else ''} in {name}")
    along = "last dimension" if step.bins.block_dim == -1 else "other dimensions"
    size = step.bins.block
    return {
        i: f" With a scale for each block of {size} along the {along}: {', '.join(each)}." for i, each in told.items()
    }


def _of_others(count: int, tensors: str) -> str:
    return f" So would {count} other {tensors if count > 1 else tensors.replace('s', '', 1)}." if count else ""
