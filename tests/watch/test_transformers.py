"""Real models, from transformers (tiny, random weights): every site against plain hooks, and training that goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import hookstats
from hookstats import Site
from hookstats.numbers import fields
from tests.conftest import DEVICES
from tests.fuzz.comparing import check_site
from tests.fuzz.seen import Seen

WIDTH, VOCABULARY = 16, 24
SHAPE = {"hidden_size": WIDTH, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 32}
GROUPED = {"num_key_value_heads": 2}  # query heads share keys and values
CONTAINERS = {"output_hidden_states": True, "output_attentions": True, "attn_implementation": "eager"}
EXPERTS = {
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
}
KINDS = ("output", "grad_output", "param", "param_grad")

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, **TEXT, **GROUPED)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=32, n_embd=WIDTH, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
        )
    ),
    "bert": lambda: BertForMaskedLM(BertConfig(**SHAPE, **TEXT, **CONTAINERS)),
    "vit": lambda: ViTForImageClassification(ViTConfig(**SHAPE, image_size=16, patch_size=4, num_labels=5)),
    "experts, grouped": lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(**SHAPE, **TEXT, **GROUPED, **EXPERTS)),
    "experts, one by one": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**SHAPE, **TEXT, **GROUPED, **EXPERTS, experts_implementation="eager")
    ),
}
pytestmark = pytest.mark.usefixtures("one_thread")


def made(name: str, device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().train().to(device)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    device = next(model.parameters()).device
    if isinstance(model, ViTForImageClassification):
        images, labels = torch.randn(3, 3, 16, 16, generator=generator), torch.randint(5, (3,), generator=generator)
        return model(pixel_values=images.to(device), labels=labels.to(device)).loss
    ids = torch.randint(VOCABULARY, (3, 7), generator=generator).to(device)
    return model(input_ids=ids, labels=ids).loss


def every_module(name: str, module: nn.Module) -> bool:
    return True


def dim_of(model: nn.Module, site: Site, x: torch.Tensor) -> int | None:
    """Returns the dim of the channels; None where there are totals alone."""
    if site.tensor.startswith("param"):
        module = model.get_submodule(site.name.rpartition(".")[0])
        dim = int(type(module).__name__ == "Conv1D" and x.dim() == 2)  # its weights are [in, out]
        return None if not x.shape or x.shape[0] == 1 else dim
    module = model.get_submodule(site.name)
    return -1 if isinstance(module, (nn.Linear, nn.LayerNorm, nn.Embedding)) or x.dim() not in (4, 5) else 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_three_training_steps_of_a_real_model_match_plain_hooks_at_every_site(name: str, device: str) -> None:
    model = made(name, device)
    mon = hookstats.attach(model, every_module, tensors=KINDS, every=1, options=hookstats.Options(strict=True))
    seen, optimizer = Seen(list(KINDS)), torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen.watch(model, [optimizer], None)
    for step in range(3):
        loss = loss_of(model, step)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        snapshot = mon.step()
        expected = {site: each for site, each in seen.steps[step].items() if site[1].partition(".")[0] in KINDS}
        assert {tuple(site) for site in snapshot.order} == set(expected)
        for site in snapshot.order:
            tensors = expected[tuple(site)]
            assert snapshot[site].calls == len(tensors)
            check_site(snapshot[site], tensors, dim_of(model, site, tensors[0]))
        assert snapshot.grad_norm == pytest.approx(norm.item(), rel=1e-6)
        assert snapshot["", "output.loss"].total.mean == loss.item()
        seen.end_step()
    assert mon.skipped == {}


def test_what_real_models_return_in_containers_has_sites_of_its_own() -> None:
    """The test above compares them; this one holds that there are such sites in it."""
    kinds = {}
    for name in ("bert", "experts, grouped"):
        model = made(name)
        mon = hookstats.attach(model, every_module, every=1)
        loss_of(model, 0).backward()
        kinds[name] = {site.tensor for site in mon.snapshot().order if site.name == ""}
    hidden, attentions = [f"output.hidden_states.{i}" for i in range(3)], [f"output.attentions.{i}" for i in range(2)]
    outputs = {"output.loss", "output.logits", *hidden, *attentions}
    assert kinds["bert"] == outputs | {f"grad_{kind}" for kind in outputs}
    outputs = {"output.loss", "output.aux_loss", "output.logits", "output.router_logits.0", "output.router_logits.1"}
    assert kinds["experts, grouped"] == outputs | {f"grad_{kind}" for kind in outputs}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_counts_each_forward_once(reentrant: bool) -> None:
    def snapshot_of(recompute: bool) -> hookstats.Snapshot:
        model = made("llama")
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        ran = []
        model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: ran.append(1))
        mon = hookstats.attach(model, every_module, tensors=KINDS, every=1, options=hookstats.Options(strict=True))
        optimizer = torch.optim.AdamW(model.parameters())
        for microbatch in range(2):
            loss_of(model, microbatch).backward()
        optimizer.step()
        snapshot = mon.step()
        assert snapshot is not None
        assert len(ran) == (4 if recompute else 2)
        return snapshot

    plain, recomputed = snapshot_of(False), snapshot_of(True)
    assert set(recomputed.order) == set(plain.order)
    for site in plain.order:
        assert recomputed[site].calls == plain[site].calls
        got, want = ([getattr(each[site].total, name) for name in fields.STATISTICS] for each in (recomputed, plain))
        np.testing.assert_array_equal(got, want, err_msg=str(site))


def test_a_table_of_positions_is_not_named_as_silent() -> None:
    model = MODELS["llama"]()
    mon = hookstats.attach(model, every=1)
    tokens = torch.randint(0, VOCABULARY, (2, 6))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            model(input_ids=tokens, labels=tokens).loss.backward()
            mon.step()
    assert [str(warning.message) for warning in told if "hookstats" in str(warning.message)] == []
    assert ("model.rotary_emb", "output.0") in mon.snapshot().order
