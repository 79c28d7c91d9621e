"""torchtitan: its trainer with tensor and sequence parallelism on two ranks."""

import torch
from torch.distributed.tensor import Shard  # +

import hookstats  # +
from tests.clients.trainers import titan

RANKS = 2


def train() -> torch.nn.Module:
    trainer = titan.trainer(tensor_parallel_degree=2)
    [model] = trainer.model_parts
    watched = hookstats.presets.language_model(model)  # +
    tokens, channels, heads = Shard(-2), Shard(-1), Shard(1)  # +
    placements = {"tok_embeddings": tokens, "layers.*": tokens, "*.w[qkv13]": channels, "*.inner_attention": heads}  # +
    ranks = hookstats.Ranks(trainer.parallel_dims.get_mesh("tp"), placements=placements)  # +
    monitor = hookstats.attach(model, **watched, process_group=ranks, sinks=hookstats.record("runs"))  # +
    logger = trainer.metrics_processor.logger  # +
    logger.log = lambda metrics, step: monitor.step(step, loss=metrics["loss_metrics/global_avg_loss"])  # +
    trainer.train()
    monitor.detach()  # +
    trainer.close()
    return model
