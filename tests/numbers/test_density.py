"""Tests of a histogram between its edges: quantiles, shares."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hookstats
from hookstats import ExponentBins, LinearBins
from tests import scaled

SCALES = [1e-6, 1.0, 1.2, 1.4, 1.6, 1.8, 700.0]  # relative to the edges, which are powers of two
INF, NAN = float("inf"), float("nan")


def normal(n: int = 200_000, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("q", [0.001, 0.01, 0.1, 0.3, 0.7, 0.9, 0.99, 0.999])
def test_quantiles_of_a_normal_are_within_three_percent_up_to_the_last_hundredth(q: float, scale: float) -> None:
    x = normal() * scale
    exact = np.quantile(x.numpy(), q)
    assert abs(hookstats.measure(x, None).quantile(q) / exact - 1) <= (0.03 if 0.01 <= q <= 0.99 else 0.06)
    rows = hookstats.measure(torch.stack([x, 3 * x]), 0, ExponentBins(per_channel=True)).quantile(q)
    exact = np.quantile(x.abs().numpy(), q)
    np.testing.assert_allclose(rows, [exact, 3 * exact], rtol=0.05)


@pytest.mark.parametrize("q", [0.001, 0.3, 0.5, 0.97])
def test_quantiles_of_even_data_are_exact_whatever_bin_they_end_in(q: float) -> None:
    for high in (0.6, 1.0, 2.01, 3.0, 4.0):
        x = torch.linspace(0, high, 100_001)
        assert hookstats.measure(x, None).quantile(q) == pytest.approx(q * high, rel=2e-3, abs=1e-4)
        assert hookstats.measure(-x, None).quantile(q) == pytest.approx((q - 1) * high, rel=2e-3, abs=1e-4)


def test_the_median_of_a_relu_is_zero() -> None:
    x = normal(10_001).clamp_min(0)
    x[:100] = 0
    assert hookstats.measure(x, None).quantile(0.5) == 0
    assert hookstats.measure(x[:, None], 1, ExponentBins(True)).quantile(0.5).tolist() == [0]


def edges_of(stats: hookstats.results.SiteStats) -> list[float]:
    return [float(edge) for edge in stats.histogram.edges if 1e-4 < abs(edge) < 1e4 or edge == 0]


@pytest.mark.parametrize("bins", [ExponentBins(), LinearBins(-2, 3, 23)])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_shares_are_exact_at_zero_and_at_edges(bins: Any, scale: float) -> None:
    x = normal(5000) * scale
    x[:700] = 0.0
    x[700:710] = torch.tensor([NAN, INF, -INF, 1e-40, -1e-40] * 2)
    stats = hookstats.measure(x, None, bins)
    values = x[x.isfinite()].double().numpy()
    points = [*edges_of(stats), *([0.0] if isinstance(bins, ExponentBins) else [])]
    assert len(points) > 20
    for at in points:
        assert stats.share_above(at) == pytest.approx((values > at).mean(), rel=1e-12, abs=1e-12), at
        assert stats.share_below(at) == pytest.approx((values < at).mean(), rel=1e-12, abs=1e-12), at
    assert (stats.share_above(-INF), stats.share_above(INF), stats.share_below(-1e30)) == (1, 0, 0)


@pytest.mark.parametrize("bins", [ExponentBins(True), LinearBins(-2, 3, 23, per_channel=True)])
def test_shares_of_channels(bins: Any) -> None:
    x = normal(6000).view(2000, 3) * torch.tensor([0.1, 1, 10])
    x[:500, 0] = 0.0
    stats = hookstats.measure(x, 1, bins)
    values = x.double().numpy()
    values = np.abs(values) if isinstance(bins, ExponentBins) else values
    for at in edges_of(stats):
        np.testing.assert_allclose(stats.share_above(at), (values > at).mean(0), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(stats.share_below(at), (values < at).mean(0), rtol=1e-12, atol=1e-12)
    for at in (0.07, 0.3, 2.5):  # between
        np.testing.assert_allclose(stats.share_above(at)[1:], (values > at).mean(0)[1:], atol=0.03)


@pytest.mark.parametrize("scale", SCALES)
def test_shares_of_a_normal_between_edges(scale: float) -> None:
    stats, values = hookstats.measure(normal() * scale, None), normal().numpy()
    for at in (-3, -2.3, -1.1, -0.7, 0.3, 0.6, 0.9, 1.3, 2.2, 2.9):
        above, below = (values > at).mean(), (values < at).mean()
        tolerance = 0.006 if abs(at) < 2.5 else 0.0015
        assert abs(stats.share_above(at * scale) - above) <= tolerance
        assert abs(stats.share_below(at * scale) - below) <= tolerance
        assert stats.share_above(at * scale) + stats.share_below(at * scale) == pytest.approx(1)


def test_shares_and_quantiles_say_the_same() -> None:
    for bins in (ExponentBins(), LinearBins(-2, 3, 23)):
        stats = hookstats.measure(normal(5000) * 1.3, None, bins)
        for q in (0.001, 0.2, 0.6, 0.9, 0.999):
            assert stats.share_below(stats.quantile(q)) == pytest.approx(q)


@pytest.mark.parametrize("value", [3.0, -1.0, 0.0, 1e-40, 2.0**-126])
def test_equal_values_lie_at_one_point(value: float) -> None:
    x = torch.full((10,), value)
    for stats in (hookstats.measure(x, None), hookstats.measure(x, None, LinearBins(-5, 5, 7))):
        assert stats.quantile(0.3) == pytest.approx(x[0].item(), abs=0)
        assert (stats.share_above(value + 1e-3), stats.share_above(value - 1e-3)) == (0, 1)
        assert (stats.share_below(value + 1e-3), stats.share_below(value - 1e-3)) == (1, 0)


def test_float64_beyond_float32_has_quantiles_up_to_its_extremes() -> None:
    x = torch.tensor([-1e200, -1e-60, 1e-60, 1e-50, 1e300], dtype=torch.float64)
    stats = hookstats.measure(x, None)
    assert stats.quantile(0) == -1e200
    assert stats.quantile(1) == 1e300
    assert stats.share_above(0) == pytest.approx(0.5)  # the signs of three are not known: a half
    assert hookstats.measure(x.abs()[:, None], 1, ExponentBins(True)).quantile(1) == [1e300]


def test_a_share_of_nothing_is_not_a_number() -> None:
    stats = hookstats.measure(torch.full((4, 2), NAN), 1, ExponentBins(True))
    assert np.isnan(stats.share_above(0)).all()
    assert np.isnan(hookstats.measure(torch.full((4,), NAN), None).share_below(1.0))
    mixed = torch.tensor([[NAN, 1.0], [NAN, 3.0]])
    share = hookstats.measure(mixed, 1, ExponentBins(True)).share_above(2)
    assert np.isnan(share[0])
    assert share[1] == 0.5


def test_gradients_that_were_scaled_have_shares_of_their_own_values() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
    mon = hookstats.attach(model, tensors="grad_output")
    output = model(torch.randn(500, 8))
    output.retain_grad()
    scaler.scale(output.square().sum()).backward()
    assert output.grad is not None
    gradient = (output.grad / 1000).flatten().numpy()
    scaled.show(scaler, model)
    stats = mon.snapshot()["1", "grad_output"]
    assert stats.share_above(0) == (gradient > 0).mean()
    assert stats.share_above(1.0) == pytest.approx((gradient > 1.0).mean(), abs=0.02)
