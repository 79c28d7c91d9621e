"""Many tensors in one launch, against float64 on the same data, on every backend."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch

from tests.conftest import DTYPES, HISTOGRAMS, Backend, State, check
from tests.kernels.test_kernels import normal


def of_bytes(most: int, dtype: torch.dtype, count: int) -> int:
    """Make so many values, or fewer where they have more bytes: parts are cut by bytes."""
    return min(count, most // dtype.itemsize)


# name: (tensor from float64 values of a dtype, channel dimension; None: one channel)
PARAMETERS: dict[str, tuple[Any, int | None]] = {
    "bias": (lambda t: normal(64).to(t), None),
    "one_value": (lambda t: normal(1).to(t), None),
    "scalar": (lambda t: normal(1)[0].to(t), None),
    "weight": (lambda t: normal(48, 256).to(t), 0),
    "wide_weight": (lambda t: normal(9, 4100).to(t), 0),
    "narrow_weight": (lambda t: normal(257, 8).to(t), 0),
    "odd_weight": (lambda t: normal(37, 33).to(t), 0),
    "long_vector": (lambda t: normal(of_bytes(1_400_000, t, 700_000)).to(t), None),
    "two_long_channels": (lambda t: normal(2, of_bytes(800_000, t, 300_000)).to(t), 0),
    "convolution": (lambda t: normal(16, 8, 3, 3).to(t), 0),
    "convolution_channels_last": (lambda t: normal(16, 8, 3, 3).to(t).to(memory_format=torch.channels_last), 0),
    "transposed_convolution": (lambda t: normal(8, 16, 4, 4).to(t), 1),
    "depthwise_convolution": (lambda t: normal(96, 1, 3, 3).to(t), 0),
    "transposed_weight": (lambda t: normal(40, 72).to(t).t(), 0),
    "odd_storage_offset": (lambda t: normal(1 + 24 * 64).to(t)[1:].view(24, 64), 0),
    "slice": (lambda t: normal(30, 64, 9).to(t)[:, 3:50, 1:7], 0),
    "slice_of_slice": (lambda t: normal(6, 8, 6, 8).to(t)[:, ::2, 1:5, ::2], 0),  # read alone
}


def batch_of(backend: Backend, tensors: list[Any], dims: list[int | None], histogram: str) -> tuple[Any, list[State]]:
    states = [
        State(1 if d is None else x.shape[d], histogram, backend.device) for x, d in zip(tensors, dims, strict=True)
    ]
    return backend.batch(states, [d or 0 for d in dims]), states


LONG = {"long_vector", "two_long_channels"}


def made(dtype: torch.dtype, without: Collection[str] = ()) -> tuple[list[torch.Tensor], list[int | None]]:
    chosen = [each for name, each in PARAMETERS.items() if name not in without]
    return [make(dtype) for make, _ in chosen], [dim for _, dim in chosen]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_shapes_of_parameters_together_match_float64(backend: Backend, dtype: torch.dtype) -> None:
    """Shapes cut into parts have a histogram or none: what is counted of a part depends on no other."""
    for histogram in HISTOGRAMS:
        tensors, dims = made(dtype) if histogram == "per_channel" else made(dtype, LONG)
        batch, states = batch_of(backend, tensors, dims, histogram)
        assert batch.accumulate([backend.to_device(x) for x in tensors]) == []
        for x, dim, state in zip(tensors, dims, states, strict=True):
            check(state.stats(), x, dim)
            assert state.counters[0] == 1


def test_tensors_of_several_dtypes_and_what_is_not_finite(backend: Backend) -> None:
    tensors = [normal(30, 200).to(dtype) for dtype in DTYPES]
    for x in tensors[:4]:
        x[3, 5], x[3, 7], x[4, 9] = float("nan"), float("inf"), float("-inf")
    batch, states = batch_of(backend, tensors, [0] * len(tensors), "per_channel")
    assert batch.accumulate([backend.to_device(x) for x in tensors]) == []
    for x, state in zip(tensors, states, strict=True):
        check(state.stats(), x, 0)


def test_a_later_call_merges_other_values_at_other_addresses(backend: Backend) -> None:
    a, b = (
        [normal(8, 64).float(), normal(100).float()],
        [normal(8, 64, seed=1).float() + 50, normal(100, seed=2).float()],
    )
    batch, states = batch_of(backend, a, [0, None], "per_tensor")
    for tensors in (a, b):
        assert batch.accumulate([backend.to_device(x) for x in tensors]) == []
    check(states[0].stats(), torch.cat([a[0], b[0]], dim=1), 0)
    check(states[1].stats(), torch.cat([a[1], b[1]]), None)
    assert [int(state.counters[0]) for state in states] == [2, 2]


def test_missing_and_empty_tensors_change_nothing(backend: Backend) -> None:
    x = normal(8, 64).float()
    batch, states = batch_of(backend, [x] * 4, [0, 0, None, 0], "per_tensor")
    device_x = backend.to_device(x)
    assert batch.accumulate([None, device_x, torch.empty(0, device=backend.device), None]) == []
    assert [int(state.counters[0]) for state in states] == [0, 1, 0, 0]
    assert batch.accumulate([None] * 4) == []
    assert batch.accumulate([device_x, None, device_x, None]) == []
    assert [int(state.counters[0]) for state in states] == [1, 1, 1, 0]
    for state, dim in zip(states[:3], (0, 0, None), strict=True):
        check(state.stats(), x, dim)


def test_tensors_may_change_shape_strides_dtype_and_alignment(backend: Backend) -> None:
    whole = normal(8, 65).float()
    unaligned = normal(1 + 8 * 64, seed=3).float()[1:].view(8, 64)
    kinds = [
        whole[:, :64].contiguous(),
        unaligned,
        whole,
        whole[:, 1:],
        whole.bfloat16(),
        whole.t().contiguous().t(),
        whole,
    ]
    state = State(8, "per_channel", backend.device)
    batch = backend.batch([state], [0])
    for x in kinds:
        assert batch.accumulate([backend.to_device(x)]) == []
    check(state.stats(), torch.cat([x.double() for x in kinds], dim=1), 0)


def test_what_cannot_be_measured_is_named_and_the_rest_is_measured(backend: Backend) -> None:
    x = normal(8, 64).float()
    batch, states = batch_of(backend, [x] * 4, [0, 0, 0, 0], "none")
    device_x = backend.to_device(x)
    failures = batch.accumulate([device_x, device_x[:5], device_x.to_sparse(), device_x.long()])
    assert [number for number, _ in failures] == [1, 2, 3]
    assert "expected 8 channels in dimension 0" in failures[0][1]
    assert "expected a dense strided tensor" in failures[1][1]
    assert "expected a tensor of one of" in failures[2][1]
    assert [int(state.counters[0]) for state in states] == [1, 0, 0, 0]
    check(states[0].stats(), x, 0)
    with pytest.raises(RuntimeError, match="expected 4 tensors, got 3"):
        batch.accumulate([device_x] * 3)


def test_a_zero_flag_stops_all(backend: Backend) -> None:
    x = backend.to_device(normal(8, 64).float())
    active = torch.zeros(1, dtype=torch.int32, device=backend.device)
    states = [State(8, "per_tensor", backend.device) for _ in range(3)]
    batch = backend.batch(states, [0, 0, 0], active)
    batch.accumulate([x] * 3)
    assert all(state.counters[0] == 0 and state.moments.count_nonzero() == 0 for state in states)
    active.fill_(1)
    batch.accumulate([x] * 3)
    assert all(state.counters[0] == 1 for state in states)


def test_one_launch_for_each_dtype_and_one_more_for_what_has_no_packs(harness: Any) -> None:
    backend = Backend("cuda_on_cpu", harness, "cpu")
    weights = [normal(16, 64), normal(64), normal(8, 4, 3, 3), normal(700_000)]

    def launches(tensors: list[torch.Tensor]) -> int:
        batch, _ = batch_of(backend, tensors, [0 if x.dim() > 1 else None for x in tensors], "per_channel")
        before: int = harness.launches()
        batch.accumulate(tensors)
        first = harness.launches() - before
        batch.accumulate(tensors)  # as before: nothing is planned anew
        assert harness.launches() - before == 2 * first
        return int(first)

    assert launches([x.float() for x in weights]) == 1
    assert launches([x.to(t) for x in weights for t in (torch.float32, torch.bfloat16, torch.float16)]) == 3
    assert launches([x.float() for x in weights] + [normal(5, 7).float()]) == 2


def test_a_dtype_of_which_nothing_comes_is_not_launched(harness: Any) -> None:
    backend = Backend("cuda_on_cpu", harness, "cpu")
    tensors = [normal(16, 64).to(t) for t in (torch.float32, torch.bfloat16, torch.float16)]
    batch, states = batch_of(backend, tensors, [0, 0, 0], "per_channel")
    batch.accumulate(tensors)
    before = harness.launches()
    batch.accumulate([None, tensors[1], None])
    assert harness.launches() - before == 1
    batch.accumulate([None, None, None])
    assert harness.launches() - before == 1
    assert [int(state.counters[0]) for state in states] == [1, 2, 1]


def test_more_tensors_than_one_launch_takes(harness: Any) -> None:
    backend = Backend("cuda_on_cpu", harness, "cpu")
    x = normal(1025, 4).float()
    batch, states = batch_of(backend, list(x), [None] * len(x), "none")
    before = harness.launches()
    batch.accumulate(list(x))
    assert harness.launches() - before == 2
    means = torch.stack([state.moments[1, 0] for state in states])
    torch.testing.assert_close(means, x.double().mean(1), rtol=1e-6, atol=1e-6)
