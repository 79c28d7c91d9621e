"""How the tokens of a mixture of experts are spread over these."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator

import numpy as np

from hookstats.numbers.fields import Array, Counts
from hookstats.rules.finding import Finding
from hookstats.rules.formatting import number
from hookstats.rules.history import extended
from hookstats.rules.step import Step
from hookstats.rules.thresholds import rule


class Routed:
    """The loads of experts that routers show, over the last steps."""

    def __init__(self, window: int) -> None:
        self._window = window
        self.loads: dict[int, deque[Array]] = {}  # by site, of each step

    def push(self, step: Step) -> dict[int, Array]:
        """Those of the sites of this step of which there are enough: by site, tokens per expert."""
        found: dict[int, Array] = {}
        for site in np.flatnonzero(step.is_kind("router.load") & (step.totals.count > 0) & step.has_channels).tolist():
            channels = step.channels(site)
            assert channels is not None
            loads = self.loads.setdefault(site, deque(maxlen=self._window))
            loads.append(np.asarray(channels.mean * channels.count))
            if len(loads) == self._window:
                found[site] = np.sum(np.array(loads), axis=0)
        return found


@rule
class DeadExperts:
    """An expert of a mixture has got no token for long (warning): in ``window`` = 50 measured steps.

    An expert that gets no token learns nothing, and its router never finds out. The rule judges what
    ``tensors=("router", ...)`` counts. torchtitan and OLMo-core log how many experts have none; for how long is ours to
    say.

    What else looks like it: experts that are meant for inputs that are not in the data. What to do: balance the load by
    a loss or a bias per expert, add noise to the router's logits, or initialise the dead expert again, from a busy one.

    So that a healthy run is silent: all experts together got at least ``tokens`` = 100 each in these steps; where the
    load as a whole has collapsed, `expert_load` says so alone.
    """

    window: int = 50
    tokens: float = 100.0

    def __post_init__(self) -> None:
        self._routed = Routed(self.window)

    def __call__(self, step: Step) -> list[Finding] | None:
        routed = self._routed.push(step)
        if not self._routed.loads:
            return None
        found = []
        for site, load in routed.items():
            dead = np.flatnonzero(load == 0).tolist()
            if dead and load.mean() >= self.tokens and 2 * len(dead) < len(load):
                found.append(self._finding(step, site, dead, len(load)))
        return found

    def _finding(self, step: Step, site: int, dead: list[int], experts: int) -> Finding:
        some = ", ".join(map(str, dead[:8])) + (", ..." if len(dead) > 8 else "")
        sentence = (
            f"{len(dead)} of the {experts} experts of {step.sites[site].name} got no token in {self.window} measured "
            f"steps: {some}. They learn nothing. Balance the load, or initialise them again."
        )
        return step.finding("dead-experts", site, len(dead), 0, "warning", sentence)


@rule
class ExpertLoad:
    """A router sends nearly all tokens to a few of its experts (warning).

    The load of experts is what ``tensors=("router", ...)`` counts. Without it, experts are modules whose path has
    ``name`` and a number, ``layers.3.mlp.experts.5``, or what is inside them, and their load is the count of values in
    their output. It is summed over the last ``window`` = 10 measured steps. A router is ill if the entropy of the
    loads, divided by the logarithm of the number of experts, is below ``entropy`` = 0.5: of 8 experts, fewer than 3
    work. torchtitan logs the same, and the largest load over the mean; where it becomes an illness is ours to say.

    What else looks like it: experts that are meant for different inputs, of which only some are in the data. What to
    do: add a loss that balances the load, or a bias per expert, or noise to the router's logits; see that its learning
    rate and initial weights are small.

    So that a healthy run is silent: an uneven load, or a single idle expert, is no illness; two experts are not judged.
    Experts that one module computes together (stacked weights) have no outputs of their own, and are seen by their
    router alone.
    """

    entropy: float = 0.5
    window: int = 10
    name: str = "experts"

    def __post_init__(self) -> None:
        self._groups: dict[str, Counts] = {}
        self._known = 0  # sites
        self._loads: deque[Array] = deque(maxlen=self.window)
        self._routed = Routed(self.window)

    def __call__(self, step: Step) -> list[Finding] | None:
        if self._known < len(step.sites):
            self._groups, self._known = self._grouped(step), len(step.sites)
        routed = self._routed.push(step)
        if not self._groups and not routed:
            return None
        self._loads.append(step.totals.count)
        found = list(self._collapsed(step)) if len(self._loads) == self.window else []
        for site, load in routed.items():
            found += self._judged(step, site, load, step.sites[site].name, "expert {}", None)
        return found

    def _collapsed(self, step: Step) -> Iterator[Finding]:
        loads = np.sum([extended(each, len(step.sites), 0) for each in self._loads], axis=0)
        seen = {step.sites[site].name.rpartition(".")[0] for site in self._routed.loads}
        for path, experts in self._groups.items():
            if path.rpartition(".")[0] not in seen:
                yield from self._judged(step, None, loads[experts], path, "{}", experts)

    def _judged(
        self, step: Step, site: int | None, load: Array, path: str, name: str, experts: Counts | None
    ) -> Iterator[Finding]:
        """site: of the router; None: that of the busiest of these experts."""
        if not load.any() or len(load) < 3:
            return
        shares = load / load.sum()
        some = shares[shares > 0]
        entropy = float(-(some * np.log(some)).sum() / np.log(len(load)))
        if entropy >= self.entropy:
            return
        busiest = int(shares.argmax())
        where = site if experts is None else int(experts[busiest])
        who = name.format(busiest if experts is None else step.sites[int(experts[busiest])].name)
        sentence = (
            f"the router of {path} has collapsed: {who} gets {number(100 * shares.max())} % of the tokens, and "
            f"{int((shares < 0.1 / len(load)).sum())} of {len(load)} experts get next to none. Raise the weight of the "
            "balancing loss, lower the router's learning rate, or add noise to it."
        )
        yield step.finding("expert-load", where, entropy, self.entropy, "warning", sentence)

    def _grouped(self, step: Step) -> dict[str, Counts]:
        """Of each router, the ids of its experts' outputs: their own, or else those of the first thing in them."""
        pattern = re.compile(rf"(?P<path>.*?{re.escape(self.name)})\.(?P<number>\d+)(?P<inside>\..*)?")
        found: dict[str, dict[str, list[int]]] = {}
        for i in np.flatnonzero(step.is_kind("output")).tolist():
            match = pattern.fullmatch(step.sites[i].name)
            if match:
                inside = f"{match['inside'] or ''} {step.sites[i].tensor}"
                found.setdefault(match["path"], {}).setdefault(inside, []).append(i)
        groups = {
            path: max(inside.items(), key=lambda each: (len(each[1]), -len(each[0])))[1]
            for path, inside in found.items()
        }
        return {path: np.array(ids) for path, ids in groups.items() if len(ids) > 2}
