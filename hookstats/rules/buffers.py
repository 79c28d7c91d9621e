"""Buffers: tables that were never filled, running statistics that stand still or run away."""

from __future__ import annotations

import numpy as np

from hookstats.numbers.fields import Counts
from hookstats.rules.engine import Ill, rule
from hookstats.rules.formatting import number
from hookstats.rules.memory import Memory
from hookstats.rules.step import Mask, Step

_TABLE = "inv_freq"  # of rotary positions: the name that they have everywhere
_MOMENTUM = "Check the norm's momentum (the weight of the new batch, usually 0.1), and "


@rule(of="buffer_sample", depth=0)
def uninitialised_buffer(
    step: Step, memory: Memory, largest: float = 1e18, smallest: float = 1e-30, fastest: float = 100.0
) -> Ill | None:
    """A buffer was never initialised, and holds whatever was in memory (warning).

    In the first measured step that has it, its values are NaN, or beyond ``largest`` = 1e18, or none is as large as
    ``smallest`` = 1e-30. Of the frequencies of rotary positions (``inv_freq``) it is enough that all are 0, or one is
    below 0 or above ``fastest`` = 100. Modules that are made on the meta device, or whose weights are loaded from a
    checkpoint that does not hold such a buffer (``persistent=False``), leave it as ``torch.empty`` gave it. The figures
    are ours.

    What else looks like it: nothing that we know. What to do: compute the buffer once more after the weights are
    loaded, by the module's own initialisation; then train from the beginning, or compare with a model made on the CPU.

    False-positive guards: masks of -Inf and of large negative numbers, buffers of one value, and those that are
    constant, are not judged; nor is a buffer that was in order when it was first seen. NaN that reaches no output is a
    note.
    """
    known = memory.keep_by_site("known", False)
    judged = step.find_fired("buffer_sample") & ~known
    if not np.count_nonzero(judged):
        return None
    totals, size = step.totals, step.totals.abs_max
    is_table = np.array([_TABLE in name.rpartition(".")[2] for name, _ in step.sites], bool)
    is_nan = (totals.nans > 0) & (totals.nans + totals.count > 1)
    is_absurd = (totals.max > largest) | ((size > 0) & (size < smallest))
    is_wrong_table = is_table & ((totals.nans > 0) | (totals.min < 0) | (size == 0) | (totals.max > fastest))
    ill = judged & (is_nan | (is_absurd & (totals.max > totals.min)) | is_wrong_table)
    known |= judged & ~ill
    reaches = step.has_nonfinite and bool(step.nonfinite[step.find_fired("output")].any())

    def what(site: int) -> str:
        if totals.nans[site]:
            return f"{number(totals.nans[site])} of its values are NaN"
        if size[site] == 0:
            return "all of its values are 0"
        return f"its values range from {number(totals.min[site])} to {number(totals.max[site])}"

    text = (
        "{tensor} was never initialised: {what}. Buffers of a module that was made on the meta device, or that the "
        "checkpoint lacks, keep whatever was in memory: initialise them after the weights are loaded."
    )
    is_note, values = is_nan & ~is_table & (not reaches), np.where(is_nan, totals.nans, size)
    return Ill(ill, text, values, largest, np.where(is_note, "note", "warning"), words={"what": what})


@rule(of="buffer_sample", depth=1)
def still_statistics(step: Step, memory: Memory, consecutive_steps: int = 10) -> Ill | None:
    """The running statistics of a norm do not change during training (warning; note if they once did).

    Mean and variance are what they were in the measured step before, to the last bit, in ``consecutive_steps`` = 10 of
    them, though the norm runs and gradients arrive. Those that are still 0 and 1 have never moved, and evaluation will
    normalise by them: a momentum of 0, or a norm that is trained in evaluation mode. It follows from what a batch norm
    computes; the figure is ours.

    What else looks like it: statistics that are frozen on purpose after a while, and so a note. What to do: look at the
    norm's momentum (PyTorch's is the share of the new batch, 0.1), and call ``model.train()`` after a validation; where
    batches are too small for running statistics, use a norm that needs none.

    False-positive guards: statistics that were loaded and never moved since, and norms that do not run or get no
    gradient, are not judged.
    """
    is_mean, differs = step.make_for_alike(_find_means), _find_moved(step, memory)
    if differs is None:
        return None
    totals, moved = step.totals, memory.keep_by_site("moved", False)
    variances = step.find_partner("buffer_sample", "buffer_sample", "running_mean", "running_var")
    moved |= differs
    is_new = (totals.abs_max == 0) & (totals.min[variances] == 1) & (totals.max[variances] == 1)
    outputs = step.find_partner("buffer_sample", "output", "running_mean")
    weights = step.find_partner("buffer_sample", "param_grad", "running_mean", "weight")
    runs = ((outputs >= 0) & (step.calls[outputs] > 0)) | ((weights >= 0) & (totals.abs_max[weights] > 0))
    judged = is_mean & runs & bool(step.grad_norm)
    ill = judged & ~differs & (moved | is_new) & (totals.max[variances] > 0)
    text = (
        "the running mean and variance of {norm} have not changed since step {since}, although it is trained{new}. "
        "Check its momentum, and whether it is in evaluation mode."
    )
    new = ", and are still 0 and 1: in evaluation the norm would not normalise"
    words = {
        "norm": lambda site: step.sites[site].name.rpartition(".")[0] or "the model",
        "new": lambda site: "" if moved[site] else new,
    }
    return Ill(
        ill, text, consecutive_steps, consecutive_steps, np.where(moved, "note", "warning"),
        judged, consecutive_steps, words=words,
    )  # fmt: skip


@rule(of="buffer_sample", depth=1)
def moving_statistics(step: Step, memory: Memory, consecutive_steps: int = 20) -> Ill | None:
    """Norms in a frozen part of the model still update their running statistics (note).

    The running mean or variance of a norm moves from one measured step to the next, and no gradient ever goes through
    its output, while others get theirs: the weights around it are frozen, and what it makes of the same image is
    another thing in each step, and another one in evaluation. In ``consecutive_steps`` = 20 measured steps in a row. It
    follows from what a batch norm computes; the figure is ours.

    What else looks like it: statistics that are to be those of the new data, and a teacher that is an average of the
    model. What to do: call ``eval()`` on the frozen part after each ``model.train()``; ``requires_grad=False`` and
    ``no_grad`` stop gradients, not statistics.

    False-positive guards: norms whose own weights get a gradient are not judged, nor is a model without gradients of
    outputs.
    """
    ids, outputs = step.make_for_alike(_find_norms)
    gradients = step.find_partner("output", "grad_output")[outputs]
    weights = step.find_partner("buffer_sample", "param_grad", "running_mean", "weight")[ids]
    differs, had = _find_moved(step, memory), memory.keep_by_site("had", False)
    had[ids] |= ((gradients >= 0) & (step.calls[gradients] > 0)) | ((weights >= 0) & (step.calls[weights] > 0))
    if differs is None or not len(ids) or not step.find_fired("grad_output").any():
        return None
    judged = np.zeros(len(step.sites), bool)
    judged[ids] = True
    text = (
        "{names}: no gradient passes through these norms, but their statistics have changed in each measured step "
        "since step {since}: the frozen part is still in training mode, so its features differ from step to step and "
        "in evaluation. Call eval() on that part after model.train()."
    )
    return Ill(
        judged & differs & ~had, text, consecutive_steps, consecutive_steps, "note", judged, consecutive_steps,
        together=True,
    )  # fmt: skip


@rule(of="buffer_sample", depth=1, sums=True)
def norm_of_few_values(step: Step, memory: Memory, values: int = 4, consecutive_steps: int = 10) -> Ill | None:
    """A batch norm normalises over ``values`` = 4 values of each channel, or fewer (warning).

    A norm with running statistics takes the mean and the variance of each channel over the rows and places of a batch.
    Over two values it makes 1 and -1 of them, whatever they were; over four, the deviation is off by 40 % from batch to
    batch, and evaluation normalises by others. So many there were of each channel in a forward, in
    ``consecutive_steps`` = 10 measured steps in a row. It is a matter of counting; the figures are ours.

    What else looks like it: nothing that we know. What to do: larger batches, a GroupNorm or LayerNorm in its place,
    SyncBatchNorm where several ranks have a few rows each, or ``eval()`` for norms that were trained before.

    False-positive guards: a smaller batch at the end of an epoch is none in a row; norms whose statistics stand still,
    as in evaluation mode, are not judged.
    """
    ids, outputs = step.make_for_alike(_find_norms)
    differs = _find_moved(step, memory)
    if differs is None or not len(ids):
        return None
    counts, judged = np.full(len(step.sites), np.inf), np.zeros(len(step.sites), bool)
    counts[outputs] = step.totals.count[outputs] / (step.totals.count[ids] * step.calls[outputs])
    judged[outputs] = differs[ids]
    text = (
        "{names}: normalised over only {value} values of each channel since step {since}. Their mean and variance are "
        "mostly chance, and evaluation uses others. Use larger batches, GroupNorm or LayerNorm, or SyncBatchNorm over "
        "ranks."
    )
    return Ill(counts <= values, text, counts, values, judged=judged, steps=consecutive_steps, together=True)


@rule(of="buffer_sample", depth=3)
def runaway_statistics(
    step: Step, memory: Memory, ratio: float = 100.0, consecutive_steps: int = 8, min_history: int = 20
) -> list[Ill] | None:
    """The running statistics of a norm grow without limit, or a variance falls below 0 (warning).

    From one measured step to the next the rms of a running mean or variance grows, each time by more than before, for
    ``consecutive_steps`` = 8 of them and by ``ratio`` = 100 in all: an average that approaches what is measured does
    the reverse. A momentum above 1 weighs what was with a negative number: above 2 it diverges, and below that a
    variance can fall under 0, whose root is NaN in evaluation. The figures are ours.

    What else looks like it: activations that grow by themselves, which the norm hides until evaluation. What to do: a
    momentum between 0 and 1 (0.1: the share of the new batch); else look at the layer before the norm, at the learning
    rate, and for weights without decay.

    False-positive guards: statistics that grow more slowly from step to step, as they do on the way to a new level, and
    growth that began in the first ``min_history`` = 20 measured steps and has not gone on since, are not judged.
    """
    is_mean = step.make_for_alike(_find_means)
    if not is_mean.any():
        return None
    variances = step.find_partner("buffer_sample", "buffer_sample", "running_mean", "running_var")[is_mean]
    totals, judged = step.totals, is_mean.copy()
    judged[variances] = True
    is_negative = judged & ~is_mean & (totals.min < 0)
    last, grown, first = (memory.keep_by_site(name, np.nan) for name in ("last", "grown", "first"))
    now = totals.rms - last
    age = memory.keep_by_site("age", 0)
    age += judged
    grows = judged & (now > 0) & (now > grown)
    first[:] = np.where(grows, first, totals.rms)
    last[:], grown[:] = np.where(judged, totals.rms, last), np.where(judged, now, grown)
    streak = memory.streak()
    factors = totals.rms / first
    ill = streak.push(step.number, grows, judged, consecutive_steps) & (factors >= ratio) & (age > min_history)
    is_grown = "{tensor} runs away: it has grown {factor} times since step {since}, in each measured step by more than "
    is_grown += f"before. {_MOMENTUM}how the output of the layer before it grows."
    is_below = (
        "{tensor} is {value} in at least one channel: a variance is never below 0, and in evaluation its root is NaN. "
    )
    is_below += f"{_MOMENTUM}what else writes to it."
    return [
        Ill(is_negative, is_below, totals.min, 0.0),
        Ill(ill & ~is_negative, is_grown, streak.lengths, consecutive_steps, since=streak.since,
            words={"factor": factors}),
    ]  # fmt: skip


def _find_means(step: Step) -> Mask:
    """``[n]``: running means that came, with their variances."""
    fired = step.find_fired("buffer_sample")
    variances = step.find_partner("buffer_sample", "buffer_sample", "running_mean", "running_var")
    return fired & (variances >= 0) & fired[variances]


def _find_norms(step: Step) -> Counts:
    """``[2, norms]``: the ids of running means that came, and of the outputs of their norms that ran."""
    outputs = step.find_partner("buffer_sample", "output", "running_mean")
    ids = np.flatnonzero(step.make_for_alike(_find_means) & (outputs >= 0) & step.find_finite("output")[outputs])
    return np.array([ids, outputs[ids]])


def _find_moved(step: Step, memory: Memory) -> Mask | None:
    """``[n]``: the running means that are other than in the measured step before, or whose variances are."""
    is_mean, totals = step.make_for_alike(_find_means), step.totals
    if not is_mean.any():
        return None
    now, last = np.array([totals.mean, totals.rms, totals.max]), memory.get("statistics")
    memory["statistics"] = now
    if last is None or last.shape != now.shape:
        return None
    differs = (now != last).any(0)
    variances = step.find_partner("buffer_sample", "buffer_sample", "running_mean", "running_var")
    return np.asarray(is_mean & (differs | differs[variances]))
