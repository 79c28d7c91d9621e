"""Attention whose logits grow, and whose heads look at one key alone."""

from __future__ import annotations

from collections import deque

import numpy as np

from hookstats.numbers.fields import Array
from hookstats.rules.finding import Finding
from hookstats.rules.formatting import number, times
from hookstats.rules.history import Streak
from hookstats.rules.step import Step
from hookstats.rules.thresholds import rule


@rule
class AttentionLogits:
    """Logits of an attention are so large that its softmax is a choice of one key (warning): above ``value`` = 100.

    Kimi K2 scales the weights of query and key down where a head's largest logit is beyond 100 (Kimi Team 2025, arXiv
    2507.20534, QK-clip); Megatron-LM, torchtitan and MaxText watch the same number. The rule judges what
    ``tensors=("attention", ...)`` measures. A sample of queries may miss the largest: where half of ``value`` was seen,
    and the product of the largest norms of a query and a key allows more than ``value``, it is a note.

    What else looks like it: a bias by position that is added to the logits, or a scale that was forgotten: then it is
    so from the start. What to do: clip the weights of query and key (QK-clip), normalise both (QK-norm), or lower the
    learning rate of their weights; look at whether weight decay reaches them.

    So that a healthy run is silent: in ``consecutive_steps`` = 3 verdicts in a row.
    """

    value: float = 100.0
    consecutive_steps: int = 3

    def __post_init__(self) -> None:
        self._seen, self._allowed = Streak(self.consecutive_steps), Streak(self.consecutive_steps)

    def __call__(self, step: Step) -> list[Finding] | None:
        judged = step.is_kind("attention.max_logit") & (step.calls > 0)
        if not judged.any():
            return None
        largest = np.where(judged, step.totals.max, -np.inf)
        partner = step.partner("attention.max_logit", "attention.bound")
        bound = np.where(judged & (partner >= 0), step.totals.max[partner], -np.inf)
        beyond = largest > self.value
        seen = self._seen.push(step.number, beyond, judged)
        allowed = self._allowed.push(step.number, ~beyond & (largest > self.value / 2) & (bound > self.value), judged)
        return [self._finding(step, site, float(largest[site])) for site in step.in_order(seen)] + [
            self._note(step, site, float(largest[site]), float(bound[site])) for site in step.in_order(allowed)
        ]

    def _finding(self, step: Step, site: int, largest: float) -> Finding:
        sentence = (
            f"the attention logits of {step.sites[site].name} reach {number(largest)}{self._heads(step, site)}: beyond "
            f"{number(self.value)} its softmax chooses one key, and gradients through it vanish or jump. Clip or "
            "normalise query and key, or lower the learning rate of their weights."
        )
        since = self._seen.since[site]
        return step.finding("attention-logits", site, largest, self.value, "warning", sentence, since=since)

    def _note(self, step: Step, site: int, largest: float, bound: float) -> Finding:
        sentence = (
            f"the attention logits of {step.sites[site].name} reach {number(largest)} in the queries that were looked "
            f"at, and may reach {number(bound)} in others, by the norms of queries and keys."
        )
        since = self._allowed.since[site]
        return step.finding("attention-logits", site, bound, self.value, "note", sentence, since=since)

    def _heads(self, step: Step, site: int) -> str:
        channels = step.channels(site)
        if channels is None or len(channels.max) < 2:
            return ""
        beyond = int((channels.max > self.value).sum())
        largest = int(np.nanargmax(channels.max))
        return f" in head {largest}; {beyond} of {times(len(channels.max), 'head')} are beyond"


@rule
class AttentionEntropy:
    """The heads of an attention have come to look at a single key each (warning).

    The entropy of the softmax, averaged over queries, has fallen below ``ratio`` = 0.1 of its past in at least
    ``heads`` = 0.5 of the heads: Zhai et al. 2023, arXiv 2303.06296, found that such a collapse goes with a loss that
    oscillates or diverges; where it becomes one is ours to say. Past is the median of the last ``window`` = 50
    verdicts, of which there are at least ``min_history`` = 5.

    What else looks like it: sequences that become shorter, which have less to look at. What to do: look at the logits'
    size, too; lower the learning rate, normalise query and key.

    So that a healthy run is silent: in ``consecutive_steps`` = 3 verdicts in a row; single heads may do so, for they
    learn to look at the token before, or at the first one.
    """

    ratio: float = 0.1
    heads: float = 0.5
    window: int = 50
    min_history: int = 5
    consecutive_steps: int = 3

    def __post_init__(self) -> None:
        self._past: dict[int, deque[Array]] = {}
        self._streak = Streak(self.consecutive_steps)

    def __call__(self, step: Step) -> list[Finding] | None:
        judged = step.is_kind("attention.entropy") & (step.calls > 0)
        if not judged.any():
            return None
        ill, worst = np.zeros(len(step.sites), bool), np.ones(len(step.sites))
        for site in np.flatnonzero(judged).tolist():
            entropy = step.channels_or_whole(site).mean
            past = self._past.setdefault(site, deque(maxlen=self.window))
            if past and len(past[0]) != len(entropy):
                past.clear()
            if len(past) >= self.min_history:
                ratios = entropy / np.median(np.array(past), axis=0)
                ill[site] = np.mean(ratios < self.ratio) >= self.heads
                worst[site] = np.median(ratios)
            if not ill[site] and np.isfinite(entropy).all():
                past.append(entropy)
        told = self._streak.push(step.number, ill, judged)
        return [self._finding(step, site, float(worst[site])) for site in step.in_order(told)]

    def _finding(self, step: Step, site: int, ratio: float) -> Finding:
        sentence = (
            f"the attention of {step.sites[site].name} has collapsed: the entropy of its heads has fallen to "
            f"{number(100 * ratio)} % of what it was, to {number(step.totals.mean[site])} nats: each query looks at "
            "hardly more than one key. Look at its logits; lower the learning rate, or normalise query and key."
        )
        since = self._streak.since[site]
        return step.finding("attention-entropy", site, ratio, self.ratio, "warning", sentence, since=since)


@rule
class AttentionSink:
    """Heads of an attention rest on the first key (a note): more than ``share`` = 0.3 of what they give.

    bo-ke/llm-internal-medicine calls a head with more than 0.3 a sink; Xiao et al. 2023, arXiv 2309.17453, found them
    in all large language models. Nothing is wrong with them by themselves: they are where massive activations come
    from, which low precision suffers from, and a cache that drops the first key breaks them.

    What else looks like it: short sequences, whose queries have few keys. What to do: nothing, unless you quantise or
    evict; gates on the attention's output, a learned sink, or registers make them unnecessary.

    So that a healthy run is silent: at least ``heads`` = 0.5 of the heads do so, in ``consecutive_steps`` = 10 verdicts
    in a row; and their entropy is at least 0.5 nats, which queries with few keys do not have.
    """

    share: float = 0.3
    heads: float = 0.5
    consecutive_steps: int = 10

    def __post_init__(self) -> None:
        self._streak = Streak(self.consecutive_steps)

    def __call__(self, step: Step) -> list[Finding] | None:
        judged = step.is_kind("attention.sink") & (step.calls > 0)
        if not judged.any():
            return None
        ill = np.zeros(len(step.sites), bool)
        entropy = step.partner("attention.sink", "attention.entropy")
        for site in np.flatnonzero(judged & (entropy >= 0)).tolist():
            shares = step.channels_or_whole(site).mean
            ill[site] = np.mean(shares > self.share) >= self.heads and step.totals.mean[entropy[site]] > 0.5
        told = self._streak.push(step.number, ill, judged)
        return [self._finding(step, site) for site in step.in_order(told)]

    def _finding(self, step: Step, site: int) -> Finding:
        share = float(step.totals.mean[site])
        sentence = (
            f"the attention of {step.sites[site].name} rests on the first key, which gets {number(100 * share)} % of "
            "it. Large language models do so; low precision and a cache that drops the first key suffer from it."
        )
        return step.finding("attention-sink", site, share, self.share, "note", sentence, since=self._streak.since[site])
