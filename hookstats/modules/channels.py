"""Along which dimension of a tensor its channels lie, and how many they are. No device work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from hookstats.modules.selection import Slot
from hookstats.numbers.selection import as_globs, matches

# A vector of more entries is no vector of channels, of which vocabularies have the most, but parameters in a row.
MOST_ENTRIES = 1 << 18
# Modules of torch.nn whose features are in the last place of all that they return.
_LAST = (
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)


class ChannelAxis(NamedTuple):
    """Along which dimension a tensor's channels lie, and how many they are. None: known when the tensor is seen."""

    dim: int | None
    width: int | None


def find_parameter_channels(slot: Slot, parameter: torch.Tensor) -> ChannelAxis:
    """A weight's channels are its outputs: dimension 0, of a transposed convolution and of [in, out] weights 1.

    Each entry of a vector (a bias, the weight of a norm) is a channel of one value, up to MOST_ENTRIES of them. Those
    of a buffer are its rows. One of width 1 has no channels.
    """
    if nn.parameter.is_lazy(parameter) or not parameter.dim():
        return ChannelAxis(0, 1)
    if is_vector(parameter) and not slot.is_buffer and parameter.shape[0] > MOST_ENTRIES:
        return ChannelAxis(0, 1)
    is_in_out = isinstance(slot.module, nn.modules.conv._ConvTransposeNd) or _is_in_out(slot.module, parameter)
    dim = 1 if is_in_out and parameter.dim() > 1 and not slot.is_buffer else 0
    return ChannelAxis(dim, max(parameter.shape[dim], 1))


def is_vector(tensor: torch.Tensor) -> bool:
    return not nn.parameter.is_lazy(tensor) and tensor.dim() == 1


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _is_in_out(module: nn.Module, weight: torch.Tensor) -> bool:
    """Return whether a weight is [in, out], as in transformers' Conv1D: by that name, or by the bias's size."""
    if weight.dim() != 2 or _is_of_torch(module):
        return False
    if any(cls.__name__ == "Conv1D" and cls.__module__.startswith("transformers.") for cls in type(module).__mro__):
        return True
    biases = {each.numel() for each in module._parameters.values() if each is not None and each.dim() == 1}
    return weight.shape[1] in biases and weight.shape[0] not in biases


def _count_spatial_dims(module: nn.Module) -> int | None:
    """1, 2 or 3 for modules that are made for a number of spatial dimensions."""
    kinds = (nn.modules.conv._ConvNd, nn.modules.instancenorm._InstanceNorm, nn.modules.batchnorm._BatchNorm)
    named_pool = type(module).__module__ == nn.MaxPool1d.__module__
    if isinstance(module, kinds) or named_pool:
        for cls in type(module).__mro__:
            for spatial in (1, 2, 3):
                if cls.__name__.endswith(f"{spatial}d"):
                    return spatial
    return None


def find_natural_channels(module: nn.Module) -> ChannelAxis:
    """Return where the channels of a module's output lie, from its type. Widths come from its own attributes."""
    spatial = _count_spatial_dims(module)
    if isinstance(module, (nn.Linear, nn.Bilinear)):
        found = ChannelAxis(-1, module.out_features)
    elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        found = ChannelAxis(-1, module.embedding_dim)
    elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and _is_of_torch(module):
        # What derives from them may move the channels there and back.
        found = ChannelAxis(-1, module.normalized_shape[-1])
    elif isinstance(module, nn.modules.batchnorm._BatchNorm):
        found = ChannelAxis(1, module.num_features)
    elif isinstance(module, nn.GroupNorm):
        found = ChannelAxis(1, module.num_channels)
    elif isinstance(module, nn.modules.conv._ConvNd) and spatial:
        found = ChannelAxis(-1 - spatial, module.out_channels)
    elif isinstance(module, nn.modules.instancenorm._InstanceNorm) and spatial:
        found = ChannelAxis(-1 - spatial, module.num_features)
    elif isinstance(module, _LAST):
        found = ChannelAxis(-1, None)
    elif isinstance(module, nn.GLU):
        found = ChannelAxis(module.dim, None)
    else:
        found = ChannelAxis(-1 - spatial if spatial else None, None)
    lazy = not found.width or not isinstance(found.width, int)  # a Lazy module before its first forward
    return ChannelAxis(found.dim, None) if lazy else found


def find_input_channels(module: nn.Module, wanted: int | None) -> ChannelAxis | None:
    """The channels of a module's input; None for a module whose inputs are indices."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return None
    if wanted is not None:
        return ChannelAxis(wanted, None)
    natural = find_natural_channels(module)
    if isinstance(module, nn.Linear):
        return ChannelAxis(-1, module.in_features or None)  # 0: a Lazy module before its first forward
    if isinstance(module, nn.modules.conv._ConvNd):
        return ChannelAxis(natural.dim, module.in_channels or None)
    of_batch = nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm
    keeps_them = isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, *of_batch))
    return natural if keeps_them else ChannelAxis(natural.dim if _count_spatial_dims(module) else None, None)


def find_channels(name: str, module: nn.Module, wanted: int | None) -> ChannelAxis:
    """The channels of a module's output, `wanted` being the caller's ``Channels.dim`` for it.

    ValueError where the module's type fixes the number of dimensions and `wanted` is not among them.
    """
    natural = find_natural_channels(module)
    if wanted is None:
        return natural
    spatial = _count_spatial_dims(module)
    if spatial is not None:
        ndim = spatial + 2
        if not -ndim <= wanted < ndim:
            raise ValueError(
                f"Channels.dim: expected {-ndim} to {ndim - 1} for {name!r} ({type(module).__name__}, whose output has "
                f"{ndim} dimensions), got {wanted}"
            )
        same = natural.dim is not None and wanted % ndim == natural.dim % ndim
    else:
        same = wanted == natural.dim
    return ChannelAxis(wanted, natural.width if same else None)


def find_channel_dim(tensor: torch.Tensor, dim: int | None) -> int:
    """The channel dimension of a tensor that is at hand: what is known of it, else by its number of dimensions."""
    if dim is not None:
        return dim
    return 1 if tensor.dim() in (4, 5) else -1


def match_names(argument: str, given: int | Mapping[str, int] | None, names: Iterable[str]) -> dict[str, int]:
    """Return the caller's value for each name that has one. ValueError for a glob that matches none."""
    known = list(names)
    if given is None:
        return {}
    if isinstance(given, int):
        return dict.fromkeys(known, given)
    for glob in given:
        as_globs(argument, glob, known)
    return {name: wanted for name in known for glob, wanted in given.items() if matches(name, [glob])}
