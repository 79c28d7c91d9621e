"""Kurtosis, estimated from the histogram by exponent, beside that of the same data."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hookstats
from hookstats import ExponentBins, LinearBins
from tests import reference
from tests.conftest import ROOT
from tests.numbers.samples import KINDS


def normal(n: int = 100_000) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("x", [normal().relu(), normal().exp()], ids=["relu", "lognormal"])
def test_kurtosis_does_not_depend_on_the_sign(x: torch.Tensor) -> None:
    assert hookstats.measure(-x, None).kurtosis() == pytest.approx(hookstats.measure(x, None).kurtosis())


def stated() -> list[tuple[str, int, float]]:
    """Kind of data, how many values, and how far off `kurtosis` may be: of the table in docs/numbers.md."""
    lines = (ROOT / "docs" / "numbers.md").read_text().split("| values | 100 |")[1].split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    sizes = [100, *(int(cell.replace(",", "")) for cell in rows[0])]
    return [
        (kind, n, float(cell.split()[0]) / 100)
        for kind, *cells in rows[2:]
        for n, cell in zip(sizes, cells, strict=True)
    ]


def test_the_bounds_of_every_kind_are_stated() -> None:
    assert [kind for kind, n, _ in stated() if n == 1000] == list(KINDS)


@pytest.mark.parametrize(("kind", "n", "bound"), stated())
def test_kurtosis_is_as_near_as_is_stated(kind: str, n: int, bound: float) -> None:
    generator = np.random.default_rng(n)
    for draw in KINDS[kind]:
        for number in range(4 if n > 10_000 else 20):
            scale = (1.0, 3000.0, 1e-6)[number % 3] * 2 ** generator.uniform(0, 1)  # edges are powers of two
            x = torch.tensor(draw(generator, n) * scale)
            x = x.to(torch.bfloat16 if number % 2 else torch.float32)
            estimate = hookstats.measure(x, None).kurtosis()
            if abs(x.double().mean()) < 1.9 * x.double().std():
                assert abs(estimate / reference.kurtosis(x.double().numpy()) - 1) <= bound, (number, x.dtype)


def test_kurtosis_is_no_estimate_where_most_values_are_a_single_one() -> None:
    """docs/numbers.md says so, and readers need to know."""
    generator = np.random.default_rng(0)
    worst = 0.0
    for scale in (1.0, 1.1, 1.2, 1.3, 1.4):
        x = torch.tensor(scale * np.where(generator.random(10_000) < 0.9, 0.7, generator.standard_normal(10_000)))
        worst = max(worst, abs(hookstats.measure(x, None).kurtosis() / reference.kurtosis(x.numpy()) - 1))
    assert 0.3 < worst < 1.5


@pytest.mark.parametrize("outlier", [10.0, 100.0, -1000.0])
def test_a_single_outlier_is_taken_as_it_is(outlier: float) -> None:
    x = torch.cat([normal(), torch.tensor([outlier])])
    expected = reference.kurtosis(x.double().numpy())
    assert hookstats.measure(x, None).kurtosis() == pytest.approx(expected, rel=0.07 if outlier == 10 else 0.005)


def test_kurtosis_of_two_points_is_exact() -> None:
    x = torch.tensor([0.0, 4.0]).repeat(50)
    assert hookstats.measure(x, None).kurtosis() == pytest.approx(1)
    assert hookstats.measure(torch.tensor([-2.0, 2.0, 2.0, -2.0]), None).kurtosis() == pytest.approx(1)
    mixed = torch.cat([x, torch.tensor([float("nan"), float("inf")])])
    assert hookstats.measure(mixed, None).kurtosis() == pytest.approx(1)


def test_kurtosis_is_not_a_number_where_bins_do_not_resolve_the_data() -> None:
    for x in (normal() + 5, torch.full((9,), 3.0), torch.zeros(9), torch.ones(1), torch.full((4,), float("nan"))):
        assert np.isnan(hookstats.measure(x, None).kurtosis())


def test_kurtosis_needs_a_histogram_with_signs() -> None:
    x = normal(100)
    with pytest.raises(ValueError, match="kurtosis: expected a site with a histogram"):
        hookstats.measure(x, None, None).kurtosis()
    for bins in (ExponentBins(per_channel=True), LinearBins(-1, 1, 5)):
        with pytest.raises(ValueError, match=r"kurtosis: expected a histogram of ExponentBins\(\), got one of"):
            hookstats.measure(x, None, bins).kurtosis()
