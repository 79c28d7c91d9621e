"""Whether tensors would fit into float16 and float8: from the histogram by exponent, while they are still wider."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hookstats.numbers.blocks import Drained
from hookstats.numbers.fields import Array, Counts, Site
from hookstats.numbers.snapshot import Snapshot
from hookstats.rules.finding import Finding
from hookstats.rules.formatting import percent, tensor_of
from hookstats.rules.history import Streak
from hookstats.rules.step import Mask, Sites, Step


class _Format(NamedTuple):
    largest: float
    tiniest: int  # its exponent: the smallest value that is not 0 is 2^tiniest


FORMATS = {
    "float16": _Format(65504.0, -24),
    "float8_e4m3fn": _Format(448.0, -9),
    "float8_e5m2": _Format(57344.0, -16),
}


class Fit(NamedTuple):
    """What casting to a format would do to a tensor: shares of the values that are not 0."""

    site: Site
    format: str
    underflow: float  # that become 0, as the tensor is
    overflow: tuple[float, float]  # that become infinite or the largest value: at least, and at most
    exponent: int  # of the best scale 2^exponent: the largest with which nothing overflows
    scaled_underflow: float  # that become 0 with that scale


class _Fits(NamedTuple):
    """The same of many tensors, arrays ``[k]``."""

    ids: Counts
    underflow: Array
    least_overflow: Array
    most_overflow: Array
    exponent: Counts
    scaled_underflow: Array


def fit(measured: Snapshot | Drained, format: str) -> list[Fit]:
    """Of each site with a histogram ``ExponentBins()``, in order of making: would it survive this format?

    format: "float16", "float8_e4m3fn" or "float8_e5m2". Underflow is exact, rounding to nearest even included, but for
    values of exactly half the smallest one, which count as kept. Overflow is a bound, because the largest value of a
    format lies inside a bin; it is 0 where the tensor's largest value fits. Values are judged as they were in training:
    gradients without the scale of a GradScaler, which must be a power of 2, as it is by default. ValueError for another
    format.
    """
    if format not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}; got {format!r}")
    step = Step(measured, Sites())
    fits = _fits(_Magnitudes(step, step.calls > 0), FORMATS[format])
    rows = zip(*(column.tolist() for column in fits), strict=True)
    return [Fit(step.sites[i], format, under, (low, high), scale, best) for i, under, low, high, scale, best in rows]


class _Magnitudes:
    """Of those among some sites that have a histogram by exponent and values that are not 0."""

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
        at = np.clip(exponent + self.scaler + 127, -1, 255)
        counts: Counts = np.take_along_axis(self.below, np.maximum(at, 0)[:, None], axis=1)[:, 0]
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


@dataclass
class LowPrecisionFit:
    """A tensor that would not survive a low precision, while the run still has a higher one (a note).

    Judged are outputs, inputs and parameters in float8_e4m3fn, gradients of outputs and inputs in float8_e5m2 (the
    hybrid recipe of TransformerEngine), both in float16. A tensor does not fit where more than ``lost`` = 0.01 of its
    values that are not 0 would become 0 at the best power of two as its scale, the largest with which nothing
    overflows; and an output where it would overflow in float16 as it is, because autocast has no scale for outputs.
    There is no agreed share: this one is ours (FP8-LM, arXiv 2310.18313, adapts its scale at 0.001 % overflow). `fit`
    gives all numbers.

    So that a healthy run is silent: in ``consecutive_steps`` = 5 verdicts in a row, from 1,000 values on that are not
    0. Only steps with histograms by exponent are judged, in each of them one of ``turns`` = 4 parts of the sites:
    reading histograms is what costs most of all rules, and nobody chooses a precision within four steps.
    """

    lost: float = 0.01
    consecutive_steps: int = 5
    turns: int = 4

    def __post_init__(self) -> None:
        self._turn, self._streak = 0, Streak(self.consecutive_steps)

    def __call__(self, step: Step) -> list[Finding] | None:
        outputs, weights = step.is_kind("output") | step.is_kind("input"), step.is_kind("param")
        gradients = step.is_kind("grad_output") | step.is_kind("grad_input")
        n = len(step.sites)
        in_turn = np.arange(n) % self.turns == self._turn
        values = _Magnitudes(step, (step.calls > 0) & in_turn & (outputs | weights | gradients))
        if not values.ids.size and not step.has_histograms:
            return None
        self._turn = (self._turn + 1) % self.turns
        ids = values.ids
        fits = {name: _fits(values, format) for name, format in FORMATS.items()}
        lost = np.where(gradients[ids], fits["float8_e5m2"].scaled_underflow, fits["float8_e4m3fn"].scaled_underflow)
        overflow = np.where(outputs[ids], fits["float16"].most_overflow, 0.0)
        enough = values.below[:, -1] >= 1000
        is_ill, judged = np.zeros(n, bool), np.zeros(n, bool)
        is_ill[ids] = enough & ((lost > self.lost) | (overflow > 0))
        judged[ids] = enough
        found = []
        for site in step.in_order(self._streak.push(is_ill, judged)):
            place = int(np.searchsorted(ids, site))
            tensor, value, threshold = tensor_of(step.sites[site]), lost[place], self.lost
            if value > threshold:
                shares = ", ".join(
                    f"{percent(each.scaled_underflow[place])} in {name} (scale 2^{each.exponent[place]})"
                    for name, each in fits.items()
                )
                sentence = (
                    f"cast to a lower precision at its best scale, {tensor} would lose to 0 of its values: {shares}. "
                    "Leave this layer out where you quantise, or give it a scale per channel or block."
                )
            else:
                value, threshold = overflow[place], 0.0
                sentence = (
                    f"{tensor} reaches {step.totals.abs_max[site]:.3g}, beyond float16's 65504: in float16 it would be "
                    "infinite. Keep this layer in bfloat16 or float32."
                )
            found.append(step.finding("low-precision-fit", site, value, threshold, "note", sentence))
        return found
