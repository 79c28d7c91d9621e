"""open_clip: its own command, open_clip_train.main, on pictures that it makes itself."""

import json
from pathlib import Path

import open_clip
import torch
from open_clip_train import main as trainer
from torch.optim.optimizer import register_optimizer_step_post_hook  # +

import hookstats  # +


def train() -> torch.nn.Module:
    config = {
        "embed_dim": 32,
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "head_width": 16, "patch_size": 8},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
    }
    Path("small.json").write_text(json.dumps(config))
    open_clip.add_model_config("small.json")
    made = []
    monitors = []  # +
    create = trainer.create_model_and_transforms

    def created(*args, **kwargs):
        made.append(create(*args, **kwargs))
        options = hookstats.Options(training_only=True)  # +
        monitors.append(hookstats.attach(made[0][0], options=options, sinks=hookstats.record("runs")))  # +
        register_optimizer_step_post_hook(lambda *_: monitors[0].step())  # +
        return made[-1]

    trainer.create_model_and_transforms = created
    arguments = "--dataset-type synthetic --train-num-samples 80 --batch-size 8 --epochs 1 --model small --workers 0 "
    trainer.main((arguments + "--precision fp32 --warmup 3 --logs out --lr 1e-3").split())
    monitors[0].detach()  # +
    return made[0][0]
