"""Small causal language models of transformers with random weights, of many types; and what hookstats finds in them.

python -m tests.language.zoo    # the table
"""

from __future__ import annotations

from typing import Any

import torch

TYPES = """
    apertus arcee aria_text biogpt bitnet bloom codegen cohere cohere2 cwm deepseek_v2 deepseek_v3 deepseek_v32
    diffllama doge ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon flex_olmo gemma gemma2 gemma3_text glm glm4
    glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite
    granitemoe granitemoeshared helium internlm3 jetmoe lfm2 llama llama4_text mamba mimo_v2_flash minicpm3 minimax
    minimax_m2 ministral3 mistral mixtral modernbert-decoder mpt nanochat olmo olmo2 olmo3 olmo_hybrid olmoe opt
    persimmon phi phi3 phimoe qwen2 qwen3 qwen3_moe qwen3_next rwkv seed_oss smollm3 solar_open stablelm starcoder2
    vaultgemma xglm
""".split()  # noqa: SIM905
_SIZES = (
    dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim"), 32)
    | dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2)
    | dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4)
    | dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 64)
    | dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "vocab_size"), 64)
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8)
    | dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k", "n_group"), 2)
    | dict.fromkeys(("head_dim", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "sliding_window"), 8)
    | {"num_key_value_heads": 2, "moe_intermediate_size": 16, "topk_group": 1, "first_k_dense_replace": 1}
    | {"qk_rope_head_dim": 4, "rotary_dim": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
)
_DROPOUTS = """
    attention_dropout hidden_dropout resid_pdrop attn_pdrop embd_pdrop dropout embedding_dropout activation_dropout
    resid_dropout embed_dropout attention_probs_dropout_prob hidden_dropout_prob layerdrop
""".split()  # noqa: SIM905
_OWN: dict[str, dict[str, Any]] = {  # None: the default
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": None},
    "falcon": {"head_dim": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "mamba": {"layer_types": None},
}
_OPTIONAL = ("num_key_value_heads", "sliding_window", "n_inner", "head_dim", "q_lora_rank")


def make(model_type: str, attention: str = "sdpa") -> Any:
    """A model in training mode; with eager attention where the type has no other. Always the same weights."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    transformers.logging.set_verbosity_error()
    made = CONFIG_MAPPING[model_type]
    given = made()
    sizes: dict[str, Any] = {
        name: size
        for name, size in (_SIZES | dict.fromkeys(_DROPOUTS, 0.0)).items()
        if hasattr(given, name) and not (name in _OPTIONAL and getattr(given, name) is None)
    }
    if "num_key_value_heads" in sizes and given.num_key_value_heads == getattr(given, "num_attention_heads", None):
        sizes["num_key_value_heads"] = 4
    kinds = list(getattr(given, "layer_types", None) or [])
    if kinds:
        sizes["layer_types"] = kinds[:2] if len(set(kinds[:2])) == len(set(kinds)) else sorted(set(kinds))[:2]
    sizes |= _OWN.get(model_type, {})
    config = made(**{name: size for name, size in sizes.items() if size is not None})
    torch.manual_seed(0)
    kind = transformers.AutoModelForCausalLM
    try:
        return kind.from_config(config, attn_implementation=attention).train()
    except (ValueError, ImportError):
        return kind.from_config(config, attn_implementation="eager").train()


def batch() -> dict[str, torch.Tensor]:
    """Two sequences of 24 tokens."""
    ids = torch.randint(3, 64, (2, 24), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def find_in(model_type: str) -> tuple[str, dict[str, Any]]:
    """A row of the table, from one step with the preset; and what there was to be found."""
    import hookstats

    model = make(model_type)
    arguments = hookstats.presets.language_model(model)
    with hookstats.attach(model, **arguments) as monitor:
        loss = model(**batch()).loss
        loss.backward()
        snapshot = monitor.step()
        assert snapshot is not None
        skipped = monitor.skipped
    sites = {kind: [site for site in snapshot.order if site.tensor == kind] for kind in KINDS}
    attentions, routers = (len(sites[kind]) for kind in KINDS)
    heads = sorted({len(snapshot[site].channels.count) for site in sites["attention.max_logit"]})
    experts = sorted({len(snapshot[site].channels.count) for site in sites["router.load"]})
    row = [
        model_type,
        model.config._attn_implementation if attentions else "",
        f"{attentions} of {'/'.join(map(str, heads))} heads" if attentions else "none",
        f"{routers} of {'/'.join(map(str, experts))} experts" if routers else "",
    ]
    facts = {"attentions": attentions, "routers": routers, "skipped": skipped, "loss": loss.item(), "model": model}
    return f"| {' | '.join(row)} |", facts


KINDS = ("attention.max_logit", "router.load")


def main() -> None:
    print("| type | attention | found | routers |\n|---|---|---|---|")
    for model_type in TYPES:
        print(find_in(model_type)[0], flush=True)


if __name__ == "__main__":
    main()
