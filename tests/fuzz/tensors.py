"""A random tensor, measured in a random way, against float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

import hookstats
from hookstats.numbers.fields import Site
from hookstats.numbers.frame import StepFrame
from hookstats.numbers.merge import merge
from hookstats.results import SiteStats
from tests.conftest import BINS, DTYPES, Backend, State
from tests.fuzz.chance import Chance
from tests.fuzz.comparing import check_groups, check_site
from tests.kernels.test_blocks import counted

_BINS = [name for name in BINS if not name.startswith("many")]
_SITE = Site("fuzz", "output")
_CPU = Backend("cpu", torch.ops.hookstats, "cpu")


def check_tensor(seed: int) -> None:
    """Raise AssertionError where a statistic is wrong."""
    chance = Chance(seed)
    x = _tensor(chance)
    dim = chance.upto(x.dim() - 1) if x.dim() and chance.comes(0.8) else None
    if dim is not None and x.shape[dim] == 0:
        dim = None
    bins = chance.of(_BINS)
    ways: list[Callable[..., None]] = [_whole, _in_parts, _of_rows, _together, _halves, _of_two_widths]
    chance.of(ways)(chance, x, dim, bins)


def _tensor(chance: Chance) -> torch.Tensor:
    shape = [chance.of((1, 2, 3, 4, 5, 7, 8, 13, 16, 31)) for _ in range(chance.upto(4))]
    if shape and chance.comes(0.2):
        shape[chance.upto(len(shape) - 1)] = chance.of((0, 64, 127, 400))
    x = _values(chance, shape)
    share = chance.of((0.0, 0.0, 0.01, 0.3, 1.0))
    for value in (0.0, float("nan"), float("inf"), -float("inf")):
        if chance.comes(0.3):
            x[chance.mask(shape, share)] = value
    return _laid_out(chance, x.to(chance.of(DTYPES)))


def _values(chance: Chance, shape: list[int]) -> torch.Tensor:
    x = chance.normal(*shape)
    makers: list[Callable[[], torch.Tensor]] = [
        lambda: x,
        lambda: x + chance.of((1e4, -1e4)),  # the mean is 1e4 deviations
        lambda: x * 2.0 ** chance.of((-130, -40, 20, 100)),
        lambda: x * torch.exp2(12 * chance.normal(*shape)),
        lambda: (2 * x).round(),  # of which many are equal
        lambda: torch.full(shape, float(chance.of((0.0, -0.0, 1.5, 3e4)))).double(),
        lambda: x.abs().neg(),
    ]
    return chance.of(makers)().clone()


def _laid_out(chance: Chance, x: torch.Tensor) -> torch.Tensor:
    """The same values somewhere else in memory."""
    if x.dim() == 0:
        return x
    a, b = chance.upto(x.dim() - 1), chance.upto(x.dim() - 1)

    def strided() -> torch.Tensor:
        around = torch.full([2 * size + 3 for size in x.shape], 1e3).to(x.dtype)
        there = around[tuple(slice(1, 1 + 2 * size, 2) for size in x.shape)]
        return there.copy_(x)

    def unaligned() -> torch.Tensor:
        return torch.cat([torch.zeros(1, dtype=x.dtype), x.flatten()])[1:].view(x.shape)

    layouts: list[Callable[[], torch.Tensor]] = [
        lambda: x,
        lambda: x.transpose(a, b).contiguous().transpose(a, b),
        lambda: x.transpose(a, b),
        strided,
        unaligned,
        lambda: x.narrow(a, 0, min(1, x.shape[a])).expand(x.shape) if x.shape[a] else x,
    ]
    return chance.of(layouts)()


def _check(state: State, x: torch.Tensor, dim: int | None, calls: int) -> None:
    stats = state.stats()
    calls = calls if x.numel() else 0
    assert stats.calls == calls, f"expected {calls} calls, got {stats.calls}"
    check_site(stats, [x], dim)


def _whole(chance: Chance, x: torch.Tensor, dim: int | None, bins: str) -> None:
    stats = hookstats.measure(x, dim, BINS[bins], channels=dim is not None)
    check_site(stats, [x], dim)
    width = 1 if dim is None else x.shape[dim]
    if dim is not None:
        size = chance.of([n for n in range(1, width + 1) if width % n == 0])
        check_groups(stats.grouped(width // size), x, dim, size)
    if bins.startswith("blocks") and x.numel():
        matrix = x.double().reshape(-1, x.shape[-1] if x.dim() > 1 else x.numel())
        np.testing.assert_array_equal(stats._histogram[512:], counted(matrix.numpy(), bins))  # type: ignore[index]


def _parts(chance: Chance, x: torch.Tensor, dim: int | None) -> list[torch.Tensor]:
    """The tensor, cut across its channels."""
    others = [each for each in range(x.dim()) if each != dim and x.shape[each]]
    return list(x.split(1 + chance.upto(6), chance.of(others))) if others else [x]


def _in_parts(chance: Chance, x: torch.Tensor, dim: int | None, bins: str) -> None:
    """One after another into one state; then all channels into one."""
    state, parts = State(1 if dim is None else x.shape[dim], bins, "cpu"), _parts(chance, x, dim)
    for part in parts:
        _CPU.accumulate(part, dim, bins, into=state)
    _check(state, x, dim, len(parts))
    if not bins.startswith("blocks"):
        total = State(1, bins, "cpu")
        _CPU.merge(total, state)
        _check(total, x, None, len(parts))


def _of_rows(chance: Chance, x: torch.Tensor, dim: int | None, bins: str) -> None:
    """The rows of a mask over the first dimensions; channels lie in a later one."""
    if x.dim() < 2 or dim in (None, 0) or x.numel() == 0:
        return _in_parts(chance, x, dim, bins)
    leading = 1 + chance.upto(dim - 1)
    kept = chance.mask(x.shape[:leading], chance.of((0.1, 0.5, 0.9)))
    state = _CPU.accumulate(x, dim, bins, mask=kept)
    check_site(state.stats(), [x[kept]], dim - leading + 1)


def _together(chance: Chance, x: torch.Tensor, dim: int | None, bins: str) -> None:
    """By one call with other tensors, as parameters come."""
    given = [(x, dim), (_values(chance, [3, 17]).float(), 1), (x.flatten()[:5], None), (x, dim)]
    states = [State(1 if d is None else t.shape[d], bins, "cpu") for t, d in given]
    batch = _CPU.batch(states, [0 if d is None else d for _, d in given])
    problems = batch.accumulate([t for t, _ in given])
    assert not problems, problems
    for state, (tensor, d) in zip(states, given, strict=True):
        if tensor.numel():
            _check(state, tensor, d, 1)


def _frame(stats: SiteStats) -> StepFrame:
    return StepFrame.from_stats({_SITE: stats}, [_SITE], 0)


def _halves(chance: Chance, x: torch.Tensor, dim: int | None, bins: str) -> None:
    """Measured by two processes: merged by the operator, and by numpy."""
    if x.dim() == 0:
        return _in_parts(chance, x, dim, bins)
    parts = _parts(chance, x, dim)
    halves = [torch.cat(parts[i::2], _cut(x, parts)) for i in range(2) if parts[i::2]]
    states = [_CPU.accumulate(half, dim, bins) for half in halves]
    merged = merge([_frame(state.stats()) for state in states]).stats(0)
    together = torch.cat(halves, _cut(x, parts))
    check_site(merged, [together], dim if merged.channels is not None else None)
    if len(states) == 2:
        _CPU.merge(*states)
        _check(states[0], together, dim, 2)


def _cut(x: torch.Tensor, parts: list[torch.Tensor]) -> int:
    """The dimension in which the parts differ from the whole."""
    differ = [i for i in range(x.dim()) if any(part.shape[i] != x.shape[i] for part in parts)]
    return differ[0] if differ else 0


def _of_two_widths(chance: Chance, x: torch.Tensor, dim: int | None, bins: str) -> None:
    """Totals, as after a width has changed."""
    if dim is None or x.shape[dim] < 3:
        return _halves(chance, x, dim, bins)
    at = 1 + chance.upto(x.shape[dim] - 2)
    narrow, wide = x.narrow(dim, 0, at), x.narrow(dim, at, x.shape[dim] - at)
    states = [_CPU.accumulate(part, dim, bins) for part in (narrow, wide)]
    merged = merge([_frame(state.stats()) for state in states]).stats(0)
    is_kept = at == x.shape[dim] - at
    assert (merged.channels is not None) == is_kept
    if is_kept:
        check_site(merged, [narrow, wide], dim)
    else:
        check_site(merged, [x], None)
        total = State(1, bins, "cpu")
        for state in states:
            _CPU.merge(total, state)
        _check(total, x, None, 2)
