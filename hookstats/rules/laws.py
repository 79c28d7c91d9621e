"""Laws: equations between what is measured anyway, which hold in every healthy step, whatever the loss and the data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hookstats.numbers.fields import Array, Counts, Site
from hookstats.numbers.kinds import kind_of
from hookstats.rules.arriving import sums_of_outputs
from hookstats.rules.engine import Ill, rule
from hookstats.rules.finding import Finding
from hookstats.rules.formatting import number, times
from hookstats.rules.history import middle
from hookstats.rules.memory import Memory
from hookstats.rules.step import Mask, Step

# Of the L1 norm of a bias's gradient, and of its output's: of a sum that has cancelled farther, what rounding to
# bfloat16, and what adding up in float32, has made of it may be anything.
_LEAST, _LEAST_OF_OUTPUT = 0.02, 1e-5
_EQUAL, _CONSTANT = 0.01, 0.005


def _of_one_ratio(
    step: Step,
    memory: Memory,
    gradients: Counts,
    ratios: Array,
    factor: float,
    steps: int,
    say: Callable[[str, str, float, int, int, bool], str],
) -> list[Ill]:
    """A law by which two sums of a layer have one ratio, the same in all layers: where it jumps, and stays.

    gradients, ratios: the ids of gradients whose sums have not cancelled, and the ratio of each. say: of a name, its
    ratio over the others', the others' ratio, how many others there are, since when, and whether it jumped.
    """
    equal, streak = np.count_nonzero(abs(ratios - 1) < _EQUAL), memory.streak()
    agreed, known = memory.of_sites("agreed", False), memory.of_sites("known", False)  # in the last judged step; ever
    if equal == len(ratios) and not streak.goes_on:
        agreed[gradients] = known[gradients] = True
        return []
    common = 1.0 if equal else middle(ratios)
    relative = np.full(len(step.sites), np.nan)
    if common:
        relative[gradients] = ratios / common
    agree = abs(relative - 1) < _EQUAL
    count = int(np.count_nonzero(agree))
    if count < (1 if common == 1 else 2) or (common != 1 and 3 * count < 2 * gradients.size):
        return []
    judged = np.isfinite(relative)
    off = judged & ~((relative < factor) & (relative > 1 / factor))
    late = memory.of_sites("late", False)
    if np.count_nonzero(off):
        first = memory.of_sites("first", np.nan)  # the ratio when the streak began
        lengths = np.append(streak.lengths, np.zeros(len(off) - len(streak.lengths), np.int64))
        goes_on = (lengths > 0) & (abs(relative / first - 1) < _CONSTANT)
        begins = off & (lengths == 0) & (agreed | (~known if count > 1 else False))
        first[begins], late[begins] = relative[begins], agreed[begins]
        off &= goes_on | begins
    memory["agreed"] = np.where(judged, agree, agreed)
    known |= judged

    def sentence(site: int, since: int) -> str:
        ratio = float(relative[site])
        size = number(ratio) if abs(ratio) > 0.95 else f"1/{number(1 / ratio)}"
        return say(step.sites[site].name, size, common, count, since, bool(late[site]))

    def severity(site: int) -> str:
        return "warning" if late[site] else "note"

    return [Ill(off, sentence, relative, factor, severity, judged, steps)]


def bias_ratios(step: Step) -> tuple[Counts, Array]:
    """The gradients of biases whose sums have not cancelled, and each over the sum of its output's gradient."""
    gradients, outputs = step.alike(_biases_and_outputs)
    if not len(gradients):
        return gradients, np.empty(0)
    now, fresh, sizes = step.sums[gradients], step.sums[outputs], step.totals.l1_norm
    known: Mask = (abs(now) > _LEAST * sizes[gradients]) & (abs(fresh) > _LEAST_OF_OUTPUT * sizes[outputs])
    if step.has_nonfinite:
        known &= step.nonfinite[gradients] + step.nonfinite[outputs] == 0
    return gradients[known], now[known] / fresh[known]


@rule(of="grad_output", depth=4, sums=True, law="bias")
def bias_gradient(step: Step, memory: Memory, factor: float = 1.5, consecutive_steps: int = 5) -> list[Ill] | None:
    """A layer's gradients have become a multiple of what its output's gradient says (warning).

    The gradient of a bias (of a linear layer, a convolution, a norm) is the sum of the gradient of its module's output,
    by the chain rule. Over all channels both sums are known, and their ratio is 1, or what clipping has made of it in
    all layers alike: then it is their median. A layer is ill if its ratio jumps, from one measured step to the next, to
    ``factor`` = 1.5 times that or more, or to less than 1 / 1.5 of it, and stays the same to 0.5 % for
    ``consecutive_steps`` = 5 measured steps. A ratio that is so from the first step on is a note. The law is
    arithmetic; the figures are ours.

    What else looks like it: by design, a module that multiplies its output after it has added the bias, a hook on
    parameters that is meant to scale their gradients, a reversal layer or a straight-through estimator inside a module;
    they hold from the first step on, and ``Options(laws={"bias": False})`` declares them. What to do: look at what
    changes gradients after backward: hooks on parameters, reductions over a process group, a division that is missing
    or done twice.

    False-positive guards: a layer is judged where its output had one gradient in the step, where its sums
    have not cancelled, as they do between a residual stream and the norms behind it, and where other layers agree to
    1 %. Clipping each parameter or group by itself, what is learned, and other ranks' data change a ratio from step to
    step.
    """
    gradients, ratios = bias_ratios(step)
    if not gradients.size:
        return None

    def say(name: str, size: str, common: float, count: int, since: int, is_late: bool) -> str:
        others = times(count, "other layer")
        if common == 1:
            sentence = (
                f"the gradient of {name} is {size} times the sum of its output's gradient, in each measured step since "
                f"step {since}. By the chain rule it is that sum, and {others} keep{'s' * (count == 1)} to it. "
            )
        else:
            sentence = (
                f"the gradient of {name}, over the sum of its output's gradient, is {size} times what it is in "
                f"{others}, in each measured step since step {since}. By the chain rule it is the same in all of them. "
            )
        return sentence + (
            "Look at what changes gradients after backward: a hook on these parameters, a reduction over the wrong "
            "process group, a division that is missing or done twice."
            if is_late
            else "It has been so from the start: that is right where the module multiplies its output, or where a hook "
            "is to scale these gradients; else look at reductions over process groups and at missing divisions."
        )

    return _of_one_ratio(step, memory, gradients, ratios, factor, consecutive_steps, say)


def _biases_and_outputs(step: Step) -> Counts:
    """``[2, pairs]``: those of `sums_of_outputs` that are of biases, where the output had one gradient."""
    gradients, outputs, is_weight = step.once(sums_of_outputs)
    came = (step.totals.count[gradients] > 0) & (step.totals.count[outputs] > 0)
    result: Counts = np.array([gradients, outputs])[:, (is_weight == 0) & (step.calls[outputs] == 1) & came]
    return result


@rule(of="param_grad_local", depth=4, law="reduction")
def reduced_gradient(step: Step, memory: Memory, factor: float = 1.5, consecutive_steps: int = 5) -> list[Ill] | None:
    """Reduced gradients are no mean of what the ranks brought: averaged twice, or one layer otherwise (warning).

    Needs ``"param_grad_local"`` among the tensors, and ``process_group``. The gradient that an optimizer takes is the
    mean over the ranks of what their backwards brought together, so their sums are: this ratio is 1, the number of
    ranks where gradients are summed, or what clipping has made of it in all layers alike: then it is their median. A
    layer is ill if its ratio jumps to ``factor`` = 1.5 times that or more, or to less than 1 / 1.5 of it, and stays the
    same to 0.5 % for ``consecutive_steps`` = 5 measured steps; one that is so from the first step on is a note. All
    layers are ill if their ratio is 1 over the number of ranks for as long. The law is arithmetic; the figures are
    ours.

    What else looks like it: by design, a group of experts, whose gradients fewer ranks share; a loss that was divided
    by hand by the number of ranks; ``Options(laws={"reduction": False})`` declares it. What to do: look at what divides
    gradients after backward: DistributedDataParallel has done it.

    False-positive guards: a parameter is judged where its sums have not cancelled, and where others agree to
    1 %. Clipping by a norm gives another ratio in each step, the same in all layers.
    """
    if step.ranks == 1:
        return None
    ranks, sums, sizes = step.ranks, step.sums, step.totals.l1_norm
    local = step.partner("param_grad", "param_grad_local")
    known: Mask = (local >= 0) & (step.calls > 0) & (step.calls[local] > 0)
    known &= (abs(sums) > _LEAST * sizes) & (abs(sums[local]) > _LEAST * sizes[local])
    known &= np.isfinite(sums) & np.isfinite(sums[local]) & (step.nonfinite + step.nonfinite[local] == 0)
    gradients = np.flatnonzero(known)
    if not gradients.size:
        return None
    ratios = ranks * sums[gradients] / sums[local[gradients]]

    def say(name: str, size: str, common: float, count: int, since: int, is_late: bool) -> str:
        return (
            f"the reduced gradient of {name}, over the mean of what {ranks} ranks have brought, is {size} times "
            f"what it is in {times(count, 'other parameter')}, in each measured step since step {since}. "
        ) + (
            "Look at the reduction of this parameter: over which ranks, and how often."
            if is_late
            else "It has been so from the start: that is right where fewer ranks share it, as experts."
        )

    def say_of_all(site: None, since: int) -> str:
        return (
            f"the reduced gradients are 1/{ranks} of the mean over {ranks} ranks of what these have brought, in "
            f"all {len(gradients)} parameters that tell, in each measured step since step {since}: they were "
            "divided by the number of ranks twice. DistributedDataParallel has done it."
        )

    is_divided = len(gradients) > 1 and bool(np.isclose(ratios, 1 / ranks, rtol=_EQUAL).all())
    of_all = Ill(is_divided, say_of_all, 1 / ranks, 1.0, steps=consecutive_steps, key="all")
    return [*_of_one_ratio(step, memory, gradients, ratios, factor, consecutive_steps, say), of_all]


@rule(per_site=False, depth=1, law="replica")
def replica_drift(step: Step, memory: Memory) -> list[Finding] | None:
    """Ranks hold other values of a parameter, or of its reduced gradient, than their replicas: critical, or a warning.

    Data parallel ranks hold the same parameters, and after the reduction the same gradients, bit for bit; so do ranks
    of tensor parallelism of what is not cut. Of a step that was merged (``attach(process_group=...)``) the states of
    samples of parameters, and of gradients, are compared as hashes. Which ranks are replicas is said by a DTensor's
    mesh, or by DistributedDataParallel: then it is critical. Else it is known from three measured steps in which ranks
    changed alike: then it is a warning.

    What else looks like it: parameters that are averaged every so many steps, by design, which
    ``Options(laws={"replica": False})`` declares. What to do: look at what one rank does alone since the step that is
    named: clipping by a norm of its own, a step of the optimizer that is left out, a gradient that is not reduced, a
    generator of random numbers with another seed. `check_replicas` compares all bits.

    False-positive guards: it is arithmetic, without a threshold. Not compared is what one rank alone holds,
    what was measured at another place in the step, and a gradient that no optimizer has taken; ranks that do not call
    ``monitor.step`` as often are at other steps, and under DistributedDataParallel.join nothing is compared.
    """
    if step.ranks == 1:
        return None
    began: dict[Site, int] = memory.get("began", {})  # in a row, until the latest step
    began = memory["began"] = {each.site: began.get(each.site, step.number) for each in step.drifts}
    if not step.drifts:
        return []
    first = min(step.drifts, key=lambda each: (not each.is_certain, began[each.site]))
    sites = [i for i, site in enumerate(step.sites) if site in began]
    where = next((i for i in sites if step.sites[i] == first.site), None)
    since = began[first.site]

    several = len(first.ranks) > 1
    who = f"rank{'s' * several} {', '.join(map(str, first.ranks[:8]))}{', ...' * (len(first.ranks) > 8)}"
    those = f"rank {first.reference_rank}" + (f" and {times(first.agree - 1, 'other')}" if first.agree > 1 else "")
    what = kind_of(first.site.tensor).one.format("", first.site.name)
    sentence = f"{who} hold{'' if several else 's'} other values of {what} than {those}, since step {since}"
    if len(began) > 1:
        sentence += f", and of {len(began) - 1} more"
    how = "They are replicas: " if first.is_certain else "They held the same before, and changed alike: "
    sentence = (
        f"{sentence}. {how}look at what a rank does alone, such as clipping by a norm of its own, leaving out a "
        "step of the optimizer, or a gradient that is not reduced over the ranks."
    )
    severity, many = "critical" if first.is_certain else "warning", len(first.ranks)
    return [step.finding("replica-drift", where, many, 0.0, severity, sentence, since=since, sites=sites)]
