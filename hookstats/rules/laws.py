"""Laws: equations between what is measured anyway, which hold in every healthy step, whatever the loss and the data."""

from __future__ import annotations

import numpy as np

from hookstats.numbers.fields import Counts, Site
from hookstats.numbers.kinds import kind_of
from hookstats.rules.engine import Ill, rule
from hookstats.rules.finding import Finding
from hookstats.rules.formatting import times
from hookstats.rules.memory import Memory
from hookstats.rules.ratios import TELLS, Broken, Sides, are_added, judge_ratios, residuals
from hookstats.rules.step import Step

_EQUAL = 0.01


@rule(of="grad_output", depth=4, sums=True, law="bias")
def bias_gradient(step: Step, memory: Memory, factor: float = 1.5, consecutive_steps: int = 5) -> list[Ill] | None:
    """The gradient of a bias is not the sum of its output's gradient (critical from a factor on, or warning).

    The gradient of a bias (of a linear layer, a convolution, a norm) is the sum of the gradient of its module's output,
    by the chain rule, in each channel. Their ratio is 1, or what clipping, or the mean over ranks, has made of it in
    all layers alike: then it is their median. It is held against the gradients that an optimizer takes, and against
    each rank's own (``"param_grad_local"``). What rounding leaves is known: 2^-8, half the distance between numbers of
    bfloat16, of the sum, and of 4 deviations of a sum of so many roundings; of each row, where the gradient has no more
    bits than those of bfloat16 or float16, in which it may have been summed. A finding names the layer, the channels,
    if not all, and the factor. Whole factors (8, 1/8, -1, 0) are told in the second measured step in a row, others
    where they stay the same to 0.5 % for ``consecutive_steps`` = 5, which clipping does not. It is critical from
    ``factor`` = 1.5 on, else a warning, of at least two channels that agree as exactly as other layers keep the law.
    Channels that have no factor in common are a warning where the layer kept the law before. Where no channels are
    there (``Channels.every``), totals are judged.

    What else looks like it: by design, a module that multiplies its output after it has added the bias, a hook on
    parameters that is meant to scale their gradients, a reversal layer or a straight-through estimator inside a module,
    clipping parameter by parameter; ``Options(laws={"bias": False})`` declares them. What to do: look at what changes
    gradients after backward: hooks on parameters, reductions over a process group, a division that is missing or done
    twice.

    False-positive guards: a layer is judged where its sums have not cancelled and where other layers keep the law; one
    whose output had several gradients in the step, if another one with as many keeps it. Clipping, what is learned, and
    other ranks' data change a ratio from step to step; several values of one size, the largest there is, were clipped.
    """

    def say(broken: Broken) -> str:
        others = times(broken.others, "other layer")
        name = f"{broken.name}{broken.where}"
        if broken.factor != broken.factor:
            sentence = (
                f"the gradient of {name} is neither the sum of its output's gradient nor a multiple of it, since step "
                f"{broken.since}. By the chain rule it is that sum, as in {others}. "
            )
        elif broken.common == 1:
            sentence = (
                f"the gradient of {name} is {broken.size} times the sum of its output's gradient, since step "
                f"{broken.since}. By the chain rule it is that sum, as in {others}. "
            )
        else:
            sentence = (
                f"the gradient of {name}, divided by the sum of its output's gradient, is {broken.size} times what it "
                f"is in {others}, since step {broken.since}. By the chain rule it is the same in all. "
            )
        return sentence + (
            "Check what changes gradients after backward: a hook on these parameters, a reduction over the wrong "
            "process group, a division that is missing or done twice."
            if broken.is_late
            else "It has been so from the start: check reductions over process groups, and divisions that are missing "
            'or done twice; if it is intended, declare it by Options(laws={"bias": False}).'
        )

    found: list[Ill] = []
    for kind in _REDUCED_OR_LOCAL:
        sides, calls = find_sides_of_biases(step, kind)
        if sides is not None:
            found += judge_ratios(step, memory, kind, sides, calls, factor, consecutive_steps, 1 / step.ranks, say)
    return found


@rule(of="grad_output", per_site=False, depth=4, sums=True, law="bias")
def dropped_gradients(step: Step, memory: Memory, consecutive_steps: int = 20) -> Ill | None:
    """Gradients of some backward passes never reach the optimizer (note).

    Where a model is called several times in a step (microbatches), the gradient of each bias is the sum of the
    gradients of all its outputs, by the law of ``bias-gradient``. In all layers it is neither that sum nor any multiple
    of it, by 8 times what rounding leaves, in ``consecutive_steps`` = 20 measured steps in a row.

    What else looks like it: by design, a method that makes two passes and drops the gradients of one (SAM, adversarial
    training, a discriminator through which a generator is trained); ``Options(laws={"bias": False})`` declares it. What
    to do: call ``zero_grad()`` once in a step, before the first microbatch.

    False-positive guards: all layers that tell must have as many gradients as outputs, more than one, and the same
    number; that excludes derivatives by ``torch.autograd.grad``. Gradients that nobody zeroes are not judged.
    """
    sides, calls = find_sides_of_biases(step, "param_grad")
    if sides is None or calls.min() < 2:
        return None
    factors, tells = sides.factors()
    told = np.flatnonzero(tells > TELLS)
    off = np.maximum.reduceat(sides.residual(factors), sides.begin)[told]
    outputs = step.find_partner("param_grad", "output", "bias", "")[sides.layers[told]]
    count, forwards = int(calls.max()), step.calls[outputs[outputs >= 0]]
    is_same = len(forwards) == len(told) > 1 and bool((forwards == count).all() and (calls[told] == count).all())
    breaks, keeps = is_same and bool((off > TELLS).all()), bool((off <= 1).any())
    is_added = are_added(step, memory, "dropped", sides, np.ones(len(sides.layers), bool))[told].any()
    if is_added or not (breaks or keeps):
        return None

    def say(site: None, since: int) -> str:
        return (
            f"gradients of parameters are not the sum over the {count} forwards of a step, in any layer, since step "
            f"{since}: those of some backward passes were zeroed or overwritten before the optimizer stepped. Call "
            "zero_grad() once per step, before the first microbatch. If two passes are intended (SAM, adversarial "
            'training, a discriminator), declare them by Options(laws={"bias": False}).'
        )

    return Ill(breaks, say, count, 1, "note", steps=consecutive_steps)


_REDUCED_OR_LOCAL = ("param_grad", "param_grad_local")


def find_sides_of_biases(step: Step, kind: str) -> tuple[Sides | None, Counts]:
    """Gradients of biases, of a kind, and those of their outputs; how many tensors each of the latter is of."""
    gradients, outputs = step.make_for_alike(_pair_biases_with_outputs, kind)
    if step.has_nonfinite and len(gradients):
        known = step.nonfinite[gradients] + step.nonfinite[outputs] == 0
        gradients, outputs = gradients[known], outputs[known]
    if not len(gradients):
        return None, gradients
    sides = Sides.of(step, gradients, outputs)
    if sides is None:
        return None, gradients
    calls = dict(zip(gradients.tolist(), step.calls[outputs].tolist(), strict=True))
    return sides, np.array([calls[each] for each in sides.layers.tolist()], np.int64)


def _pair_biases_with_outputs(step: Step, kind: str) -> Counts:
    """``[2, pairs]``: of what came in this step."""
    pairs = step.make_for_sites(_pair_all_biases_with_outputs, kind)
    result: Counts = pairs[:, (step.totals.count[pairs] > 0).all(0)]
    return result


def _pair_all_biases_with_outputs(step: Step, kind: str) -> Counts:
    ids, found = {site: place for place, site in enumerate(step.sites)}, []
    for site in np.flatnonzero(step.is_kind(kind)).tolist():
        module, _, name = step.sites[site].name.rpartition(".")
        output = ids.get(Site(module, "grad_output"), -1)
        if output >= 0 and name == "bias":
            found.append((site, output))
    result: Counts = np.array(found, np.int64).reshape(-1, 2).T
    return result


@rule(of="reduction", depth=4, law="reduction")
def reduced_gradient(step: Step, memory: Memory, factor: float = 1.5, consecutive_steps: int = 5) -> list[Ill] | None:
    """A reduced gradient is not the mean of what the ranks contributed (critical from a factor on, or warning).

    Needs ``"reduction"`` among the tensors, and ``process_group``. The gradient that an optimizer takes is the mean
    over the ranks of what their backwards brought together, at each element: 64 of each parameter are compared. Their
    ratio is 1, the number of ranks where gradients are summed, or what clipping has made of it in all layers alike:
    then it is their median. Rounding leaves as much as in ``bias-gradient``, and findings come as there: whole factors
    (2, 1/4) in the second measured step in a row, others where they stay the same to 0.5 % for ``consecutive_steps`` =
    5. They are critical from ``factor`` = 1.5 on. All layers are ill if their ratio is 1 over the number of ranks for
    two steps in a row.

    What else looks like it: by design, a group of experts, whose gradients fewer ranks share; a loss that was divided
    by hand by the number of ranks; ``Options(laws={"reduction": False})`` declares it. What to do: look at what divides
    gradients after backward: DistributedDataParallel has done it.

    False-positive guards: a parameter is judged where its sums have not cancelled, and where others keep the law.
    Clipping by a norm gives another ratio in each step, the same in all layers.
    """
    if step.ranks == 1:
        return None
    ranks, local = step.ranks, step.find_partner("reduction.reduced", "reduction.local")
    counts, bad = step.totals.count, step.nonfinite
    ids = np.flatnonzero((local >= 0) & (counts > 0) & (counts[local] > 0) & (bad + bad[local] == 0))
    sides = Sides.of(step, ids, local[ids])
    if sides is None:
        return None
    factors, told = sides.factors()[0], residuals(sides, ranks)[1]
    is_divided = len(told) > 1 and bool(np.isclose(factors[told], 1 / ranks, rtol=_EQUAL).all())

    def say(broken: Broken) -> str:
        others = times(broken.others, "other parameter")
        name = f"{broken.name}{broken.where.replace(' channel', ' sampled element')}"
        if broken.factor != broken.factor:
            return (
                f"the reduced gradient of {name} is neither the mean of what {ranks} ranks contributed nor a multiple "
                f"of it, since step {broken.since}; that of {others} is. Check the reduction of this parameter."
            )
        return (
            f"the reduced gradient of {name}, divided by the mean of what {ranks} ranks contributed, is {broken.size} "
            f"times what it is in {others}, since step {broken.since}. "
        ) + (
            "Check the reduction of this parameter: over which ranks, and how often."
            if broken.is_late
            else "It has been so from the start, which is right where fewer ranks share it, as with experts: then "
            'declare it by Options(laws={"reduction": False}).'
        )

    def say_of_all(site: None, since: int) -> str:
        return (
            f"the reduced gradients are 1/{ranks} of the mean over {ranks} ranks of what these contributed, in all "
            f"{len(told)} parameters that could be compared, since step {since}: they are divided by the number of "
            "ranks twice. DistributedDataParallel already averages them: remove the other division."
        )

    calls = np.ones(len(sides.layers), np.int64)
    ills = judge_ratios(step, memory, "reduction", sides, calls, factor, consecutive_steps, ranks, say)
    return [*ills, Ill(is_divided, say_of_all, 1 / ranks, 1.0, "critical", steps=2, key="all")]


@rule(per_site=False, depth=1, law="replica")
def replica_drift(step: Step, memory: Memory) -> list[Finding] | None:
    """Replicas of a parameter, or of its reduced gradient, differ between ranks (critical, or warning).

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
    sentence = f"{who} hold{'' if several else 's'} different values of {what} than {those}, since step {since}"
    if len(began) > 1:
        sentence += f", and of {len(began) - 1} more"
    how = "They are replicas: " if first.is_certain else "They were equal before, and changed alike: "
    sentence = (
        f"{sentence}. {how}check what a rank does alone, such as clipping by a norm of its own, skipping a step of the "
        "optimizer, or a gradient that is not reduced over the ranks."
    )
    severity, many = "critical" if first.is_certain else "warning", len(first.ranks)
    return [step.finding("replica-drift", where, many, 0.0, severity, sentence, since=since, sites=sites)]
