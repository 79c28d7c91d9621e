"""Tests of losses in formats with a scale for each block, against quantising in float64 and by torchao."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch

import hookstats
from hookstats import ExponentBins, Site, rules
from hookstats.rules import BlockFit
from tests import scaled
from tests.numbers.test_low_precision import measured
from tests.reference import Array


class Element(NamedTuple):
    """A float format: 2^smallest_normal is its smallest normal value, `bits` are those of its mantissa."""

    largest: float
    smallest_normal: int
    bits: int


E2M1 = Element(6.0, 0, 1)
E4M3 = Element(448.0, -6, 3)
ELEMENTS = {"mxfp8_e4m3": E4M3, "mxfp8_e5m2": Element(57344.0, -14, 2), "mxfp4": E2M1, "nvfp4": E2M1}
MX = [name for name in ELEMENTS if name != "nvfp4"]


def rounded(x: Array, element: Element) -> Array:
    """Round to nearest, ties to even, with too large values clipped to the largest."""
    with np.errstate(divide="ignore"):
        exponent = np.maximum(np.floor(np.log2(np.abs(x))), element.smallest_normal)
    step = np.exp2(exponent - element.bits)
    return np.clip(np.rint(x / step) * step, -element.largest, element.largest)


def quantised(x: Array, format: str) -> Array:
    """Quantise rows ``[n, width]`` in float64, with blocks along the width. Blocks keep their infinities and NaN."""
    element, size = ELEMENTS[format], 16 if format == "nvfp4" else 32
    tensor_scale = np.abs(x[np.isfinite(x)]).max(initial=0) / (448 * 6)
    result = np.empty_like(x)
    for first in range(0, x.shape[1], size):
        block = x[:, first : first + size]
        largest = np.abs(block).max(1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            if format == "nvfp4":
                scale = rounded(largest / 6 / tensor_scale, E4M3) * tensor_scale
            else:
                shared = np.floor(np.log2(largest)) - math.floor(math.log2(element.largest))
                scale = np.exp2(np.clip(shared, -127, 127))
            quotient = np.where(scale > 0, block / scale, 0)
            result[:, first : first + size] = np.where(np.isfinite(largest), rounded(quotient, element) * scale, np.nan)
    return result


def share_lost(x: torch.Tensor, format: str, dim: int = -1) -> float:
    """Compute the share lost of the values that are not 0, in blocks that are finite."""
    wide = x.double().numpy().reshape(-1, x.shape[-1])
    wide = wide if dim == -1 else wide.T
    result = quantised(wide, format)
    some = (wide != 0) & ~np.isnan(result)
    return float((result[some] == 0).mean())


def fit_of(x: torch.Tensor, format: str, dim: int = -1) -> BlockFit:
    bins = ExponentBins(block=16 if format == "nvfp4" else 32, block_dim=dim)
    found = rules.fit(measured(x, histogram=bins), format)
    (one,) = [each for each in found if each.site == Site("tensor0", "output")]
    assert isinstance(one, BlockFit)
    assert one.format == format
    return one


@functools.cache
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    wide = normal(60, 100) * torch.exp2(12 * normal(60, 100))
    outliers = normal(64, 128)
    outliers[:, 17] *= 300
    sparse = normal(64, 96).relu()
    sparse[:, 40:70] = 0
    heavy = normal(33, 77) / normal(33, 77)
    poisoned = normal(64, 96)
    poisoned[3, 4], poisoned[20, 90] = float("nan"), float("inf")
    powers = torch.exp2(-torch.arange(96.0).remainder(40)).repeat(8, 1)
    return {
        "normal": normal(64, 128),
        "wide": wide,
        "outliers": outliers,
        "sparse": sparse,
        "heavy": heavy,
        "poisoned": poisoned,
        "powers of two": powers,
        "just above": powers * (1 + 2.0**-7),
        "short": normal(40, 5),
        "tokens": normal(2, 30, 48) * torch.exp2(6 * normal(2, 30, 1)),
        "bfloat16": (normal(64, 128) * torch.exp2(4 * normal(64, 128))).bfloat16(),
        "float16 with subnormals": (normal(64, 128) * 2.0**-20).half(),
    }


@pytest.mark.parametrize("kind", tensors())
@pytest.mark.parametrize("format", MX)
@pytest.mark.parametrize("dim", [-1, 0])
def test_what_mx_formats_lose_is_exact(kind: str, format: str, dim: int) -> None:
    x = tensors()[kind]
    found = fit_of(x, format, dim)
    expected = share_lost(x, format, dim)
    assert found.lost == (pytest.approx(expected, rel=1e-12), pytest.approx(expected, rel=1e-12))
    assert found.standard_error == 0
    assert (found.nonfinite > 0) == (kind == "poisoned")


@pytest.mark.parametrize("kind", tensors())
@pytest.mark.parametrize("dim", [-1, 0])
def test_what_nvfp4_loses_lies_between_its_bounds(kind: str, dim: int) -> None:
    x = tensors()[kind]
    least, most = fit_of(x, "nvfp4", dim).lost
    assert least <= share_lost(x, "nvfp4", dim) <= most
    if kind == "normal":
        assert most - least < 0.2


@pytest.mark.parametrize("format", ELEMENTS)
@pytest.mark.parametrize("power", [-90, -110, -120, -127, -135, -140, -148])
def test_where_exponents_end_bounds_hold(format: str, power: int) -> None:
    """Values lie where the scales of MX end, and where they are subnormal."""
    generator = torch.Generator().manual_seed(1)
    x = (
        torch.randn(64, 128, generator=generator)
        * torch.exp2(6 * torch.randn(64, 128, generator=generator))
        * 2.0**power
    )
    x[5] *= 2.0**40
    assert (x != 0).any()
    least, most = fit_of(x, format).lost
    assert least <= share_lost(x, format) <= most


def test_every_fuzzed_tensor_lies_between_its_bounds() -> None:
    generator = torch.Generator().manual_seed(2)
    for number in range(60):
        shape = torch.randint(1, 70, (2,), generator=generator).tolist()
        x = torch.randn(shape, generator=generator) * torch.exp2(
            float(torch.randint(0, 20, (1,), generator=generator)) * torch.randn(shape, generator=generator)
        )
        x *= torch.rand(shape, generator=generator) > 0.2
        if not x.count_nonzero():
            continue
        for format in ELEMENTS:
            least, most = fit_of(x, format, -(number % 2)).lost
            expected = share_lost(x, format, -(number % 2))
            assert least - 1e-12 <= expected <= most + 1e-12, (number, format)
            assert format == "nvfp4" or most - least < 1e-12 or x[x != 0].abs().min() < 2.0**-126


@pytest.mark.parametrize("format", ELEMENTS)
@pytest.mark.parametrize("kind", ["normal", "outliers", "sparse", "bfloat16", "powers of two"])
def test_the_casts_of_torchao_lose_as_much(format: str, kind: str) -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = tensors()[kind]
    if format == "nvfp4":
        _, packed = nvfp4.nvfp4_quantize(x, 16, nvfp4.per_tensor_amax_to_scale(x.abs().max().float()))
    else:
        element = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2}.get(
            format, torch.float4_e2m1fn_x2
        )
        _, packed = mx.to_mx(x, element, 32)
    data = packed.view(torch.uint8)
    codes = torch.cat([data & 7, data >> 4 & 7]) if format in ("mxfp4", "nvfp4") else data & 127
    lost = (int((codes == 0).sum()) - int((x == 0).sum())) / int((x != 0).sum())
    least, most = fit_of(x, format).lost
    assert least - 1e-12 <= lost <= most + 1e-12
    assert lost > 0 or kind != "outliers" or format.startswith("mxfp8")


def small_blocks(relative: float, *values: float) -> torch.Tensor:
    """The largest value of a tensor in one block; in the others 1 and these values, which `relative` makes small."""
    x = torch.zeros(9, 16)
    x[0, 0] = 1 / relative
    x[1:] = torch.tensor([1.0, *values]).repeat(16)[:16]
    return x


def test_a_block_whose_nvfp4_scale_is_0_may_lose_all() -> None:
    for largest in (1.0, 1.99):
        x = largest * small_blocks(2.0**-20, 0.9)
        assert share_lost(x, "nvfp4") > 0.99
        assert fit_of(x, "nvfp4").lost == (0, 128 / 129)


def test_a_block_whose_nvfp4_scale_is_rounded_far_down_may_keep_more() -> None:
    x = small_blocks(1.49 * 2.0**-9 / 448, *[0.03] * 15)
    assert share_lost(x, "nvfp4") == 0
    assert fit_of(x, "nvfp4").lost == (0, 1)
    just_normal = small_blocks(1.01 * 2.0**-8 / 448, *[0.03] * 15)
    assert fit_of(just_normal, "nvfp4").lost == (120 / 129, 120 / 129)
    assert share_lost(just_normal, "nvfp4") == 120 / 129


@pytest.mark.parametrize(("format", "bins"), [("nvfp4", ExponentBins(block=16)), ("float8_e5m2", ExponentBins())])
def test_gradients_are_judged_without_the_scale_of_a_grad_scaler(format: str, bins: ExponentBins) -> None:
    found = []
    for scale in (1.0, 2.0**16):
        model, scaler = torch.nn.Sequential(torch.nn.ReLU6()), torch.amp.GradScaler("cpu", init_scale=scale)
        model.register_parameter("unused", torch.nn.Parameter(torch.zeros(1)))
        kinds = {"every": 1, "tensors": "grad_output", "histogram": bins}
        with hookstats.attach(model, **kinds) as monitor:  # type: ignore[arg-type]
            x = torch.ones(9, 16, requires_grad=True)
            (model(x) * small_blocks(2.0**-16, 0.9, 0.04)).sum().mul(scale).backward()
            scaled.show(scaler, model)
            found.append(rules.fit(monitor.snapshot(), format))
    assert found[0] == found[1] != []


def test_a_format_needs_blocks_of_its_size() -> None:
    x = tensors()["normal"]
    for bins, told in ((ExponentBins(), r"ExponentBins\(\)"), (ExponentBins(block=16), r"ExponentBins\(block=16\)")):
        with pytest.raises(
            ValueError, match=rf"mxfp4: expected sites measured with ExponentBins\(block=32\), got {told}"
        ):
            rules.fit(measured(x, histogram=bins), "mxfp4")
    with pytest.raises(ValueError, match=r"format: expected one of float16, .*mxfp8_e4m3.*nvfp4; got 'fp4'"):
        rules.fit(measured(x), "fp4")


def large() -> dict[str, Callable[[torch.Generator], torch.Tensor]]:
    """Tensors of which some blocks are counted, of many kinds."""

    def normal(g: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g)

    def spread(g: torch.Generator, by: torch.Tensor) -> torch.Tensor:
        return normal(g, 500, 256) * torch.exp2(by * normal(g, 500, 256))

    def with_outliers(g: torch.Generator) -> torch.Tensor:
        x = normal(g, 500, 256)
        x[:, torch.randperm(256, generator=g)[:3]] *= 200
        return x

    return {
        "all alike": lambda g: normal(g, 500, 256),
        "each row of its scale": lambda g: normal(g, 500, 256) * torch.exp2(8 * normal(g, 500, 1)),
        "each row of its spread": lambda g: spread(g, 3 * normal(g, 500, 1)),
        "some rows alone": lambda g: spread(g, 4.0 * (torch.rand(500, 1, generator=g) < 0.1)),
        "each column of its spread": lambda g: spread(g, 3 * normal(g, 1, 256)),
        "rising from row to row": lambda g: spread(g, torch.linspace(0, 4, 500)[:, None]),
        "outlier channels": with_outliers,
        "two thirds of the blocks": lambda g: spread(g, 3 * normal(g, 500, 1))[:190],
        "one row": lambda g: spread(g, torch.tensor(2.0)).view(1, -1)[:, :99_991],
        "narrow": lambda g: spread(g, 3 * normal(g, 500, 1))[:, :40].repeat(8, 1),
    }


@pytest.mark.parametrize(("format", "dim"), [("mxfp4", -1), ("mxfp4", 0), ("mxfp8_e4m3", -1)])
def test_the_standard_error_is_how_far_samples_are_off(format: str, dim: int) -> None:
    generator, off = torch.Generator().manual_seed(0), dict[str, Array]()
    for kind, make in large().items():
        found = []
        for _ in range(10):
            x = make(generator)
            fit = fit_of(x, format, dim)
            assert 0 < fit.standard_error < 0.02
            found.append((fit.lost[0] - share_lost(x, format, dim)) / fit.standard_error)
        off[kind] = np.sqrt(np.mean(np.square(found)))
    del off["one row"]  # along the other dimension, blocks of one value, of which none is lost
    assert 0.7 < np.sqrt(np.mean(np.square(list(off.values())))) < 1.5  # 1.18, were all groups' means normal
    assert format == "mxfp8_e4m3" or all(0.3 < each < 2.5 for each in off.values()), off


def test_a_sample_in_which_nothing_is_lost_is_no_proof() -> None:
    x = torch.ones(2000, 64)
    found = fit_of(x, "mxfp4")
    assert found.lost == (0, 0)
    assert found.standard_error == pytest.approx(math.sqrt(1 - 1024 / 4000) / (1024 * 32))
    assert fit_of(x[:512], "mxfp4").standard_error == 0


def test_tensors_of_zeros_alone_are_left_out() -> None:
    found = rules.fit(measured(torch.zeros(4, 64), histogram=ExponentBins(block=32)), "mxfp4")
    assert [each.site for each in found if each.site.name == "tensor0"] == []
