"""Attention whose logits grow, and whose heads look at one key alone."""

from __future__ import annotations

from collections import deque

import numpy as np

from hookstats.numbers.fields import Array
from hookstats.rules.engine import Ill, rule
from hookstats.rules.formatting import number, times
from hookstats.rules.memory import Memory
from hookstats.rules.step import Step


@rule(of="attention.max_logit", depth=3)
def attention_logits(step: Step, value: float = 100.0, consecutive_steps: int = 3) -> list[Ill]:
    """Logits of an attention are so large that its softmax is a choice of one key (warning): above ``value`` = 100.

    Kimi K2 scales the weights of query and key down where a head's largest logit is beyond 100 (Kimi Team 2025, arXiv
    2507.20534, QK-clip); Megatron-LM, torchtitan and MaxText watch the same number. The rule judges what
    ``tensors=("attention", ...)`` measures. A sample of queries may miss the largest: where half of ``value`` was seen,
    and the product of the largest norms of a query and a key allows more than ``value``, it is a note.

    What else looks like it: a bias by position that is added to the logits, or a scale that was forgotten: then it is
    so from the start. What to do: clip the weights of query and key (QK-clip), normalise both (QK-norm), or lower the
    learning rate of their weights; look at whether weight decay reaches them.

    False-positive guards: in ``consecutive_steps`` = 3 verdicts in a row.
    """
    judged = step.fired("attention.max_logit")
    largest = np.where(judged, step.totals.max, -np.inf)
    partner = step.partner("attention.max_logit", "attention.bound")
    bound = np.where(judged & (partner >= 0), step.totals.max[partner], -np.inf)
    beyond = largest > value

    def say(site: int, since: int) -> str:
        channels, heads = step.channels(site), ""
        if channels is not None and len(channels.max) > 1:
            many = times(len(channels.max), "head")
            heads = f" in head {np.nanargmax(channels.max)}; {(channels.max > value).sum()} of {many} are beyond"
        return (
            f"the attention logits of {step.sites[site].name} reach {number(largest[site])}{heads}: beyond "
            f"{number(value)} its softmax chooses one key, and gradients through it vanish or jump. Clip or "
            "normalise query and key, or lower the learning rate of their weights."
        )

    def say_of_others(site: int, since: int) -> str:
        return (
            f"the attention logits of {step.sites[site].name} reach {number(largest[site])} in the queries that were "
            f"looked at, and may reach {number(bound[site])} in others, by the norms of queries and keys."
        )

    may_be = ~beyond & (largest > value / 2) & (bound > value)
    return [
        Ill(beyond, say, largest, value, judged=judged, steps=consecutive_steps),
        Ill(may_be, say_of_others, bound, value, "note", judged, consecutive_steps, key="others"),
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
    """The heads of an attention have come to look at a single key each (warning).

    The entropy of the softmax, averaged over queries, has fallen below ``ratio`` = 0.1 of its past in at least
    ``heads`` = 0.5 of the heads: Zhai et al. 2023, arXiv 2303.06296, found that such a collapse goes with a loss that
    oscillates or diverges; where it becomes one is ours to say. Past is the median of the last ``window`` = 50
    verdicts, of which there are at least ``min_history`` = 5.

    What else looks like it: sequences that become shorter, which have less to look at. What to do: look at the logits'
    size, too; lower the learning rate, normalise query and key.

    False-positive guards: in ``consecutive_steps`` = 3 verdicts in a row; single heads may do so, for they
    learn to look at the token before, or at the first one.
    """
    judged = step.fired("attention.entropy")
    ill, ratios = np.zeros(len(step.sites), bool), np.ones(len(step.sites))
    for site in np.flatnonzero(judged).tolist():
        entropy = step.channels_or_whole(site).mean
        past: deque[Array] = memory.last(f"past of {site}", window)
        if past and len(past[0]) != len(entropy):
            past.clear()
        if len(past) >= min_history:
            fallen = entropy / np.median(np.array(past), axis=0)
            ill[site] = np.mean(fallen < ratio) >= heads
            ratios[site] = np.median(fallen)
        if not ill[site] and np.isfinite(entropy).all():
            past.append(entropy)

    def say(site: int, since: int) -> str:
        return (
            f"the attention of {step.sites[site].name} has collapsed: the entropy of its heads has fallen to "
            f"{number(100 * ratios[site])} % of what it was, to {number(step.totals.mean[site])} nats: each query "
            "looks at hardly more than one key. Look at its logits; lower the learning rate, or normalise query and "
            "key."
        )

    return Ill(ill, say, ratios, ratio, judged=judged, steps=consecutive_steps)


@rule(of="attention.sink", depth=3)
def attention_sink(step: Step, share: float = 0.3, heads: float = 0.5, consecutive_steps: int = 10) -> Ill:
    """Heads of an attention rest on the first key (a note): more than ``share`` = 0.3 of what they give.

    bo-ke/llm-internal-medicine calls a head with more than 0.3 a sink; Xiao et al. 2023, arXiv 2309.17453, found them
    in all large language models. Nothing is wrong with them by themselves: they are where massive activations come
    from, which low precision suffers from, and a cache that drops the first key breaks them.

    What else looks like it: short sequences, whose queries have few keys. What to do: nothing, unless you quantise or
    evict; gates on the attention's output, a learned sink, or registers make them unnecessary.

    False-positive guards: at least ``heads`` = 0.5 of the heads do so, in ``consecutive_steps`` = 10 verdicts
    in a row; and their entropy is at least 0.5 nats, which queries with few keys do not have.
    """
    judged, means = step.fired("attention.sink"), step.totals.mean
    entropy = step.partner("attention.sink", "attention.entropy")
    ill = np.zeros(len(step.sites), bool)
    for site in np.flatnonzero(judged & (entropy >= 0) & (means[entropy] > 0.5)).tolist():
        ill[site] = np.mean(step.channels_or_whole(site).mean > share) >= heads

    def say(site: int, since: int) -> str:
        return (
            f"the attention of {step.sites[site].name} rests on the first key, which gets {number(100 * means[site])} "
            "% of it. Large language models do so; low precision and a cache that drops the first key suffer from it."
        )

    return Ill(ill, say, means, share, "note", judged, consecutive_steps)
