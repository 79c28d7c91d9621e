"""merge, and what is accumulated in parts, against float64 on the same data, on every backend."""

from __future__ import annotations

import pytest
import torch

from hookstats.numbers import fields
from tests.conftest import HISTOGRAMS, Backend, State, check
from tests.kernels.test_kernels import INF, NAN, normal


def test_accumulating_parts_equals_accumulating_the_whole(backend: Backend) -> None:
    x = (normal(5000, 20) + 100 * torch.arange(5000).view(-1, 1) / 5000).float()
    whole = backend.accumulate(x, 1, "per_channel")
    parts = State(20, "per_channel", backend.device)
    for part in x.split(577):
        backend.accumulate(part, 1, into=parts)
    check(parts.stats(), x, 1)
    assert parts.counters[0] == 9
    assert torch.equal(parts.moments[0], whole.moments[0])
    assert whole.histogram is not None
    assert parts.histogram is not None
    assert torch.equal(parts.histogram, whole.histogram)


@pytest.mark.parametrize("histogram", HISTOGRAMS)
def test_merge_of_parts_with_far_means(backend: Backend, histogram: str) -> None:
    a, b = normal(1000, 40), normal(300, 40, seed=1) + 1e3
    a, b = a.float(), b.float()
    merged = backend.accumulate(a, 1, histogram)
    backend.merge(merged, backend.accumulate(b, 1, histogram))
    check(merged.stats(), torch.cat([a, b]), 1)
    assert merged.counters[0] == 2


@pytest.mark.parametrize("histogram", HISTOGRAMS)
@pytest.mark.parametrize("channels", [2, 255, 700])
def test_merge_folds_channels_into_one(backend: Backend, channels: int, histogram: str) -> None:
    x = (normal(50, channels) + 10 * torch.arange(channels)).float()
    x[3, 1] = NAN
    one = State(1, histogram, backend.device)
    backend.merge(one, backend.accumulate(x, 1, histogram))
    check(one.stats(), x, None)


def test_of_merged_states_the_one_that_came_first_says_when(backend: Backend) -> None:
    early, late = (backend.accumulate(normal(10, 5).float(), 1) for _ in range(2))
    first = int(early.counters[1])
    assert 0 < first < int(late.counters[1])
    backend.merge(late, early)
    assert int(late.counters[1]) == first
    backend.merge(early, backend.accumulate(normal(10, 5).float(), 1))
    assert int(early.counters[1]) == first


def test_merge_with_an_empty_state_changes_nothing(backend: Backend) -> None:
    x = normal(100, 5).float() + 3
    full, empty = backend.accumulate(x, 1, "per_tensor"), State(5, "per_tensor", backend.device)
    backend.merge(full, empty)
    check(full.stats(), x, 1)
    backend.merge(empty, full)
    assert empty.same_bits(full)
    assert empty.counters[1] == full.counters[1]
    nans = backend.accumulate(torch.full((10, 5), NAN), 1, "per_tensor")
    backend.merge(nans, full)
    check(nans.stats(), torch.cat([x, torch.full((10, 5), NAN)]), 1)


@pytest.mark.parametrize("count", [2**24, 2**31, 2**52])
def test_counts_stay_exact_past_what_a_float_or_int32_holds(backend: Backend, count: int) -> None:
    state = State(2, "per_tensor", backend.device)
    row = {name: i for i, name in enumerate(fields.FIELDS)}
    for name in ("count", "zeros", "nans", "posinfs", "neginfs"):
        state.moments[row[name]] = count
    state.histogram[0] = count
    one = backend.accumulate(torch.tensor([[0.0, 0.0], [NAN, NAN], [INF, INF], [-INF, -INF]]), 1, "per_tensor")
    for _ in range(3):
        backend.merge(state, one)
    for name in ("count", "zeros", "nans", "posinfs", "neginfs"):
        assert state.moments[row[name]].tolist() == [count + 3, count + 3]
    assert state.histogram[0] == count + 6
