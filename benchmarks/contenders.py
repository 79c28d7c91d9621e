"""The contenders: the same statistics by hookstats, by torch's eager operators, and by torch.compile of those.

Each contender is a callable without arguments that leaves its result on the device. `check` compares them first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from hookstats import _native
from hookstats.numbers import fields


class Case(NamedTuple):
    """A tensor to measure."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    channel_dim: int
    channels_last: bool = False
    values: str = "normal"  # or one of those in `tensor`

    def tensor(self, device: str) -> torch.Tensor:
        """Random values, every call other ones."""
        x = torch.randn(self.shape, device=device, dtype=self.dtype if self.dtype.itemsize > 1 else torch.bfloat16)
        if self.values == "relu":
            x.relu_()
        elif self.values == "constant":
            x.fill_(1.5)
        elif self.values == "drift":  # as a running mean over a sequence has it
            x = x.float().cumsum(0) / torch.arange(1, len(x) + 1, device=device).view(-1, *[1] * (x.dim() - 1))
        elif self.values == "hot":  # all but a few in one bin
            x = torch.where(x > 2, x, x.new_tensor(1.5))
        elif self.values == "nan":
            x[torch.rand(self.shape, device=device) < 0.01] = float("nan")
        elif self.values == "wide":
            x = torch.ldexp(x, torch.randint(-120, 120, self.shape, device=device))
        elif self.values == "mean":
            x += 1e4
        x = x.to(self.dtype)
        return x.to(memory_format=torch.channels_last) if self.channels_last else x

    @property
    def bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


def by_operators(x: torch.Tensor, channel_dim: int) -> torch.Tensor:
    """The rows of hookstats' state, float32 [fields, channels], by torch's own operators."""
    dims = [d for d in range(x.dim()) if d != channel_dim % x.dim()]
    finite = torch.isfinite(x)
    y = torch.where(finite, x, 0).float()
    count = finite.sum(dims)
    mean = y.sum(dims, keepdim=True) / count.view([-1 if d not in dims else 1 for d in range(x.dim())])
    m2 = torch.where(finite, (y - mean) ** 2, 0).sum(dims)
    low = torch.where(finite, y, float("inf")).amin(dims)
    high = torch.where(finite, y, float("-inf")).amax(dims)
    zeros, nans = (x == 0).sum(dims), torch.isnan(x).sum(dims)
    posinfs, neginfs = (x == float("inf")).sum(dims), (x == float("-inf")).sum(dims)
    rows = [count, mean.flatten(), m2, low, high, y.abs().sum(dims), zeros, nans, posinfs, neginfs]
    return torch.stack([row.float() for row in rows])


def octaves_by_operators(x: torch.Tensor, channel_dim: int) -> torch.Tensor:
    """The octave histogram alone, int64 [channels * 64], by torch's own operators."""
    edges = torch.from_numpy(fields.octave_edges()[1:-1]).to(x)
    bins = torch.bucketize(x.movedim(channel_dim, -1).abs(), edges, right=True)
    bins += fields.OCTAVE_BINS * torch.arange(x.shape[channel_dim], device=x.device)
    return torch.bincount(bins.flatten(), minlength=fields.OCTAVE_BINS * x.shape[channel_dim])


class Measured:
    """hookstats' accumulate into a state that is allocated once, as a hook calls it."""

    def __init__(self, channels: int, histogram: str, device: str) -> None:
        bins = {"none": None, "per_tensor": [fields.EXPONENT_BINS], "per_channel": [channels, fields.OCTAVE_BINS]}
        shape = bins[histogram]
        self.moments = torch.zeros(len(fields.FIELDS), channels, dtype=torch.float64, device=device)
        self.counters = torch.zeros(_native.COUNTERS, dtype=torch.int64, device=device)
        self.histogram = None if shape is None else torch.zeros(shape, dtype=torch.int64, device=device)
        self.sites: dict[int, Any] = {}  # by channel dimension, as a hook has one

    def __call__(self, x: torch.Tensor, channel_dim: int, rows: tuple[torch.Tensor, ...] = ()) -> None:
        if channel_dim not in self.sites:
            self.sites[channel_dim] = self.site(channel_dim)
        self.sites[channel_dim].fold(x, *rows)

    def site(self, channel_dim: int, active: torch.Tensor | None = None) -> Any:
        state = SimpleNamespace(moments=self.moments, counters=self.counters, histogram=self.histogram, active=active)
        state.channel_dim, state.low, state.high, state.block = channel_dim, 0.0, 0.0, 0
        return _native.Site(state)


def contenders(case: Case, device: str) -> dict[str, Callable[[torch.Tensor], Any]]:
    """By name; each takes the tensor. The first is the read itself, as torch does it."""
    channels = case.shape[case.channel_dim]
    compiled = torch.compile(by_operators, dynamic=False)
    found: dict[str, Callable[[torch.Tensor], Any]] = {"x.sum()": lambda x: x.sum()}
    for histogram in ("none", "per_tensor", "per_channel"):
        measured = Measured(channels, histogram, device)
        name = "hookstats" if histogram == "none" else f"hookstats + {histogram} histogram"
        found[name] = partial(measured, channel_dim=case.channel_dim)
    if case.channel_dim == 1:
        masked, rows = Measured(channels, "none", device), every_other_row(case.shape[0], device)
        found["hookstats, half of the rows masked"] = partial(masked, channel_dim=1, rows=rows)
    found["torch.compile of the operators"] = lambda x: compiled(x, case.channel_dim)
    tuned = torch.compile(by_operators, dynamic=False, mode="max-autotune-no-cudagraphs")
    found["the same, max-autotune"] = lambda x: tuned(x, case.channel_dim)
    others = [d for d in range(len(case.shape)) if d != case.channel_dim]
    found["torch.var_mean alone"] = lambda x: torch.var_mean(x, others)
    found["eager operators"] = lambda x: by_operators(x, case.channel_dim)
    found["octaves alone, bucketize + bincount"] = lambda x: octaves_by_operators(x, case.channel_dim)
    found["torch.histc alone"] = lambda x: torch.histc(x if x.dtype == torch.float32 else x.float(), 64, -8, 8)
    return found


def every_other_row(count: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """List every other row (of images: every other image), as a mask hands over which rows count."""
    listed = torch.zeros(count, dtype=torch.int32, device=device)
    listed[: (count + 1) // 2] = torch.arange(0, count, 2, device=device)
    return listed, torch.full((1,), (count + 1) // 2, dtype=torch.int32, device=device)


def transformer(layers: int, width: int, vocabulary: int) -> list[tuple[int, ...]]:
    """The shapes of a Llama-like model's parameters."""
    hidden = width * 8 // 3 // 64 * 64
    layer: list[tuple[int, ...]] = [(width, width)] * 4 + [(hidden, width)] * 2 + [(width, hidden)] + [(width,)] * 2
    return [(vocabulary, width), *layer * layers, (width,)]


# Many tensors at once: their shapes and dtype.
MANY: dict[str, tuple[list[tuple[int, ...]], torch.dtype]] = {
    "64 tensors, 256 KB fp32": ([(32, 32)] * 63 + [(1024,)], torch.float32),
    "111 tensors, 50 MB fp32": (transformer(12, 256, 16384), torch.float32),
    "201 tensors, 2.2 GB bf16": (transformer(22, 2048, 32000), torch.bfloat16),
}


class MeasuredTogether:
    """hookstats' states of many tensors, channels = dimension 0, as parameters are measured."""

    def __init__(self, shapes: list[tuple[int, ...]], device: str) -> None:
        self.states = [Measured(shape[0] if len(shape) > 1 else 1, "none", device) for shape in shapes]
        active = torch.ones(1, dtype=torch.int32, device=device)
        self.batch = _native.Batch([state.site(0, active) for state in self.states])

    def together(self, tensors: list[torch.Tensor]) -> None:
        failures = self.batch.accumulate(tensors)
        if failures:
            raise RuntimeError(f"not measured: {failures}")

    def one_by_one(self, tensors: list[torch.Tensor]) -> None:
        for state, x in zip(self.states, tensors, strict=True):
            state(x, 0)


def many_contenders(name: str, device: str) -> dict[str, Callable[[list[torch.Tensor]], Any]]:
    """By name; each takes the list of tensors."""
    shapes, _ = MANY[name]
    return {
        "hookstats, together": MeasuredTogether(shapes, device).together,
        "hookstats, one by one": MeasuredTogether(shapes, device).one_by_one,
        "norms alone (foreach)": torch._foreach_norm,
        "norms alone, one by one": lambda tensors: [torch.linalg.vector_norm(x) for x in tensors],
        "eager operators": lambda tensors: [by_operators(x.view(len(x), -1), 0) for x in tensors],
    }


def check(case: Case, device: str) -> None:
    """Raises unless hookstats and the operators agree on this case."""
    x = case.tensor(device)
    measured = Measured(case.shape[case.channel_dim], "per_channel", device)
    measured(x, case.channel_dim)
    assert measured.histogram is not None
    assert torch.equal(measured.histogram.flatten(), octaves_by_operators(x, case.channel_dim))
    torch.testing.assert_close(measured.moments.float(), by_operators(x, case.channel_dim), rtol=1e-3, atol=1e-3)
