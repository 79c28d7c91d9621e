"""measure(): the statistics of one tensor, now."""

from __future__ import annotations

import operator

import torch

from hookstats import _native
from hookstats.modules.channels import find_channel_dim
from hookstats.numbers.fields import Bins, ExponentBins, Site
from hookstats.numbers.site_stats import SiteStats
from hookstats.watch.arguments import check_histogram, refuse_device
from hookstats.watch.drain import Drain
from hookstats.watch.memory import StateStore, accumulate
from hookstats.watch.scalars import Kept, Scalars


def measure(
    tensor: torch.Tensor,
    channel_dim: int | None = None,
    histogram: Bins | None = ExponentBins(),
    *,
    channels: bool = True,
) -> SiteStats:
    """The statistics of one tensor, now.

    Args:
        tensor: float32, float16, bfloat16, float64, float8_e4m3fn or float8_e5m2, any strides, on a CPU or (with a CUDA
            build) a GPU.
        channel_dim: the dimension whose entries are kept apart. None: 1 for 4-D and 5-D tensors, else the last. Not
            read for a 0-dim tensor.
        histogram: as in `attach`.
        channels: whether they are kept apart at all.

    Raises:
        TypeError: for another dtype, or what is not a dense tensor; for a channel_dim that is no int, and channels that
            are no bool. IndexError: for a channel_dim out of range.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"measure: expected a torch.Tensor, got {type(tensor).__name__}")
    refuse_device(tensor.device)
    check_histogram(histogram)
    if not isinstance(channels, bool):
        raise TypeError(f"measure: channels: expected True or False, got {channels!r}")
    if channel_dim is not None and not hasattr(channel_dim, "__index__"):
        raise TypeError(f"measure: channel_dim: expected an int or None, got {channel_dim!r}")
    if tensor.layout != torch.strided or tensor.is_nested or _native.has_no_data(tensor):
        raise TypeError(f"measure: expected a dense strided tensor with data, got {tensor.layout} on {tensor.device}")
    if tensor.dtype not in _native.DTYPES:
        raise TypeError(f"measure: expected a tensor of one of {_native.DTYPES}, got {tensor.dtype}")
    dim = find_channel_dim(tensor, channel_dim)
    keep_channels = channels and tensor.dim() > 0
    if not keep_channels:
        width = 1
    elif not -tensor.dim() <= operator.index(dim) < tensor.dim():
        raise IndexError(f"measure: expected channel_dim from {-tensor.dim()} to {tensor.dim() - 1}, got {dim}")
    else:
        width = max(tensor.shape[dim], 1)
    store = StateStore(histogram, 0, strict=True)
    store.reserve(tensor.device, store.site_bytes(width) // 8)
    state = store.add(Site("", "tensor"), tensor.device, width, dim, keep_channels).state
    store.flags.value = True
    accumulate(tensor.detach(), state)
    return Drain(store).begin(Kept.of(0, Scalars({})), clear=False).finish().stats(0)
