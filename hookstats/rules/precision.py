"""Low precisions, and what tensors would lose in them: from the histogram by exponent, while they are still wider."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import numpy as np

from hookstats.numbers.fields import Array, Counts, ExponentBins, Site
from hookstats.numbers.frame import StepFrame
from hookstats.numbers.kinds import KINDS
from hookstats.numbers.snapshot import Snapshot
from hookstats.rules.blocks import BLOCK_FORMATS, BlockFit, fit_blocks
from hookstats.rules.engine import Ill, rule
from hookstats.rules.formatting import percent
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
        return fit_blocks(step, step.calls > 0, format)
    values = _Magnitudes(step, step.calls > 0)
    rows = zip(values.ids.tolist(), *(column.tolist() for column in values.fit(FORMATS[format])), strict=True)
    return [Fit(step.sites[i], format, under, (low, high), scale, best) for i, under, low, high, scale, best in rows]


class _Magnitudes:
    """The exponents of those among some sites that have a histogram by exponent and values that are not 0."""

    def __init__(self, step: Step, chosen: Mask) -> None:
        ids, counts = step.exponents(chosen)
        zeros = step.totals.zeros[ids].astype(np.int64)
        below = np.cumsum(counts[:, :256] + counts[:, 256:], axis=1) - zeros[:, None]
        some = below[:, -1] > 0
        self.ids = ids[some]
        self.below = below[some]  # [k, 256]: values that are not 0, up to this exponent + 127
        self.abs_max = step.totals.abs_max[self.ids]
        self.scaler = np.rint(np.log2(step.scales[self.ids])).astype(np.int64)

    def up_to(self, exponent: Counts | int, beyond: bool = False) -> Array:
        """The share of values that are not 0 whose exponent is at most this one, ``[k]``; or is beyond it."""
        at, whole = np.minimum(np.maximum(exponent + self.scaler + 127, -1), 255), self.below[:, -1]
        counted = np.where(at < 0, 0, self.below[np.arange(len(at)), np.maximum(at, 0)])
        share: Array = (whole - counted if beyond else counted) / whole
        return share

    def at_best(self, largest: Any, tiniest: Any) -> tuple[Counts, Array]:
        """Return the exponent of the best scale, and the share that becomes 0 with it. Of a `_Format`, or ``[k]``."""
        mantissa, exponent = np.frexp(self.abs_max)
        limit, top = np.frexp(largest)
        best = (top - exponent - (mantissa > limit)).astype(np.int64)
        return best, self.up_to(tiniest - 2 - best)  # an exponent below half the smallest value

    def fit(self, format: _Format) -> tuple[Array, Array, Array, Counts, Array]:
        """Return the fields of `Fit` in this format, each ``[k]``; of the overflow, the least and the most."""
        top = int(np.frexp(format.largest)[1])  # values from 2^top on are too large, some from 2^(top - 1) on
        most = np.where(self.abs_max > format.largest, self.up_to(top - 2, beyond=True), 0.0)
        return self.up_to(format.tiniest - 2), self.up_to(top - 1, beyond=True), most, *self.at_best(*format)


@rule(depth=7, is_cause=False)
def low_precision_fit(
    step: Step, memory: Memory, lost: float = 0.01, consecutive_steps: int = 5, turns: int = 4
) -> list[Ill] | None:
    """A tensor would not survive a lower precision, while the run still has a higher one (note).

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
    ids, enough = values.ids, values.below[:, -1] >= 1000
    one, other = FORMATS["float8_e5m2"], FORMATS["float8_e4m3fn"]
    losing = values.at_best(*(np.where(gradients[ids], *both) for both in zip(one, other, strict=True)))[1]
    ill, judged, (shares, reached) = np.zeros(n, bool), np.zeros(n, bool), np.zeros((2, n))
    shares[ids] = np.where(losing > lost, losing, 0.0)  # that are lost; and the largest values of those that overflow
    reached[ids] = np.where(outputs[ids] & (values.abs_max > FORMATS["float16"].largest), values.abs_max, 0.0)
    ill[ids], judged[ids] = enough & ((shares + reached)[ids] > 0), enough
    streak = memory.streak()
    lasting = streak.push(step.number, ill, judged, consecutive_steps)
    if not np.count_nonzero(lasting):
        return []
    fits = {name: values.at_best(*format) for name, format in FORMATS.items()}
    told = [(kind.several, lasting & (shares > 0) & step.is_kind(name), shares, lost) for name, kind in KINDS.items()]
    found = list[Ill]()
    for several, chosen, numbers, threshold in [*told, ("outputs", lasting & (reached > 0), reached, 65504.0)]:
        sites = step.put_in_order(chosen)
        if sites:  # one finding, at the site that is worst
            worst = max(sites, key=lambda site: numbers[site])
            place = int(np.flatnonzero(ids == worst)[0])
            sites = [worst, *(site for site in sites if site != worst)]
            it = "this layer" if len(sites) == 1 else "these layers"
            others = f"; the same holds for {len(sites) - 1} more of the {several}" if len(sites) > 1 else ""
            if numbers is reached:
                text = (
                    "{tensor} reaches {value}, beyond float16's largest number, 65504{others}. In float16 it would be "
                )
                text += "infinite: keep {it} in bfloat16 or float32."
            else:
                text = "a cast to a lower precision, at the best scale, would turn values of {tensor} into 0: {losses}"
                text += "{others}. {blocks}Leave {it} out where you quantise, or give a scale per channel or block."
            losses = (
                f"{percent(share[place])} in {name} (scale 2^{best[place]})"
                for name, (best, share) in fits.items()
                if share[place] > 0
            )
            words = {"losses": ", ".join(losses), "others": others, "it": it, "blocks": _say_blocks(step, worst)}
            since = int(streak.since[sites].min())
            found.append(
                Ill(True, text, numbers[worst], threshold, "note", since=since, site=worst, sites=sites, words=words)
            )
    return found


def _say_blocks(step: Step, site: int) -> str:
    """Say what would be lost of a site with a scale for each block; nothing where none are counted."""
    if not isinstance(step.bins, ExponentBins) or not step.bins.block:
        return ""
    told, chosen = list[str](), np.arange(len(step.sites)) == site
    for name in (name for name, format in BLOCK_FORMATS.items() if format.block == step.bins.block):
        for each in fit_blocks(step, chosen, name):
            least, most = map(percent, each.lost)
            error = f" ± {percent(each.standard_error)}" if each.standard_error else ""
            told.append(f"{least if each.lost[0] == each.lost[1] else f'{least} to {most}'}{error} in {name}")
    along = "last dimension" if step.bins.block_dim == -1 else "other dimensions"
    return f"With a scale for each block of {step.bins.block} along the {along}: {', '.join(told)}. " if told else ""
