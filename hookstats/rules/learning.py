"""Whether parameters learn: those that never change, updates lost to rounding, gradients that never arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hookstats.numbers.fields import Array, Counts, Site
from hookstats.rules.finding import Finding
from hookstats.rules.formatting import number, percent, times
from hookstats.rules.history import Streak, extended
from hookstats.rules.step import Mask, Step

_SPARSE = 0.5  # share of a gradient that is 0, from which on it is one of rows that were not in the batch
_LEAST = 3  # measured steps, by which anything is said to last
_ACCUMULATED = 100  # steps, in which gradients may be accumulated
_TINY = 1e-4  # of the usual size of a gradient
_ROUNDED = {"bfloat16": 8, "float16": 11}  # bits of the mantissa, with the one that is not stored


def _names(step: Step, sites: list[int]) -> str:
    """Up to three of them, and how many others."""
    shown = ", ".join(step.sites[site].name for site in sites[:3])
    return shown if len(sites) <= 3 else f"{shown} and {times(len(sites) - 3, 'other')}"


class _Losses:
    """Whether the loss has come down since the run began."""

    def __init__(self) -> None:
        self._firsts: list[float] = []
        self._last: deque[float] = deque(maxlen=10)

    def push(self, step: Step) -> None:
        for scalars in (*step.earlier_scalars.values(), step.scalars):
            if "loss" in scalars:
                if len(self._firsts) < 5:
                    self._firsts.append(scalars["loss"])
                self._last.append(scalars["loss"])

    def came_down(self) -> bool | None:
        """None: that is not known."""
        if len(self._last) < 10:
            return None
        first, last = float(np.median(self._firsts)), float(np.median(self._last))
        return last < first - 0.02 * abs(first)


class _Still:
    """From which step on each parameter has stayed as it was, between measured steps as well."""

    def __init__(self) -> None:
        self.since, self._measured = np.empty(0, np.int64), np.empty(0, np.int64)
        self._values = np.empty(0)

    def push(self, step: Step, measured: Mask) -> Mask:
        """``[n]``: of each update that was measured, whether its parameter has not changed."""
        n = len(measured)
        weights = step.weights_of_updates
        values = np.where(measured & (weights >= 0), step.totals.l2_norm[weights], np.nan)
        before = extended(self._values, n, np.nan)
        self._values = np.where(np.isfinite(values), values, before)
        still = measured & (step.totals.zeros == step.totals.count)
        counts, since = extended(self._measured, n, 0), extended(self.since, n, 0)
        is_other = (counts > 0) & np.isfinite(values) & np.isfinite(before) & (values != before)
        begins = still & ((counts == 0) | is_other)
        self.since = np.where(begins, step.number, since)
        self._measured = np.where(begins, 1, np.where(still, counts + 1, np.where(measured, 0, counts)))
        result: Mask = still & ~is_other
        return result

    def lasts(self, step: Step, steps: int) -> Mask:
        """``[n]``: those that have stayed so for so many steps."""
        return (self._measured >= _LEAST) & (step.number - self.since + 1 >= steps)


@dataclass
class UnchangedParameters:
    """Parameters that no step changes, although gradients arrive: warning; critical where none of the model changes.

    For ``steps`` = 20 steps, in which other parameters changed, or ``all_steps`` = 30 in which none did, of which at
    least three were measured. Judged is the sample of each parameter: "update_sample" has nothing but zeros, and
    "param_sample" is what it was in the measured step before, so that nothing happened between them, either. The
    figures are ours.

    What else looks like it: updates that are lost to rounding (LostUpdates), a learning rate of 0 on purpose, a
    schedule that has ended. What to do: see that the optimizer was made of ``model.parameters()`` of this very model,
    after it was moved, wrapped or replaced, and print the learning rates of its groups.

    So that a healthy run is silent: frozen parameters (``requires_grad=False``) have no gradient, and neither have
    those whose modules do not run; both are not judged, nor are gradients that are mostly 0 (an embedding, whose rows
    are not in each batch) or below 1e-4 of the others' (these vanish). Warmup from 0 and turns of several optimizers
    end before; while gradients grow from step to step, as they do when they are accumulated, it waits for 100 steps.
    """

    steps: int = 20
    all_steps: int = 30

    def __post_init__(self) -> None:
        self._still, self._changed = _Still(), np.empty(0, bool)
        self._all_since, self._norms = -1, list[float]()

    def __call__(self, step: Step) -> list[Finding] | None:
        measured = step.updates & (step.totals.count > 0)
        if not measured.any():
            return None
        still = self._still.push(step, measured)
        self._changed = extended(self._changed, len(measured), False) | (measured & ~still)
        if (measured & ~still).any():
            self._all_since, self._norms = -1, []
            held_back = still & _gets_gradient(step) & ~_is_rounded_away(step, still)
            held_back &= ~self._is_tiny(step, measured & ~still)
            return list(self._of_some(step, step.in_order(held_back & self._still.lasts(step, self.steps))))
        if self._all_since < 0:
            self._all_since = step.number
        self._norms.append(step.grad_norm or 0.0)
        waits = _ACCUMULATED if self._is_accumulated() else self.all_steps
        if len(self._norms) < _LEAST or step.number - self._all_since + 1 < waits:
            return []
        gets_gradient = _gets_gradient(step)
        ill = step.in_order(gets_gradient & ~_is_rounded_away(step, still))
        if ill:
            return [self._of_all(step, ill)]
        is_zeroed = not gets_gradient.any() and (step.calls[step.is_kind("grad_output")] > 0).any()
        return [self._of_zeroed(step, step.in_order(measured))] if is_zeroed and not max(self._norms) else []

    def _is_accumulated(self) -> bool:
        """Whether gradients have grown since nothing changes."""
        third = -(-len(self._norms) // 3)
        first, last = float(np.median(self._norms[:third])), float(np.median(self._norms[-third:]))
        return last > 1.5 * first

    @staticmethod
    def _is_tiny(step: Step, changed: Mask) -> Mask:
        """``[n]``: of each update, whether its gradient is so small beside others' that a change may be lost."""
        gradients = step.gradients_of_updates
        sizes = np.where(gradients >= 0, step.totals.rms[gradients], np.nan)
        usual = sizes[changed & (sizes > 0)]
        with np.errstate(invalid="ignore"):
            return np.asarray(sizes < _TINY * (np.median(usual) if usual.size else 0.0))

    def _of_zeroed(self, step: Step, sites: list[int]) -> Finding:
        sentence = (
            "no parameter of the model changes: gradients go through the outputs, and no parameter has one when the "
            "optimizer steps. Call zero_grad() before backward(), not between backward() and step()."
        )
        return step.finding(
            "unchanged-parameters", None, 1.0, 1.0, "critical", sentence, since=self._all_since, sites=sites
        )

    def _of_all(self, step: Step, ill: list[int]) -> Finding:
        if self._changed[ill].any():
            what = f"no parameter has changed since step {self._all_since}"
            advice = "Look at the schedule: its learning rate may have become 0; and at whether step() is called."
        else:
            what = "no parameter of the model has ever changed"
            advice = (
                "Either the learning rate is 0, or step() is not called, or the optimizer holds the parameters of "
                "another model: make it of this one's, after it is moved or wrapped."
            )
        sentence = f"{what}, although gradients arrive. {advice}"
        return step.finding(
            "unchanged-parameters", None, 1.0, 1.0, "critical", sentence, since=self._all_since, sites=ill
        )

    def _of_some(self, step: Step, ill: list[int]) -> Iterator[Finding]:
        stopped = [site for site in ill if self._changed[site]]
        never = [site for site in ill if not self._changed[site]]
        if never:
            sentence = (
                f"{_names(step, never)} never {'changes' if len(never) == 1 else 'change'}, although gradients arrive "
                "and other parameters learn. No optimizer has "
                f"{'it' if len(never) == 1 else 'them'}, or the learning rate of the group is 0: compare the "
                "optimizer's param_groups with model.named_parameters()."
            )
            yield self._finding(step, never, sentence)
        if stopped:
            since = int(self._still.since[stopped[0]])
            sentence = (
                f"{_names(step, stopped)} {'has' if len(stopped) == 1 else 'have'} not changed since step {since}, "
                "although gradients arrive and other parameters learn. Look at the learning rate of the group, and at "
                "whether the optimizer was made anew without them; freeze with requires_grad=False, if it is meant."
            )
            yield self._finding(step, stopped, sentence)

    def _finding(self, step: Step, ill: list[int], sentence: str) -> Finding:
        since = int(self._still.since[ill[0]])
        return step.finding("unchanged-parameters", ill[0], 1.0, 1.0, "warning", sentence, since=since, sites=ill)


@dataclass
class LostUpdates:
    """Updates that are lost to rounding: parameters of a low precision stay as they are (a note, or a warning).

    A parameter whose values are all of bfloat16 or float16 keeps a change only if it is half a unit in the last place:
    1/512 of a value in bfloat16. Ill is a model of which ``share`` = 0.8 of all sampled elements stay as they are in
    each measured step, five at least, for ``steps`` = 20 steps: a warning where the loss has not come down since the
    run began. The dtype is told by the smallest and largest values of the parameters, which it holds exactly. The share
    is ours; the cause is described in arXiv 2010.06192 (Zamirai et al. 2020).

    What else looks like it: an optimizer that keeps float32 copies of the parameters, whose changes add up unseen until
    they show here; then the loss comes down, and it is a note. What to do: keep float32 parameters and use autocast, or
    an optimizer with float32 copies or stochastic rounding.

    So that a healthy run is silent: gradients that are mostly 0 (rows of an embedding) are not judged.
    """

    share: float = 0.8
    steps: int = 20
    per_site: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._losses, self._for, self._since = _Losses(), 0, 0

    def __call__(self, step: Step) -> list[Finding] | None:
        self._losses.push(step)
        judged = step.updates & (step.totals.count > 0) & _gets_gradient(step)
        if not judged.any():
            return None
        judged &= _is_rounded(step)
        totals = step.totals
        sites = step.in_order(judged & (totals.zeros > 0))
        count, zeros = totals.count[judged].sum(), totals.zeros[judged].sum()
        self._for = self._for + 1 if count and zeros > self.share * count else 0
        if self._for == 1:
            self._since = step.number
        if self._for < 5 or step.number - self._since + 1 < self.steps or not sites:
            return []
        came_down = self._losses.came_down()
        most = sorted(sites, key=lambda site: -totals.zeros[site] / totals.count[site])
        dtype = _dtype_of(step, most[0])
        sentence = (
            f"{percent(zeros / count)} of the sampled elements of the parameters stay as they are in each step: in "
            f"{dtype} a change below 1/{2 ** (_ROUNDED[dtype] + 1)} of a value is lost to rounding. "
        )
        if came_down:
            sentence += "The loss comes down, so the optimizer may keep float32 copies; then nothing is wrong."
        else:
            sentence += (
                f"{'The loss does not come down. ' if came_down is False else ''}Keep the parameters in float32 and "
                "use autocast, or take an optimizer with float32 copies or stochastic rounding."
            )
        severity = "warning" if came_down is False else "note"
        value = float(zeros / count)
        return [
            step.finding("lost-updates", most[0], value, self.share, severity, sentence, since=self._since, sites=most)
        ]


@dataclass
class MissingGradients:
    """Parameters that never get a gradient, although what they belong to runs and others get theirs: note, or warning.

    A warning where the path from the loss is cut for certain: everything that runs before has no gradient either, or
    what runs behind it in the same block has one. No gradient, or one that is 0 throughout, from the start and for
    ``steps`` = 20 steps in which the module ran, at least five of them measured. Named is the last module without one
    in order of execution: behind it the path from the loss is cut, by ``detach()``, ``no_grad``, an integer,
    ``.item()``, or weights that are 0. The figures are ours.

    What else looks like it: a head that this loss does not use, or not yet. What to do: look at what is done with the
    output that is named, up to the next module; freeze what is not to learn with ``requires_grad=False``.

    So that a healthy run is silent: frozen parameters have no gradient to wait for; modules that do not run are not
    judged, nor is what ever had a gradient, or has changed without one; a gradient that is 0 behind weights that begin
    with 0 (LoRA, the last norm of a residual block) lasts a step or two.
    """

    steps: int = 20
    per_site: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._outputs = np.empty(0, np.int64)  # of each gradient of a parameter, the output of its module
        self._reached, self._waited = np.empty(0, bool), np.empty(0, np.int64)
        self._first = np.empty(0, np.int64)

    def __call__(self, step: Step) -> list[Finding] | None:
        gradients, totals = step.is_kind("param_grad"), step.totals
        arrived = gradients & (totals.count + step.nonfinite > 0)
        if not arrived.any():
            return None
        n = len(gradients)
        if len(self._outputs) < n:
            self._outputs = _outputs_of_gradients(step)
        updates = step.updates_of_gradients
        changes = (updates >= 0) & ((totals.abs_max > 0) & (totals.count > 0))[updates] & ~arrived
        has_size = arrived & ((totals.abs_max > 0) | (step.nonfinite > 0))
        self._reached = extended(self._reached, n, False) | has_size | (gradients & changes)
        waits = gradients & ~self._reached & (self._outputs >= 0) & (totals.count > 0)[self._outputs]
        waited = extended(self._waited, n, 0)
        self._first = np.where(waits & (waited == 0), step.number, extended(self._first, n, 0))
        self._waited = waited + waits
        ill = waits & (self._waited >= 5) & (step.number - self._first + 1 >= self.steps)
        if not ill.any() or not self._reached[gradients].any():
            return []
        places = {site: place for place, site in enumerate(step.order.tolist())}
        sites = sorted(np.flatnonzero(ill).tolist(), key=lambda site: places[int(self._outputs[site])])
        outputs = step.in_order(step.is_kind("output") & (totals.count > 0))
        return [self._finding(step, sites, {step.sites[site].name: place for place, site in enumerate(outputs)})]

    def _finding(self, step: Step, sites: list[int], ran: dict[str, int]) -> Finding:
        last = step.sites[sites[-1]].name.rpartition(".")[0]
        behind = [name for name, place in ran.items() if place > ran[last]]
        is_zero = bool((step.calls[sites] > 0).any())
        what = "only a gradient that is 0" if is_zero else "no gradient"
        cut = f"between {last or 'the model'} and {behind[0]}" if behind else f"behind {last or 'the model'}"
        why = (
            "weights that are all 0, or units that are dead or saturated, let nothing through"
            if is_zero
            else "look for detach(), no_grad, .item() or an integer there, or an output that the loss does not use"
        )
        sentence = (
            f"{_names(step, sites[::-1])} {'gets' if len(sites) == 1 else 'get'} {what}, in all "
            f"{int(self._waited[sites[-1]])} measured steps, and {'does' if len(sites) == 1 else 'do'} not learn: the "
            f"way back from the loss ends {cut}: {why}."
        )
        listed = [sites[-1], *sites[:-1]]
        since = int(self._first[sites[-1]])
        severity = "warning" if self._is_cut(step, sites, ran) else "note"
        return step.finding("missing-gradients", sites[-1], 0.0, 0.0, severity, sentence, since=since, sites=listed)

    def _is_cut(self, step: Step, missing: list[int], ran: dict[str, int]) -> bool:
        """Whether all that runs up to there lacks gradients, or what runs behind it in the same block has some.

        Otherwise it may be a head of its own.
        """
        places = {
            module: ran[module]
            for site in np.flatnonzero(self._reached & step.is_kind("param_grad")).tolist()
            if (module := step.sites[site].name.rpartition(".")[0]) in ran
        }
        modules = [step.sites[site].name.rpartition(".")[0] for site in missing]
        if not places or max(ran[module] for module in modules) <= min(places.values()):
            return True
        for module in modules:
            block = module.rpartition(".")[0]
            if block and any(each.startswith(f"{block}.") and places[each] > ran[module] for each in places):
                return True
        return False


@dataclass
class GrowingGradients:
    """Gradients are added to those of the steps before, because nobody zeroes them (warning).

    The gradient of the bias of a linear layer, a convolution or a norm adds up to the same as the gradient of its
    output; so does that of an embedding. Ill is a model where what these add up to is the sum of this step and of what
    it was in the measured step before: to a residual of ``residual`` = 0.05, while this step alone leaves 0.3, in
    ``consecutive_steps`` = 5 steps in a row that were measured one after another; or a single one of them, to 0.01 in
    eight such steps; or, where steps between were not measured, where it has been ``growth`` = 3 times that of this
    step, in the same direction, for twice as many. It follows from the definition; the figures are ours.

    What else looks like it: gradient accumulation. What to do: call ``optimizer.zero_grad()`` once in each step, before
    backward, of the optimizer that has these parameters.

    So that a healthy run is silent: only steps in which the parameters change are judged, and only what changes: so
    accumulation over several calls of `Monitor.step` is in order, and a parameter that no optimizer has is another
    illness.
    """

    residual: float = 0.05
    growth: float = 3.0
    consecutive_steps: int = 5
    per_site: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._for, self._grown_for, self._since = 0, 0, 0
        self._at, self._sums, self._alone = -2, np.empty(0), Streak(8)
        self._sites, self._sums_of = -1, np.empty((3, 0), np.int64)

    def __call__(self, step: Step) -> list[Finding] | None:
        gradients, outputs = self._pairs(step)
        if not gradients.size:
            return None
        sums = step.totals.mean * step.totals.count
        now, fresh = sums[gradients], sums[outputs]
        before = extended(self._sums, len(sums), np.nan)[gradients]
        follows, self._at = step.number == self._at + 1, step.number
        self._sums = sums
        known = np.isfinite(now) & np.isfinite(fresh) & np.isfinite(before)
        if not known.any() or not (now[known] ** 2).sum() > 0:
            return []
        now, fresh, before, gradients = now[known], fresh[known], before[known], gradients[known]
        alone = self._added_alone(step, gradients, now, before, fresh, follows)
        size = float(now @ now)
        is_added = ((now - before - fresh) ** 2).sum() < self.residual * size
        is_not_fresh = ((now - fresh) ** 2).sum() > 0.3 * size
        lengths = float(np.sqrt(size * (before @ before)))
        is_grown = size > self.growth**2 * (fresh @ fresh) and now @ before > 0.8 * lengths
        self._for = self._for + 1 if follows and is_added and is_not_fresh else 0
        self._grown_for = self._grown_for + 1 if is_grown else 0
        if max(self._for, self._grown_for) == 1:
            self._since = step.number
        sites = step.in_order(alone)
        if self._for < self.consecutive_steps and self._grown_for < 2 * self.consecutive_steps:
            if not sites:
                return []
            chosen = np.isin(gradients, sites)
            size, fresh, self._since = float(now[chosen] @ now[chosen]), fresh[chosen], int(self._alone.since[sites[0]])
        grown = float(np.sqrt(size / max(fresh @ fresh, 1e-300)))
        sentence = (
            f"the gradients {f'of {_names(step, sites)} ' if sites else ''}are added to those of the steps before, and "
            f"are {number(grown)} times those of this step alone: nobody zeroes them. Call optimizer.zero_grad() once "
            "in each step, before backward, of the optimizer that has these parameters."
        )
        first, since = sites[0] if sites else int(gradients[0]), self._since
        return [step.finding("growing-gradients", first, grown, 1.0, "warning", sentence, since=since, sites=sites)]

    def _added_alone(
        self, step: Step, gradients: Counts, now: Array, before: Array, fresh: Array, follows: bool
    ) -> Mask:
        """``[n]``: the gradients that are those of the step before and of this one, for some steps in a row."""
        ill, judged = np.zeros(len(step.sites), bool), np.zeros(len(step.sites), bool)
        is_added = (abs(now - before - fresh) < 0.01 * abs(now)) & (abs(now - fresh) > 0.3 * abs(now))
        ill[gradients], judged[gradients] = is_added & follows, True
        return self._alone.push(step.number, ill, judged)

    def _pairs(self, step: Step) -> Counts:
        """``[2, pairs]``: the ids of gradients, and of the gradients of outputs that add up to the same."""
        totals = step.totals
        if self._sites < len(step.sites):
            self._sites, self._sums_of = len(step.sites), _sums_of_outputs(step)
        gradients, outputs, is_embedding = self._sums_of
        came = (totals.count[gradients] > 0) & (totals.count[outputs] > 0) & (step.calls[outputs] == 1)
        is_sparse = totals.zeros[gradients] > _SPARSE * totals.count[gradients]
        chosen = came & _changed(step)[gradients] & ((is_embedding == 0) | is_sparse)
        pairs: Counts = self._sums_of[:2, chosen]
        return pairs


def _sums_of_outputs(step: Step) -> Counts:
    """``[3, pairs]``: the ids of gradients of biases, and of weights without one, which may be embeddings; those of the
    gradients of the outputs of their modules; and which are of weights."""
    ids, found = {site: place for place, site in enumerate(step.sites)}, []
    for site in np.flatnonzero(step.is_kind("param_grad")).tolist():
        module, _, name = step.sites[site].name.rpartition(".")
        output = ids.get(Site(module, "grad_output"), -1)
        is_weight = name == "weight" and Site(f"{module}.bias".lstrip("."), "param_grad") not in ids
        if output >= 0 and (name == "bias" or is_weight):
            found.append((site, output, int(is_weight)))
    result: Counts = np.array(found, np.int64).reshape(-1, 3).T
    return result


def _outputs_of_gradients(step: Step) -> Counts:
    """``[n]``: of each gradient of a parameter, the id of the output of the module that has it; -1 without one."""
    ids = {site.name: place for place, site in enumerate(step.sites) if site.tensor.partition(".")[0] == "output"}
    result = np.full(len(step.sites), -1, np.int64)
    for site in np.flatnonzero(step.is_kind("param_grad")).tolist():
        result[site] = ids.get(step.sites[site].name.rpartition(".")[0], -1)
    return result


def _changed(step: Step) -> Mask:
    """``[n]``: of each gradient of a parameter, whether this step changed it; all, where that is not measured."""
    if not step.updates.any():
        return step.is_kind("param_grad")
    updates = step.updates_of_gradients
    return (updates >= 0) & (step.totals.zeros < step.totals.count)[updates]


@dataclass
class ShrinkingWeights:
    """Weights that become smaller by decay alone (a note; a warning where the loss does not come down).

    Where only weight decay changes a parameter, all of its values go towards 0 together: what mean |w| loses is the
    mean |update|. Ill is a model of which more than half of the matrices lose more than ``part`` = 0.5 of their updates
    so, each step at least ``rate`` = 5e-4 of their size, in five measured steps in a row, for ``steps`` = 20. A decay
    of 0.1 at a learning rate of 1e-3 is 1e-4 a step. The figures are ours.

    What else looks like it: data that were learned by heart, behind which nothing but the decay is left. What to do:
    lower weight_decay, or leave out norms and biases; AdamW multiplies it by the learning rate, Adam does not.

    So that a healthy run is silent: parameters with fewer than ``values`` = 64 sampled elements, and those that have
    one value, are not judged; ordinary updates go anywhere.
    """

    part: float = 0.5
    rate: float = 5e-4
    steps: int = 20
    values: int = 64
    per_site: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._streak, self._losses = Streak(5), _Losses()
        self._sizes, self._at = np.empty(0), -1
        self._firsts: dict[int, float] = {}

    def __call__(self, step: Step) -> list[Finding] | None:
        self._losses.push(step)
        weights = step.weights_of_updates
        measured = (weights >= 0) & (step.totals.count >= self.values)
        measured &= (step.totals.min != step.totals.max)[weights]
        if not measured.any():
            return None
        sizes = np.where(measured, step.totals.abs_mean[weights], np.nan)
        before = extended(self._sizes, len(sizes), np.nan)
        passed, self._sizes, self._at = step.number - self._at, sizes, step.number
        path = step.totals.abs_mean * passed
        with np.errstate(invalid="ignore", divide="ignore"):
            lost = (before - sizes) / path
            ill = measured & (lost > self.part) & (path > self.rate * passed * sizes)
        going = self._streak.push(step.number, ill, measured & np.isfinite(lost))
        sites = step.in_order(going & (step.number - self._streak.since + 1 >= self.steps))
        for site in sites:
            self._firsts.setdefault(site, float(sizes[site]))
        if 2 * len(sites) <= int(measured.sum()):
            return []
        first = sites[0]
        rate = float(step.totals.abs_mean[first] / sizes[first])
        came_down = self._losses.came_down()
        sentence = (
            f"{_names(step, sites)} {'becomes' if len(sites) == 1 else 'become'} smaller by {percent(rate)} in each "
            f"step, and nearly nothing else changes them: weight decay is stronger than the gradient"
            f"{', and the loss does not come down' if came_down is False else ''}. Lower weight_decay; AdamW "
            "multiplies it by the learning rate, Adam and SGD add it to the gradient."
        )
        severity = "warning" if came_down is False else "note"
        since = int(self._streak.since[first])
        return [step.finding("shrinking-weights", first, rate, self.rate, severity, sentence, since=since, sites=sites)]


def _gets_gradient(step: Step) -> Mask:
    """``[n]``: of each update, whether the gradient of its parameter arrived, and is not mostly 0."""
    totals, gradients = step.totals, step.gradients_of_updates
    dense = (totals.abs_max > 0) & (totals.zeros < _SPARSE * totals.count)
    return (gradients >= 0) & dense[gradients]


def _holds(values: Array, bits: int) -> Mask:
    """``[n]``: whether a mantissa of so many bits holds a value exactly."""
    mantissa, _ = np.frexp(values)
    scaled = mantissa * 2.0**bits
    return np.asarray(np.isfinite(values) & (scaled == np.rint(scaled)))


def _dtype_of(step: Step, site: int) -> str:
    """The narrowest of those that hold the extremes of a parameter exactly."""
    weights = int(step.weights_of_updates[site])
    extremes = np.array([step.totals.min[weights], step.totals.max[weights]])
    return next((name for name, bits in _ROUNDED.items() if _holds(extremes, bits).all()), "float16")


def _is_rounded(step: Step) -> Mask:
    """``[n]``: of each update, whether its parameter is of a low precision, as far as its extremes tell.

    One parameter may have such extremes by chance, or hold nothing but ones: so it is that of most which have others.
    """
    weights, totals = step.weights_of_updates, step.totals
    known = (weights >= 0) & (totals.min != totals.max)[weights] & (totals.count > 0)
    bits = max(_ROUNDED.values())
    low = known & (_holds(totals.min, bits) & _holds(totals.max, bits))[weights]
    return (weights >= 0) & (totals.count > 0) if known.any() and (low == known).all() else low


def _is_rounded_away(step: Step, unchanged: Mask) -> Mask:
    """``[n]``: updates that may be lost to rounding, which `LostUpdates` tells."""
    return unchanged & _is_rounded(step) if unchanged.any() else unchanged
