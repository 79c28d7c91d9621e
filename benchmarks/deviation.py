"""Distance between trainings by equivalent compiled programs: with hookstats attached, and otherwise put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import nn

import hookstats
from benchmarks.llama import Llama, Shape

SHAPE = Shape(width=128, hidden=344, heads=4, blocks=3, vocabulary=512, batch=2, length=64)
STEPS = 5


def as_it_is(model: nn.Module) -> nn.Module:
    return model


def whole(model: nn.Module) -> nn.Module:
    model.compile()
    return model


def in_blocks(model: Any) -> nn.Module:
    for block in model.blocks:
        block.compile()
    return model  # type: ignore[no-any-return]


def without_fusion(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def watched(model: nn.Module) -> nn.Module:
    model.monitor = hookstats.attach(model, every=1)  # type: ignore[assignment]
    return whole(model)


# What is compared with `whole`.
PROGRAMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "the same, again": whole,
    "with hookstats": watched,
    "its blocks compiled apart": in_blocks,
    "compiled without fusion (aot_eager)": without_fusion,
    "eager": as_it_is,
}


def trained(program: Callable[[nn.Module], nn.Module], dtype: torch.dtype, steps: int = STEPS) -> torch.Tensor:
    """All parameters, float64, after some steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Llama(SHAPE).to(dtype)
    ids = torch.randint(SHAPE.vocabulary, (SHAPE.batch, SHAPE.length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = program(model)
    for _ in range(steps):
        run(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().double().reshape(-1) for parameter in model.parameters()])


def deviation_figures() -> list[dict[str, Any]]:
    """The RMS difference to the compiled model, over the RMS by which training has moved its parameters."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        start, base = trained(as_it_is, dtype, steps=0), trained(whole, dtype)
        moved = (base - start).square().mean().sqrt()
        for name, program in PROGRAMS.items():
            apart = (trained(program, dtype) - base).square().mean().sqrt()
            found.append({"name": name, "dtype": str(dtype).removeprefix("torch."), "deviation": float(apart / moved)})
    return found
