"""Small models whose identities are known by hand."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    def __init__(self, width: int, offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.offset = nn.Parameter(torch.ones(width) - offset), offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (self.weight + self.offset)


class Attention(nn.Module):
    """Grouped queries and rotated pairs, as in Llama."""

    def __init__(self, width: int = 32, heads: int = 4, key_heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.dropout = heads, width // heads, dropout
        self.q_proj = nn.Linear(width, width)
        self.k_proj, self.v_proj = (nn.Linear(width, key_heads * self.head_dim, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            each(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotated(q), rotated(k)
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        out: torch.Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out


def rotated(x: torch.Tensor) -> torch.Tensor:
    size = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] * 0.5 ** torch.arange(size).to(x.dtype)
    a, b = x[..., :size], x[..., size:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class MLP(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0, offset: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(32, offset), RMSNorm(32, offset)
        self.attention, self.mlp, self.dropout = Attention(dropout=dropout), MLP(), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        out: torch.Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return out


class Llama(nn.Module):
    def __init__(self, layers: int = 2, dropout: float = 0.0, offset: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(Block(dropout, offset) for _ in range(layers))
        self.norm, self.head = RMSNorm(32, offset), nn.Linear(32, 50, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def ids(rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of random targets."""
    targets = torch.randint(0, 50, tokens.shape, generator=torch.Generator().manual_seed(2))
    logits: torch.Tensor = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
