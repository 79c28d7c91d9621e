"""A small GPT, trained for 300 steps on text that Python itself ships with, and the report of its run.

    python docs/report_example.py [--output build/example]

Two faults are put in, for the page to show: one channel of the residual stream is scaled up little by little from
step 40 on, and from step 200 to 203 the learning rate is thirty times what it should be.
"""

from __future__ import annotations

import argparse
import inspect
import json
import shutil
import time
from collections import Counter
from pathlib import Path

import torch
from torch import nn

import hookstats

STEPS, BATCH, LENGTH = 300, 16, 64
WIDTH, HEADS, BLOCKS = 64, 4, 4
RATE = 2e-3
SPIKE = range(200, 204)
OUTLIER, OUTLIER_BLOCK, OUTLIER_FROM, GROWTH = 37, 2, 40, 1.035


def text() -> torch.Tensor:
    """Docstrings and sources of Python's standard library: about 300,000 characters of ASCII."""
    sources = [argparse, inspect, json, shutil, json.decoder, json.encoder]
    letters = "".join(inspect.getsource(module) for module in sources).encode("ascii", "ignore")
    return torch.frombuffer(bytearray(letters), dtype=torch.uint8).long()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.act(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(128, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 128, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train(run: Path) -> None:
    torch.manual_seed(0)
    letters, model = text(), GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    began = time.perf_counter()
    with hookstats.attach(model, every=1, sinks=hookstats.record(run)) as monitor:
        for step in range(STEPS):
            rate = RATE * min(1.0, (step + 1) / 20) * (30 if step in SPIKE else 1)
            optimizer.param_groups[0]["lr"] = rate
            starts = torch.randint(len(letters) - LENGTH - 1, (BATCH,))
            batch = torch.stack([letters[start : start + LENGTH + 1] for start in starts])
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step >= OUTLIER_FROM:
                with torch.no_grad():
                    model.blocks[OUTLIER_BLOCK].down.weight[OUTLIER] *= GROWTH
            monitor.step(loss=loss, lr=rate)
            if step % 50 == 49:
                print(f"step {step + 1}: loss {loss.item():.3f}")
        for name, times in Counter(finding.rule for finding in monitor.findings).most_common():
            print(f"{times} x {name}")
    print(f"trained in {time.perf_counter() - began:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("build/example"))
    arguments = parser.parse_args()
    run = arguments.output / "gpt"
    shutil.rmtree(run, ignore_errors=True)
    train(run)
    page = hookstats.report.write(run, arguments.output / "report.html")
    print(f"{page}: {page.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
