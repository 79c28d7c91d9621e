"""The rules of attention and of experts: on trainings that are truly ill, and what is in order although it looks so."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hookstats.rules import (
    Finding,
    attention_entropy,
    attention_logits,
    attention_sink,
    dead_experts,
    expert_load,
    judge,
    second_moment,
)
from tests.rules.test_guards import told

pytest.importorskip("transformers")
from tests.language.trainings import Language, mixture, train, with_a_sink


def name_finding(findings: list[Finding], rule: str) -> list[Finding]:
    return [each for each in findings if each.rule == rule]


def test_a_learning_rate_of_queries_and_keys_that_spikes_drives_logits_beyond_100() -> None:
    findings = judge(train(Language(), 60, after=30))
    found, *_ = name_finding(findings, "attention-logits")
    assert 30 < found.step < 40
    assert found.severity == "warning"
    assert found.site[1] == "attention.max_logit"
    assert "in head" in found.sentence
    assert "heads above 100" in found.sentence
    assert name_finding(findings, "attention-entropy")


def test_a_training_that_is_in_order_is_told_nothing_of_its_attention() -> None:
    findings = judge(train(Language(), 60))
    assert [each for each in findings if each.rule.startswith("attention")] == []


def test_gradients_below_the_epsilon_of_adam() -> None:
    found = name_finding(judge(train(Language(), 40, scale=1e-8)), "second-moment")
    assert len(found) == 1
    assert found[0].step == 19
    assert found[0].site_count > 5
    assert name_finding(judge(train(Language(), 40)), "second-moment") == []


def moments(*values: float) -> dict[tuple[str, str], torch.Tensor]:
    return {("a.weight", "optimizer.exp_avg_sq"): torch.tensor(values, dtype=torch.float32).repeat(100)}


def test_second_moments_that_are_0_do_not_count() -> None:
    assert told(second_moment, [moments(0, 0, 0, 1e-13)] * 20) == []
    assert told(second_moment, [moments(1e-18, 1e-17, 1e-10)] * 19) == []
    assert told(second_moment, [moments(1e-18, 1e-17, 1e-12)] * 20) == [(19, "second-moment")]
    assert told(second_moment, [moments(1e-18, 1e-15, 1e-12)] * 20) == []
    assert told(second_moment, [moments(0, 1e-18, 1e-17)] * 20) == [(19, "second-moment")]


def heads(*values: float) -> dict[tuple[str, str], torch.Tensor]:
    """Return the largest logit of each head over 64 rows."""
    return {("a", "attention.max_logit"): torch.tensor(values, dtype=torch.float32).repeat(64, 1)}


def test_logits_are_large_for_some_steps_before_it_is_said() -> None:
    assert told(attention_logits, [heads(3, 101)] * 2 + [heads(3, 99)] + [heads(3, 101)] * 2) == []
    assert told(attention_logits, [heads(3, 101)] * 3) == [(2, "attention-logits")]
    assert told(attention_logits(value=20), [heads(3, 21)] * 3) == [(2, "attention-logits")]


def test_a_bound_is_a_note_where_half_of_it_was_seen() -> None:
    def both(seen: float, bound: float) -> dict[tuple[str, str], torch.Tensor]:
        return heads(seen) | {("a", "attention.bound"): torch.tensor([[bound]], dtype=torch.float32)}

    assert told(attention_logits, [both(40, 300)] * 5) == []
    assert told(attention_logits, [both(60, 99)] * 5) == []
    assert told(attention_logits, [both(60, 300)] * 5) == [(2, "attention-logits")]


def entropies(*values: float) -> dict[tuple[str, str], torch.Tensor]:
    return {("a", "attention.entropy"): torch.tensor(values, dtype=torch.float32).repeat(64, 1)}


def test_single_heads_may_come_to_look_at_one_key() -> None:
    usual, some, most = entropies(3, 3, 3, 3), entropies(3, 3, 3, 0.01), entropies(3, 3, 0.1, 0.01)
    assert told(attention_entropy, [usual] * 10 + [some] * 10) == []
    assert told(attention_entropy, [usual] * 10 + [most] * 3) == [(12, "attention-entropy")]
    assert told(attention_entropy, [usual] * 10 + [entropies(3, 3, 1, 0.5)] * 10) == []
    assert told(attention_entropy, [most] * 20) == []
    assert told(attention_entropy, [usual] * 4 + [most] * 3) == []


def sinks(share: float, entropy: float) -> dict[tuple[str, str], torch.Tensor]:
    return {("a", "attention.sink"): torch.full((64, 4), share)} | entropies(entropy, entropy, entropy, entropy)


def test_a_sink_is_a_note_and_short_sequences_are_none() -> None:
    assert told(attention_sink, [sinks(0.4, 2.0)] * 9) == []
    assert told(attention_sink, [sinks(0.4, 2.0)] * 10) == [(9, "attention-sink")]
    assert told(attention_sink, [sinks(0.2, 2.0)] * 20) == []
    assert told(attention_sink, [sinks(0.9, 0.3)] * 20) == []


def load(*tokens: float) -> dict[tuple[str, str], torch.Tensor]:
    return {("moe.gate", "router.load"): torch.tensor([tokens], dtype=torch.float32)}


def test_an_expert_without_tokens_for_long_is_dead() -> None:
    idle = load(40, 40, 0, 40)
    assert told(dead_experts, [idle] * 49 + [load(40, 40, 1, 40)] + [idle] * 49) == []
    assert told(dead_experts, [idle] * 50) == [(49, "dead-experts")]
    lost = load(*[float("nan")] * 4)  # as what failed in a graph: it ran, and has no values
    assert told(dead_experts, [idle] * 49 + [lost] + [idle]) == [(50, "dead-experts")]
    assert told(dead_experts, [load(1, 1, 0, 1)] * 60) == []
    assert told(dead_experts, [load(400, 0, 0, 0)] * 60) == []  # of which expert-load tells


def test_a_router_that_has_collapsed_is_told_by_its_own_load() -> None:
    assert told(expert_load, [load(98, 1, 1, 0, 0, 0, 0, 0)] * 10) == [(9, "expert-load")]
    assert told(expert_load, [load(40, 5, 5, 5, 5, 5, 5, 0)] * 20) == []
    turns = [load(*np.roll([98, 1, 1, 0, 0, 0, 0, 0], turn).tolist()) for turn in range(30)]
    assert told(expert_load, turns) == []


def test_a_mixture_whose_router_collapses() -> None:
    ill = name_finding(judge(mixture(40, -10)), "expert-load")
    assert ill
    assert {each.site for each in ill} <= {(f"model.layers.{i}.mlp.router", "router.load") for i in range(2)}


def test_an_expert_that_is_never_chosen() -> None:
    (found,) = name_finding(judge(mixture(60, 0.1, without=3)), "dead-experts")
    assert found.site == ("model.layers.0.mlp.router", "router.load")
    assert "1 of the 8 experts of model.layers.0.mlp.router got no token in 50 measured steps: 3." in found.sentence


def test_a_mixture_that_is_in_order() -> None:
    findings = judge(mixture(60, 0.1))
    assert name_finding(findings, "expert-load") == name_finding(findings, "dead-experts") == []


def test_attention_that_rests_on_the_first_token_is_a_note() -> None:
    found, *_ = name_finding(judge(train(with_a_sink(Language()), 20, begin=0)), "attention-sink")
    assert found.severity == "note"
    assert found.step == 9
