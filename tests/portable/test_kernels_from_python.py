"""What Python hands to the kernels is what the glue hands to them: the same bits come back, also as on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hookstats import _native, portable
from hookstats.portable import library
from tests.conftest import DTYPES, HISTOGRAMS, Backend, State, check
from tests.kernels.test_checksums import SHAPES
from tests.kernels.test_kernels import LAYOUTS, normal
from tests.kernels.test_rows import MASKS

_LOADED: dict[str, Backend] = {}


def loaded(name: str, kernels: Path) -> Backend:
    if name not in _LOADED:
        namespace = f"hookstats_portable_{name}"
        classes = portable.load(kernels, namespace, name == "cuda_on_cpu")
        _LOADED[name] = Backend("portable", getattr(torch.ops, namespace), "cpu", classes)
    return _LOADED[name]


@pytest.fixture(params=["cpu", "cuda_on_cpu"])
def both(request: pytest.FixtureRequest) -> tuple[Backend, Backend]:
    """By Python, and by what it stands for."""
    if request.param == "cpu":
        return loaded("cpu", _native.KERNELS), Backend("cpu", torch.ops.hookstats, "cpu")
    harness = request.getfixturevalue("harness")
    (built,) = (path for path in torch.ops.loaded_libraries if path.endswith("hookstats_cuda_on_cpu.so"))
    return loaded("cuda_on_cpu", Path(built)), Backend("cuda_on_cpu", harness, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_dtype(both: tuple[Backend, Backend], layout: str, dtype: torch.dtype) -> None:
    make, channel_dim = LAYOUTS[layout]
    x = make(dtype)
    for histogram in HISTOGRAMS if dtype is torch.float32 else ["per_channel"]:
        found, wanted = (backend.accumulate(x, channel_dim, histogram) for backend in both)
        assert found.same_bits(wanted), histogram
        assert int(found.counters[0]) == int(wanted.counters[0])


@pytest.mark.parametrize("name", MASKS)
def test_rows_that_count(both: tuple[Backend, Backend], name: str) -> None:
    mask = MASKS[name](9, 30)
    for x in (normal(*mask.shape, 7).float(), normal(mask.numel(), 7).float(), normal(3, 7).float()):
        found, wanted = (backend.accumulate(x, -1, "per_channel", mask=mask) for backend in both)
        assert found.same_bits(wanted)


@pytest.mark.parametrize("histogram", HISTOGRAMS)
def test_merges_and_totals(both: tuple[Backend, Backend], histogram: str) -> None:
    made = []
    for backend in both:
        states = [backend.accumulate(normal(90, n).float(), 1, histogram) for n in (1, 5, 3000)]
        whole = State(1, histogram, "cpu")
        for state in states if histogram in ("none", "per_tensor", "linear") else states[:1]:
            backend.merge(whole, state)
        table = backend.classes.Totals([s.moments for s in states], [s.counters for s in states])
        blocks = [torch.arange(9), torch.arange(5)]
        words = table.take(blocks)
        assert not any(block.any() for block in blocks)
        words[:, -1] = 0  # the place in the order of execution
        made.append((whole, words))
    (found, words), (wanted, other) = made
    assert found.same_bits(wanted)
    assert torch.equal(words, other)


@pytest.mark.parametrize("shape", SHAPES)
def test_checksums(both: tuple[Backend, Backend], shape: str) -> None:
    tensors = [SHAPES[shape](dtype) for dtype in (torch.float32, torch.bool, torch.complex128, torch.bfloat16)]
    found, wanted = (backend.ops.checksums(tensors) for backend in both)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("top_k", [0, 2])
def test_softmax_rows(both: tuple[Backend, Backend], dtype: torch.dtype, top_k: int) -> None:
    for logits in (normal(4, 9, 33), normal(33, 5).t(), normal(33), normal(0, 33), normal(2, 3, 4, 33)[:, ::2, 1:]):
        found, wanted = (backend.ops.softmax_rows(logits.to(dtype), top_k) for backend in both)
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


def test_samples(both: tuple[Backend, Backend]) -> None:
    old = [normal(70, 3).float(), normal(100, 200).bfloat16().t(), normal(0, 5).float(), normal(7).double()]
    new, taken = [each + 1 for each in old], []
    for backend in both:
        values = [torch.zeros(min(each.numel(), 4096), dtype=_wide(each)) for each in old]
        differences = [torch.zeros_like(each) for each in values]
        backend.ops.sample(old, values, None, [])
        backend.ops.sample(new, values, torch.ones(1, dtype=torch.int32), differences)
        backend.ops.sample(old, values, torch.zeros(1, dtype=torch.int32), differences)
        taken.append(values + differences)
    assert all(map(torch.equal, *taken))
    assert taken[0][0].eq(new[0].reshape(-1)).all()


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def test_tensors_that_come_together(both: tuple[Backend, Backend]) -> None:
    found = []
    given = [normal(40, 6).float(), None, normal(40, 5).float(), torch.empty(0, 6), torch.zeros(3, 6, device="meta")]
    for backend in both:
        states = [State(6, "per_tensor", "cpu") for _ in given]
        batch = backend.batch(states, [1] * len(given))
        failures = batch.accumulate(given)
        assert [number for number, _ in failures] == [2, 4]
        assert "expected 6 channels in dimension 1" in failures[0][1]
        assert "expected a tensor on cpu" in failures[1][1]
        found.append(states)
    first = given[0]
    assert first is not None
    for states in found:  # in one launch and one by one, sums may differ by a rounding
        check(states[0].stats(), first, 1)
        assert [int(state.counters[0]) for state in states] == [1, 0, 0, 0, 0]


def test_copies_of_blocks_and_zeros(both: tuple[Backend, Backend]) -> None:
    backend, _ = both
    blocks = [torch.arange(9), torch.arange(70_000)]
    copies = backend.classes.Copies().take(blocks, True)
    assert [torch.equal(copy, torch.arange(len(copy))) for copy in copies] == [True, True]
    assert not any(block.any() for block in blocks)
    again = [torch.ones(3, dtype=torch.int64)]
    assert backend.classes.Copies().take(again, False)[0].tolist() == again[0].tolist() == [1, 1, 1]
    backend.classes.clear(again)
    assert again[0].tolist() == [0, 0, 0]
    with pytest.raises(TypeError, match=r"take: expected contiguous int64, got torch\.float32"):
        backend.classes.Copies().take([torch.zeros(3)], False)


def test_a_part_is_no_view_and_shares_the_memory() -> None:
    memory = torch.zeros(20, dtype=torch.int64)
    part = portable.operators.part(memory, 3, (2, 3), True)
    part.fill_(1.0)
    assert (part.dtype, part.shape, part._version, memory._version) == (torch.float64, (2, 3), 1, 0)
    assert memory.nonzero().flatten().tolist() == list(range(3, 9))
    with pytest.raises(IndexError, match="expected words 18 to 21 in a memory of 20"):
        portable.operators.part(memory, 18, (3,), False)


def test_a_library_with_other_structures_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layout(library.Layout):
        _fields_ = (("more", library.c_int64),)

    monkeypatch.setattr(library, "STRUCTURES", (Layout, *library.STRUCTURES[1:]))
    with pytest.raises(ImportError, match=r"expected structures of .* bytes in .*_kernels.so, got"):
        library.Library(_native.KERNELS)


def test_constants_are_those_of_the_glue() -> None:
    said: Callable[[str], Any] = lambda name: library.Library(_native.KERNELS).constants[name]  # noqa: E731
    for name in ("COUNTERS", "EXPONENT_BINS", "OCTAVE_BINS", "FIRST_OCTAVE"):
        assert said(name) == getattr(_native._C, name)
    assert tuple(said("FIELDS")) == tuple(_native._C.FIELDS)
    assert portable.sites.DIMS_BY_NDIM == _native.DIMS_BY_NDIM


def test_a_site_that_meets_other_shapes_strides_and_dtypes(both: tuple[Backend, Backend]) -> None:
    """Layouts are kept from tensor to tensor."""
    square = normal(6, 6).float()
    given = [square, square.t(), square.double(), square.t().bfloat16(), square]
    given += [normal(rows, 6).float() for rows in range(1, 30)]
    for backend in both:
        (state,) = states = [State(6, "per_channel", "cpu")]
        batch = backend.batch(states, [1])
        for x in given:
            assert batch.accumulate([x]) == []
        check(state.stats(), torch.cat([x.double() for x in given]), 1)
