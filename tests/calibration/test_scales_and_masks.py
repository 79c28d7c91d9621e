"""Calibration.smoothquant and .wanda: against the authors' formulas and torchao's observers, on the same batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hookstats
from hookstats.calibration.weights import find_weight
from hookstats.results import Calibration, InputStats
from tests.calibration.small import calibrate_small, llama, rows_of, sentences, watch_inputs


class WrappedGPT:
    """The Wanda authors' own class (lib/layerwrapper.py, MIT licence), for Linear."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self.columns = layer.weight.data.shape[1]
        self.scaler_row = torch.zeros(self.columns)
        self.nsamples = 0

    def add_batch(self, inp: torch.Tensor) -> None:
        if len(inp.shape) == 2:
            inp = inp.unsqueeze(0)
        tmp = inp.shape[0]
        if len(inp.shape) == 3:
            inp = inp.reshape((-1, inp.shape[-1]))
        inp = inp.t()
        self.scaler_row *= self.nsamples / (self.nsamples + tmp)
        self.nsamples += tmp
        inp = inp.type(torch.float32)
        self.scaler_row += torch.norm(inp, p=2, dim=1) ** 2 / self.nsamples

    def mask(self, sparsity_ratio: float) -> torch.Tensor:
        """lib/prune.py, prune_wanda."""
        metric = torch.abs(self.layer.weight.data) * torch.sqrt(self.scaler_row.reshape((1, -1)))
        mask = torch.zeros_like(metric) == 1
        indices = torch.sort(metric, dim=-1, stable=True)[1][:, : int(metric.shape[1] * sparsity_ratio)]
        return mask.scatter_(1, indices, True)


def smooth_scales(fcs: list[nn.Linear], act_scales: torch.Tensor, alpha: float) -> torch.Tensor:
    """Compute the scales as the SmoothQuant authors do (smoothquant/smooth.py, MIT licence), changing no weights."""
    weight_scales = torch.cat([fc.weight.abs().max(dim=0, keepdim=True)[0] for fc in fcs], dim=0)
    weight_scales = weight_scales.max(dim=0)[0].clamp(min=1e-5)
    return (act_scales.pow(alpha) / weight_scales.pow(1 - alpha)).clamp(min=1e-5)


GROUPS = [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)]


def test_layers_that_are_given_the_same_inputs_are_a_group() -> None:
    _, _, calibration = calibrate_small()
    parts = ("self_attn", "self_attn", "mlp", "mlp")
    expected = [
        tuple(f"model.layers.{layer}.{part}.{name}" for name in names)
        for layer in range(2)
        for part, names in zip(parts, GROUPS, strict=True)
    ]
    assert calibration.groups == [*expected, ("lm_head",)]


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(InputStats)])
def test_inputs_that_differ_in_one_bit_are_no_group(field: str) -> None:
    """Such as x and -x, whose means alone tell them apart."""
    _, _, calibration = calibrate_small()
    stats = calibration["lm_head"]
    value = np.array(getattr(stats, field))
    flat = value.reshape(-1)
    flat[-1] = np.nextafter(flat[-1], np.inf) if value.dtype == np.float64 else flat[-1] + 1
    other = dataclasses.replace(stats, **{field: value})
    assert Calibration({"a": stats, "b": dataclasses.replace(stats)}, {}).groups == [("a", "b")]
    assert Calibration({"a": stats, "b": other}, {}).groups == [("a",), ("b",)]


def test_layers_that_are_given_zeros_or_nothing_are_no_group() -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 2) for name in "abcd"})

    def forward(model: Any, batch: torch.Tensor) -> None:
        model["a"](batch), model["b"](batch)

    calibration = hookstats.calibrate(model, [torch.zeros(3, 4)], forward=forward)
    assert calibration.groups == [("a",), ("b",), ("c",), ("d",)]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.85, 1.0])
def test_scales_are_those_of_the_authors_of_smoothquant(alpha: float) -> None:
    model, kept, calibration = calibrate_small()
    scales = calibration.smoothquant(alpha)
    assert list(scales) == list(calibration)
    for names in calibration.groups:
        layers = [model.get_submodule(name) for name in names]
        act_scales = rows_of(kept[names[0]]).abs().amax(0).float()
        expected = smooth_scales(layers, act_scales, alpha)  # type: ignore[arg-type]
        for name in names:
            assert scales[name].dtype == torch.float32
            torch.testing.assert_close(scales[name], expected.detach(), rtol=1e-6, atol=0)
            assert scales[name] is scales[names[0]]


def test_alpha_is_a_half_and_sparsity_too_if_nothing_is_said() -> None:
    _, _, calibration = calibrate_small()
    assert torch.equal(calibration.smoothquant()["lm_head"], calibration.smoothquant(0.5)["lm_head"])
    assert torch.equal(calibration.wanda()["lm_head"], calibration.wanda(0.5)["lm_head"])


def test_tiny_weights_and_channels_of_zeros_have_scales_from_1e_5() -> None:
    model = nn.Sequential(nn.Linear(4, 2, bias=False))
    model[0].weight.data[:, 0] = 1e-9
    x = torch.tensor([[1.0, 0.0, 4.0, 1e-30]])
    scales = hookstats.calibrate(model, [x]).smoothquant()["0"]
    expected = smooth_scales([model[0]], x[0].abs(), 0.5)
    torch.testing.assert_close(scales, expected.detach(), rtol=1e-6, atol=0)
    assert scales[0].item() == pytest.approx(1e-5**-0.5)
    assert scales[1].item() == pytest.approx(1e-5)


def test_maxima_are_those_of_torchao_to_the_bit_and_its_factors_are_the_scales_of_one_layer() -> None:
    core = pytest.importorskip("torchao.prototype.smoothquant.core")
    _, _, calibration = calibrate_small()
    model = llama()
    observers: dict[str, Any] = {}

    def see(name: str, module: nn.Module, x: torch.Tensor) -> None:
        if name not in observers:
            weight = module.weight.detach()
            observers[name] = (
                core.RunningAbsMaxSmoothQuantObserver(weight),
                core.SmoothQuantObserver(weight),
            )
        for observer in observers[name]:
            observer(x)

    with watch_inputs(model, nn.Linear, see), torch.no_grad():
        for batch in sentences():
            model(batch)
    scales = calibration.smoothquant()
    assert set(observers) == set(calibration)
    for name, (running, keeping) in observers.items():
        np.testing.assert_array_equal(calibration[name].abs_max, running.x_abs_max.double().numpy())
        if (name,) in calibration.groups:  # it knows no groups, and adds 1.2e-7 where the authors clamp
            factor = keeping.calculate_qparams()[0]
            torch.testing.assert_close(scales[name], factor, rtol=1e-5, atol=0)


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 0.77, 1.0])
def test_masks_are_those_of_the_authors_of_wanda(sparsity: float) -> None:
    model, kept, calibration = calibrate_small()
    masks = calibration.wanda(sparsity)
    assert list(masks) == list(calibration)
    for name, mask in masks.items():
        theirs = WrappedGPT(model.get_submodule(name))  # type: ignore[arg-type]
        for x in kept[name]:
            theirs.add_batch(x)
        assert mask.dtype == torch.bool
        assert int((mask != theirs.mask(sparsity)).sum()) == 0, name


def test_of_a_row_whose_share_is_no_whole_number_fewer_are_pruned() -> None:
    model = nn.Sequential(nn.Linear(10, 7))
    calibration = hookstats.calibrate(model, [torch.randn(5, 10)])
    for sparsity, pruned in ((0.37, 3), (0.39, 3), (0.4, 4), (0.99, 9), (0.05, 0)):
        assert calibration.wanda(sparsity)["0"].sum(1).tolist() == [pruned] * 7


def test_equal_importances_are_pruned_from_the_first_on() -> None:
    model = nn.Sequential(nn.Linear(1000, 2))
    nn.init.constant_(model[0].weight, 0.5)
    mask = hookstats.calibrate(model, [torch.ones(3, 1000)]).wanda()["0"]
    assert mask.tolist() == [[True] * 500 + [False] * 500] * 2


def test_scales_come_in_the_order_of_the_model() -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 2) for name in "abc"})

    def forward(model: Any, batch: torch.Tensor) -> None:
        model["a"](batch), model["b"](2 * batch), model["c"](batch)

    calibration = hookstats.calibrate(model, [torch.randn(3, 4)], forward=forward)
    assert calibration.groups == [("a", "c"), ("b",)]
    assert list(calibration.smoothquant()) == ["a", "b", "c"]


@pytest.mark.parametrize("groups", [1, 2])
def test_scales_and_masks_of_a_convolution(groups: int) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(6, 4, 3, groups=groups)
    x = torch.randn(2, 6, 8, 8) * torch.arange(1.0, 7)[:, None, None]
    calibration = hookstats.calibrate(nn.Sequential(layer), [x])
    weight, per_group = layer.weight.detach().double(), 6 // groups
    largest = torch.stack(
        [
            weight[4 // groups * (c // per_group) : 4 // groups * (c // per_group + 1), c % per_group].abs().max()
            for c in range(6)
        ]
    )
    expected = (x.abs().amax((0, 2, 3)) / largest).sqrt().float()
    torch.testing.assert_close(calibration.smoothquant()["0"], expected, rtol=1e-6, atol=0)
    norms = x.double().square().sum((0, 2, 3)).sqrt()
    mask = calibration.wanda(0.3)["0"]
    assert mask.shape == layer.weight.shape
    for row in range(4):
        first = per_group * (row // (4 // groups))
        importance = (weight[row].abs() * norms[first : first + per_group, None, None]).flatten()
        least = importance.argsort(stable=True)[: int(len(importance) * 0.3)]
        assert mask[row].flatten().nonzero().flatten().tolist() == sorted(least.tolist())


def test_scales_of_a_layer_whose_weight_is_bf16_are_those_of_its_values() -> None:
    layer = nn.Linear(6, 3).bfloat16()
    x = torch.randn(5, 6).bfloat16()
    calibration = hookstats.calibrate(nn.Sequential(layer), [x])
    expected = (x.double().abs().amax(0) / layer.weight.detach().double().abs().amax(0)).sqrt()
    torch.testing.assert_close(calibration.smoothquant()["0"], expected.float(), rtol=1e-6, atol=0)
    assert find_weight(layer).largest().dtype == torch.float64


def test_neither_changes_the_model_and_both_read_its_weights_as_they_are_now() -> None:
    model = llama()
    calibration = hookstats.calibrate(model, sentences(2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scales = calibration.smoothquant()
    calibration.wanda()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.get_submodule("lm_head").weight.data *= 4
    torch.testing.assert_close(calibration.smoothquant()["lm_head"], scales["lm_head"] / 2)


def test_a_layer_without_a_token_has_neither_scales_nor_a_mask() -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 2) for name in "ab"})
    calibration = hookstats.calibrate(model, [torch.randn(3, 4)], forward=lambda model, batch: model["b"](batch))
    assert list(calibration.smoothquant()) == list(calibration.wanda()) == ["b"]


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), "0.5", None, True])
def test_alpha_and_sparsity_are_from_0_to_1(value: Any) -> None:
    _, _, calibration = calibrate_small()
    with pytest.raises(ValueError, match="smoothquant: expected alpha from 0 to 1, got"):
        calibration.smoothquant(value)
    with pytest.raises(ValueError, match="wanda: expected sparsity from 0 to 1, got"):
        calibration.wanda(value)
