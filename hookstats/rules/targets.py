"""The gradient of the model's answer, and what it tells of the loss and its targets."""

from __future__ import annotations

import numpy as np

from hookstats.numbers.fields import FIELDS
from hookstats.rules.engine import Ill, rule
from hookstats.rules.formatting import number, tensor_of
from hookstats.rules.memory import Memory
from hookstats.rules.step import Step

_COUNT, _MIN, _MAX = map(FIELDS.index, ("count", "min", "max"))


def answer(step: Step) -> tuple[int, int] | None:
    """The ids of the model's last output and of its gradient; None where there is none, or it came more than once."""
    return step.alike(_answer)


def _answer(step: Step) -> tuple[int, int] | None:
    outputs = step.ordered("output")
    if not outputs:
        return None
    gradient = int(step.partner("output", "grad_output")[outputs[-1]])
    if gradient < 0 or step.calls[gradient] != 1 or not step.totals.count[gradient]:
        return None
    return outputs[-1], gradient


@rule(of="grad_output", depth=2, sums=True)
def broadcast_target(step: Step, consecutive_steps: int = 5, residual: float = 1e-4) -> Ill | None:
    """Every answer is compared with every target, as (N, 1) against (N) is: the model learns their mean (warning).

    The gradient of a squared error is 2 / N times the answer minus its target. Where the target is one number for all
    rows, the gradient varies from row to row exactly as the answer does: std(gradient) * N / std(answer) is 2, or 1 for
    half of the square, and so it is if each answer is compared with all targets, which broadcasting does silently. Then
    the loss is also larger than the mean square that this gradient implies, by the variance of the targets. A model
    with one output is ill if both hold, to ``residual`` = 1e-4 and 0.01, in ``consecutive_steps`` = 5 measured steps in
    a row. The law is arithmetic; the figures are ours.

    What else looks like it: one target for the whole batch, and a second term of the loss. What to do: give both the
    same shape, by ``output.squeeze(-1)`` or ``target[:, None]``; torch warns of it where the loss is `mse_loss`.

    False-positive guards: where targets differ the two agree by chance alone; answers of fewer than 8 values,
    and those that are the same for all rows, are not judged.
    """
    found, loss = answer(step), step.scalars.get("loss")
    if found is None or loss is None:
        return None
    site, gradient = found
    totals, state = step.totals, step.state(site)
    if state is not None and state.shape[1] > 1:
        return None
    count = float(totals.count[site])
    if count < 8 or count != totals.count[gradient]:
        return None
    spread = float(totals.std[site])
    if not spread > 1e-3 * float(totals.rms[site]):
        return None
    ratio = float(totals.std[gradient]) * count / spread
    factor = 2.0 if ratio > 1.5 else 1.0
    is_one = abs(ratio / factor - 1) < residual
    if is_one:
        square = factor / 2 * (float(totals.rms[gradient]) * count / factor) ** 2
        is_one = loss > 1.01 * square

    def say(_: int, since: int) -> str:
        return (
            f"the gradient of {tensor_of(step.sites[site])} is that of a squared error against one number for all "
            f"{number(count)} rows, in each measured step since step {since}, and the loss is not: (N, 1) was compared "
            "with (N), each answer with every target, and the model can learn their mean alone. "
            "Give both the same shape: output.squeeze(-1), or target[:, None]."
        )

    return Ill(is_one, say, ratio, residual, steps=consecutive_steps, site=site)


@rule(of="grad_output", depth=2)
def nll_of_logits(step: Step, consecutive_steps: int = 5) -> Ill | None:
    """A negative log likelihood of what are no log-probabilities: logits, or probabilities (warning).

    The loss takes one value of each row as it is: the gradient of the model's last output is one negative number in one
    place of each row, and 0 in all others. So it must be where log-probabilities come out, which are never above 0; but
    that output has values above 0. In ``consecutive_steps`` = 5 measured steps in a row. Both are arithmetic.

    What else looks like it: a model whose chosen output is to grow for its own sake. What to do: use `cross_entropy`,
    which takes logits; or give `nll_loss` the result of ``log_softmax``.

    False-positive guards: a gradient that has several sizes, as that of Q learning has, is not judged, nor is
    one of fewer than 8 rows.
    """
    found = answer(step)
    if found is None:
        return None
    site, gradient = found
    totals = step.totals
    is_ill = False
    if totals.max[gradient] == 0:
        lowest, count = float(totals.min[gradient]), float(totals.count[gradient])
        chosen = count - float(totals.zeros[gradient])
        size = float(totals.l1_norm[gradient])
        is_ill = lowest < 0 and chosen >= 8 and abs(size / (-lowest * chosen) - 1) < 1e-5
    if is_ill:
        channels = step.channels(gradient)
        is_ill = channels is not None and chosen * len(channels.count) <= count and len(channels.count) > 1
    is_ill = is_ill and bool(totals.max[site] > 0)

    def say(_: int, since: int) -> str:
        return (
            f"the loss takes one value of each row of {tensor_of(step.sites[site])} as it is, and these reach "
            f"{number(float(totals.max[site]))}: log-probabilities, which nll_loss expects, are never above 0. So the "
            "loss falls without an end, and the other classes learn nothing. Use cross_entropy, or give nll_loss the "
            "result of log_softmax."
        )

    return Ill(is_ill, say, float(totals.max[site]), 0.0, steps=consecutive_steps, site=site)


@rule(of="grad_output", depth=0)
def sorted_data(step: Step, memory: Memory, share: float = 0.7, batches: int = 10, rows: int = 8) -> Ill | None:
    """Each batch holds one class, and another one later: the data are sorted, and nobody shuffles them (warning).

    The gradient of a cross-entropy is below 0 at the class of a row and above 0 at all others, and adds up to 0 in each
    row. So a batch of one class pulls one channel up in all of its rows, and all others down. A run is ill if that is
    so in ``share`` = 0.7 of the last ``batches`` = 10 measured ones, and if it was not the same class in all of them
    since the run began. It follows from the definition; the figures are ours.

    What else looks like it: tasks that are learned one after another on purpose. What to do: shuffle
    (``DataLoader(shuffle=True)``; for streams a buffer that is larger than a class; for files, their order).

    False-positive guards: batches of fewer than ``rows`` = 8 rows are not judged; nor is a class that is
    nearly all of the data, for then it is always the same.
    """
    found = answer(step)
    if found is None:
        return None
    site, gradient = found
    totals = step.totals
    size = float(totals.l1_norm[gradient])
    if not abs(float(step.sums[gradient])) < 1e-3 * size:
        return None
    state = step.state(gradient)
    if state is None or state.shape[1] < 3 or state[_COUNT].min() < rows:
        return None
    pulled = np.flatnonzero(state[_MIN] < 0)
    chosen = int(pulled[0]) if len(pulled) == 1 and state[_MAX, pulled[0]] <= 0 else -1
    last, known = memory.last("last", batches), memory.setdefault("classes", set())
    last.append(chosen)
    if chosen >= 0:
        memory.setdefault("since", step.number)
    known |= {chosen} - {-1}
    alone = sum(each >= 0 for each in last)
    is_ill = len(last) == batches and alone >= share * batches and len(known) > 1

    def say(_: int, since: int) -> str:
        return (
            f"{alone} of the last {batches} measured batches held a single class each, {len(known)} different ones "
            f"since step {since}, as the gradient of {tensor_of(step.sites[site])} shows: the data are sorted by "
            "class. Shuffle them: DataLoader(shuffle=True), or a buffer that holds more than a class."
        )

    return Ill(is_ill, say, alone / batches, share, since=memory.get("since"), site=site)


@rule(of="grad_output", per_site=False, depth=2)
def absent_class(
    step: Step, memory: Memory, batches: int = 40, rows: float = 100.0, share: float = 0.25
) -> Ill | list[Ill] | None:
    """A class that is never a target, so that the model learns never to answer it (a note).

    The gradient of a cross-entropy is below 0 at the class of a row and above 0 at all others, and adds up to 0 in each
    row. So a channel of the gradient of the last output that has been above 0 and never below is a class that no row
    had. It is told after ``batches`` = 40 measured steps and ``rows`` = 100 rows for each class. It follows from the
    definition; the figures are ours.

    What else looks like it: padding and reserved classes, which are left out on purpose; a class that is rarer than one
    row in all. What to do: look whether the data have that class, whether ``ignore_index`` or a mask takes more than
    the padding (an end-of-text token that is also the padding is never learned, and a model that was trained so does
    not stop), and whether labels count from 0.

    False-positive guards: where more than ``share`` = 0.25 of the classes are absent, the vocabulary is wider than the
    data, and nothing is said; nor of fewer than 3 classes.
    """
    found = answer(step)
    if found is None:
        return None
    site, gradient = found
    state = step.state(gradient)
    is_softmax = abs(step.sums[gradient]) < 1e-3 * step.totals.l1_norm[gradient]
    if state is None or state.shape[1] < 3 or not is_softmax:
        return None
    classes = state.shape[1]
    had, others = memory.get("had"), memory.get("others")
    if had is None or len(had) != classes:
        had, others = memory["had"], memory["others"] = np.zeros((2, classes), bool)
        memory["rows"] = memory["steps"] = 0
        memory["since"] = step.number
    had |= state[_MIN] < 0
    others |= state[_MAX] > 0
    memory["rows"] += float(state[_COUNT].max())
    memory["steps"] += 1
    if memory["steps"] < batches or memory["rows"] < rows * classes:
        return []
    absent = np.flatnonzero(others & ~had)

    def say(_: int, since: int) -> str:
        listed = ", ".join(map(str, absent[:5].tolist())) + (", ..." if len(absent) > 5 else "")
        what, have, it = ("class", "has", "it") if len(absent) == 1 else ("classes", "have", "them")
        return (
            f"{what} {listed} of {tensor_of(step.sites[site])} {have} been the target of no row in "
            f"{memory['steps']} measured steps: the model learns never to answer {it}. That is right for padding and "
            "reserved classes; else look at the data, at labels that do not count from 0, and at ignore_index, which "
            "must not be the end-of-text token."
        )

    is_ill = 0 < len(absent) <= share * classes
    return Ill(is_ill, say, len(absent), 0.0, "note", since=memory["since"], site=site)
