"""The totals of sites of so many channels that a GPU's block would take long: they are cut into several."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hookstats.numbers import fields
from tests.conftest import Backend, State
from tests.kernels.test_kernels import normal
from tests.watch.test_tiers import totals_of


def of_many_channels(backend: Backend, channels: int, seed: int = 0) -> State:
    """Make a state as if it had met tensors: some channels empty, means far apart."""
    state = State(channels, "none", backend.device)
    known = dict(zip(fields.FIELDS, state.moments, strict=True))
    counts = torch.from_numpy(np.random.default_rng(seed).integers(0, 50, channels)).double()
    means = 1e3 * normal(channels, seed=seed)
    wanted = {"count": counts, "mean": means, "m2": counts, "min": means - 3, "max": means + 2, "abs_sum": counts}
    for name, values in wanted.items():
        known[name].copy_(values * (counts > 0))
    for offset, name in enumerate(("zeros", "nans", "posinfs", "neginfs")):
        known[name].copy_(torch.arange(channels) % 7 + offset)
    state.counters.fill_(3)
    return state


@pytest.mark.parametrize("channels", [4096, 4097, 9000, 150_000])
def test_a_site_of_so_many_channels_has_the_totals_of_float64(backend: Backend, channels: int) -> None:
    states = [of_many_channels(backend, each, each) for each in (5, channels, 4200)]
    table = backend.totals([s.moments for s in states], [s.counters for s in states])
    for _ in range(2):
        out = table.take([]).cpu()
        for state, row in zip(states, out, strict=True):
            totals = row[: len(fields.FIELDS)].contiguous().view(torch.float64).numpy()
            np.testing.assert_allclose(totals, fields.fold_channels(state.moments.cpu().numpy()), rtol=1e-10)
            assert row[len(fields.FIELDS) :].tolist() == [3, 3]


def test_the_channels_of_a_large_site_are_cut_into_blocks_whose_order_changes_nothing(harness: Any) -> None:
    backend = Backend("cuda_on_cpu", harness, "cpu")
    states = [of_many_channels(backend, channels) for channels in (150_000, 10_000, 70)]
    flag, runs = torch.ones(1, dtype=torch.int32), []
    harness.switch_off_after(flag, 37 + 3 + 1 - 1)
    for seed in (0, 1, 2):
        harness.shuffle(seed)
        runs.append(totals_of(backend, states)[0].view(np.int64))
        assert int(flag) == 0  # there are as many blocks
        flag.fill_(1)
    harness.switch_off_after(flag, -1)
    harness.shuffle(0)
    assert all(np.array_equal(run, runs[0]) for run in runs)


def test_it_is_one_launch(harness: Any) -> None:
    backend = Backend("cuda_on_cpu", harness, "cpu")
    states = [of_many_channels(backend, channels) for channels in (9000, 9000, 7)]
    before = harness.launches()
    totals_of(backend, states)
    assert harness.launches() == before + 1
