"""Laws: equations between what is measured anyway, which hold in every healthy step, whatever the loss and the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from hookstats.numbers.fields import Array, Counts, Site
from hookstats.numbers.kinds import kind_of
from hookstats.numbers.ranks import Drift
from hookstats.rules.arriving import sums_of_outputs
from hookstats.rules.finding import Finding
from hookstats.rules.formatting import number, times
from hookstats.rules.history import Streak, extended
from hookstats.rules.step import Mask, Step
from hookstats.rules.thresholds import rule

# Of the L1 norm of a bias's gradient, and of its output's: of a sum that has cancelled farther, what rounding to
# bfloat16, and what adding up in float32, has made of it may be anything.
_LEAST, _LEAST_OF_OUTPUT = 0.02, 1e-5
_EQUAL, _CONSTANT = 0.01, 0.005


class _Ratios:
    """A law by which two sums of a layer have one ratio, the same in all layers. Finds those where it jumps, and stays.

    A rule that is one has ``factor`` and ``consecutive_steps``, and says what is divided by what.
    """

    factor: float
    consecutive_steps: int

    def __post_init__(self) -> None:
        self._streak = Streak(self.consecutive_steps)
        self._first = np.empty(0)  # of each gradient: its ratio when its streak began
        self._is_late, self._agreed = np.empty(0, bool), np.empty(0, bool)  # it jumped; in the last judged step
        self._is_known = np.empty(0, bool)  # judged before

    def __call__(self, step: Step) -> list[Finding] | None:
        biases, ratios = self._ratios_of(step)
        if not biases.size:
            return None
        n = len(step.sites)
        common = 1.0 if (abs(ratios - 1) < _EQUAL).any() else float(np.median(ratios))
        relative = np.full(n, np.nan)
        if common:
            relative[biases] = ratios / common
        with np.errstate(invalid="ignore"):
            agree = abs(relative - 1) < _EQUAL
            is_off = np.isfinite(relative) & ~((relative < self.factor) & (relative > 1 / self.factor))
        if agree.sum() < (1 if common == 1 else 2) or (common != 1 and 3 * agree.sum() < 2 * biases.size):
            return []
        ill = self._push(step, relative, agree, is_off, may_begin=bool(agree.sum() > 1))
        return [self._finding(step, site, relative, common, int(agree.sum())) for site in step.in_order(ill)]

    def _push(self, step: Step, relative: Array, agree: Mask, is_off: Mask, may_begin: bool) -> Mask:
        """``[n]``: those that have been off by one factor for long enough. may_begin: also from the first step on."""
        n = len(relative)
        judged = np.isfinite(relative)
        lengths, first = extended(self._streak.lengths, n, 0), extended(self._first, n, np.nan)
        agreed, known = extended(self._agreed, n, False), extended(self._is_known, n, False)
        with np.errstate(invalid="ignore"):
            goes_on = (lengths > 0) & (abs(relative / first - 1) < _CONSTANT)
        begins = (lengths == 0) & (agreed | (may_begin & ~known))
        self._first = np.where(is_off & begins, relative, first)
        self._is_late = np.where(is_off & begins, agreed, extended(self._is_late, n, False))
        self._agreed, self._is_known = np.where(judged, agree, agreed), known | judged
        return self._streak.push(step.number, is_off & (goes_on | begins), judged)

    def _ratios_of(self, step: Step) -> tuple[Counts, Array]:
        """The ids of gradients whose sums have not cancelled, and the ratio of each."""
        raise NotImplementedError

    def _finding(self, step: Step, site: int, relative: Array, common: float, agree: int) -> Finding:
        raise NotImplementedError


@rule
class BiasGradient(_Ratios):
    """A layer's gradients have become a multiple of what its output's gradient says (warning).

    The gradient of a bias (of a linear layer, a convolution, a norm) is the sum of the gradient of its module's output,
    by the chain rule. Over all channels both sums are known, and their ratio is 1, or what clipping has made of it in
    all layers alike: then it is their median. A layer is ill if its ratio jumps, from one measured step to the next, to
    ``factor`` = 1.5 times that or more, or to less than 1 / 1.5 of it, and stays the same to 0.5 % for
    ``consecutive_steps`` = 5 measured steps. A ratio that is so from the first step on is a note. The law is
    arithmetic; the figures are ours.

    What else looks like it: a module that multiplies its output after it has added the bias, a hook on parameters that
    is meant to scale their gradients; they hold from the first step on. What to do: look at what changes gradients
    after backward: hooks on parameters, reductions over a process group, a division that is missing or done twice.

    So that a healthy run is silent: a layer is judged where its output had one gradient in the step, where its sums
    have not cancelled, as they do between a residual stream and the norms behind it, and where other layers agree to
    1 %. Clipping each parameter or group by itself, what is learned, and other ranks' data change a ratio from step to
    step.
    """

    factor: float = 1.5
    consecutive_steps: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sites, self._pairs = -1, np.empty((3, 0), np.int64)

    def _ratios_of(self, step: Step) -> tuple[Counts, Array]:
        """The ids of gradients of biases that have not cancelled, and how many times its output's each of them is."""
        if self._sites < len(step.sites):
            self._sites, self._pairs = len(step.sites), sums_of_outputs(step)
        gradients, outputs, is_weight = self._pairs
        sums, sizes = step.totals.mean * step.totals.count, step.totals.l1_norm
        now, fresh = sums[gradients], sums[outputs]
        with np.errstate(invalid="ignore"):
            known: Mask = (is_weight == 0) & (step.calls[outputs] == 1) & (abs(now) > _LEAST * sizes[gradients])
            known &= abs(fresh) > _LEAST_OF_OUTPUT * sizes[outputs]
        known &= np.isfinite(now) & np.isfinite(fresh) & (step.nonfinite[gradients] + step.nonfinite[outputs] == 0)
        return gradients[known], now[known] / fresh[known]

    def _finding(self, step: Step, site: int, relative: Array, common: float, agree: int) -> Finding:
        name, since, factor = step.sites[site].name, int(self._streak.since[site]), float(relative[site])
        size = number(factor) if abs(factor) > 0.95 else f"1/{number(1 / factor)}"
        others = times(agree, "other layer")
        if common == 1:
            sentence = (
                f"the gradient of {name} is {size} times the sum of its output's gradient, in each measured step since "
                f"step {since}. By the chain rule it is that sum, and {others} keep{'s' * (agree == 1)} to it. "
            )
        else:
            sentence = (
                f"the gradient of {name}, over the sum of its output's gradient, is {size} times what it is in "
                f"{others}, in each measured step since step {since}. By the chain rule it is the same in all of them. "
            )
        is_late = bool(self._is_late[site])
        sentence += (
            "Look at what changes gradients after backward: a hook on these parameters, a reduction over the wrong "
            "process group, a division that is missing or done twice."
            if is_late
            else "It has been so from the start: that is right where the module multiplies its output, or where a hook "
            "is to scale these gradients; else look at reductions over process groups and at missing divisions."
        )
        severity = "warning" if is_late else "note"
        return step.finding("bias-gradient", site, factor, self.factor, severity, sentence, since=since)


@rule
class ReducedGradient(_Ratios):
    """Reduced gradients are no mean of what the ranks brought: averaged twice, or one layer otherwise (warning).

    Needs ``"param_grad_local"`` among the tensors, and ``process_group``. The gradient that an optimizer takes is the
    mean over the ranks of what their backwards brought together, so their sums are: this ratio is 1, the number of
    ranks where gradients are summed, or what clipping has made of it in all layers alike: then it is their median. A
    layer is ill if its ratio jumps to ``factor`` = 1.5 times that or more, or to less than 1 / 1.5 of it, and stays the
    same to 0.5 % for ``consecutive_steps`` = 5 measured steps; one that is so from the first step on is a note. All
    layers are ill if their ratio is 1 over the number of ranks for as long. The law is arithmetic; the figures are
    ours.

    What else looks like it: a group of experts, whose gradients fewer ranks share; a loss that was divided by hand by
    the number of ranks. What to do: look at what divides gradients after backward: DistributedDataParallel has done it.

    So that a healthy run is silent: a parameter is judged where its sums have not cancelled, and where others agree to
    1 %. Clipping by a norm gives another ratio in each step, the same in all layers.
    """

    factor: float = 1.5
    consecutive_steps: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._of_all = Streak(self.consecutive_steps)

    def __call__(self, step: Step) -> list[Finding] | None:
        if step.ranks == 1:
            return None
        gradients, ratios = self._ratios_of(step)
        found = super().__call__(step)
        if found is None:
            return None
        ranks = step.ranks
        is_divided = len(gradients) > 1 and bool(np.isclose(ratios, 1 / ranks, rtol=_EQUAL).all())
        if self._of_all.push_one(step.number, is_divided):
            since = int(self._of_all.since[0])
            sentence = (
                f"the reduced gradients are 1/{ranks} of the mean over {ranks} ranks of what these have brought, in "
                f"all {len(gradients)} parameters that tell, in each measured step since step {since}: they were "
                "divided by the number of ranks twice. DistributedDataParallel has done it."
            )
            found.append(step.finding("reduced-gradient", None, 1 / ranks, 1.0, "warning", sentence, since=since))
        return found

    def _ratios_of(self, step: Step) -> tuple[Counts, Array]:
        local = step.partner("param_grad", "param_grad_local")
        totals = step.totals
        sums, sizes = totals.mean * totals.count, totals.l1_norm
        with np.errstate(invalid="ignore"):
            known: Mask = (local >= 0) & (step.calls > 0) & (step.calls[local] > 0)
            known &= (abs(sums) > _LEAST * sizes) & (abs(sums[local]) > _LEAST * sizes[local])
            known &= np.isfinite(sums) & np.isfinite(sums[local]) & (step.nonfinite + step.nonfinite[local] == 0)
        ids: Counts = np.flatnonzero(known)
        return ids, step.ranks * sums[ids] / sums[local[ids]]

    def _finding(self, step: Step, site: int, relative: Array, common: float, agree: int) -> Finding:
        name, since, factor = step.sites[site].name, int(self._streak.since[site]), float(relative[site])
        size = number(factor) if abs(factor) > 0.95 else f"1/{number(1 / factor)}"
        is_late = bool(self._is_late[site])
        sentence = (
            f"the reduced gradient of {name}, over the mean of what {step.ranks} ranks have brought, is {size} times "
            f"what it is in {times(agree, 'other parameter')}, in each measured step since step {since}. "
        ) + (
            "Look at the reduction of this parameter: over which ranks, and how often."
            if is_late
            else "It has been so from the start: that is right where fewer ranks share it, as experts."
        )
        severity = "warning" if is_late else "note"
        return step.finding("reduced-gradient", site, factor, self.factor, severity, sentence, since=since)


@rule
class ReplicaDrift:
    """Ranks hold other values of a parameter, or of its reduced gradient, than their replicas: critical, or a warning.

    Data parallel ranks hold the same parameters, and after the reduction the same gradients, bit for bit; so do ranks
    of tensor parallelism of what is not cut. Of a step that was merged (``attach(process_group=...)``) the states of
    samples of parameters, and of gradients, are compared as hashes. Which ranks are replicas is said by a DTensor's
    mesh, or by DistributedDataParallel: then it is critical. Else it is known from three measured steps in which ranks
    changed alike: then it is a warning.

    What else looks like it: parameters that are averaged every so many steps, by design; ranks that do not call
    ``monitor.step`` as often, as with uneven inputs under DistributedDataParallel.join. What to do: look at what one
    rank does alone since the step that is named: clipping by a norm of its own, a step of the optimizer that is left
    out, a gradient that is not reduced, a generator of random numbers with another seed. `check_replicas` compares all
    bits.

    So that a healthy run is silent: it is arithmetic, without a threshold. Not compared is what one rank alone holds,
    what was measured at another place in the step, and a gradient that no optimizer has taken; a rank that holds what
    others held one of eight measured steps before or after is at another step.
    """

    per_site: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._since: dict[Site, int] = {}  # in a row, until the latest step

    def __call__(self, step: Step) -> list[Finding] | None:
        if step.ranks == 1:
            return None
        self._since = {each.site: self._since.get(each.site, step.number) for each in step.drifts}
        return [self._finding(step, step.drifts)] if step.drifts else []

    def _finding(self, step: Step, drifts: Sequence[Drift]) -> Finding:
        first = min(drifts, key=lambda each: (not each.is_certain, self._since[each.site]))
        ids = [i for i, site in enumerate(step.sites) if site in self._since]
        several = len(first.ranks) > 1
        who = f"rank{'s' * several} {', '.join(map(str, first.ranks[:8]))}{', ...' * (len(first.ranks) > 8)}"
        those = f"rank {first.reference_rank}" + (f" and {times(first.agree - 1, 'other')}" if first.agree > 1 else "")
        what = kind_of(first.site.tensor).one.format("", first.site.name)
        since = self._since[first.site]
        sentence = f"{who} hold{'' if several else 's'} other values of {what} than {those}, since step {since}"
        if len(self._since) > 1:
            sentence += f", and of {len(self._since) - 1} more"
        sentence += ". "
        if first.is_certain:
            sentence += "They are replicas: "
        else:
            sentence += "They held the same before, and changed alike: "
        sentence += (
            "look at what a rank does alone, such as clipping by a norm of its own, leaving out a step of the "
            "optimizer, or a gradient that is not reduced over the ranks."
        )
        severity = "critical" if first.is_certain else "warning"
        site = next((i for i in ids if step.sites[i] == first.site), None)
        return step.finding("replica-drift", site, len(first.ranks), 0.0, severity, sentence, since=since, sites=ids)
