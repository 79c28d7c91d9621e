"""Which samples of a step a finding is of: the ids that were given with it, and those of them that stand out."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hookstats.numbers.fields import Array, Counts, Site
from hookstats.rules.finding import Finding
from hookstats.rules.formatting import number, tensor_of, times
from hookstats.rules.step import Step

_OF_BATCHES = {"nonfinite", "input-shift", "loss-spike", "gradient-norm-spike"}  # rules that one batch can set off
_RATIO = 4.0  # times the median sample
_NAMED = 3


class _Outliers(NamedTuple):
    """Samples that stand out of their step, the farthest first."""

    site: Site  # where
    ids: Counts  # several for each, where it is not known which of several batches it was
    ratio: float  # the rms of the first, over the median sample's; NaN where its values are not finite


def named(finding: Finding, step: Step) -> Finding:
    """The finding with the samples of its step: see ``sample_ids`` of `Finding`. step: with which it was judged."""
    ids = step.sample_ids.get(finding.step)
    if finding.rule not in _OF_BATCHES or ids is None or not len(ids):
        return finding
    found = _outliers(step, ids) if finding.step == step.number else None
    if found is None:
        told = f" It was of {_listed(ids)}."
        return replace(finding, sample_ids=tuple(ids.tolist()), sentence=finding.sentence + told)
    many = len(found.ids) > 1
    how = "is not finite" if np.isnan(found.ratio) else f"is {number(found.ratio)} times that of the median sample"
    told = (
        f" Of its {times(len(ids), 'sample')} {_listed(found.ids, of_all=False)} stand{'' if many else 's'} out: the "
        f"rms at {tensor_of(found.site)} {how}."
    )
    return replace(finding, sample_ids=tuple(found.ids.tolist()), sentence=finding.sentence + told)


def _listed(ids: Counts, of_all: bool = True) -> str:
    """A few of them, and how many there are."""
    shown = ", ".join(map(str, ids[:_NAMED].tolist()))
    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    return f"{'sample' if len(ids) == 1 else 'samples'} {shown}{more}"


def _outliers(step: Step, ids: Counts) -> _Outliers | None:
    """At the first site, in order of execution, that keeps samples apart and has some that stand out."""
    for site in step.with_channels_along(0):
        if not (step.is_kind("output")[site] or step.is_kind("input")[site]):
            continue
        rms = _by_sample(step, site, len(ids))
        if rms is None:
            continue
        median = float(np.median(rms[np.isfinite(rms)])) if np.isfinite(rms).any() else 0.0
        is_out = ~np.isfinite(rms) | ((rms > _RATIO * median) & (median > 0))
        if is_out.any() and not is_out.all():
            farthest = np.argsort(-np.nan_to_num(rms, nan=np.inf), kind="stable")[: is_out.sum()]
            which = (farthest[:, None] + np.arange(0, len(ids), len(rms))).reshape(-1)
            worst = float(rms[farthest[0]])
            return _Outliers(step.sites[site], ids[which], worst / median if np.isfinite(worst) else np.nan)
    return None


def _by_sample(step: Step, site: int, count: int) -> Array | None:
    """The rms of each sample, NaN where a value of it is not finite; None where the channels are no samples.

    Channels are samples where there are as many as ids; the rows of samples (tokens) where there are so many times as
    many. Where there are so many times fewer, channel i holds the i-th samples of several microbatches or ranks.
    """
    channels = step.channels(site)
    assert channels is not None
    width = len(channels.count)
    rows = width // count if width > count and width % count == 0 else 1
    if width // rows > count or count % (width // rows):
        return None
    bad = (channels.nans + channels.posinfs + channels.neginfs).reshape(-1, rows).sum(1)
    squares = np.where(channels.count > 0, channels.l2_norm**2, 0.0).reshape(-1, rows).sum(1)
    values = channels.count.reshape(-1, rows).sum(1)
    return np.where(
        (bad == 0) & (values > 0), np.sqrt(squares / np.maximum(values, 1)), np.where(values > 0, np.nan, 0)
    )
