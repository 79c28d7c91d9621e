"""The default rules on two larger models that learn: silence."""

from __future__ import annotations

import pytest
import torch

from benchmarks.illnesses import alarms
from benchmarks.illnesses.training import lines
from hookstats.rules import judge
from tests.rules.trainings import OnDigits, train

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_digits_cnn_is_healthy() -> None:
    torch.manual_seed(0)
    demo = pytest.importorskip("examples.digits")
    images, labels, *_ = demo.digits(torch.device("cpu"))
    model = demo.cnn()
    loss_of = OnDigits(model, shape=(1, 8, 8))
    loss_of.images, loss_of.labels = images, labels
    snapshots = train(model, loss_of, torch.optim.Adam(model.parameters(), lr=2e-3), 200)
    assert snapshots[-1].scalars["loss"] < 0.2
    assert alarms(judge(snapshots)) == []


def test_a_small_llama_in_bfloat16_is_healthy() -> None:
    torch.manual_seed(0)
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=86, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)

    def loss_of(step: int) -> torch.Tensor:
        batch = lines(8, 32)
        return model(input_ids=batch, labels=batch).loss

    snapshots = train(model, loss_of, torch.optim.AdamW(model.parameters(), lr=1e-3), 200)
    assert snapshots[-1].scalars["loss"] < 0.6 * snapshots[0].scalars["loss"]
    assert alarms(judge(snapshots)) == []
