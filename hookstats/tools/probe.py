"""probe(): what of a batch reaches where it must not: other samples, earlier tokens, padding. Over torch alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hookstats.tools.leaking import Probing
from hookstats.tools.leaks import Probe
from hookstats.tools.questions import ModelBatch
from hookstats.tools.undo import (
    ModuleState,
    RandomState,
    clear_autocast_cache,
    eager,
    pause_statistics,
    unwrap_parallel,
)


def probe(model: nn.Module, batch: Any, *, batch_dim: int = 0, causal: bool | None = None) -> Probe:
    """Finds what of a batch reaches where it must not: what no statistic of a training shows.

        print(hookstats.probe(model, batch))
        assert not hookstats.probe(model, batch).leaks  # as a test

    The model runs some ten times without gradients, in evaluation and in training mode, with the same random numbers.
    Each time something of the batch is another one: the first sample, the last one, the order of samples, the last
    token, later tokens, the first of packed documents, padding, its side. Each module's output is compared with that of
    before, and named if it changed where it must not: no causal mask, or one that is off by one, an inverted mask of
    padding, documents that attend to each other, an LSTM over the batch dimension, positions over the batch, a mean
    over padding. BatchNorm in training mode is listed apart, in ``by_design``.

    Afterwards random numbers of the CPU and of devices, modes, buffers, hooks and attributes are as before, bit for
    bit. Parameters are not copied: nothing writes them but a forward that does so itself. Monitors do not measure it.
    Outputs of all modules are kept, as in a forward of training. A compiled model runs as it was before, and inside
    DistributedDataParallel the module. Where forwards communicate (FSDP), all ranks call it.

    Args:
        model: on any device.
        batch: what the model is called with, on its device: a mapping by name, as of transformers (``input_ids``,
            ``attention_mask``, ``position_ids``), a tuple or list as positional arguments, all else as the only one.
            At least two rows; rows that differ, and are shorter than the widest layer, tell most.
        batch_dim: along which dimension samples lie, 0 or 1; tokens lie along the other.
        causal: whether a token must not see later ones. None: what the ``is_causal`` of the model's modules says,
            else so if the batch has indices of tokens ``[samples, tokens]``. True also asks it of floating tokens
            ``[samples, tokens, features]``.

    Which entries of an output are whose is read off its sizes, and a change counts only if no reading explains it.
    Outputs without a dimension of samples, DTensors, packed, nested and sparse ones are not judged. A model that draws
    random numbers in evaluation mode is not asked about places in the batch.

    Returns a `hookstats.results.Probe`.

    Raises:
        TypeError: for what is no module, or a batch without a tensor. ValueError: for fewer than two rows, and for
            parameters that are not initialised yet. What the model raises for the batch as it is, it raises.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"probe: expected a torch.nn.Module, got {type(model).__name__}")
    if batch_dim not in (0, 1) or isinstance(batch_dim, bool):
        raise ValueError(f"batch_dim: expected 0 or 1, got {batch_dim!r}")
    if causal not in (None, True, False):
        raise TypeError(f"causal: expected True, False or None, got {causal!r}")
    inner = unwrap_parallel(model)
    lazy = [name for name, each in inner.named_parameters() if isinstance(each, nn.parameter.UninitializedParameter)]
    if lazy:
        raise ValueError(f"probe: expected parameters that are initialised, got {lazy[0]}: run the model once before")
    given = ModelBatch(inner, batch, batch_dim)
    if causal is None:
        flags = [each for module in inner.modules() if isinstance(each := getattr(module, "is_causal", None), bool)]
        decodes = any(name.startswith("decoder") for name in given.tensors)
        causal = any(flags) if flags and not decodes else None
    devices = {tensor.device for tensor in (*inner.parameters(), *inner.buffers(), *given.tensors.values())}
    state, randomness = ModuleState(inner), RandomState(inner, devices)
    was_training = inner.training
    try:
        with torch.no_grad(), pause_statistics(inner), eager(), clear_autocast_cache():
            return Probing(inner, given, causal, state, randomness, was_training).run()
    finally:
        state.put_back()
        randomness.put_back()
