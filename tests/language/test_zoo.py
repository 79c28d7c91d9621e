"""The preset on causal language models of transformers, of many types."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hookstats
from hookstats import Options, Snapshot

pytest.importorskip("transformers")
from tests.language import zoo
from tests.language.attentions import logits_in_float64

TEN = ["llama", "gpt2", "qwen3", "mistral", "olmo2", "phi3", "gpt_neox", "starcoder2", "deepseek_v3", "mixtral"]
WITHOUT_ATTENTION = {"mamba", "rwkv"}


@pytest.mark.parametrize("model_type", zoo.TYPES)
def test_the_preset_finds_attention_and_routers_and_changes_nothing(model_type: str) -> None:
    bare = zoo.make(model_type)
    loss = bare(**zoo.batch()).loss
    loss.backward()
    found = zoo.find_in(model_type)[1]
    assert found["loss"] == loss.item()
    for mine, other in zip(found["model"].parameters(), bare.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, other.grad)
    assert (found["attentions"] > 0) == (model_type not in WITHOUT_ATTENTION)
    assert not any(site.tensor.startswith(("attention.", "router.")) for site in found["skipped"])


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe", "minimax_m2"])
def test_loads_are_those_of_the_model_s_own_indices(model_type: str) -> None:
    model = zoo.make(model_type)
    chosen: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if "Router" in type(module).__name__:
            module.register_forward_hook(lambda _, args, output, name=name: chosen.update({name: output[-1]}))
    with hookstats.attach(model, tensors=("router",), options=Options(strict=True)) as monitor:
        model(**zoo.batch())
        snapshot = monitor.snapshot()
    assert chosen
    for name, indices in chosen.items():
        stats = snapshot[name, "router.load"].channels
        assert (stats.mean * stats.count).tolist() == torch.bincount(indices.flatten(), minlength=8).tolist()


def test_loads_are_the_sizes_of_jetmoe_s_experts() -> None:
    model, sizes = zoo.make("jetmoe"), {}
    for name, module in model.named_modules():
        if type(module).__name__ == "JetMoeTopKGating":
            module.register_forward_hook(lambda _, args, output, name=name: sizes.update({name: list(output[3])}))
    with hookstats.attach(model, tensors=("router",), options=Options(strict=True)) as monitor:
        model(**zoo.batch())
        snapshot = monitor.snapshot()
    assert len(sizes) == 4
    for name, wanted in sizes.items():
        stats = snapshot[name, "router.load"].channels
        assert (stats.mean * stats.count).tolist() == wanted


def measure_attention(model: Any, run: Any) -> Snapshot:
    with hookstats.attach(model, tensors=("attention",), options=Options(strict=True, attention_rows=None)) as monitor:
        given, keeping = [], F.scaled_dot_product_attention

        def keep_rows(q: Any, k: Any, v: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
            given.append((q, k, attn_mask, kwargs))
            return keeping(q, k, v, attn_mask, *args, **kwargs)

        if run is model:
            F.scaled_dot_product_attention = keep_rows
        try:
            run(**zoo.batch())
        finally:
            F.scaled_dot_product_attention = keeping
        snapshot = monitor.snapshot()
    sites = [site for site in snapshot.order if site.tensor == "attention.max_logit"]
    for site, (q, k, mask, kwargs) in zip(sites, given, strict=False):
        logits = logits_in_float64(q, k, mask, kwargs.get("is_causal", False), scale=kwargs.get("scale"))
        stats = snapshot[site].channels
        assert abs(stats.max - logits.amax((0, 2, 3)).numpy()).max() < 1e-5
    assert run is not model or len(given) == len(sites) == 2
    return snapshot


@pytest.mark.parametrize("model_type", TEN)
def test_the_largest_logits_are_those_of_float64(model_type: str) -> None:
    model = zoo.make(model_type)
    measure_attention(model, model)


def test_graphs_see_the_same_logits() -> None:
    torch._dynamo.reset()
    model = zoo.make("llama")
    eager = measure_attention(model, model)
    graph = measure_attention(model, torch.compile(model, backend="eager"))
    sites = [site for site in eager.order if site.tensor == "attention.max_logit"]
    assert sites
    for site in sites:
        mine, other = graph[site].channels, eager[site].channels
        assert (mine.count == other.count).all()
        assert abs(mine.max - other.max).max() < 1e-5
