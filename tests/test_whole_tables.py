"""A Snapshot as whole tables: totals of all sites, channels of all sites, parts of it, JSON."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hookstats
from hookstats import Site, Snapshot
from hookstats.numbers import fields

OF_ALL = ("output", "grad_output", "param_grad")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 70), nn.ReLU(), nn.Linear(70, 3), nn.Tanh())


def taken(scale: float | None = None, **settings: Any) -> Snapshot:
    """Of a step whose gradients were scaled, in which the tanh did not fire and one output is infinite."""
    model = network()
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    settings = {"tensors": OF_ALL, "every": 1, **settings}
    mon = hookstats.attach(model, grad_scaler=scaler, **settings)
    with torch.no_grad():
        model[0].bias[3] = 1e3
    loss = model[2](model[1](model[0](torch.randn(9, 4)))).square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()
    mon.tap(torch.tensor([1.0, float("inf"), float("nan")]), "scores")
    snapshot = mon.step(loss=1.5) or mon.snapshot()
    snapshot.skipped = {
        Site("x", "output"): fields.Skipped("a reason", 2),
        Site("y", "output"): fields.Skipped("b", None),
    }
    return snapshot


@pytest.mark.parametrize("scale", [None, 64.0, 1000.0])
@pytest.mark.parametrize("channels", [True, False, "2"])
def test_totals_are_those_of_each_site_to_the_bit(scale: float | None, channels: Any) -> None:
    snapshot = taken(scale, channels=channels)
    assert len(snapshot.order) < len(snapshot)
    for name in fields.STATISTICS:
        column = getattr(snapshot.totals, name)
        wanted = np.array([getattr(snapshot[site].total, name) for site in snapshot.order])
        assert column.dtype == np.float64
        assert column.tobytes() == wanted.tobytes(), name
    gradients = [i for i, site in enumerate(snapshot.order) if site.tensor == "grad_output"]
    plain = taken().totals.rms[gradients]  # of which nothing was scaled
    np.testing.assert_allclose(snapshot.totals.rms[gradients], plain, rtol=1e-4)


def test_totals_of_a_step_in_which_nothing_fired_are_empty() -> None:
    mon = hookstats.attach(network())
    snapshot = mon.snapshot()
    assert snapshot.totals.rms.shape == (0,)
    assert snapshot.flat() == {}
    assert snapshot.top_channels("rms", 3) == []
    assert (snapshot.first_nonfinite, snapshot.grad_norm) == (None, None)
    assert snapshot.table().splitlines()[2].startswith("did not fire: 0 output")


def test_the_model_itself_has_a_name_in_flat_that_no_module_has() -> None:
    model = nn.Linear(2, 2)
    mon = hookstats.attach(model, "")
    model(torch.ones(1, 2))
    assert list(mon.snapshot().flat("rms")) == ["output/rms/whole-model"]


@pytest.mark.parametrize("scale", [None, 1000.0])
@pytest.mark.parametrize("statistic", ["abs_max", "mean", "std", "posinfs"])
@pytest.mark.parametrize("k", [1, 12, 10**6])
def test_top_channels_are_the_largest_of_all_sites(statistic: str, k: int, scale: float | None) -> None:
    snapshot = taken(scale, channels=["0", "1", "2", "2.weight"])
    every = [
        (site, channel, value)
        for site in snapshot.order
        for stats in [snapshot[site].channels]
        if stats is not None
        for channel, value in enumerate(getattr(stats, statistic).tolist())
        if not np.isnan(value)
    ]
    assert len(every) > 200
    top = snapshot.top_channels(statistic, k)
    assert top == sorted(every, key=lambda each: -each[2])[:k]  # sorted() keeps the order of equal ones
    assert top[0].value == max(value for *_, value in every)
    assert isinstance(top[0].site, Site)


def test_top_channels_refuse_what_is_no_statistic_and_no_number() -> None:
    with pytest.raises(ValueError, match=r"top_channels: expected one of count.*got 'size'"):
        taken().top_channels("size", 3)
    with pytest.raises(ValueError, match="top_channels: expected k >= 1, got 0"):
        taken().top_channels("rms", 0)


def test_a_data_frame_of_channels_has_a_row_for_each() -> None:
    pytest.importorskip("pandas")
    snapshot = taken(1000.0, channels=["0", "2"])
    frame = snapshot.to_pandas(channels=True)
    assert frame.index.names == ["name", "tensor", "channel"]
    assert list(frame.columns) == ["calls", *fields.STATISTICS]
    kept = [site for site in snapshot.order if snapshot[site].channels is not None]
    assert 0 < len(kept) < len(snapshot.order)
    assert list(dict.fromkeys(row[:2] for row in frame.index)) == kept
    for site in kept:
        part, stats = frame.xs(tuple(site), level=["name", "tensor"]), snapshot[site].channels
        assert list(part.index) == list(range(len(stats.rms)))
        assert set(part["calls"]) == {snapshot[site].calls}
        for name in fields.STATISTICS:
            np.testing.assert_array_equal(part[name], getattr(stats, name))
