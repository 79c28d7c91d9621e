"""peft: LoRA on a frozen model, by the Trainer of transformers."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import hookstats  # +
from hookstats.integrations.transformers import HookStats  # +


def train() -> torch.nn.Module:
    base = LlamaForCausalLM(
        LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4)
    )
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    rows = [torch.arange(i, i + 24) % 97 for i in range(160)]
    Trainer(
        model,
        TrainingArguments("out", per_device_train_batch_size=8, max_steps=20, report_to=[], disable_tqdm=True),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[HookStats(sinks=hookstats.record("runs"))],  # +
    ).train()
    return model
