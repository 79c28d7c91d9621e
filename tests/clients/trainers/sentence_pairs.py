"""sentence-transformers: embeddings of pairs, in-batch negatives."""

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from sentence_transformers.models import Pooling, Transformer
from transformers import BertConfig, BertModel

import hookstats  # +
from hookstats.integrations.transformers import HookStats  # +
from tests.clients.trainers import words


def train() -> torch.nn.Module:
    config = BertConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    BertModel(config).save_pretrained("bert")
    words.tokenizer().save_pretrained("bert")
    words_in = Transformer("bert", max_seq_length=32)
    model = SentenceTransformer(modules=[words_in, Pooling(64)], device="cpu")
    lines = words.sentences(320)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            "out", max_steps=20, per_device_train_batch_size=16, use_cpu=True, report_to=[]
        ),
        train_dataset=Dataset.from_dict({"anchor": lines[:160], "positive": lines[160:]}),
        loss=losses.MultipleNegativesRankingLoss(model),
        callbacks=[HookStats(sinks=hookstats.record("runs"))],  # +
    )
    trainer.train()
    return model
