"""Attention whose logits grow, and whose heads look at one key alone; what routers give their experts."""

from __future__ import annotations

import re
from collections import deque

import numpy as np

from hookstats.numbers.fields import Array, Counts
from hookstats.rules.engine import Ill, rule
from hookstats.rules.formatting import times
from hookstats.rules.memory import Memory
from hookstats.rules.step import Step


@rule(of="attention.max_logit", depth=3)
def attention_logits(step: Step, value: float = 100.0, consecutive_steps: int = 3) -> list[Ill]:
    """Attention logits are so large that the softmax selects a single key (warning): above ``value`` = 100.

    Kimi K2 scales the weights of query and key down where a head's largest logit is beyond 100 (Kimi Team 2025, arXiv
    2507.20534, QK-clip); Megatron-LM, torchtitan and MaxText watch the same number. The rule judges what
    ``tensors=("attention", ...)`` measures. A sample of queries may miss the largest: where half of ``value`` was seen,
    and the product of the largest norms of a query and a key allows more than ``value``, it is a note.

    What else looks like it: a bias by position that is added to the logits, or a scale that was forgotten: then it is
    so from the start. What to do: clip the weights of query and key (QK-clip), normalise both (QK-norm), or lower the
    learning rate of their weights; look at whether weight decay reaches them.

    False-positive guards: in ``consecutive_steps`` = 3 verdicts in a row.
    """
    judged = step.find_fired("attention.max_logit")
    largest = np.where(judged, step.totals.max, -np.inf)
    partner = step.find_partner("attention.max_logit", "attention.bound")
    bound = np.where(judged & (partner >= 0), step.totals.max[partner], -np.inf)
    beyond = largest > value

    def heads(site: int) -> str:
        of_heads = step.read_channels_or_whole(site).max
        if len(of_heads) < 2:
            return ""
        many = times(len(of_heads), "head")
        return f" in head {np.nanargmax(of_heads)} ({(of_heads > value).sum()} of {many} above {value:g})"

    text = (
        "the attention logits of {name} reach {value}{heads}: beyond {threshold} the softmax selects a single key, "
        "and gradients through it vanish or jump. Clip or normalise queries and keys, or lower the learning rate of "
        "their weights."
    )
    of_others = (
        "the attention logits of {name} reach {largest} in the sampled queries, and may reach {value} in others, by "
        "the norms of queries and keys. Options(attention_rows=None) measures all of them."
    )
    may_be, words = ~beyond & (largest > value / 2) & (bound > value), {"heads": heads, "largest": largest}
    return [
        Ill(beyond, text, largest, value, judged=judged, steps=consecutive_steps, words=words),
        Ill(may_be, of_others, bound, value, "note", judged, consecutive_steps, key="others", words=words),
    ]


@rule(of="attention.entropy", depth=3)
def attention_entropy(
    step: Step,
    memory: Memory,
    ratio: float = 0.1,
    heads: float = 0.5,
    window: int = 50,
    min_history: int = 5,
    consecutive_steps: int = 3,
) -> Ill:
    """Attention heads that attended to many keys now attend to a single one each (warning).

    The entropy of the softmax, averaged over queries, has fallen below ``ratio`` = 0.1 of its past in at least
    ``heads`` = 0.5 of the heads: Zhai et al. 2023, arXiv 2303.06296, found that such a collapse goes with a loss that
    oscillates or diverges; where it becomes one is ours to say. Past is the median of the last ``window`` = 50
    verdicts, of which there are at least ``min_history`` = 5.

    What else looks like it: sequences that become shorter, which have less to look at. What to do: look at the logits'
    size, too; lower the learning rate, normalise query and key.

    False-positive guards: in ``consecutive_steps`` = 3 verdicts in a row; single heads may do so, for they
    learn to look at the token before, or at the first one.
    """
    judged = step.find_fired("attention.entropy")
    ill, ratios = np.zeros(len(step.sites), bool), np.ones(len(step.sites))
    for site in np.flatnonzero(judged).tolist():
        entropy = step.read_channels_or_whole(site).mean
        past: deque[Array] = memory.last(f"past of {site}", window)
        if past and len(past[0]) != len(entropy):
            past.clear()
        if len(past) >= min_history:
            fallen = entropy / np.median(np.array(past), axis=0)
            ill[site] = np.mean(fallen < ratio) >= heads
            ratios[site] = np.median(fallen)
        if not ill[site] and np.isfinite(entropy).all():
            past.append(entropy)
    text = (
        "the attention of {name} has collapsed: the entropy of its heads has fallen to {value:%} of what it was, to "
        "{entropy} nats, so each query attends to hardly more than one key. Check its logits; lower the learning "
        "rate, or normalise queries and keys."
    )
    words = {"entropy": step.totals.mean}
    return Ill(ill, text, ratios, ratio, judged=judged, steps=consecutive_steps, words=words)


@rule(of="attention.sink", depth=3)
def attention_sink(step: Step, share: float = 0.3, heads: float = 0.5, consecutive_steps: int = 10) -> Ill:
    """Attention heads give the first key more than ``share`` = 0.3 of their attention (note).

    bo-ke/llm-internal-medicine calls a head with more than 0.3 a sink; Xiao et al. 2023, arXiv 2309.17453, found them
    in all large language models. Nothing is wrong with them by themselves: they are where massive activations come
    from, which low precision suffers from, and a cache that drops the first key breaks them.

    What else looks like it: short sequences, whose queries have few keys. What to do: nothing, unless you quantise or
    evict; gates on the attention's output, a learned sink, or registers make them unnecessary.

    False-positive guards: at least ``heads`` = 0.5 of the heads do so, in ``consecutive_steps`` = 10 verdicts
    in a row; and their entropy is at least 0.5 nats, which queries with few keys do not have.
    """
    judged, means = step.find_fired("attention.sink"), step.totals.mean
    entropy = step.find_partner("attention.sink", "attention.entropy")
    ill = np.zeros(len(step.sites), bool)
    for site in np.flatnonzero(judged & (entropy >= 0) & (means[entropy] > 0.5)).tolist():
        ill[site] = np.mean(step.read_channels_or_whole(site).mean > share) >= heads
    text = (
        "the first key gets {value:%} of the attention of {name}. Large language models do this; low precision, and a "
        "cache that drops the first key, suffer from it."
    )
    return Ill(ill, text, means, share, "note", judged, consecutive_steps)


def _sum_loads(step: Step, memory: Memory, window: int) -> dict[int, Array]:
    """Tokens per expert that routers have shown, over the last steps: of the sites of this step that have so many."""
    found: dict[int, Array] = {}
    for site in step.make_for_alike(_find_routers):
        channels, loads = step.read_channels_or_whole(site), memory.last(f"loads of {site}", window)
        loads.append(channels.mean * channels.count)
        if len(loads) == window:
            found[site] = np.sum(np.array(loads), axis=0)
    return found


def _find_routers(step: Step) -> list[int]:
    found: list[int] = np.flatnonzero(step.find_finite("router.load") & step.has_channels).tolist()
    return found


@rule(of="router.load", depth=3)
def dead_experts(step: Step, memory: Memory, window: int = 50, tokens: float = 100.0) -> Ill | None:
    """An expert of a mixture got no token in ``window`` = 50 measured steps (warning).

    An expert that gets no token learns nothing, and its router never finds out. The rule judges what
    ``tensors=("router", ...)`` counts. torchtitan and OLMo-core log how many experts have none; for how long is ours to
    say.

    What else looks like it: experts that are meant for inputs that are not in the data. What to do: balance the load by
    a loss or a bias per expert, add noise to the router's logits, or initialise the dead expert again, from a busy one.

    False-positive guards: all experts together got at least ``tokens`` = 100 each in these steps; where the
    load as a whole has collapsed, `expert_load` says so alone.
    """
    loads = _sum_loads(step, memory, window)
    ill, counts = np.zeros(len(step.sites), bool), np.zeros(len(step.sites))
    for site, load in loads.items():
        counts[site] = (load == 0).sum()
        ill[site] = counts[site] and load.mean() >= tokens and 2 * counts[site] < len(load)

    def which(site: int) -> str:
        dead = np.flatnonzero(loads[site] == 0).tolist()
        return ", ".join(map(str, dead[:8])) + (", ..." if len(dead) > 8 else "")

    text = (
        "{value} of the {count} experts of {name} got no token in {window} measured steps: {which}. They learn "
        "nothing: balance the load, or initialise them again."
    )
    words = {"count": lambda site: str(len(loads[site])), "window": str(window), "which": which}
    return Ill(ill, text, counts, words=words)


@rule(depth=3)
def expert_load(
    step: Step, memory: Memory, entropy: float = 0.5, window: int = 10, name: str = "experts"
) -> list[Ill] | None:
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
    groups, routers = (
        step.make_for_sites(_find_experts, name),
        {step.sites[site].name for site in step.make_for_alike(_find_routers)},
    )
    loads = [(site, load, step.sites[site].name, "") for site, load in _sum_loads(step, memory, window).items()]
    if not groups and not routers:
        return None
    for path, experts in groups.items():
        if path.rpartition(".")[0] not in routers:
            counts = memory.last(f"counts of {path}", window)
            counts.append(step.totals.count[experts])
            if len(counts) == window and len(counts[0]) == len(counts[-1]):
                load = np.sum(np.array(counts), axis=0)
                busiest = int(experts[load.argmax()])
                loads.append((busiest, load, path, step.sites[busiest].name))
    found = []
    text = (
        "the router of {path} has collapsed: {busiest} gets {most:%} of the tokens, and {few} of {count} experts get "
        "almost none. Raise the weight of the balancing loss, lower the router's learning rate, or add noise to it."
    )
    for site, load, path, busiest_name in loads:
        if load.any() and len(load) > 2:
            shares = load / load.sum()
            some = shares[shares > 0]
            evenness = float(-(some * np.log(some)).sum() / np.log(len(load)))
            words = {
                "path": path, "busiest": busiest_name or f"expert {load.argmax()}", "most": shares.max(),
                "few": (shares < 0.1 / len(load)).sum(), "count": len(load),
            }  # fmt: skip
            found.append(Ill(evenness < entropy, text, evenness, entropy, site=site, words=words))
    return found


def _find_experts(step: Step, experts: str) -> dict[str, Counts]:
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
