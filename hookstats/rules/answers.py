"""The model's answers: probabilities where logits are expected, a loss that does not come down."""

from __future__ import annotations

import math

import numpy as np

from hookstats.rules.engine import Ill, rule
from hookstats.rules.formatting import number, tensor_of
from hookstats.rules.history import middle
from hookstats.rules.memory import Memory
from hookstats.rules.step import Step


@rule(depth=2, sums=True)
def probabilities_as_logits(step: Step, consecutive_steps: int = 10) -> Ill | None:
    """Probabilities are given to a cross-entropy that expects logits: softmax or sigmoid before it (warning).

    The last output of the model lies in [0, 1]; the loss lies where the cross-entropy of such logits of ``n`` classes,
    as many as there are channels, must lie, between log(1 + (n - 1) / e) and log(1 + (n - 1) e); and the gradient is
    that of a softmax: not 0 anywhere, 0 on average, and of the size 2 (1 - exp(-loss)) in all that the loss implies.
    All this holds in ``consecutive_steps`` = 10 measured steps in a row. The rule is ours; it follows from the
    definition.

    What else looks like it: nothing that we know; a negative log likelihood of probabilities has a gradient at one
    class of each row. What to do: leave out the softmax or sigmoid; cross_entropy has its own.

    False-positive guards: the module of that output has no parameters, as a layer whose logits are small has.
    """
    outputs, loss = step.ordered("output"), step.scalars.get("loss")
    if not outputs or loss is None:
        return None
    site = outputs[-1]
    totals = step.totals
    is_ill, least = False, 0.0
    if totals.min[site] >= 0 and totals.max[site] <= 1 and step.nonfinite[site] == 0:
        channels = step.channels(site)
        classes = 0 if channels is None else len(channels.count)
        least = math.log(1 + (classes - 1) / math.e) if classes > 1 else math.inf
        is_ill = classes > 1 and _is_cross_entropy_of(step, site, classes, loss)

    def say(_: int, since: int) -> str:
        return (
            f"{tensor_of(step.sites[site])} lies in [0, 1], as probabilities do, and the loss is the cross-entropy of "
            f"these as if they were logits: it cannot come below {number(least)}, and its gradient is small. Leave out "
            "the softmax or sigmoid before the loss: cross_entropy has its own."
        )

    return Ill(is_ill, say, loss, least, steps=consecutive_steps, site=site)


def _is_cross_entropy_of(step: Step, site: int, classes: int, loss: float) -> bool:
    """Return whether loss and gradient are those of a cross-entropy of logits in [0, 1]."""
    least, most = math.log(1 + (classes - 1) / math.e), math.log(1 + (classes - 1) * math.e)
    gradient = int(step.partner("output", "grad_output")[site])
    if not least * 0.999 <= loss <= most * 1.001 or gradient < 0 or not step.calls[gradient]:
        return False
    names = {f"{step.sites[site].name}.{name}".lstrip(".") for name in ("weight", "bias")}
    if any(each.name in names for each in step.sites):  # the module has parameters: it is no softmax or sigmoid
        return False
    totals = step.totals
    size, count = float(totals.l1_norm[gradient]), float(totals.count[gradient])
    expected = 2 * (1 - math.exp(-loss)) * step.calls[gradient]
    is_softmax = totals.zeros[gradient] < 0.1 * count and abs(step.sums[gradient]) < 1e-3 * size
    return bool(is_softmax and 0.75 < size / expected < 1.25)


@rule(depth=3, sums=True)
def initial_loss(step: Step, memory: Memory, factor: float = 3.0) -> Ill | None:
    """The first loss is far above that of guessing: wrong answers that are sure, or losses that are added up (a note).

    The first measured step is judged, if it is the first of the run: the loss is more than ``factor`` = 3 times
    log(classes), the cross-entropy of guessing, with as many classes as the last output has channels. That it is a
    cross-entropy shows in the gradient of this output: its mean is 0, and its L1 norm between 1 and 2, which is 2 (1 -
    p) of the right class. Where the output came in several microbatches, and each of their gradients has that size, the
    loss is the sum of theirs. That the loss has to begin near log(classes) is said by Karpathy, "A Recipe for Training
    Neural Networks" (2019); the factor is ours.

    What else looks like it: a pretrained model on data that it was not made for. What to do: look at the size of the
    initial weights, above all of the last layer and of embeddings that it shares its weight with; a deviation of 0.02
    is usual there. For a pretrained model compare what it is given now: labels, tokens, scaling. Divide the losses of
    microbatches by how many there are.

    False-positive guards: other losses are not judged, nor those that add up over a batch.
    """
    outputs, loss = step.ordered("output"), step.scalars.get("loss")
    if memory.get("is_judged") or step.number > 0 or not outputs or loss is None or not math.isfinite(loss):
        return None
    memory["is_judged"] = True
    site = outputs[-1]
    channels, gradient = step.channels(site), int(step.partner("output", "grad_output")[site])
    calls = int(step.calls[gradient]) if gradient >= 0 else 0
    if channels is None or len(channels.count) < 2 or not calls:
        return None
    guessing, size = math.log(len(channels.count)), float(step.totals.l1_norm[gradient])
    is_each = calls <= size <= 2.01 * calls and abs(float(step.sums[gradient])) < 1e-3 * size
    is_ill = is_each and loss > factor * guessing * (0.9 if calls > 1 else 1.0)

    def say(_: int, since: int) -> str:
        begin = f"the first loss is {number(loss)}, and guessing among {len(channels.count)} classes would cost "
        begin += f"{number(guessing)}: "
        if calls > 1:
            return begin + (
                f"{calls} microbatches, each with a loss of its own, were added up, and so were their gradients. "
                f"Divide each loss by {calls}, or lower the learning rate as much."
            )
        return begin + (
            f"the model is sure of wrong answers from the start; the deviation of {tensor_of(step.sites[site])} is "
            f"{number(float(step.totals.std[site]))}. Of a model that begins anew, make the initial weights smaller, "
            "above all those of the last layer; to a pretrained one give labels, tokens and scaling as it had them."
        )

    return Ill(is_ill, say, loss, guessing, "note", site=site)


@rule(per_site=False, depth=6, is_cause=False)
def no_progress(step: Step, memory: Memory, share: float = 0.02, after: int = 100) -> Ill | list[Ill] | None:
    """The loss is where it began (a note): what it was in the first 5 steps, after ``after`` = 100 of them.

    The median of the last 20 losses is judged: it has not come down by ``share`` = 0.02 of the first ones, nor by the
    deviation of these. Every step counts, measured or not; it is judged after 100 steps, after 200, 400, and so on, and
    said where it was not so the time before. The figures are ours.

    What else looks like it: losses that do not say what was learned, of a policy, or of both sides of a GAN; a very
    long warmup. What to do: look at what else was found; train on one batch until it is known by heart; look at whether
    labels belong to their data.
    """
    losses = step.given("loss")
    if not losses:
        return None
    firsts, last = memory.setdefault("firsts", []), memory.last("last", 20)
    for loss in filter(math.isfinite, losses.values()):
        memory["count"] = memory.get("count", 0) + 1
        if len(firsts) < 5:
            firsts.append(loss)
        last.append(loss)
    count = memory.get("count", 0)
    if count < memory.get("next", after):
        return []
    while memory.get("next", after) <= count:
        memory["next"] = 2 * memory.get("next", after)
    first, now = middle(np.array(firsts)), middle(np.array(last))
    noise = float(np.std(last)) / math.sqrt(len(last))
    is_ill = now >= first - max(share * abs(first), noise)
    is_new, memory["was_ill"] = is_ill and not memory.get("was_ill", False), is_ill

    def say(_: int, since: int) -> str:
        return (
            f"the loss is {number(now)} after {count} steps, and began at {number(first)}: nothing has been learned "
            "that it shows. If nothing else was found: train on a single batch until it is known by heart, and look at "
            "whether the labels belong to their data."
        )

    return Ill(is_new, say, now, first, "note")
