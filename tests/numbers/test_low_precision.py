"""Tests of losses by a cast to low precision, estimated from the histogram, against the casts of torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import hookstats
from hookstats import ExponentBins, Site, Snapshot
from hookstats.rules import Fit, fit

FORMATS = {"float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


def measured(*tensors: torch.Tensor, **arguments: object) -> Snapshot:
    """The outputs of as many modules."""
    model = nn.ModuleList(nn.ReLU6() for _ in tensors)
    with hookstats.attach(model, every=1, tensors="output", **arguments) as monitor:  # type: ignore[arg-type]
        for number, tensor in enumerate(tensors):
            monitor.tap(tensor, f"tensor{number}")
        return monitor.snapshot()


def fit_of(tensor: torch.Tensor, format: str) -> Fit:
    (found,) = [each for each in fit(measured(tensor), format) if each.site == Site("tensor0", "output")]
    return found


def lost(tensor: torch.Tensor, scale: float, format: str) -> float:
    """The share of values that are not 0, and are 0 after a cast; but for ties, which are rounded to 0."""
    scaled, some = tensor * scale, tensor != 0
    tiny = torch.finfo(FORMATS[format]).smallest_normal * torch.finfo(FORMATS[format]).eps
    is_tie = scaled.abs() == tiny / 2
    return ((scaled.to(FORMATS[format]).float() == 0) & some & ~is_tie).sum().item() / some.sum().item()


@pytest.fixture
def wide() -> torch.Tensor:
    """Make values of many orders of magnitude, with zeros and subnormals."""
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(20_000, generator=generator) * torch.exp2(12 * torch.randn(20_000, generator=generator))
    tensor[:1000] = 0
    tensor[1000:1100] = 1e-40
    tensor[1100:1200] = 2.0**-10  # half the smallest e4m3fn
    return tensor


@pytest.mark.parametrize("format", FORMATS)
def test_what_underflows_is_exact_as_it_is_and_at_the_best_scale(wide: torch.Tensor, format: str) -> None:
    largest = torch.finfo(FORMATS[format]).max
    found = fit_of(wide, format)
    assert found.underflow == lost(wide.clamp(-largest, largest), 1.0, format) > 0.01
    scale = 2.0**found.exponent
    assert scale * wide.abs().max() <= largest < 2 * scale * wide.abs().max()
    assert found.scaled_underflow == lost(wide, scale, format) > 0.01


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("power", [0, 4, 9])
def test_what_overflows_lies_inside_its_bound(wide: torch.Tensor, format: str, power: int) -> None:
    tensor = wide * 2.0**power
    least, most = fit_of(tensor, format).overflow
    some = (tensor != 0).sum().item()
    assert least <= (tensor.abs() > torch.finfo(FORMATS[format]).max).sum().item() / some <= most
    assert 0 < most - least < 0.1


@pytest.mark.parametrize("format", FORMATS)
def test_a_tensor_whose_largest_value_fits_does_not_overflow(format: str) -> None:
    largest = torch.finfo(FORMATS[format]).max
    just = fit_of(torch.tensor([1.0, -largest]), format)
    assert (just.overflow, just.exponent) == ((0, 0), 0)
    beyond = fit_of(torch.tensor([1.0, -math.nextafter(largest, math.inf) * (1 + 1e-6)]), format)
    assert beyond.overflow[1] == 0.5
    assert beyond.exponent == -1


def test_sites_without_a_histogram_by_exponent_and_of_zeros_alone_are_left_out() -> None:
    assert fit(measured(torch.zeros(3)), "float16") == []
    assert fit(measured(torch.ones(3), histogram=None), "float16") == []
    assert fit(measured(torch.ones(3), histogram=ExponentBins(per_channel=True)), "float16") == []


def test_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected one of float16, float8_e4m3fn, .*nvfp4; got 'int8'"):
        fit(measured(torch.ones(3)), "int8")
