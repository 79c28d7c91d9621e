"""Buffers: tables that were never filled, running statistics that stand still or run away."""

from __future__ import annotations

import numpy as np

from hookstats.numbers.fields import Counts
from hookstats.rules.engine import Ill, rule
from hookstats.rules.formatting import number, tensor_of
from hookstats.rules.memory import Memory
from hookstats.rules.step import Mask, Step

_TABLE = "inv_freq"  # of rotary positions: the name that they have everywhere


@rule(of="buffer_sample", depth=0)
def uninitialised_buffer(
    step: Step, memory: Memory, largest: float = 1e18, smallest: float = 1e-30, fastest: float = 100.0
) -> Ill | None:
    """A buffer holds what memory held by chance: nobody has computed it (warning).

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
    fired, known = step.fired("buffer_sample"), memory.of_sites("known", False)
    judged = fired & ~known
    if not np.count_nonzero(judged):
        return None
    totals, is_table, size = step.totals, step.once(_tables), step.totals.abs_max
    is_nan = (totals.nans > 0) & (totals.nans + totals.count > 1)
    is_absurd = (totals.max > largest) | ((size > 0) & (size < smallest))
    is_wrong_table = is_table & ((totals.nans > 0) | (totals.min < 0) | (size == 0) | (totals.max > fastest))
    ill = judged & (is_nan | (is_absurd & (totals.max > totals.min)) | is_wrong_table)
    known |= judged & ~ill
    reaches = step.has_nonfinite and bool(step.nonfinite[step.fired("output")].any())

    def say(site: int, since: int) -> str:
        if totals.nans[site]:
            what = f"{number(totals.nans[site])} of its values are NaN"
        elif size[site] == 0:
            what = "all of its values are 0"
        else:
            what = f"its values go from {number(totals.min[site])} to {number(totals.max[site])}"
        return (
            f"{tensor_of(step.sites[site])} was never computed: {what}. Buffers of a module that was made on the meta "
            "device, or that no checkpoint holds, stay what memory held by chance: initialise them once more after "
            "the weights are loaded."
        )

    def severity(site: int) -> str:
        return "note" if is_nan[site] and not is_table[site] and not reaches else "warning"

    return Ill(ill, say, np.where(is_nan, totals.nans, size), largest, severity)


@rule(of="buffer_sample", depth=1)
def still_statistics(step: Step, memory: Memory, consecutive_steps: int = 10) -> Ill | None:
    """The running statistics of a norm stand still while the model is trained (warning; a note where they once moved).

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
    means, variances, outputs, weights = step.alike(_statistics)
    if not len(means):
        return None
    totals = step.totals
    moved, now = memory.of_sites("moved", False), np.array([totals.mean, totals.rms, totals.max])
    ids, last, memory["last"] = np.concatenate([means, variances]), memory.get("last"), now
    if last is None or last.shape != now.shape:
        return None
    moved[ids] |= (now[:, ids] != last[:, ids]).any(0)
    is_still = (now[:, means] == last[:, means]).all(0) & (now[:, variances] == last[:, variances]).all(0)
    has_moved = moved[means] | moved[variances]
    is_new = (totals.abs_max[means] == 0) & (totals.min[variances] == 1) & (totals.max[variances] == 1)
    moved[means] = has_moved
    runs = ((outputs >= 0) & (step.calls[outputs] > 0)) | ((weights >= 0) & (totals.abs_max[weights] > 0))
    ill, judged = np.zeros((2, len(step.sites)), bool)
    judged[means] = runs & bool(step.grad_norm)
    ill[means] = judged[means] & is_still & (has_moved | is_new) & (totals.max[variances] > 0)

    def say(site: int, since: int) -> str:
        name = step.sites[site].name.rpartition(".")[0] or "the model"
        text = f"the running mean and variance of {name} have stood still since step {since}, while it is trained"
        if not moved[site]:
            text += ", and are 0 and 1 as at the beginning: evaluation will not normalise by anything that was seen"
        return f"{text}. Look at its momentum, and whether it is in evaluation mode."

    return Ill(
        ill, say, consecutive_steps, consecutive_steps, lambda site: "note" if moved[site] else "warning",
        judged, consecutive_steps,
    )  # fmt: skip


@rule(of="buffer_sample", depth=3)
def runaway_statistics(
    step: Step, memory: Memory, ratio: float = 100.0, consecutive_steps: int = 8, min_history: int = 20
) -> list[Ill] | None:
    """The running statistics of a norm run away, or a variance falls below 0 (warning).

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
    means, variances, _, _ = step.alike(_statistics)
    if not len(means):
        return None
    totals, judged = step.totals, np.zeros(len(step.sites), bool)
    judged[means] = judged[variances] = True
    is_negative = judged & (totals.min < 0)
    is_negative[means] = False
    last, grown, first = (memory.of_sites(name, np.nan) for name in ("last", "grown", "first"))
    now = totals.rms - last
    age = memory.of_sites("age", 0)
    age += judged
    grows = judged & (now > 0) & (now > grown)
    first[:] = np.where(grows, first, totals.rms)
    last[:], grown[:] = np.where(judged, totals.rms, last), np.where(judged, now, grown)
    streak = memory.streak()
    factors = totals.rms / first
    ill = streak.push(step.number, grows, judged, consecutive_steps) & (factors >= ratio) & (age > min_history)

    def say_grown(site: int, since: int) -> str:
        return (
            f"{tensor_of(step.sites[site])} runs away: it has grown {number(factors[site])} times since step {since}, "
            "in each measured step by more than before. Look at the norm's momentum, which is the share of the new "
            "batch (0.1), and at how the layer before it grows."
        )

    def say_negative(site: int, since: int) -> str:
        return (
            f"{tensor_of(step.sites[site])} is {number(totals.min[site])} at least in one channel: no variance is "
            "below 0, and in evaluation its root is NaN. Look at the norm's momentum, which is the share of the new "
            "batch (0.1), and at what else writes to it."
        )

    return [
        Ill(is_negative, say_negative, totals.min, 0.0),
        Ill(ill & ~is_negative, say_grown, streak.lengths, consecutive_steps, since=streak.since),
    ]


def _tables(step: Step) -> Mask:
    return np.array([_TABLE in name.rpartition(".")[2] for name, _ in step.sites], bool) & step.is_kind("buffer_sample")


def _statistics(step: Step) -> Counts:
    """``[4, norms]``: the ids of running means, variances, outputs, gradients of weights; -1 where there is none."""
    found, fired = [], step.fired("buffer_sample")
    for i in np.flatnonzero(fired).tolist():
        module, _, key = step.sites[i].name.rpartition(".")
        prefix = f"{module}." if module else ""
        variance = step.id_of(f"{prefix}running_var", step.sites[i].tensor)
        if key == "running_mean" and variance >= 0 and fired[variance]:
            found.append((i, variance, step.id_of(module, "output"), step.id_of(f"{prefix}weight", "param_grad")))
    result: Counts = np.array(found, np.int64).reshape(-1, 4).T
    return result
