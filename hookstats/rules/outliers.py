"""Activations of which a few values, or a few channels, are far larger than all others."""

from __future__ import annotations

import numpy as np

from hookstats.numbers.fields import Array
from hookstats.rules.finding import Finding
from hookstats.rules.formatting import number, tensor_of, times
from hookstats.rules.history import Streak
from hookstats.rules.step import Mask, Step
from hookstats.rules.thresholds import rule


@rule
class MassiveActivations:
    """A few values of an output are enormous (a note): above ``value`` = 100, and ``ratio`` = 1000 times the median.

    Sun et al. 2024, arXiv 2402.17762. Trained language models have them, so nothing needs to be wrong; int8 and float8
    lose all other values of such a tensor.

    What else looks like it: nothing that we know. What to do: nothing, unless you quantise; then leave the layer out,
    or give it a scale per channel. Attention sinks and missing norms make such values; registers and gates avoid them.

    So that a healthy run is silent: in ``consecutive_steps`` = 3 verdicts in a row; and the median is that of the
    values that are not 0, to the bin of a factor of 2 (its upper end), or all of a ReLU's would be massive. Without a
    histogram by exponent it is the mean of their absolute values, which is larger.
    """

    value: float = 100.0
    ratio: float = 1000.0
    consecutive_steps: int = 3

    def __post_init__(self) -> None:
        self._streak = Streak(self.consecutive_steps)

    def __call__(self, step: Step) -> list[Finding] | None:
        judged = step.is_kind("output") & (step.calls > 0)
        if not judged.any():
            return None
        ratios = self._ratios(step, judged & (step.totals.abs_max > self.value))
        ill = self._streak.push(step.number, ratios > self.ratio, judged)
        return [self._finding(step, site, ratios[site]) for site in step.in_order(ill)]

    def _finding(self, step: Step, site: int, ratio: float) -> Finding:
        sentence = (
            f"{tensor_of(step.sites[site])} reaches {number(step.totals.abs_max[site])}, {number(ratio)} times its "
            "median. Trained language models have such values, at tokens that attention rests on; if they grow, lower "
            "the learning rate. Quantised to 8 bits, all other values of it are lost."
        )
        since = self._streak.since[site]
        return step.finding("massive-activations", site, ratio, self.ratio, "note", sentence, since=since)

    def _ratios(self, step: Step, candidates: Mask) -> Array:
        """``[n]``: the largest |x| over the median."""
        totals, ratios = step.totals, np.zeros(len(step.sites))
        if candidates.any():
            some = totals.count[candidates] - totals.zeros[candidates]
            ratios[candidates] = totals.abs_max[candidates] * some / totals.l1_norm[candidates]
            ids, counts = step.exponents(candidates)
            magnitudes = counts[:, :256] + counts[:, 256:]
            magnitudes[:, 0] -= totals.zeros[ids].astype(np.int64)
            below = np.cumsum(magnitudes, axis=1)
            median = 2.0 ** ((below * 2 < below[:, -1:]).sum(1) - 126)
            ratios[ids] = totals.abs_max[ids] * step.scales[ids] / median
        return ratios


@rule
class OutlierChannels:
    """A few channels of an output are far larger than the others, and stay the same ones (warning).

    The largest |x| of a channel, over the median of that of all channels of the output: below 10 is normal, beyond
    ``severe`` = 1000 is ill, and so is ``many`` = 10 channels beyond ``ratio`` = 100 (bo-ke/llm-internal-medicine,
    docs/massive_activation.md).

    What else looks like it: inputs with a feature that was never scaled, before the first norm. What to do: look at the
    weights that make the channel, and at whether weight decay reaches them; in float8 or int8, give the output a scale
    per channel.

    So that a healthy run is silent: in ``consecutive_steps`` = 3 verdicts in a row, with a channel beyond ``ratio``
    that is so in all of them: early in a training outliers wander, later the same ones stay (arXiv 2602.02047). An
    outlier is at least ``value`` = 6 (Dettmers et al. 2022, LLM.int8(), arXiv 2208.07339), because where all values are
    small nothing is lost; channels that are 0 throughout do not count in the median; and an output has at least 16
    others.
    """

    severe: float = 1000.0
    ratio: float = 100.0
    many: int = 10
    value: float = 6.0
    consecutive_steps: int = 3

    def __post_init__(self) -> None:
        self._streak = Streak(self.consecutive_steps)
        self._staying: dict[int, frozenset[int]] = {}  # of a site, channels beyond the ratio since the streak began

    def __call__(self, step: Step) -> list[Finding] | None:
        judged = step.is_kind("output") & step.has_channels & (step.calls > 0)
        if not judged.any():
            return None
        totals, is_ill = step.totals, np.zeros(len(step.sites), bool)
        ratios: dict[int, Array] = {}
        # Where fewer than one channel in eight is 100 times as large as most, this follows; it spares the others.
        likely = judged & (totals.abs_max > self.value) & (totals.abs_max > 7 * totals.abs_mean)
        for site in np.flatnonzero(likely).tolist():
            ratios[site] = self._of_channels(step, site)
            is_ill[site] = ratios[site].max() > self.severe or (ratios[site] > self.ratio).sum() > self.many
            is_ill[site] &= self._stay(site, ratios[site])
        for site in [site for site in self._staying if judged[site] and not is_ill[site]]:
            del self._staying[site]
        ill = self._streak.push(step.number, is_ill, judged)
        return [self._finding(step, site, ratios[site]) for site in step.in_order(ill)]

    def _stay(self, site: int, ratios: Array) -> bool:
        """Whether channels that were beyond the ratio before still are."""
        beyond = frozenset(np.flatnonzero(ratios > self.ratio).tolist())
        self._staying[site] = beyond & self._staying.get(site, beyond)
        return bool(self._staying[site])

    def _finding(self, step: Step, site: int, ratios: Array) -> Finding:
        channels = step.channels(site)
        assert channels is not None
        worst, beyond, since = int(ratios.argmax()), int((ratios > self.ratio).sum()), int(self._streak.since[site])
        stay = len(self._staying[site])
        sentence = (
            f"channel {worst} of {tensor_of(step.sites[site])} reaches {number(channels.abs_max[worst])}, "
            f"{number(ratios[worst])} times the median channel; {times(beyond, 'channel')} "
            f"{'is' if beyond == 1 else 'are'} beyond {number(self.ratio)} times, "
            f"{'the same' if stay == beyond else f'{stay:,} of them'} since step {since:,}. Look at the weights that "
            "make it, and whether weight decay reaches them; in float8 or int8 this output needs a scale per "
            "channel."
        )
        threshold = self.severe if ratios[worst] > self.severe else self.ratio
        return step.finding("outlier-channels", site, float(ratios[worst]), threshold, "warning", sentence, since=since)

    def _of_channels(self, step: Step, site: int) -> Array:
        """``[channels]``: the largest |x| of each over the median of all; 0 where that says nothing."""
        channels = step.channels(site)
        assert channels is not None
        sizes = channels.abs_max
        some = sizes > 0
        if some.sum() <= 16:
            return np.zeros(len(sizes))
        return np.where(sizes > self.value, sizes / np.median(sizes[some]), 0.0)
