"""Activations of which a few values, or a few channels, are far larger than all others."""

from __future__ import annotations

import numpy as np

from hookstats.numbers.fields import FIELDS, Array
from hookstats.rules.engine import Ill, rule
from hookstats.rules.formatting import number, times
from hookstats.rules.history import middle
from hookstats.rules.memory import Memory
from hookstats.rules.step import Mask, Step

_MIN, _MAX = FIELDS.index("min"), FIELDS.index("max")


@rule(of="output", depth=7, is_cause=False)
def massive_activations(step: Step, value: float = 100.0, ratio: float = 1000.0, consecutive_steps: int = 3) -> Ill:
    """A few values of an output are enormous (note): above ``value`` = 100, and ``ratio`` = 1000 times the median.

    Sun et al. 2024, arXiv 2402.17762. Trained language models have them, so nothing needs to be wrong; int8 and float8
    lose all other values of such a tensor.

    What else looks like it: nothing that we know. What to do: nothing, unless you quantise; then leave the layer out,
    or give it a scale per channel. Attention sinks and missing norms make such values; registers and gates avoid them.

    False-positive guards: in ``consecutive_steps`` = 3 verdicts in a row; and the median is that of the
    values that are not 0, to the bin of a factor of 2 (its upper end), or all of a ReLU's would be massive. Without a
    histogram by exponent it is the mean of their absolute values, which is larger.
    """
    largest, judged = step.totals.abs_max, step.find_fired("output")
    ratios = _divide_by_median(step, judged & (largest > value))
    text = (
        "{tensor} reaches {largest}, {value} times its median. Trained language models have such values, at tokens "
        "that draw much attention; if they grow, lower the learning rate. Quantised to 8 bits, the tensor loses all "
        "other values."
    )
    words = {"largest": largest}
    return Ill(ratios > ratio, text, ratios, ratio, "note", judged, consecutive_steps, words=words)


def _divide_by_median(step: Step, candidates: Mask) -> Array:
    """``[n]``: the largest |x| over the median of the values that are not 0; 0 of those that are no candidates."""
    totals, ratios = step.totals, np.zeros(len(step.sites))
    if np.count_nonzero(candidates):
        some = totals.count[candidates] - totals.zeros[candidates]
        ratios[candidates] = totals.abs_max[candidates] * some / totals.l1_norm[candidates]
        ids, counts = step.exponents(candidates)
        magnitudes = counts[:, :256] + counts[:, 256:]
        magnitudes[:, 0] -= totals.zeros[ids].astype(np.int64)
        below = np.cumsum(magnitudes, axis=1)
        median = 2.0 ** ((below * 2 < below[:, -1:]).sum(1) - 126)
        ratios[ids] = totals.abs_max[ids] * step.scales[ids] / median
    return ratios


@rule(of="output", depth=3)
def outlier_channels(
    step: Step,
    memory: Memory,
    severe: float = 1000.0,
    ratio: float = 100.0,
    many: int = 10,
    value: float = 6.0,
    consecutive_steps: int = 3,
) -> Ill | list[Ill] | None:
    """A few channels of an output are far larger than the others, and stay the same ones (warning).

    The largest |x| of a channel, over the median of that of all channels of the output: below 10 is normal, beyond
    ``severe`` = 1000 is ill, and so is ``many`` = 10 channels beyond ``ratio`` = 100 (bo-ke/llm-internal-medicine,
    docs/massive_activation.md).

    What else looks like it: inputs with a feature that was never scaled, before the first norm. What to do: look at the
    weights that make the channel, and at whether weight decay reaches them; in float8 or int8, give the output a scale
    per channel.

    False-positive guards: in ``consecutive_steps`` = 3 verdicts in a row, with a channel beyond ``ratio``
    that is so in all of them: early in a training outliers wander, later the same ones stay (arXiv 2602.02047). An
    outlier is at least ``value`` = 6 (Dettmers et al. 2022, LLM.int8(), arXiv 2208.07339), because where all values are
    small nothing is lost; channels that are 0 throughout do not count in the median; and an output has at least 16
    others.
    """
    totals, judged = step.totals, step.find_fired("output") & step.has_channels
    if not np.count_nonzero(judged):
        return None
    ratios, largest = dict[int, Array](), np.zeros(len(step.sites))
    before: dict[int, set[int]] = memory.get("staying", {})  # channels beyond the ratio since the streak began
    staying = memory["staying"] = {site: before[site] for site in before if not judged[site]}
    # Where fewer than one channel in eight is 100 times as large as most, this follows; it spares the others.
    likely = judged & (totals.abs_max > value) & (totals.abs_max > 7 * totals.abs_mean)
    for site in np.flatnonzero(likely).tolist():
        ratios[site] = _divide_by_median_channel(step, site, value)
        beyond = set(np.flatnonzero(ratios[site] > ratio).tolist())
        largest[site] = ratios[site].max()
        if largest[site] > severe or len(beyond) > many:
            beyond &= before.get(site, beyond)
            staying |= {site: beyond} if beyond else {}
    ill = np.zeros(len(step.sites), bool)
    ill[list(staying)] = True

    def which(site: int) -> str:
        beyond, stay = int((ratios[site] > ratio).sum()), len(staying[site])
        same = "always the same" if stay == beyond else f"{stay:,} of them always the same"
        return f"{times(beyond, 'channel')} above {number(ratio)} times the median, {same}"

    text = (
        "channel {worst} of {tensor} reaches {reached}, which is {value} times the median channel. This has lasted "
        "since step {since}, with {which}. Check the weights that make it, and whether weight decay reaches them; in "
        "float8 or int8 this output needs a scale per channel."
    )
    words = {
        "worst": lambda site: str(ratios[site].argmax()),
        "reached": lambda site: step.read_channels_or_whole(site).abs_max[ratios[site].argmax()],
        "which": which,
    }
    threshold = np.where(largest > severe, severe, ratio)
    return Ill(ill & judged, text, largest, threshold, judged=judged, steps=consecutive_steps, words=words)


def _divide_by_median_channel(step: Step, site: int, value: float) -> Array:
    """``[channels]``: the largest |x| of each over the median of all; 0 where that says nothing."""
    state = step.state(site)
    assert state is not None
    sizes = np.maximum(-state[_MIN], state[_MAX]) / step.scales[site]
    some = sizes > 0
    if np.count_nonzero(some) <= 16:
        return np.zeros(len(sizes))
    return np.where(sizes > value, sizes / middle(sizes[some]), 0.0)
