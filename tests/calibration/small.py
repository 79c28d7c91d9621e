"""Small language models with random weights, batches for them, and the inputs of their layers kept as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import hookstats
from hookstats.results import Calibration

VOCABULARY, BATCHES = 96, 20


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=104,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )
    return LlamaForCausalLM(config).eval()


@functools.cache
def calibrate_small() -> tuple[nn.Module, dict[str, list[torch.Tensor]], Calibration]:
    """Return that model, the inputs of its Linears in all batches, and its calibration. Callers change none of them."""
    model = llama()
    kept = inputs_of(model, nn.Linear, sentences())
    return model, kept, hookstats.calibrate(model, sentences())


def mixtral(implementation: str) -> nn.Module:
    """Its experts are stacked in parameters, and multiplied in transformers' way of this name."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=VOCABULARY,
    )
    model = MixtralForCausalLM(config).eval()
    model.config._experts_implementation = implementation
    return model


def sentences(count: int = BATCHES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (2, 16), generator=generator) for _ in range(count)]


def inputs_of(
    model: nn.Module, kinds: type | tuple[type, ...], batches: Iterable[Any], call: Callable[..., Any] | None = None
) -> dict[str, list[torch.Tensor]]:
    """Return the inputs of each module of these kinds, by name and call, from hooks of plain PyTorch."""
    kept: dict[str, list[torch.Tensor]] = {}
    with (
        watch_inputs(model, kinds, lambda name, module, x: kept.setdefault(name, []).append(x.clone())),
        torch.no_grad(),
    ):
        for batch in batches:
            (call or model)(batch)
    return kept


@contextmanager
def watch_inputs(
    model: nn.Module, kinds: type | tuple[type, ...], see: Callable[[str, nn.Module, torch.Tensor], object]
) -> Iterator[None]:
    """Inside, each module of these kinds shows what it is given."""

    def hook(name: str) -> Callable[..., None]:
        def see_inputs(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            see(name, module, args[0].detach())

        return see_inputs

    named = [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]
    handles = [module.register_forward_pre_hook(hook(name)) for name, module in named]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def rows_of(kept: Iterable[torch.Tensor], channel_dim: int = -1) -> torch.Tensor:
    """float64 ``[tokens, C]``: all that came, side by side."""
    return torch.cat([x.double().movedim(channel_dim, -1).flatten(0, -2) for x in kept])
