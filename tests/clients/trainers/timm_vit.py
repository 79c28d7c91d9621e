"""timm: a vision transformer with mixup, layer decay, stochastic depth and an average of its weights."""

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3

import hookstats  # +


def train() -> torch.nn.Module:
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=4, num_classes=10, drop_path_rate=0.1)
    average = ModelEmaV3(model, decay=0.9)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, layer_decay=0.75)
    scheduler = CosineLRScheduler(optimizer, t_initial=20, warmup_t=3, warmup_lr_init=1e-5)
    mixup, criterion = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=10), SoftTargetCrossEntropy()
    monitor = hookstats.attach(model, sinks=hookstats.record("runs"))  # +
    for update in range(20):
        images, labels = mixup(torch.randn(16, 3, 64, 64), torch.randint(10, (16,)))
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        timm.utils.dispatch_clip_grad(model.parameters(), 1.0)
        optimizer.step()
        average.update(model)
        scheduler.step(update + 1)
        monitor.step(loss=loss)  # +
    monitor.detach()  # +
    return average.module
