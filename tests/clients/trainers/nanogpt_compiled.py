"""nanoGPT's train.py: gradients accumulated and clipped, a cosine of the learning rate, and the model compiled."""

import math

import torch
from torch import nn
from torch.nn import functional as F

import hookstats  # +

COMPILES = True


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        q, k, v = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in self.c_attn(self.ln_1(x)).chunk(3, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, words: int = 65, context: int = 32, width: int = 64, layers: int = 3):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width, bias=False), nn.Linear(width, words, bias=False)
        self.wte.weight = self.lm_head.weight
        for name, p in self.named_parameters():
            if p.dim() == 2:
                scale = (2 * layers) ** -0.5 if name.endswith(("c_proj.weight", "c_out.weight")) else 1
                nn.init.normal_(p, std=0.02 * scale)

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train() -> torch.nn.Module:
    model = GPT()
    matrices, others = ([p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
    compiled = torch.compile(model)
    monitor = hookstats.attach(compiled, sinks=hookstats.record("runs"))  # +
    for step in range(24):
        lr = 1e-3 * min((step + 1) / 4, 0.1 + 0.45 * (1 + math.cos(math.pi * step / 24)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        for _ in range(2):
            ids = (torch.randint(65, (8, 1)) + 7 * torch.arange(33)) % 65
            _, loss = compiled(ids[:, :-1], ids[:, 1:])
            (loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        monitor.step(loss=loss, lr=lr)  # +
        optimizer.zero_grad(set_to_none=True)
    monitor.detach()  # +
    return model
