"""torchtitan: its trainer with DDP on two ranks, mixed precision and blocks that are checkpointed."""

import torch

import hookstats  # +
from tests.clients.trainers import titan

RANKS = 2


def train() -> torch.nn.Module:
    trainer = titan.trainer(data_parallel_replicate_degree=2, data_parallel_shard_degree=1)
    [model] = trainer.model_parts
    watched = hookstats.presets.language_model(model)  # +
    mesh = trainer.parallel_dims.get_mesh("dp_replicate")  # +
    monitor = hookstats.attach(model, **watched, process_group=mesh, sinks=hookstats.record("runs"))  # +
    logger = trainer.metrics_processor.logger  # +
    logger.log = lambda metrics, step: monitor.step(step, loss=metrics["loss_metrics/global_avg_loss"])  # +
    trainer.train()
    monitor.detach()  # +
    trainer.close()
    return model
