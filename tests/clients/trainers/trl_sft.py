"""trl: supervised fine-tuning."""

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

import hookstats  # +
from hookstats.integrations.transformers import HookStats  # +
from tests.clients.trainers import words


def train() -> torch.nn.Module:
    trainer = SFTTrainer(
        model=words.llama(),
        args=SFTConfig(
            "out", max_steps=20, per_device_train_batch_size=8, max_length=32, bf16=False, use_cpu=True, report_to=[]
        ),
        train_dataset=Dataset.from_dict({"text": words.sentences(200)}),
        processing_class=words.tokenizer(),
        callbacks=[HookStats(sinks=hookstats.record("runs"))],  # +
    )
    trainer.train()
    return trainer.model
