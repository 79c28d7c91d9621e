"""Small models of many kinds, in which something goes wrong if asked to: trained alike, in one dtype or another."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import hookstats
from hookstats import Snapshot

TENSORS = ("output", "grad_output", "param", "param_grad", "param_update")
WIDTH = 64


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 4, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal, self.scale, self.masked = heads, causal, (width // heads) ** -0.5, -1
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
        if self.masked >= 0:
            y = y * (torch.arange(self.heads, device=y.device) != self.masked).to(y.dtype)[:, None, None]
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class Feed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class Layer(nn.Module):
    def __init__(self, width: int, causal: bool = True, feed: nn.Module | None = None) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, causal=causal)
        self.norm2, self.feed = nn.LayerNorm(width), feed or Feed(width)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.drop(self.feed(self.norm2(x)))


class Language(nn.Module):
    """GPT-like; the initial values of GPT-2."""

    def __init__(self, depth: int = 3, experts: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(100, WIDTH), nn.Embedding(64, WIDTH)
        feeds = [Experts(WIDTH) if experts else None for _ in range(depth)]
        self.blocks = nn.ModuleList(Layer(WIDTH, feed=feed) for feed in feeds)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 100, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class Experts(nn.Module):
    """A mixture of experts: all of them, weighted by a router that is in float32, as usual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(Feed(width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).float().softmax(-1)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return (outputs * weights[..., None, :]).sum(-1).to(x.dtype)


class Vision(nn.Module):
    """ViT-like: patches, no causal mask."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.places = nn.Parameter(0.02 * torch.randn(16, WIDTH))
        self.blocks = nn.ModuleList(Layer(WIDTH, causal=False) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h.mean(1)))


class Shortcut(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def resnet() -> nn.Module:
    blocks = [Shortcut(16) for _ in range(4)]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    )


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def mlp() -> nn.Module:
    widths = [48, 128, 128, 128, 10]
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(100, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.tokens(x))[0])


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.norm1 = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.down2, self.norm2 = nn.Conv2d(16, 32, 3, 2, padding=1), nn.GroupNorm(4, 32)
        self.middle, self.norm3 = nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(4, 32)
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)
        self.last = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = F.silu(self.norm1(self.down1(x)))
        b = F.silu(self.norm2(self.down2(a)))
        c = F.silu(self.norm3(self.middle(b)))
        return self.last(torch.cat([a, self.up(b + c)], 1))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=100, n_positions=64, n_embd=WIDTH, n_layer=3, n_head=4, use_cache=False)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=100,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            use_cache=False,
        )
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "cnn": convolutions,
    "resnet": resnet,
    "unet": UNet,
    "lstm": Recurrent,
    "gpt": Language,
    "moe": lambda: Language(experts=True),
    "vit": Vision,
    "gpt2": gpt2,
    "llama": llama,
}
OF_TOKENS = ("lstm", "gpt", "moe", "gpt2", "llama")


def batch(name: str, step: int, size: int, tokens: str = "random") -> torch.Tensor:
    """tokens: "random"; "padded", three of four are one token; "equal", all are."""
    data = torch.Generator().manual_seed(step)
    if name not in OF_TOKENS:
        side = 4 if name == "mlp" else 16
        return torch.randn(size, 3, 16, 16, generator=data)[:, :, :side, :side]
    x = torch.randint(0, 100, (size, 32), generator=data)
    if tokens == "padded":
        x[:, 8:] = 0
    return torch.zeros_like(x) if tokens == "equal" else x


def train(
    name: str,
    dtype: str = "float32",
    *,
    amp: bool = False,
    seed: int = 0,
    steps: int = 3,
    size: int = 16,
    tokens: str = "random",
    change: Callable[[Any], object] = lambda model: None,
    wrap: Callable[[nn.Module], Any] = lambda model: model,
    scale: float = 0.0,
) -> list[Snapshot]:
    """dtype: of the parameters, or, with amp, of autocast. change: what is done to the model before. scale: of the
    loss, so that gradients do not underflow in float16, with SGD; 0: none, with AdamW."""
    torch.manual_seed(seed)
    model = MODELS[name]()
    change(model)
    low = getattr(torch, dtype)
    if not amp:
        model = model.to(low)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1 / scale) if scale else torch.optim.AdamW(parameters, lr=1e-3)
    found: list[Snapshot] = []
    with hookstats.attach(model, every=1, tensors=TENSORS, sinks=found.append) as monitor:
        program = wrap(model)
        for step in range(steps):
            x = batch(name, step, size, tokens)
            with torch.autocast("cpu", low, enabled=amp):
                y = program(x if name in OF_TOKENS or amp else x.to(low))
            y = (y if isinstance(y, torch.Tensor) else y.logits).float()
            if name in OF_TOKENS:
                loss = F.cross_entropy(y[:, :-1].flatten(0, 1), x[:, 1:].flatten())
            elif name == "unet":
                loss = F.mse_loss(y, x)
            else:
                loss = F.cross_entropy(y, torch.arange(size) % 10)
            (loss * (scale or 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss=loss.item())
    return found
