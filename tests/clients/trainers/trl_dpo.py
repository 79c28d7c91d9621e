"""trl: direct preference optimisation, with a frozen model beside the one that is trained."""

import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

import hookstats  # +
from hookstats.integrations.transformers import HookStats  # +
from tests.clients.trainers import words


def train() -> torch.nn.Module:
    lines = words.sentences(320)
    words.llama().save_pretrained("llama")
    trainer = DPOTrainer(
        model="llama",
        args=DPOConfig(
            "out", max_steps=20, per_device_train_batch_size=8, max_length=32, bf16=False, use_cpu=True, report_to=[]
        ),
        train_dataset=Dataset.from_dict({"prompt": lines[:160], "chosen": lines[160:], "rejected": lines[:159:-1]}),
        processing_class=words.tokenizer(),
        callbacks=[HookStats(sinks=hookstats.record("runs"))],  # +
    )
    trainer.train()
    return trainer.model
