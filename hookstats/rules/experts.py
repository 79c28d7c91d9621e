"""How the tokens of a mixture of experts are spread over these."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hookstats.numbers.fields import Array, Counts
from hookstats.rules.finding import Finding
from hookstats.rules.formatting import number
from hookstats.rules.history import extended
from hookstats.rules.step import Step


@dataclass
class ExpertLoad:
    """A router sends nearly all tokens to a few of its experts (warning).

    Experts are modules whose path has ``name`` and a number: ``layers.3.mlp.experts.5``, or what is inside them. Their
    load is the count of values in their output, summed over the last ``window`` = 10 measured steps. Ill is an entropy
    of the loads, over the logarithm of the number of experts, below ``entropy`` = 0.5: 8 experts, of which fewer than 3
    work. torchtitan logs the same, and the largest load over the mean; where it becomes an illness is ours to say.

    What else looks like it: experts that are meant for different inputs, of which only some are in the data. What to
    do: add a loss that balances the load, or a bias per expert, or noise to the router's logits; see that its learning
    rate and initial weights are small.

    So that a healthy run is silent: an uneven load, or a single idle expert, is none; two experts are not judged.
    Experts that one module computes together (stacked weights) have no outputs of their own, and are not seen.
    """

    entropy: float = 0.5
    window: int = 10
    name: str = "experts"

    def __post_init__(self) -> None:
        self._groups: dict[str, Counts] = {}
        self._known = 0  # sites
        self._loads: deque[Array] = deque(maxlen=self.window)

    def __call__(self, step: Step) -> list[Finding] | None:
        if self._known < len(step.sites):
            self._groups, self._known = self._grouped(step), len(step.sites)
        if not self._groups:
            return None
        self._loads.append(step.totals.count)
        return list(self._collapsed(step)) if len(self._loads) == self.window else []

    def _collapsed(self, step: Step) -> Iterator[Finding]:
        loads = np.sum([extended(each, len(step.sites), 0) for each in self._loads], axis=0)
        for path, experts in self._groups.items():
            load = loads[experts]
            if not load.any():
                continue
            shares = load / load.sum()
            some = shares[shares > 0]
            entropy = float(-(some * np.log(some)).sum() / np.log(len(load)))
            if entropy < self.entropy:
                busiest = int(experts[shares.argmax()])
                sentence = (
                    f"the router of {path} has collapsed: {step.sites[busiest].name} gets {number(100 * shares.max())} "
                    f"% of the tokens, and {int((shares < 0.1 / len(load)).sum())} of {len(load)} experts get next to "
                    "none. Raise the weight of the balancing loss, lower the router's learning rate, or add noise to "
                    "it."
                )
                yield step.finding("expert-load", busiest, entropy, self.entropy, "warning", sentence)

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
