"""diffusers: an unconditional diffusion model, as their example trains it, with accelerate and averaged weights."""

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel

import hookstats  # +


def train() -> torch.nn.Module:
    accelerator = Accelerator(cpu=True)
    model = UNet2DModel(
        sample_size=16,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    noises, average = DDPMScheduler(num_train_timesteps=100), EMAModel(model.parameters(), decay=0.95)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 3, 20)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    monitor = hookstats.attach(model, sinks=hookstats.record("runs"))  # +
    for _ in range(20):
        images, noise = torch.rand(8, 1, 16, 16), torch.randn(8, 1, 16, 16)
        times = torch.randint(0, 100, (8,))
        predicted = model(noises.add_noise(images, noise, times), times).sample
        loss = torch.nn.functional.mse_loss(predicted, noise)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        monitor.step(loss=loss)  # +
    monitor.detach()  # +
    return accelerator.unwrap_model(model)
