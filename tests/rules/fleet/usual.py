"""Trainings as most are: healthy."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss, smooth_l1_loss

from tests.rules.fleet.models import GPT, Attention, Recurrent, cnn, layers, resnet
from tests.rules.fleet.training import Training, lines, plain, set_lr, some, usual


def classifier(model: nn.Module, optimizer: torch.optim.Optimizer, *shape: int, steps: int = 150) -> Training:
    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some(32, *shape)
        return cross_entropy(model(pixels), labels)

    return Training(model, plain(model, loss_of, optimizer), steps)


@usual
def mlp_sgd() -> Training:
    model = layers(64, 64, 64, 10)
    return classifier(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))


@usual
def mlp_adam() -> Training:
    model = layers(64, 64, 64, 10)
    return classifier(model, torch.optim.Adam(model.parameters(), 1e-3), steps=250)


@usual
def mlp_gelu_adamw() -> Training:
    model = layers(64, 128, 128, 10, activation=nn.GELU)
    return classifier(model, torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.1))


@usual
def mlp_tanh_rmsprop() -> Training:
    model = layers(64, 64, 64, 10, activation=nn.Tanh)
    return classifier(model, torch.optim.RMSprop(model.parameters(), 1e-3))


@usual
def logistic_regression_adagrad() -> Training:
    model = nn.Linear(64, 10)
    return classifier(model, torch.optim.Adagrad(model.parameters(), 0.1))


@usual
def cnn_adam() -> Training:
    model = cnn()
    return classifier(model, torch.optim.Adam(model.parameters(), 2e-3), 1, 8, 8)


@usual
def resnet_sgd() -> Training:
    model = resnet()
    return classifier(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True), 1, 8, 8, steps=120)


@usual
def convnext_adamw() -> Training:
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
    model = nn.Sequential(nn.Conv2d(1, 16, 2, 2), Block(), Block(), pool, nn.Flatten(), nn.Linear(16, 10))
    return classifier(model, torch.optim.AdamW(model.parameters(), 4e-3), 1, 8, 8, steps=120)


@usual
def vit_adamw() -> Training:
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

    model = ViT()
    return classifier(model, torch.optim.AdamW(model.parameters(), 1e-3))


@usual
def gpt_adamw() -> Training:
    model = GPT()
    return Training(model, plain(model, lambda i: model.loss(lines()), torch.optim.AdamW(model.parameters(), 2e-3)))


@usual
def gpt_with_warmup_cosine_and_clipping() -> Training:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def schedule(number: int) -> None:
        set_lr(optimizer, 5e-3 * min((number + 1) / 30, 0.5 + 0.5 * math.cos(math.pi * number / 250)))

    step = plain(model, lambda i: model.loss(lines()), optimizer, clip=1.0, before=schedule)
    return Training(model, step, 250)


@usual
def gpt_with_dropout() -> Training:
    model = GPT(dropout=0.2)
    return Training(model, plain(model, lambda i: model.loss(lines()), torch.optim.Adam(model.parameters(), 1e-3)))


@usual
def bert_masked() -> Training:
    model = GPT(causal=False)

    def loss_of(number: int) -> torch.Tensor:
        ids = lines()
        masked = torch.rand(ids.shape) < 0.2
        return cross_entropy(model(ids.masked_fill(masked, 128))[masked], ids[masked])

    return Training(model, plain(model, loss_of, torch.optim.AdamW(model.parameters(), 2e-3)))


@usual
def lstm_adam() -> Training:
    model = Recurrent()
    return Training(model, plain(model, lambda i: model.loss(lines()), torch.optim.Adam(model.parameters(), 3e-3)))


@usual
def gru_with_clipping() -> Training:
    model = Recurrent(nn.GRU)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    return Training(model, plain(model, lambda i: model.loss(lines()), optimizer, clip=0.5))


@usual
def sequence_to_sequence() -> Training:
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

    model = Copies()

    def loss_of(number: int) -> torch.Tensor:
        source = torch.randint(1, 20, (16, 10))
        target = source.flip(1)
        given = torch.cat([torch.zeros(16, 1, dtype=torch.long), target[:, :-1]], 1)
        return cross_entropy(model(source, given).flatten(0, 1), target.flatten())

    return Training(model, plain(model, loss_of, torch.optim.Adam(model.parameters(), 2e-3)))


@usual
def autoencoder() -> Training:
    model = layers(64, 32, 8, 32, 64)
    return Training(
        model,
        plain(
            model,
            lambda i: (lambda x: mse_loss(model(x), x))(some()[0]),
            torch.optim.Adam(model.parameters(), 2e-3),
        ),
    )


@usual
def linear_regression_sgd() -> Training:
    model, truth = nn.Linear(16, 1), torch.randn(16, 1)

    def loss_of(number: int) -> torch.Tensor:
        x = torch.randn(32, 16)
        return mse_loss(model(x), x @ truth + 0.1 * torch.randn(32, 1))

    return Training(model, plain(model, loss_of, torch.optim.SGD(model.parameters(), 0.05)))


@usual
def regression_without_noise() -> Training:
    """Its loss falls by ten orders of magnitude."""
    model, truth = nn.Linear(16, 1), torch.randn(16, 1)

    def loss_of(number: int) -> torch.Tensor:
        x = torch.randn(32, 16)
        return mse_loss(model(x), x @ truth)

    return Training(model, plain(model, loss_of, torch.optim.SGD(model.parameters(), 0.1)), 200)


@usual
def regression_with_huber() -> Training:
    model = layers(8, 64, 64, 1)

    def loss_of(number: int) -> torch.Tensor:
        x = torch.randn(64, 8)
        return smooth_l1_loss(model(x)[:, 0], (2 * x[:, 0]).sin() + x[:, 1] * x[:, 2])

    return Training(model, plain(model, loss_of, torch.optim.Adam(model.parameters(), 3e-3)), 250)


@usual
def data_learned_by_heart() -> Training:
    model = layers(64, 64, 10)
    pixels, labels = some(64)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    return Training(model, plain(model, lambda i: cross_entropy(model(pixels), labels), optimizer), 250)


@usual
def epochs_over_small_data() -> Training:
    """Shuffled anew in each; the last batch of each is smaller."""
    model = layers(64, 64, 10)
    pixels, labels = some(200)
    order: list[torch.Tensor] = []

    def loss_of(number: int) -> torch.Tensor:
        if not order:
            order.extend(torch.randperm(200).split(32))
        chosen = order.pop(0)
        return cross_entropy(model(pixels[chosen]), labels[chosen])

    return Training(model, plain(model, loss_of, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)), 300)


@usual
def batches_of_four() -> Training:
    model = layers(64, 64, 10)

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some(4)
        return cross_entropy(model(pixels), labels)

    return Training(model, plain(model, loss_of, torch.optim.Adam(model.parameters(), 1e-3)), 400)


@usual
def unet() -> Training:
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down1, self.down2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
            self.up, self.out = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 1, 3, padding=1)
            self.relu = nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one = self.relu(self.down1(x))
            return self.out(torch.cat([one, self.relu(self.up(self.relu(self.down2(one))))], 1))

    model = UNet()

    def loss_of(number: int) -> torch.Tensor:
        pixels, _ = some(16, 1, 8, 8)
        return binary_cross_entropy_with_logits(model(pixels + 0.3 * torch.randn_like(pixels)), (pixels > 0.5).float())

    return Training(model, plain(model, loss_of, torch.optim.Adam(model.parameters(), 3e-3)))


@usual
def diffusion() -> Training:
    model = layers(65, 128, 128, 64, activation=nn.SiLU)

    def loss_of(number: int) -> torch.Tensor:
        pixels, noise, time = some()[0], torch.randn(32, 64), torch.rand(32, 1)
        mixed = (1 - time).sqrt() * pixels + time.sqrt() * noise
        return mse_loss(model(torch.cat([mixed, time], 1)), noise)

    return Training(model, plain(model, loss_of, torch.optim.Adam(model.parameters(), 1e-3)))


@usual
def two_tasks_together() -> Training:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.classes, self.mean = layers(64, 64, 64), nn.Linear(64, 10), nn.Linear(64, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.trunk(x).relu()
            return self.classes(x), self.mean(x)[:, 0]

    model = Two()

    def loss_of(number: int) -> torch.Tensor:
        pixels, labels = some()
        logits, mean = model(pixels)
        return cross_entropy(logits, labels) + mse_loss(mean, pixels.mean(1))

    return Training(model, plain(model, loss_of, torch.optim.Adam(model.parameters(), 2e-3)))


@usual
def lora() -> Training:
    class Adapted(nn.Module):
        def __init__(self, whole: nn.Linear) -> None:
            super().__init__()
            self.whole = whole.requires_grad_(False)
            self.down, self.up = (
                nn.Linear(whole.in_features, 4, bias=False),
                nn.Linear(4, whole.out_features, bias=False),
            )
            nn.init.zeros_(self.up.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.whole(x) + self.up(self.down(x))

    model = nn.Sequential(
        Adapted(nn.Linear(64, 64)), nn.ReLU(), Adapted(nn.Linear(64, 64)), nn.ReLU(), nn.Linear(64, 10)
    )
    return classifier(model, torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 5e-3))


@usual
def graph_network() -> Training:
    """Classes of nodes of one graph, all nodes in each step."""
    labels = torch.arange(120) % 4
    edges = (torch.rand(120, 120) < torch.where(labels[:, None] == labels, 0.15, 0.03)).float() + torch.eye(120)
    mixing, given = edges / edges.sum(1, keepdim=True), torch.randn(120, 16)

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.relu = nn.Linear(16, 32), nn.Linear(32, 4), nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return mixing @ self.two(self.relu(mixing @ self.one(x)))

    model = Graph()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=5e-4)
    return Training(model, plain(model, lambda i: cross_entropy(model(given), labels), optimizer))
