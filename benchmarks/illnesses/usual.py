"""Trainings as most are: healthy."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss, smooth_l1_loss
from torch.optim import Adagrad, Adam, RMSprop

from benchmarks.illnesses.models import GPT, Attention, Function, Recurrent, Several, layers, resnet
from benchmarks.illnesses.training import Batch, Setup, adam, by, digits, healthy, lines, sgd, some


@healthy("digits")
def mlp_sgd(setup: Setup) -> None:
    setup.model, setup.make_optimizer = layers(64, 64, 64, 10), sgd(0.1)


@healthy("digits")
def mlp_adam(setup: Setup) -> None:
    setup.model, setup.make_optimizer, setup.steps = layers(64, 64, 64, 10), by(Adam, 1e-3), 250


@healthy("digits")
def mlp_gelu_adamw(setup: Setup) -> None:
    setup.model = layers(64, 128, 128, 10, activation=nn.GELU)
    setup.make_optimizer = adam(2e-3, weight_decay=0.1)


@healthy("digits")
def mlp_tanh_rmsprop(setup: Setup) -> None:
    setup.model, setup.make_optimizer = layers(64, 64, 64, 10, activation=nn.Tanh), by(RMSprop, 1e-3)


@healthy("digits")
def logistic_regression_adagrad(setup: Setup) -> None:
    setup.model, setup.make_optimizer = nn.Linear(64, 10), by(Adagrad, 0.1)


@healthy("digits")
def resnet_sgd(setup: Setup) -> None:
    setup.model, setup.make_optimizer = resnet(), sgd(0.05, nesterov=True)
    setup.data, setup.steps = digits(32, 1, 8, 8), 120


@healthy("digits")
def convnext_adamw(setup: Setup) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.LayerNorm(16)
            self.up, self.act, self.down = nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)
            self.scale = nn.Parameter(torch.full((16,), 1e-6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.down(self.act(self.up(self.norm(self.conv(x).permute(0, 2, 3, 1)))))
            return x + (self.scale * y).permute(0, 3, 1, 2)

    pool = nn.AdaptiveAvgPool2d(1)
    setup.model = nn.Sequential(nn.Conv2d(1, 16, 2, 2), Block(), Block(), pool, nn.Flatten(), nn.Linear(16, 10))
    setup.make_optimizer, setup.data, setup.steps = adam(4e-3), digits(32, 1, 8, 8), 120


@healthy("digits")
def vit_adamw(setup: Setup) -> None:
    class ViT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Linear(4, 32)
            self.places = nn.Parameter(0.02 * torch.randn(16, 32))
            self.blocks = nn.ModuleList(Attention(32, causal=False) for _ in range(2))
            self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.patches(x.view(-1, 16, 4)) + self.places
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x).mean(1))

    setup.model = ViT()


@healthy("text")
def gpt_with_warmup_cosine_and_clipping(setup: Setup) -> None:
    setup.model, setup.steps = GPT(), 250
    setup.make_optimizer = adam(3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    setup.before = [
        lambda i: setup.set_lr(5e-3 * min((i + 1) / 30, 0.5 + 0.5 * math.cos(math.pi * i / 250))),
    ]
    setup.clip(1.0)


@healthy("text")
def gpt_with_dropout(setup: Setup) -> None:
    setup.model, setup.make_optimizer = GPT(dropout=0.2), by(Adam, 1e-3)


@healthy("text")
def bert_masked(setup: Setup) -> None:
    setup.model, setup.make_optimizer = GPT(causal=False), adam(2e-3)

    def loss_of(number: int) -> torch.Tensor:
        ids = lines()
        masked = torch.rand(ids.shape) < 0.2
        return cross_entropy(setup.model(ids.masked_fill(masked, 128))[masked], ids[masked])

    setup.loss_of = loss_of


@healthy("text")
def gru_with_clipping(setup: Setup) -> None:
    setup.model, setup.make_optimizer = Recurrent(nn.GRU), sgd(0.5)
    setup.clip(0.5)


@healthy("text")
def sequence_to_sequence(setup: Setup) -> None:
    """Learns to turn a sequence round."""

    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(20, 32), nn.Parameter(0.1 * torch.randn(10, 32))
            self.core = nn.Transformer(32, 2, 1, 1, 64, 0.0, batch_first=True)
            self.head = nn.Linear(32, 20)

        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(10)
            return self.head(
                self.core(self.tokens(source) + self.places, self.tokens(target) + self.places, tgt_mask=mask)
            )

    setup.model, setup.make_optimizer = Copies(), by(Adam, 2e-3)

    def loss_of(number: int) -> torch.Tensor:
        source = torch.randint(1, 20, (16, 10))
        target = source.flip(1)
        given = torch.cat([torch.zeros(16, 1, dtype=torch.long), target[:, :-1]], 1)
        return cross_entropy(setup.model(source, given).flatten(0, 1), target.flatten())

    setup.loss_of = loss_of


@healthy("digits")
def autoencoder(setup: Setup) -> None:
    setup.model, setup.make_optimizer = layers(64, 32, 8, 32, 64), by(Adam, 2e-3)
    setup.damage, setup.loss = lambda step, x, y: (x, x), mse_loss


def _linear(setup: Setup, lr: float, noise: float) -> None:
    setup.model, truth = nn.Linear(16, 1), torch.randn(16, 1)
    setup.make_optimizer, setup.loss = by(torch.optim.SGD, lr), mse_loss

    def data(number: int) -> Batch:
        x = torch.randn(32, 16)
        return x, x @ truth + (noise * torch.randn(32, 1) if noise else 0)

    setup.data = data


@healthy("digits")
def linear_regression_sgd(setup: Setup) -> None:
    _linear(setup, 0.05, 0.1)


@healthy("digits")
def regression_without_noise(setup: Setup) -> None:
    """Its loss falls by ten orders of magnitude."""
    _linear(setup, 0.1, 0.0)
    setup.steps = 200


@healthy("digits")
def regression_with_huber(setup: Setup) -> None:
    setup.model, setup.make_optimizer, setup.steps = layers(8, 64, 64, 1), by(Adam, 3e-3), 250

    def loss_of(number: int) -> torch.Tensor:
        x = torch.randn(64, 8)
        return smooth_l1_loss(setup.model(x)[:, 0], (2 * x[:, 0]).sin() + x[:, 1] * x[:, 2])

    setup.loss_of = loss_of


@healthy("digits")
def epochs_over_small_data(setup: Setup) -> None:
    """Shuffled anew in each; the last batch of each is smaller."""
    setup.model, setup.make_optimizer, setup.steps = layers(64, 64, 10), sgd(0.1), 300
    pixels, labels = some(200)
    order: list[torch.Tensor] = []

    def data(number: int) -> Batch:
        if not order:
            order.extend(torch.randperm(200).split(32))
        chosen = order.pop(0)
        return pixels[chosen], labels[chosen]

    setup.data = data


@healthy("digits")
def batches_of_four(setup: Setup) -> None:
    setup.model, setup.make_optimizer = layers(64, 64, 10), by(Adam, 1e-3)
    setup.data, setup.steps = digits(4), 400


@healthy("digits")
def unet(setup: Setup) -> None:
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down1, self.down2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
            self.up, self.out = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 1, 3, padding=1)
            self.relu = nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one = self.relu(self.down1(x))
            return self.out(torch.cat([one, self.relu(self.up(self.relu(self.down2(one))))], 1))

    setup.model, setup.make_optimizer, setup.data = UNet(), by(Adam, 3e-3), digits(16, 1, 8, 8)
    setup.damage = lambda step, x, y: (x + 0.3 * torch.randn_like(x), (x > 0.5).float())
    setup.loss = binary_cross_entropy_with_logits


@healthy("digits")
def diffusion(setup: Setup) -> None:
    setup.model, setup.make_optimizer = layers(65, 128, 128, 64, activation=nn.SiLU), by(Adam, 1e-3)
    setup.loss = mse_loss

    def damage(step: int, pixels: torch.Tensor, labels: torch.Tensor) -> Batch:
        noise, time = torch.randn(32, 64), torch.rand(32, 1)
        return torch.cat([(1 - time).sqrt() * pixels + time.sqrt() * noise, time], 1), noise

    setup.damage = damage


@healthy("digits")
def two_tasks_together(setup: Setup) -> None:
    setup.model = Several(layers(64, 64, 64), classes=nn.Linear(64, 10), mean=nn.Linear(64, 1))
    setup.make_optimizer = by(Adam, 2e-3)

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some()
        logits, mean = setup.model(pixels)
        return cross_entropy(logits, labels) + mse_loss(mean[:, 0], pixels.mean(1))

    setup.loss_of = loss_of


@healthy("digits")
def graph_network(setup: Setup) -> None:
    """Classes of nodes of one graph, all nodes in each step."""
    labels = torch.arange(120) % 4
    edges = (torch.rand(120, 120) < torch.where(labels[:, None] == labels, 0.15, 0.03)).float() + torch.eye(120)
    mixing, given = edges / edges.sum(1, keepdim=True), torch.randn(120, 16)

    mix = Function(lambda x: mixing @ x)
    setup.model = nn.Sequential(nn.Linear(16, 32), mix, nn.ReLU(), nn.Linear(32, 4), Function(mix.function))
    setup.make_optimizer = by(Adam, 1e-2, weight_decay=5e-4)
    setup.data = lambda step: (given, labels)
