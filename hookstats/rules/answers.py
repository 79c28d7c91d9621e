"""The model's answers, their gradient, and what these tell of the loss and its targets."""

from __future__ import annotations

import math

import numpy as np

from hookstats.numbers.fields import FIELDS
from hookstats.rules.engine import Ill, rule
from hookstats.rules.history import middle
from hookstats.rules.memory import Memory
from hookstats.rules.step import Step, make_once_for_alike

_COUNT, _MIN, _MAX = map(FIELDS.index, ("count", "min", "max"))


@make_once_for_alike
def find_answer(step: Step) -> tuple[int, int, int] | None:
    """The ids of the model's last output and of its gradient, and how often that came; None where it did not."""
    outputs = step.list_finite("output")
    if not outputs:
        return None
    gradient = int(step.find_partner("output", "grad_output")[outputs[-1]])
    if gradient < 0 or not step.totals.count[gradient]:
        return None
    return outputs[-1], gradient, int(step.calls[gradient])


def is_of_softmax(step: Step, gradient: int) -> bool:
    """Return whether a gradient adds up to 0, as that of a softmax does in each row."""
    return bool(abs(step.sums[gradient]) < 1e-3 * step.totals.l1_norm[gradient])


def count_classes(step: Step, site: int) -> int:
    """Return how many channels a site has; 0 where they are not known."""
    state = step.state(site)
    return 0 if state is None else state.shape[1]


@rule(depth=2, sums=True)
def probabilities_as_logits(step: Step, consecutive_steps: int = 10) -> Ill | None:
    """A loss that expects logits gets probabilities: softmax, sigmoid or tanh before a cross-entropy (warning).

    The last output of the model lies in [0, 1], or in [-1, 1] up to its ends; the loss lies where the cross-entropy of
    such logits of ``n`` classes, as many as there are channels, must lie, between log(1 + (n - 1) / e) and log(1 + (n -
    1) e), of a tanh with e squared; and the gradient is that of a softmax: not 0 anywhere, 0 on average, and of the
    size 2 (1 - exp(-loss)) in all that the loss implies. Or it is that of a binary cross-entropy of logits in [0, 1],
    sigmoid(y) - t, which is never between -0.26 and 0.5, nor beyond 0.74 and -0.5. All this holds in
    ``consecutive_steps`` = 10 measured steps in a row. The rule is ours; it follows from the definition.

    What else looks like it: nothing that we know; a negative log likelihood of probabilities has a gradient at one
    class of each row, and that of a binary cross-entropy of probabilities is beyond 1. What to do: leave out the last
    activation; cross_entropy and binary_cross_entropy_with_logits have their own.

    False-positive guards: the module of that output has no parameters, as a layer whose logits are small has; its
    values add up to 1, are near 0.5 in the middle, or come near an end, as those of a pooling need not.
    """
    found, loss = find_answer(step), step.scalars.get("loss")
    if found is None or loss is None:
        return None
    site, gradient, calls = found
    totals, is_ill, least = step.totals, False, 0.0
    low, high = float(totals.min[site]), float(totals.max[site])
    if low >= -1 and high <= 1 and step.nonfinite[site] == 0 and not step.make_for_sites(has_weights)[site]:
        classes, is_tanh, mean = count_classes(step, site), low < 0, float(totals.mean[site])
        rows = float(step.sums[site]) / max(classes, 1)  # 1 or more where it adds up to 1 over the batch
        is_one = abs(mean * classes - 1) < 1e-3 or 0.3 < mean < 0.7 or high > 0.95
        is_one = is_one or (rows > 0.5 and abs(rows - round(rows)) < 1e-4 * rows)
        if max(high, -low) > 0.99 if is_tanh else is_one:
            span = 2 if is_tanh else 1
            least, most = (math.log(1 + (max(classes, 2) - 1) * math.exp(sign * span)) for sign in (-1, 1))
            if classes > 1 and least * 0.999 <= loss <= most * 1.001 and is_of_softmax(step, gradient):
                expected = 2 * (1 - math.exp(-loss)) * calls
                is_ill = 0.75 * expected < totals.l1_norm[gradient] < 1.25 * expected
                is_ill = is_ill and totals.zeros[gradient] < 0.1 * totals.count[gradient]
            if not is_ill and not is_tanh and calls == 1:
                is_ill, least = _is_of_two_sigmoids(step, gradient, loss), math.log(1 + math.exp(-1))
    text = (
        "{tensor} lies in [{low}, {high}], like the output of a softmax, sigmoid or tanh, and the cross-entropy takes "
        "it as logits: the loss cannot fall below {threshold}, and its gradient is small. Remove that activation: the "
        "loss applies its own."
    )
    words = {"low": -1.0 if low < 0 else 0.0, "high": 1.0}
    return Ill(is_ill, text, loss, least, steps=consecutive_steps, site=site, words=words)


def _is_of_two_sigmoids(step: Step, gradient: int, loss: float) -> bool:
    """Return whether a gradient is that of a binary cross-entropy whose logits lie in [0, 1]."""
    totals, count = step.totals, float(step.totals.count[gradient])
    low, high, off = float(totals.min[gradient]) * count, float(totals.max[gradient]) * count, 0.01
    one = 1 / (1 + math.exp(-1))  # of the largest logit
    is_within = 0.5 - off < high < one + off and -0.5 - off < low < one - 1 + off
    is_apart = totals.zeros[gradient] == 0 and float(totals.abs_mean[gradient]) * count > 1 - one
    return bool(is_within and is_apart and math.log(1 + math.exp(-1)) < loss < math.log(1 + math.e))


def has_weights(step: Step) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """``[n]``: whether the module of a site has parameters that are watched."""
    names = {name.rpartition(".")[0] for name, _ in step.sites if name.rpartition(".")[2] in ("weight", "bias")}
    return np.array([site.name in names for site in step.sites], bool)


@rule(depth=3, sums=True)
def initial_loss(step: Step, memory: Memory, factor: float = 3.0) -> Ill | None:
    """The first loss is far above that of guessing: confident wrong answers, or losses that are added up (note).

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
    loss, has_outputs = step.scalars.get("loss"), bool(step.list_finite("output"))
    if memory.get("is_judged") or step.number > 0 or not has_outputs or loss is None or not math.isfinite(loss):
        return None
    memory["is_judged"] = True
    found = find_answer(step)
    classes = 0 if found is None else count_classes(step, found[0])
    if found is None or classes < 2:
        return None
    site, gradient, calls = found
    guessing, size = math.log(classes), float(step.totals.l1_norm[gradient])
    is_each = calls <= size <= 2.01 * calls and is_of_softmax(step, gradient)
    is_ill = is_each and loss > factor * guessing * (0.9 if calls > 1 else 1.0)
    begin = "the first loss is {value}, where guessing among {classes} classes would cost {threshold}: "
    if calls > 1:
        begin += (
            "{calls} microbatches, each with a loss of its own, were added up, and so were their gradients. Divide "
            "each loss by {calls}, or lower the learning rate by that factor."
        )
    else:
        begin += (
            "the model starts out sure of wrong answers; the deviation of {tensor} is {spread}. For a new model, make "
            "the initial weights smaller, above all in the last layer; for a pretrained one, use the labels, tokens "
            "and scaling that it was trained with."
        )
    words = {"classes": str(classes), "calls": str(calls), "spread": step.totals.std[site]}
    return Ill(is_ill, begin, loss, guessing, "note", site=site, words=words)


@rule(per_site=False, depth=6, is_cause=False)
def no_progress(
    step: Step, memory: Memory, share: float = 0.02, small: float = 0.2, after: int = 100
) -> Ill | list[Ill] | None:
    """The loss is where it began, or has stopped after a small fall, after ``after`` = 100 steps (note).

    The median of the last 20 losses is judged: it has not come down by ``share`` = 0.02 of the first 5, nor by the
    deviation of these; or it has come down by less than ``small`` = 0.2 of them, and not at all since half of the
    steps. Every step counts, measured or not; it is judged after 100 steps, after 200, 400, and so on, and said where
    it was not so the time before. The figures are ours.

    What else looks like it: losses that do not say what was learned, of a policy, or of both sides of a GAN; a very
    long warmup; data of which little can be known. What to do: look at what else was found; train on one batch until it
    is known by heart; look at whether labels belong to their data, and whether the answer depends on the input at all:
    a model that has learned how often each answer comes has such a loss.
    """
    losses = [loss for loss in step.read_scalar("loss").values() if math.isfinite(loss)]
    if not step.read_scalar("loss"):
        return None
    firsts, last = memory.setdefault("firsts", []), memory.last("last", 20)
    firsts += losses[: 5 - len(firsts)]
    last.extend(losses)
    count = memory["count"] = memory.get("count", 0) + len(losses)
    turn = memory.setdefault("next", after // 2)  # the first half is there to be compared with
    if count < turn:
        return []
    while memory["next"] <= count:
        memory["next"] *= 2
    before, now = memory.get("half", math.nan), middle(np.array(last))
    memory["half"], first = now, middle(np.array(firsts))
    if turn < after:
        return []
    noise = float(np.std(last)) / math.sqrt(len(last))
    never = now >= first - max(share * abs(first), noise)
    stands = now > 0 and now > (1 - small) * first and now >= before - max(share * (first - now), noise)
    is_new, memory["was_ill"] = (never or stands) and not memory.get("was_ill", False), never or stands
    text = "the loss is {value} after {steps} steps, and began at {threshold}: "
    text += (
        "nothing has been learned. "
        if never
        else (
            "it was {before} after half of them, and has stopped falling. Such a loss is often that of predicting how "
            "frequent each answer is, without the input. "
        )
    )
    text += "If nothing else was found, overfit a single batch, and check that the labels belong to their inputs."
    return Ill(is_new, text, now, first, "note", words={"steps": str(count), "before": before})


@rule(per_site=False, depth=5, is_cause=False)
def impossible_loss(
    step: Step, memory: Memory, share: float = 0.02, classes: int = 20, within: int = 1000, consecutive_steps: int = 10
) -> Ill | list[Ill] | None:
    """The loss is lower than it can be, or than it can be so soon: below 0, or almost 0 (note).

    A loss whose first five values were above 0 has been below 0 for ``consecutive_steps`` = 10 steps in a row. Or a
    cross entropy over more than ``classes`` = 20 classes, which the gradient of the last output shows it to be, has
    come to ``share`` = 0.02 of that of guessing, within ``within`` = 1000 steps. The bound of a cross entropy and of a
    squared error is arithmetic; the figures are ours.

    What else looks like it: likelihoods of densities, which may be below 0, an entropy or a reward that is subtracted;
    data that are learned by heart. What to do: of a binary cross entropy see that targets lie between 0 and 1, and of a
    divergence which argument holds logarithms; where the answer is known too soon, see whether the input holds it:
    labels that are not shifted by one token, a missing causal mask, rows that training and validation share.

    False-positive guards: losses that begin below 0, and models that know the answer from the start, are not judged.
    """
    losses = [loss for loss in step.read_scalar("loss").values() if math.isfinite(loss)]
    firsts, last = memory.setdefault("firsts", []), memory.last("last", consecutive_steps)
    firsts += losses[: 5 - len(firsts)]
    last.extend(losses)
    if not losses or len(last) < consecutive_steps or min(firsts) <= 0:
        return []
    below = (
        "the loss has been below 0 for {steps} steps, now {value}, and began at {first}: a cross-entropy or a squared "
        "error cannot be negative. Check that the targets of a binary cross-entropy lie between 0 and 1, that a "
        "divergence gets logarithms where it expects them, and what is subtracted; likelihoods of densities may be "
        "below 0."
    )
    words, now = {"steps": str(consecutive_steps), "first": middle(np.array(firsts))}, middle(np.array(last))
    found, guessing = [Ill(max(last) < 0, below, now, 0.0, "note", words=words)], math.inf
    if 0 <= now < 1 and step.number <= within and (known := find_answer(step)) is not None:
        width = count_classes(step, known[0])
        guessing = math.log(width) if width > classes and is_of_softmax(step, known[1]) else math.inf
    soon = (
        "the loss is {value} after {number} steps, where guessing among so many classes costs {threshold}: the answer "
        "is probably in the input. Look for labels that are not shifted by one, a missing causal mask, a target among "
        "the inputs, or one batch that is repeated."
    )
    is_soon = min(firsts) > guessing / 2 and now < share * guessing < math.inf
    return [*found, Ill(is_soon, soon, now, guessing, "note", words={"number": str(step.number + 1)})]


@rule(of="grad_output", depth=2, sums=True)
def broadcast_target(step: Step, consecutive_steps: int = 5, residual: float = 1e-4) -> Ill | None:
    """Every answer is compared with every target, as (N, 1) against (N): the model learns only their mean (warning).

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
    found, loss = find_answer(step), step.scalars.get("loss")
    if found is None or loss is None or found[2] > 1 or count_classes(step, found[0]) > 1:
        return None
    site, gradient, _ = found
    totals = step.totals
    count, spread = float(totals.count[site]), float(totals.std[site])
    if count < 8 or count != totals.count[gradient] or not spread > 1e-3 * float(totals.rms[site]):
        return None
    ratio = float(totals.std[gradient]) * count / spread
    factor = 2.0 if ratio > 1.5 else 1.0
    square = factor / 2 * (float(totals.rms[gradient]) * count / factor) ** 2
    is_one = abs(ratio / factor - 1) < residual and loss > 1.01 * square
    text = (
        "the gradient of {tensor} has been that of a squared error against one number for all {count} rows since step "
        "{since}, although the loss is not: (N, 1) was broadcast against (N), and the model can learn only the mean "
        "of the targets. Give both the same shape: output.squeeze(-1), or target[:, None]."
    )
    return Ill(is_one, text, ratio, residual, steps=consecutive_steps, site=site, words={"count": count})


@rule(of="grad_output", depth=2)
def nll_of_logits(step: Step, consecutive_steps: int = 5) -> Ill | None:
    """A negative log likelihood gets logits or probabilities instead of log-probabilities (warning).

    The loss takes one value of each row as it is: the gradient of the model's last output is one negative number in one
    place of each row, and 0 in all others. So it must be where log-probabilities come out, which are never above 0; but
    that output has values above 0. In ``consecutive_steps`` = 5 measured steps in a row. Both are arithmetic.

    What else looks like it: a model whose chosen output is to grow for its own sake. What to do: use `cross_entropy`,
    which takes logits; or give `nll_loss` the result of ``log_softmax``.

    False-positive guards: a gradient that has several sizes, as that of Q learning has, is not judged, nor is
    one of fewer than 8 rows.
    """
    found = find_answer(step)
    if found is None or found[2] > 1:
        return None
    site, gradient, _ = found
    totals = step.totals
    is_ill = False
    if totals.max[gradient] == 0:
        lowest, count = float(totals.min[gradient]), float(totals.count[gradient])
        chosen, classes = count - float(totals.zeros[gradient]), count_classes(step, gradient)
        is_ill = chosen >= 8 and lowest < 0 and abs(float(totals.l1_norm[gradient]) / (-lowest * chosen) - 1) < 1e-5
        is_ill = is_ill and classes > 1 and chosen * classes <= count and bool(totals.max[site] > 0)
    text = (
        "the loss reads one value of each row of {tensor} directly, and these reach {value}: log-probabilities, which "
        "nll_loss expects, are never above 0. The loss falls without limit, and the other classes learn nothing. Use "
        "cross_entropy, or give nll_loss the output of log_softmax."
    )
    return Ill(is_ill, text, float(totals.max[site]), 0.0, steps=consecutive_steps, site=site)


@rule(of="grad_output", depth=0)
def sorted_data(step: Step, memory: Memory, share: float = 0.7, batches: int = 10, rows: int = 8) -> Ill | None:
    """Batches hold a single class each, because the data are sorted and not shuffled (warning).

    The gradient of a cross-entropy is below 0 at the class of a row and above 0 at all others, and adds up to 0 in each
    row. So a batch of one class pulls one channel up in all of its rows, and all others down. A run is ill if that is
    so in ``share`` = 0.7 of the last ``batches`` = 10 measured ones, and if it was not the same class in all of them
    since the run began. It follows from the definition; the figures are ours.

    What else looks like it: tasks that are learned one after another on purpose. What to do: shuffle
    (``DataLoader(shuffle=True)``; for streams a buffer that is larger than a class; for files, their order).

    False-positive guards: batches of fewer than ``rows`` = 8 rows are not judged; nor is a class that is
    nearly all of the data, for then it is always the same.
    """
    found = find_answer(step)
    state = None if found is None or found[2] > 1 else step.state(found[1])
    if found is None or state is None or state.shape[1] < 3 or state[_COUNT].min() < rows:
        return None
    if not is_of_softmax(step, found[1]):
        return None
    pulled = np.flatnonzero(state[_MIN] < 0)
    chosen = int(pulled[0]) if len(pulled) == 1 and state[_MAX, pulled[0]] <= 0 else -1
    last, known = memory.last("last", batches), memory.setdefault("classes", set())
    last.append(chosen)
    if chosen >= 0:
        memory.setdefault("since", step.number)
        known.add(chosen)
    alone = sum(each >= 0 for each in last)
    is_ill = len(last) == batches and alone >= share * batches and len(known) > 1
    text = (
        "{alone} of the last {batches} measured batches held a single class each, {classes} different ones since step "
        "{since}, as the gradient of {tensor} shows: the data are sorted by class. Shuffle them: "
        "DataLoader(shuffle=True), or a buffer that holds more than one class."
    )
    words = {"alone": alone, "batches": batches, "classes": len(known)}
    return Ill(is_ill, text, alone / batches, share, since=memory.get("since"), site=found[0], words=words)


@rule(of="grad_output", per_site=False, depth=2)
def absent_class(
    step: Step, memory: Memory, batches: int = 40, rows: float = 100.0, share: float = 0.25
) -> Ill | list[Ill] | None:
    """A class is never a target, so the model learns never to answer it (note); or all but one (warning).

    The gradient of a cross-entropy is below 0 at the class of a row and above 0 at all others, and adds up to 0 in each
    row. So a channel of the gradient of the last output that has been above 0 and never below is a class that no row
    had. It is told after ``batches`` = 40 measured steps and ``rows`` = 100 rows for each class. It follows from the
    definition; the figures are ours.

    What else looks like it: padding and reserved classes, which are left out on purpose; a class that is rarer than one
    row in all. What to do: look whether the data have that class, whether ``ignore_index`` or a mask takes more than
    the padding (an end-of-text token that is also the padding is never learned, and a model that was trained so does
    not stop), and whether labels count from 0.

    False-positive guards: where more than ``share`` = 0.25 of the classes are absent, the vocabulary is wider than the
    data, and nothing is said, unless one class is the target of all rows; nor of fewer than 3 classes.
    """
    found = find_answer(step)
    state = None if found is None or found[2] > 1 else step.state(found[1])
    if found is None or state is None or state.shape[1] < 3 or not is_of_softmax(step, found[1]):
        return None
    classes = state.shape[1]
    if len(memory.get("had", ())) != classes:
        memory["had"], memory["others"] = np.zeros((2, classes), bool)
        memory["rows"], memory["steps"], memory["since"] = 0, 0, step.number
    memory["had"] |= state[_MIN] < 0
    memory["others"] |= state[_MAX] > 0
    memory["rows"] += float(state[_COUNT].max())
    memory["steps"] += 1
    if memory["steps"] < batches or memory["rows"] < rows * classes:
        return []
    absent = np.flatnonzero(memory["others"] & ~memory["had"])
    listed = ", ".join(map(str, absent[:5].tolist())) + (", ..." if len(absent) > 5 else "")
    what, have, it = ("class", "has", "it") if len(absent) == 1 else ("classes", "have", "them")
    text = (
        f"{what} {listed} of {{tensor}} {have} not been the target of any row in {{steps}} measured steps: the model "
        f"learns never to answer {it}. That is right for padding and reserved classes; otherwise check the data, "
        "labels that do not count from 0, and ignore_index, which must not be the end-of-text token."
    )
    only = (
        f"class {int(memory['had'].argmax())} of {{tensor}} has been the target of every row in {{steps}} measured "
        "steps: there is nothing to tell apart. Print the labels as the loss gets them: a scaling, a cast to integers "
        "or a comparison may have made them all equal."
    )
    since, words = memory["since"], {"steps": str(memory["steps"])}
    is_one, is_ill = len(absent) == classes - 1, 0 < len(absent) <= share * classes
    return [
        Ill(is_ill, text, len(absent), 0.0, "note", since=since, site=found[0], words=words),
        Ill(is_one, only, len(absent), 0.0, since=since, site=found[0], words=words, key="only"),
    ]
