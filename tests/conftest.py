"""The backends that every kernel test runs on, and comparison with the reference."""

from __future__ import annotations

import functools
import gc
import os
import re
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import hookstats
from hookstats import _native
from hookstats._native import operators
from hookstats.numbers import fields
from hookstats.watch import guards
from tests import reference
from tests.cuda_on_cpu.loading import Harness, load_harness
from tests.guarded import guarded_copy, guarded_zeros, with_lazy_bits
from tests.order import dealt
from tests.report.browser import CHROMIUM, Browser

ROOT = Path(__file__).parent.parent
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
HISTOGRAMS = ["none", "per_tensor", "per_channel", "linear", "linear_per_channel"]
BINS = {
    "none": None,
    "per_tensor": fields.ExponentBins(),
    "per_channel": fields.ExponentBins(per_channel=True),
    "linear": fields.LinearBins(-1.5, 2.0, 37),
    "linear_per_channel": fields.LinearBins(-1.5, 2.0, 37, per_channel=True),
    "blocks of 32": fields.ExponentBins(block=32),
    "blocks of 16": fields.ExponentBins(block=16),
    "blocks of 32 along rows": fields.ExponentBins(block=32, block_dim=0),
    "blocks of 16 along rows": fields.ExponentBins(block=16, block_dim=0),
    "many_linear": fields.LinearBins(0.0, 1.0, 10_000),  # more than shared memory holds
    "many_linear_per_channel": fields.LinearBins(-4.0, 4.0, 2000, per_channel=True),
}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
# What tests import at the top of a file, and who has not installed the extra "test" may lack.
OPTIONAL = {"duckdb", "lightning", "matplotlib", "pandas", "polars", "pyarrow", "pytorch_lightning", "rich", "sklearn"}
OPTIONAL |= {"tensorboard", "transformers"}
BACKENDS = ["cpu", "cuda_on_cpu", *(["gpu"] if torch.cuda.is_available() else [])]


def pytest_configure() -> None:
    # Of this checkout alone: whoever is killed while he writes into one that all share leaves files that break others.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ROOT / "build" / "inductor"))
    # Else each process asks ten small programs whether what the compiler writes runs here, in three seconds.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores, and so do the processes that they start
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """Exempt what was imported for thousands of tests from garbage collection.

    As often as is usual, those would take 5 % of a compiler's time, which makes many objects and little garbage.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A file of tests that cannot be imported without an optional package is skipped where that is missing."""
    report = yield
    missing = re.findall(r"No module named '(\w+)", str(report.longrepr)) if report.failed else []
    if missing and missing[0] in OPTIONAL:
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: needs {missing[0]}")
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = dealt(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    for item in items if _native.WITHOUT_GLUE else ():
        if item.get_closest_marker("glue"):
            item.add_marker(pytest.mark.skip(reason="needs hooks that are C"))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU: make gpu"))


@pytest.fixture(autouse=True)
def _same_random_numbers_in_every_run() -> None:
    torch.default_generator.manual_seed(0)  # torch.manual_seed keeps a stack for each kind of device that is not there
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture
def only_monitors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The monitors of other tests, still open, have no part in which programs run."""
    monkeypatch.setattr(guards, "now", guards.Now())


@pytest.fixture(scope="session")
def _browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    with Browser() as browser:
        yield browser


@pytest.fixture
def chromium(_browser: Browser) -> Iterator[Browser]:
    """A light page, 1280 wide; nothing may be wrong with it at the end."""
    _browser.look(1280)
    _browser.errors.clear()
    _browser.requests.clear()
    yield _browser
    assert _browser.errors == []
    _browser.call("Page.navigate", url="about:blank")  # asks for nothing more


@pytest.fixture
def fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.fixture
def without_gpp() -> Iterator[None]:
    """Inductor calls torch's kernels. What it writes itself is compiled by g++, a second for each kernel."""
    import torch._inductor.config

    with torch._inductor.config.patch(fallback_by_default=True):
        yield


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(threads: None) -> None:
    """On a busy machine, threads that wait for each other take most of the time of small models."""
    torch.set_num_threads(1)


@functools.cache
def harness_operators() -> operators.Operators:
    """Return the harness's operators, once it is loaded."""
    return operators.Operators("hookstats_cuda_on_cpu")


@pytest.fixture(scope="session")
def harness() -> Harness:
    return load_harness()


class State:
    """A site's state outside any monitor."""

    def __init__(self, channels: int, histogram: str, device: str) -> None:
        self.bins = BINS[histogram]
        shape = fields.histogram_shape(self.bins, channels)
        zeros = guarded_zeros if device == "cpu" else functools.partial(torch.zeros, device=device)
        self.moments = zeros((len(fields.FIELDS), channels), dtype=torch.float64)
        self.counters = zeros((2,), dtype=torch.int64)
        self.histogram = None if self.bins is None else zeros(shape, dtype=torch.int64)

    @property
    def range(self) -> tuple[float, float]:
        return (self.bins.lo, self.bins.hi) if isinstance(self.bins, fields.LinearBins) else (0.0, 0.0)

    @property
    def block(self) -> int:
        return fields.kernel_block(self.bins)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return self.moments, self.counters, self.histogram

    def site(self, channel_dim: int, active: Any = None, ops: Any = _native.OPS) -> operators.SiteInPython:
        """ops: of another library."""
        low, high = self.range
        own = SimpleNamespace(
            **vars(self), active=active, channel_dim=channel_dim, low=low, high=high, block=self.block
        )
        return operators.SiteInPython(ops, own)

    def fold(self, x: torch.Tensor, channel_dim: int, rows: Any = (), active: Any = None, ops: Any = None) -> None:
        """Folds a tensor into it. rows: of `listed`."""
        self.site(channel_dim, active, ops or _native.OPS).fold(x, *rows)

    def stats(self) -> hookstats.results.SiteStats:
        bins = None if self.histogram is None else self.histogram.cpu().numpy()
        return hookstats.results.SiteStats(self.moments.cpu().numpy(), int(self.counters[0]), bins, True, self.bins)

    def same_bits(self, other: State) -> bool:
        """Everything but the place in the order of execution."""
        bits, other_bits = self.moments.view(torch.int64), other.moments.view(torch.int64)
        pairs = [(bits, other_bits), (self.counters[:1], other.counters[:1])]
        if self.histogram is not None and other.histogram is not None:
            pairs.append((self.histogram, other.histogram))
        return all(torch.equal(a, b) for a, b in pairs)


def listed(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn a mask into the operator's arguments: the rows that count before the others, and the number that count."""
    rows = torch.argsort(~mask.flatten(), stable=True).to(torch.int32)
    return rows.view(mask.shape), mask.sum(dtype=torch.int32).view(1)


class Backend:
    """One implementation of the operators, and the device of its tensors. ``operators``: for what is in Python."""

    def __init__(self, name: str, ops: Any, device: str) -> None:
        self.name = name
        self.ops = ops
        self.device = device
        self.operators = _native.OPS if ops is torch.ops.hookstats else harness_operators()
        self.totals = functools.partial(operators.Totals, self.operators)

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
        rows = [] if mask is None else [each.to(self.device) for each in listed(mask)]
        dim = _native.DIMS_BY_NDIM if channel_dim is None else channel_dim
        state.fold(self.to_device(x), dim, rows, ops=self.ops)
        return state

    def batch(self, states: list[State], channel_dims: list[int], active: torch.Tensor | None = None) -> Any:
        """The sites of these states, whose tensors come together."""
        active = torch.ones(1, dtype=torch.int32, device=self.device) if active is None else active
        sites = [state.site(dim, active, self.ops) for state, dim in zip(states, channel_dims, strict=True)]
        return operators.Batch(self.operators, sites)

    def merge(self, into: State, other: State) -> None:
        into.site(0, ops=self.ops).merge(other.site(0, ops=self.ops))

    def to_device(self, x: torch.Tensor) -> torch.Tensor:
        """With the same strides and storage offset.

        On a CPU in memory that is guarded (tests/guarded.py). On a GPU in memory of whole words: where a tensor ends
        inside a word, kernels copy that word whole. torch allots at least 512 bytes, but not for compute-sanitizer
        (benchmarks/gpu.py), which knows the end of its memory to the byte.
        """
        if self.device == "cpu":
            return guarded_copy(x)
        content = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
        words = torch.zeros(-(-len(content) // 16) * 2, dtype=torch.int64, device=self.device)
        words.view(torch.uint8)[: len(content)] = content.to(self.device)
        there = torch.as_strided(words.view(x.dtype), x.shape, x.stride(), x.storage_offset())
        return with_lazy_bits(there, x)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if request.param == "cuda_on_cpu":
        ops = request.getfixturevalue("harness")
        yield Backend("cuda_on_cpu", ops, "cpu")
        ops.shuffle(0)
    else:
        yield Backend(request.param, torch.ops.hookstats, "cuda" if request.param == "gpu" else "cpu")


def check(stats: hookstats.results.SiteStats, x: torch.Tensor, channel_dim: int | None, rtol: float = 1e-5) -> None:
    """Compares per channel and in total with float64 on the same data.

    Counts, min, max and histogram exactly; mean to rtol of max(|mean|, std); everything else to rtol.
    """
    rows = reference.channel_rows(x, channel_dim)
    assert stats.channels is not None
    compare({name: getattr(stats.channels, name) for name in fields.STATISTICS}, rows, f"{tuple(x.shape)}", rtol)
    compare({name: getattr(stats.total, name) for name in fields.STATISTICS}, rows.reshape(1, -1), "total", rtol)
    if stats._histogram is not None and isinstance(stats._bins, fields.LinearBins):
        counted = rows if stats._bins.per_channel else rows.reshape(1, -1)
        wanted = reference.linear_counts(counted, stats._bins, x.dtype)
        np.testing.assert_array_equal(stats._histogram.reshape(wanted.shape), wanted)
    elif stats.histogram is not None:
        if stats.histogram.counts.ndim == 1:
            np.testing.assert_array_equal(stats.histogram.counts, reference.exponent_counts(rows.reshape(-1)))
        else:
            np.testing.assert_array_equal(stats.histogram.counts, reference.octave_counts(rows))


def compare(got: Mapping[str, Any], rows: Any, where: str, rtol: float) -> None:
    """`got`: a number for each of the channels in `rows` [channels, values], or [values] and one number."""
    wanted = reference.statistics(rows)
    for name, want in wanted.items():
        here = np.atleast_1d(got[name])
        assert here.shape == want.shape, f"{where}: {name}: expected {want.shape}, got {here.shape}"
        exact = name in ("count", "min", "max", "abs_max", "zeros", "nans", "posinfs", "neginfs")
        tolerance = 0.0 if exact else rtol * np.abs(want)
        if name == "mean":
            tolerance = np.fmax(tolerance, rtol * wanted["std"])  # which is NaN for a single value
        if name == "var":
            tolerance = 2 * tolerance  # the square of std
        with np.errstate(invalid="ignore"):
            wrong = ~(np.isnan(want) & np.isnan(here) | (np.abs(here - want) <= tolerance))
        for c in np.flatnonzero(wrong)[:1]:
            raise AssertionError(f"{where}, channel {c}: {name}: expected {want[c]!r}, got {here[c]!r}")
