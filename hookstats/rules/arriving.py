"""Whether gradients reach all parameters, and are those of one step alone."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from hookstats.numbers.fields import Array, Counts, Site
from hookstats.numbers.kinds import is_of_kind
from hookstats.rules.finding import Finding
from hookstats.rules.formatting import number
from hookstats.rules.history import Streak, extended
from hookstats.rules.step import Mask, Step
from hookstats.rules.thresholds import rule

SPARSE = 0.5  # share of a gradient that is 0, from which on it is one of rows that were not in the batch


@rule
class MissingGradients:
    """Parameters that never get a gradient, although what they belong to runs and others get theirs: note, or warning.

    A warning where the path from the loss is cut for certain: everything that runs before has no gradient either, or
    what runs behind it in the same block has one. The parameters have had no gradient, or one that is 0 throughout,
    from the start and for ``steps`` = 20 steps in which the module ran, at least five of them measured. The finding
    names the last module without one in order of execution: behind it the path from the loss is cut, by ``detach()``,
    ``no_grad``, an integer, ``.item()``, or weights that are 0. The figures are ours.

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
            f"{step.names_of(sites[::-1])} {'gets' if len(sites) == 1 else 'get'} {what}, in all "
            f"{int(self._waited[sites[-1]])} measured steps, and {'does' if len(sites) == 1 else 'do'} not learn: the "
            f"way back from the loss ends {cut}: {why}."
        )
        listed = [sites[-1], *sites[:-1]]
        since = self._first[sites[-1]]
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


@rule
class GrowingGradients:
    """Gradients are added to those of the steps before, because nobody zeroes them (warning).

    The gradient of the bias of a linear layer, a convolution or a norm adds up to the same as the gradient of its
    output; so does that of an embedding. A model is ill if what these add up to is the sum of this step and of what it
    was in the measured step before. This must hold to a residual of ``residual`` = 0.05, while this step alone leaves
    0.3, in ``consecutive_steps`` = 5 steps in a row that were measured one after another; or for a single one of them,
    to 0.01, in eight such steps. Where steps between were not measured, a model is ill if it has been ``growth`` = 3
    times that of this step, in the same direction, for twice as many steps. It follows from the definition; the figures
    are ours.

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
            f"the gradients {f'of {step.names_of(sites)} ' if sites else ''}are added to those of the steps before, "
            f"and are {number(grown)} times those of this step alone: nobody zeroes them. Call optimizer.zero_grad() "
            "once in each step, before backward, of the optimizer that has these parameters."
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
            self._sites, self._sums_of = len(step.sites), sums_of_outputs(step)
        gradients, outputs, is_embedding = self._sums_of
        came = (totals.count[gradients] > 0) & (totals.count[outputs] > 0) & (step.calls[outputs] == 1)
        is_sparse = totals.zeros[gradients] > SPARSE * totals.count[gradients]
        chosen = came & _changed(step)[gradients] & ((is_embedding == 0) | is_sparse)
        pairs: Counts = self._sums_of[:2, chosen]
        return pairs


def sums_of_outputs(step: Step) -> Counts:
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
    ids = {site.name: place for place, site in enumerate(step.sites) if is_of_kind(site.tensor, "output")}
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
