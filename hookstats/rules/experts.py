"""The loads of a mixture of experts."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from hookstats.numbers.fields import Array, Counts
from hookstats.rules.engine import Ill, rule
from hookstats.rules.finding import Finding
from hookstats.rules.formatting import number
from hookstats.rules.history import extended
from hookstats.rules.memory import Memory
from hookstats.rules.step import Step


def _routed(step: Step, memory: Memory, window: int) -> dict[int, Array]:
    """Tokens per expert that routers have shown, over the last steps: of the sites of this step that have so many."""
    found: dict[int, Array] = {}
    if step.has_any(("router.load",)):
        for site in np.flatnonzero(step.valued("router.load") & step.has_channels).tolist():
            channels = step.channels(site)
            assert channels is not None
            loads = memory.last(f"loads of {site}", window)
            loads.append(np.asarray(channels.mean * channels.count))
            memory.setdefault("routers", set()).add(site)
            if len(loads) == window:
                found[site] = np.sum(np.array(loads), axis=0)
    return found


@rule(depth=3)
def dead_experts(step: Step, memory: Memory, window: int = 50, tokens: float = 100.0) -> list[Ill] | None:
    """An expert of a mixture has got no token for long (warning): in ``window`` = 50 measured steps.

    An expert that gets no token learns nothing, and its router never finds out. The rule judges what
    ``tensors=("router", ...)`` counts. torchtitan and OLMo-core log how many experts have none; for how long is ours to
    say.

    What else looks like it: experts that are meant for inputs that are not in the data. What to do: balance the load by
    a loss or a bias per expert, add noise to the router's logits, or initialise the dead expert again, from a busy one.

    False-positive guards: all experts together got at least ``tokens`` = 100 each in these steps; where the
    load as a whole has collapsed, `expert_load` says so alone.
    """
    routed = _routed(step, memory, window)
    if not memory.get("routers"):
        return None
    ill, counts = np.zeros(len(step.sites), bool), np.zeros(len(step.sites))
    for site, load in routed.items():
        counts[site] = (load == 0).sum()
        ill[site] = counts[site] and load.mean() >= tokens and 2 * counts[site] < len(load)

    def say(site: int, since: int) -> str:
        dead = np.flatnonzero(routed[site] == 0).tolist()
        some = ", ".join(map(str, dead[:8])) + (", ..." if len(dead) > 8 else "")
        return (
            f"{len(dead)} of the {len(routed[site])} experts of {step.sites[site].name} got no token in {window} "
            f"measured steps: {some}. They learn nothing. Balance the load, or initialise them again."
        )

    return [Ill(ill, say, counts)]


@rule(depth=3)
def expert_load(
    step: Step, memory: Memory, entropy: float = 0.5, window: int = 10, name: str = "experts"
) -> list[Finding] | None:
    """A router sends nearly all tokens to a few of its experts (warning).

    The load of experts is what ``tensors=("router", ...)`` counts. Without it, experts are modules whose path has
    ``name`` and a number, ``layers.3.mlp.experts.5``, or what is inside them, and their load is the count of values in
    their output. It is summed over the last ``window`` = 10 measured steps. A router is ill if the entropy of the
    loads, divided by the logarithm of the number of experts, is below ``entropy`` = 0.5: of 8 experts, fewer than 3
    work. torchtitan logs the same, and the largest load over the mean; where it becomes a problem is ours to say.

    What else looks like it: experts that are meant for different inputs, of which only some are in the data. What to
    do: add a loss that balances the load, or a bias per expert, or noise to the router's logits; see that its learning
    rate and initial weights are small.

    False-positive guards: an uneven load, or a single idle expert, is no problem; two experts are not judged.
    Experts that one module computes together (stacked weights) have no outputs of their own, and are seen by their
    router alone.
    """
    groups, routed = step.once(_experts, name), _routed(step, memory, window)
    if not groups and not routed:
        return None
    found: list[Finding] = []
    if groups:
        loads = memory.last("counts", window)
        loads.append(step.totals.count)
        if len(loads) == window:
            sums = np.sum([extended(each, len(step.sites), 0) for each in loads], axis=0)
            seen = {step.sites[site].name.rpartition(".")[0] for site in memory.get("routers", ())}
            for path, experts in groups.items():
                if path.rpartition(".")[0] not in seen:
                    busiest = int(experts[sums[experts].argmax()])
                    found += _collapsed(step, busiest, sums[experts], path, step.sites[busiest].name, entropy)
    for site, load in routed.items():
        found += _collapsed(step, site, load, step.sites[site].name, f"expert {load.argmax()}", entropy)
    return found


def _collapsed(step: Step, site: int, load: Array, path: str, busiest: str, least: float) -> Iterator[Finding]:
    """site: of the router, or of the busiest of these experts."""
    if not load.any() or len(load) < 3:
        return
    shares = load / load.sum()
    some = shares[shares > 0]
    entropy = float(-(some * np.log(some)).sum() / np.log(len(load)))
    if entropy < least:
        sentence = (
            f"the router of {path} has collapsed: {busiest} gets {number(100 * shares.max())} % of the tokens, and "
            f"{int((shares < 0.1 / len(load)).sum())} of {len(load)} experts get next to none. Raise the weight of the "
            "balancing loss, lower the router's learning rate, or add noise to it."
        )
        yield step.finding("expert-load", site, entropy, least, "warning", sentence)


def _experts(step: Step, experts: str) -> dict[str, Counts]:
    """Return the ids of the outputs of each router's experts: their own, or else those of the first thing in them."""
    pattern = re.compile(rf"(?P<path>.*?{re.escape(experts)})\.(?P<number>\d+)(?P<inside>\..*)?")
    found: dict[str, dict[str, list[int]]] = {}
    for i in np.flatnonzero(step.is_kind("output")).tolist():
        match = pattern.fullmatch(step.sites[i].name)
        if match:
            inside = f"{match['inside'] or ''} {step.sites[i].tensor}"
            found.setdefault(match["path"], {}).setdefault(inside, []).append(i)
    groups = {
        path: max(inside.items(), key=lambda each: (len(each[1]), -len(each[0])))[1] for path, inside in found.items()
    }
    return {path: np.array(ids) for path, ids in groups.items() if len(ids) > 2}
