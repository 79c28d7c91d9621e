"""accelerate: a loop of one's own, with gradients accumulated and clipped."""

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

import hookstats  # +


def train() -> torch.nn.Module:
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=176, num_hidden_layers=3, num_attention_heads=4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.utils.data.DataLoader([torch.arange(i, i + 32) % 97 for i in range(480)], batch_size=8, shuffle=True)
    scheduler = get_linear_schedule_with_warmup(optimizer, 3, 30)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    monitor = hookstats.attach(model, sinks=hookstats.record("runs"))  # +
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:  # +
            monitor.step(loss=loss)  # +
    monitor.detach()  # +
    return accelerator.unwrap_model(model)
