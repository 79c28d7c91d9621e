"""trl: group relative policy optimisation, which generates between its steps."""

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import hookstats  # +
from hookstats.integrations.transformers import HookStats  # +
from tests.clients.trainers import words


def many_words(completions: list[str], **kwargs: object) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def train() -> torch.nn.Module:
    trainer = GRPOTrainer(
        model=words.llama(),
        reward_funcs=many_words,
        args=GRPOConfig(
            "out",
            max_steps=12,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=12,
            bf16=False,
            use_cpu=True,
            report_to=[],
        ),
        train_dataset=Dataset.from_dict({"prompt": words.sentences(64)}),
        processing_class=words.tokenizer(),
        callbacks=[HookStats(sinks=hookstats.record("runs"))],  # +
    )
    trainer.train()
    return trainer.model
