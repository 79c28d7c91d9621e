"""The samples of a step that a finding is of: the ids that were given with it, and those of them that stand out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hookstats.numbers.fields import Array, Counts, Site, Stats
from hookstats.rules.finding import Finding
from hookstats.rules.formatting import number, tensor_of, times
from hookstats.rules.step import Step

_OF_BATCHES = {"nonfinite", "input-shift", "loss-spike", "gradient-norm-spike"}  # rules that one batch can set off
_RATIO = 4.0  # times the median sample
_NAMED = 3


def add_samples(finding: Finding, step: Step) -> Finding:
    """The finding with the samples of its step: see ``sample_ids`` of `Finding`. step: with which it was judged.

    What began in an earlier step is not of one batch.
    """
    ids = step.sample_ids.get(finding.step)
    if finding.rule not in _OF_BATCHES or finding.since != finding.step or ids is None or not len(ids):
        return finding
    found = _find_outliers(step, ids) if finding.step == step.number else None
    if found is None:
        told = f" Step {finding.step} had {'sample' if len(ids) == 1 else 'samples'} {_list_ids(ids)}."
        return replace(finding, sample_ids=tuple(ids.tolist()), sentence=finding.sentence + told)
    site, outliers, ratio = found
    one = len(outliers) == 1
    how = "not finite"
    if not np.isnan(ratio):
        how = f"{'' if one else 'up to '}{number(ratio)} times that of the median sample"
    told = (
        f" Of the {times(len(ids), 'sample')} of step {finding.step}, {len(outliers)} stand{'s' if one else ''} out "
        f"({_list_ids(outliers)}): {'its' if one else 'their'} rms at {tensor_of(site)} is {how}."
    )
    return replace(finding, sample_ids=tuple(outliers.tolist()), sentence=finding.sentence + told)


def _list_ids(ids: Counts) -> str:
    """A few of them, and how many more there are."""
    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    return ", ".join(map(str, ids[:_NAMED].tolist())) + more


def _find_outliers(step: Step, ids: Counts) -> tuple[Site, Counts, float] | None:
    """Samples that stand out at the first site, in order of execution, that keeps samples apart and has some that do.

    The site; their ids, the farthest first, several for each where it is not known which of several batches it was; the
    rms of the first, over the median sample's, NaN where its values are not finite.
    """
    for site, channels in step.of_samples.items():
        if not (step.is_kind("output")[site] or step.is_kind("input")[site]):
            continue
        rms = _sum_samples(channels, len(ids))
        median = float(np.median(rms[np.isfinite(rms)])) if np.isfinite(rms).any() else 0.0
        is_out = ~np.isfinite(rms) | ((rms > _RATIO * median) & (median > 0))
        if is_out.any() and not is_out.all():
            farthest = np.argsort(-np.nan_to_num(rms, nan=np.inf), kind="stable")[: is_out.sum()]
            which = (farthest[:, None] + np.arange(0, len(ids), len(rms))).reshape(-1)
            worst = float(rms[farthest[0]])
            return step.sites[site], ids[which], worst / median if np.isfinite(worst) else np.nan
    return None


def _sum_samples(channels: Stats[Array], count: int) -> Array:
    """The rms of each sample, or of each group of them, see `Step.of_samples`; NaN where a value is not finite."""
    rows = max(len(channels.count) // count, 1)
    bad = (channels.nans + channels.posinfs + channels.neginfs).reshape(-1, rows).sum(1)
    squares = np.where(channels.count > 0, channels.l2_norm**2, 0.0).reshape(-1, rows).sum(1)
    values = channels.count.reshape(-1, rows).sum(1)
    return np.where(bad == 0, np.sqrt(squares / np.maximum(values, 1)), np.nan)
