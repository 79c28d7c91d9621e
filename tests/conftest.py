"""The backends that every kernel test runs on, and comparison with the reference."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import cpp_extension

import hookstats
from hookstats import _native, fields
from tests import reference

ROOT = Path(__file__).parent.parent
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
HISTOGRAMS = ["none", "per_tensor", "per_channel", "linear", "linear_per_channel"]
BINS = {
    "none": None,
    "per_tensor": fields.ExponentBins(),
    "per_channel": fields.ExponentBins(per_channel=True),
    "linear": fields.LinearBins(-1.5, 2.0, 37),
    "linear_per_channel": fields.LinearBins(-1.5, 2.0, 37, per_channel=True),
    "many_linear": fields.LinearBins(0.0, 1.0, 10_000),  # more than shared memory holds
    "many_linear_per_channel": fields.LinearBins(-4.0, 4.0, 2000, per_channel=True),
}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
BACKENDS = ["cpu", "cuda_on_cpu", *(["gpu"] if torch.cuda.is_available() else [])]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU: make gpu"))


@pytest.fixture(autouse=True)
def _same_random_numbers_in_every_run() -> None:
    torch.manual_seed(0)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def load_harness() -> Any:
    """torch.ops namespace in which CPU tensors go to the CUDA kernels, run on the CPU (tests/cuda_on_cpu)."""
    sources = ["csrc/ops.cpp", "csrc/scratch.cpp", "csrc/batch.cpp", "csrc/totals.cpp", "csrc/cpu/accumulate.cpp"]
    sources += ["tests/cuda_on_cpu/harness.cpp"]
    # HOOKSTATS_ASAN=1, with the sanitizer's library preloaded, also finds accesses outside of any tensor (.ci/run).
    sanitized = ["-fsanitize=address"] if os.environ.get("HOOKSTATS_ASAN") == "1" else []
    build = ROOT / "build" / f"cuda_on_cpu-{torch.__version__}{'-asan' if sanitized else ''}"
    build.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cpp_extension.load(
        name="hookstats_cuda_on_cpu",
        sources=[str(ROOT / source) for source in sources],
        extra_cflags=["-O1", "-g", "-fopenmp", "-DHOOKSTATS_CUDA_ON_CPU", *sanitized],
        extra_ldflags=["-fopenmp", *sanitized],
        extra_include_paths=[str(ROOT / "tests" / "cuda_on_cpu"), str(ROOT / "csrc")],
        build_directory=str(build),
        is_python_module=False,
    )
    return torch.ops.hookstats_cuda_on_cpu


@pytest.fixture(scope="session")
def harness() -> Any:
    return load_harness()


class State:
    """A site's state outside any monitor."""

    def __init__(self, channels: int, histogram: str, device: str) -> None:
        self.bins = BINS[histogram]
        shape = fields.histogram_shape(self.bins, channels)
        self.moments = torch.zeros(len(fields.FIELDS), channels, dtype=torch.float64, device=device)
        self.counters = torch.zeros(2, dtype=torch.int64, device=device)
        self.histogram = None if self.bins is None else torch.zeros(shape, dtype=torch.int64, device=device)

    @property
    def range(self) -> tuple[float, float]:
        return (self.bins.lo, self.bins.hi) if isinstance(self.bins, fields.LinearBins) else (0.0, 0.0)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return self.moments, self.counters, self.histogram

    def stats(self) -> hookstats.SiteStats:
        bins = None if self.histogram is None else self.histogram.cpu().numpy()
        return hookstats.SiteStats(self.moments.cpu().numpy(), int(self.counters[0]), bins, True, self.bins)

    def same_bits(self, other: State) -> bool:
        """Everything but the place in the order of execution."""
        bits, other_bits = self.moments.view(torch.int64), other.moments.view(torch.int64)
        pairs = [(bits, other_bits), (self.counters[:1], other.counters[:1])]
        if self.histogram is not None and other.histogram is not None:
            pairs.append((self.histogram, other.histogram))
        return all(torch.equal(a, b) for a, b in pairs)


def listed(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the operator is given for a mask: the rows that count, before those that do not, and their number."""
    rows = torch.argsort(~mask.flatten(), stable=True).to(torch.int32)
    return rows.view(mask.shape), mask.sum(dtype=torch.int32).view(1)


class Backend:
    """One implementation of the operators, and the device of its tensors."""

    def __init__(self, name: str, ops: Any, device: str) -> None:
        self.name = name
        self.ops = ops
        self.device = device
        library = "hookstats" if ops is torch.ops.hookstats else "hookstats_cuda_on_cpu"
        self.classes = getattr(torch.classes, library)

    def accumulate(
        self,
        x: torch.Tensor,
        channel_dim: int | None,
        histogram: str = "none",
        into: State | None = None,
        mask: torch.Tensor | None = None,
    ) -> State:
        channels = 1 if channel_dim is None or x.dim() == 0 else x.shape[channel_dim]
        state = into or State(channels, histogram, self.device)
        rows = () if mask is None else tuple(each.to(self.device) for each in listed(mask))
        dim = _native.UNKNOWN_DIM if channel_dim is None else channel_dim
        self.ops.accumulate(self.to_device(x), *state.tensors, None, dim, False, *state.range, *rows)
        return state

    def batch(self, states: list[State], channel_dims: list[int], active: torch.Tensor | None = None) -> Any:
        """The sites of these states, whose tensors come together."""
        active = torch.ones(1, dtype=torch.int32, device=self.device) if active is None else active
        columns = zip(*(state.tensors for state in states), strict=True)
        return self.classes.Batch(*map(list, columns), [active] * len(states), channel_dims, *states[0].range)

    def merge(self, into: State, other: State) -> None:
        self.ops.merge(*into.tensors, *other.tensors)

    def to_device(self, x: torch.Tensor) -> torch.Tensor:
        """With the same strides and storage offset."""
        if self.device == "cpu":
            return x
        storage = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(self.device)
        return torch.as_strided(storage, x.shape, x.stride(), x.storage_offset())


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if request.param == "cuda_on_cpu":
        ops = request.getfixturevalue("harness")
        yield Backend("cuda_on_cpu", ops, "cpu")
        ops.shuffle(0)
    else:
        yield Backend(request.param, torch.ops.hookstats, "cuda" if request.param == "gpu" else "cpu")


def check(stats: hookstats.SiteStats, x: torch.Tensor, channel_dim: int | None, rtol: float = 1e-5) -> None:
    """Compares per channel and in total with float64 on the same data.

    Counts, min, max and histogram exactly; mean to rtol of max(|mean|, std); everything else to rtol.
    """
    rows = reference.channel_rows(x, channel_dim)
    assert stats.channels is not None
    for c, row in enumerate(rows):
        got = {name: float(getattr(stats.channels, name)[c]) for name in fields.STATISTICS}
        compare(got, row, f"channel {c} of {tuple(x.shape)}", rtol)
    compare({name: getattr(stats.total, name) for name in fields.STATISTICS}, rows.reshape(-1), "total", rtol)
    if stats._histogram is not None and isinstance(stats._bins, fields.LinearBins):
        all_counts = stats._histogram.reshape(-1, stats._bins.n + 2)
        for counts, row in zip(all_counts, rows if stats._bins.per_channel else rows.reshape(1, -1), strict=True):
            np.testing.assert_array_equal(counts, reference.linear_counts(row, stats._bins, x.dtype))
    elif stats.histogram is not None:
        if stats.histogram.counts.ndim == 1:
            np.testing.assert_array_equal(stats.histogram.counts, reference.exponent_counts(rows.reshape(-1)))
        else:
            for counts, row in zip(stats.histogram.counts, rows, strict=True):
                np.testing.assert_array_equal(counts, reference.octave_counts(row))


def compare(got: dict[str, float], row: Any, where: str, rtol: float) -> None:
    wanted = reference.statistics(row)
    for name, want in wanted.items():
        exact = name in ("count", "min", "max", "abs_max", "zeros", "nans", "posinfs", "neginfs")
        tolerance = 0.0 if exact else rtol * abs(want)
        if name == "mean" and not np.isnan(wanted["std"]):
            tolerance = rtol * max(abs(want), wanted["std"])
        if name == "var":
            tolerance *= 2  # the square of std
        ok = (np.isnan(want) and np.isnan(got[name])) or abs(got[name] - want) <= tolerance
        assert ok, f"{where}: {name}: expected {want!r}, got {got[name]!r}"
