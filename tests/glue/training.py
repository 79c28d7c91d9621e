"""A training with much in it: it prints a digest of each site in each step, and of the weights.

Run with HOOKSTATS_GLUE=none and without, it must print the same.
"""

from __future__ import annotations

import hashlib
import warnings

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookstats


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(2, (2, 8)).transpose(1, 2) for part in self.qkv(x).split(16, 2))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.attention = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(self.lstm(self.norm(x))[0])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.conv = nn.Conv1d(16, 8, 3)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, x, use_reentrant=False)
        x = checkpoint(self.second, x, use_reentrant=True)
        return self.head(self.conv(x.transpose(1, 2)).mean(2))


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tensors = ("output", "grad_output", "input", "grad_input", "model_input", "param", "param_sample", "param_grad")
    tensors += ("param_update", "update_sample", "optimizer", "buffer", "attention")
    monitor = hookstats.attach(model, tensors=tensors, every=1, channels=hookstats.Channels(every=1))
    for step in range(4):
        x = torch.randn(6, 9, 16, requires_grad=True)
        if step == 2:
            x.data[0, 0, 0] = float("nan")
        with monitor.ignore(torch.arange(9).expand(6, 9) >= torch.arange(3, 9).view(6, 1)):
            loss = model(x).square().mean()
        if step != 2:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss=loss)
        with torch.no_grad():
            model.eval()(x)
        model.train()
        snapshot = monitor.snapshot()
        for site in sorted(snapshot, key=str):
            stats = snapshot[site]
            content = stats._moments.tobytes() + (b"" if stats._histogram is None else stats._histogram.tobytes())
            print(step, site, stats.calls, hashlib.sha256(content).hexdigest()[:16])
        print(step, "skipped", sorted(map(str, snapshot.skipped.items())))
    print("weights", hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
