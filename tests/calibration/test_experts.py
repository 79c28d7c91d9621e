"""Mixtures of experts: tokens of each, and those that got none, of modules and of parameters that hold them all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import hookstats
from hookstats import calibrate
from tests.calibration.small import mixtral, sentences

EXPERTS, WIDTH, HIDDEN = 4, 8, 12


class Modules(nn.Module):
    """Experts that are modules; a token goes to the one that its first value says."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = x[:, 0].long() == number
            y[mine] = expert(x[mine])
        return y


def tokens_for(*experts: int) -> torch.Tensor:
    x = torch.randn(len(experts), WIDTH)
    x[:, 0] = torch.tensor(experts) + 0.5
    return x


def test_an_expert_that_is_a_module_and_got_no_token_is_named() -> None:
    calibration = calibrate(Modules(), [tokens_for(0, 0, 1, 3), tokens_for(0, 1)])
    assert {name: stats.tokens for name, stats in calibration.items()} == {
        "experts.0": 3,
        "experts.1": 2,
        "experts.2": 0,
        "experts.3": 1,
    }
    assert calibration.find_uncovered(2) == {"experts.2": 0, "experts.3": 1}


def test_experts_that_are_modules_are_given_their_own_rows() -> None:
    batches = [tokens_for(0, 2, 1, 3, 2), tokens_for(2, 1)]
    calibration, x = calibrate(Modules(), batches), torch.cat(batches)
    for number in range(EXPERTS):
        mine = x[x[:, 0].long() == number].double().numpy()
        np.testing.assert_array_equal(calibration[f"experts.{number}"].abs_max, abs(mine).max(0))


class Stacked(nn.Module):
    """The same with all weights in two parameters, each with inputs first or last, multiplied in several ways."""

    def __init__(self, way: str, inputs_first: bool) -> None:
        super().__init__()
        self.way = way
        self.inputs_first = inputs_first
        self.experts = nn.Module()
        shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
        for key, (inputs, outputs) in shapes.items():
            shape = (EXPERTS, inputs, outputs) if inputs_first else (EXPERTS, outputs, inputs)
            setattr(self.experts, key, nn.Parameter(torch.randn(shape)))

    def product(self, x: torch.Tensor, key: str, chosen: torch.Tensor) -> torch.Tensor:
        weight = getattr(self.experts, key)
        weight = weight if self.inputs_first else weight.mT  # [experts, inputs, outputs]
        if self.way == "gathered":
            return torch.bmm(x[:, None], weight[chosen])[:, 0]
        if self.way == "every":
            every = torch.bmm(x.expand(EXPERTS, *x.shape), weight)
            return every[chosen, torch.arange(len(x))]
        if self.way == "grouped":
            order = chosen.argsort(stable=True)
            ends = torch.bincount(chosen, minlength=EXPERTS).cumsum(0).int()
            y = torch.empty(len(x), weight.shape[2])
            y[order] = functional.grouped_mm(x[order], weight, offs=ends)
            return y
        y = torch.empty(len(x), weight.shape[2])
        for number in chosen.unique():
            rows, own = x[chosen == number], weight[number]
            y[chosen == number] = {
                "linear": lambda rows, own: functional.linear(rows, own.T),
                "matmul": lambda rows, own: rows @ own,
                "mm": lambda rows, own: rows.mm(own),
                "halves": lambda rows, own: torch.cat([rows @ half for half in own.chunk(2, dim=1)], dim=1),
            }[self.way](rows, own)
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[:, 0].long()
        return self.product(self.product(x, "up", chosen).relu(), "down", chosen)


@pytest.mark.parametrize("inputs_first", [False, True])
@pytest.mark.parametrize("way", ["linear", "matmul", "mm", "grouped"])
def test_experts_in_one_parameter_are_measured_row_by_row(way: str, inputs_first: bool) -> None:
    torch.manual_seed(0)
    model = Stacked(way, inputs_first)
    batches = [tokens_for(0, 3, 1, 3, 0), tokens_for(1, 1)]
    calibration, x = calibrate(model, batches), torch.cat(batches)
    assert list(calibration) == [f"experts.{number}.{key}" for key in ("up", "down") for number in range(EXPERTS)]
    chosen = x[:, 0].long()
    with torch.no_grad():
        hidden = model.product(x, "up", chosen).relu()
    for key, inputs in (("up", x), ("down", hidden)):
        for number in (0, 1, 3):
            stats, mine = calibration[f"experts.{number}.{key}"], inputs[chosen == number].double().numpy()
            assert stats.tokens == len(mine)
            np.testing.assert_allclose(stats.abs_max, abs(mine).max(0), rtol=1e-5)
            np.testing.assert_allclose(stats.l2_norm, np.sqrt((mine**2).sum(0)), rtol=1e-5)
    assert calibration.find_uncovered(1) == {"experts.2.up": 0, "experts.2.down": 0}
    assert len(calibration["experts.2.down"].abs_max) == HIDDEN
    assert calibration.not_covered == ()


@pytest.mark.parametrize("inputs_first", [False, True])
def test_scales_and_masks_of_stacked_experts_are_those_of_their_own_weights(inputs_first: bool) -> None:
    torch.manual_seed(0)
    model = Stacked("linear", inputs_first)
    calibration = calibrate(model, [tokens_for(0, 3, 1, 3, 0)])
    scales, masks = calibration.smoothquant(), calibration.wanda(0.5)
    assert set(scales) == set(masks) == {f"experts.{number}.{key}" for key in ("up", "down") for number in (0, 1, 3)}
    for name, mask in masks.items():
        _, number, key = name.split(".")
        own = getattr(model.experts, key).detach()[int(number)]
        assert mask.shape == own.shape
        weight = (own.T if inputs_first else own).double()  # [outputs, inputs]
        stats = calibration[name]
        expected = (stats.abs_max / weight.abs().amax(0).numpy()) ** 0.5
        np.testing.assert_allclose(scales[name].numpy(), np.maximum(expected, 1e-5), rtol=1e-6)
        least = (weight.abs() * torch.from_numpy(stats.l2_norm)).argsort(dim=1, stable=True)[:, : weight.shape[1] // 2]
        wanted = torch.zeros_like(weight, dtype=torch.bool).scatter_(1, least, True)
        assert torch.equal(mask.T if inputs_first else mask, wanted)


@pytest.mark.parametrize("way", ["gathered", "every", "halves"])
def test_stacked_experts_whose_tokens_nobody_shows_are_named_as_not_covered(way: str) -> None:
    calibration = calibrate(Stacked(way, True), [tokens_for(0, 3, 1)])
    assert len(calibration) == 0
    assert calibration.not_covered == ("experts.up", "experts.down")
    assert calibration.find_uncovered() == {"experts.up": 0, "experts.down": 0}
    assert "not covered: experts.up: which tokens" in calibration.table()
    assert repr(calibration) == "Calibration(0 layers, 2 without a token)"


def test_a_convolution_that_is_called_an_expert_is_a_layer() -> None:
    model = nn.ModuleDict({"expert": nn.Conv1d(6, 4, 3)})
    x = torch.randn(2, 6, 9)
    calibration = hookstats.calibrate(model, [x], forward=lambda model, x: model["expert"](x))
    assert {name: stats.tokens for name, stats in calibration.items()} == {"expert": 18}
    assert calibration.not_covered == ()


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_the_experts_of_a_mixtral_are_measured_however_they_are_multiplied(implementation: str) -> None:
    model = mixtral(implementation)
    routed: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda module, args, name=name: routed.setdefault(name, []).append((args[0].clone(), args[1].clone()))
        )
        for name, module in model.named_modules()
        if name.endswith("experts")
    ]
    calibration = calibrate(model, sentences(3))
    for handle in handles:
        handle.remove()
    assert len(routed) == 2
    assert sum("experts" in name for name in calibration) == 2 * 2 * EXPERTS
    for name, calls in routed.items():
        for number in range(EXPERTS):
            mine = torch.cat([x[(chosen == number).any(1)] for x, chosen in calls]).double().numpy()
            stats = calibration[f"{name}.{number}.gate_up_proj"]
            assert stats.tokens == calibration[f"{name}.{number}.down_proj"].tokens == len(mine)
            np.testing.assert_array_equal(stats.abs_max, abs(mine).max(0))
            assert len(calibration[f"{name}.{number}.down_proj"].abs_max) == 48


def test_experts_of_a_mixtral_whose_weights_are_gathered_first_are_named() -> None:
    calibration = calibrate(mixtral("batched_mm"), sentences(1))
    expected = {f"model.layers.{i}.mlp.experts.{key}_proj": 0 for i in range(2) for key in ("gate_up", "down")}
    assert calibration.find_uncovered(1) == expected


def test_a_glob_chooses_experts_alone() -> None:
    calibration = calibrate(mixtral("eager"), sentences(1), "*.1.mlp.experts")
    assert len(calibration) == 2 * EXPERTS
    assert all(name.startswith("model.layers.1.mlp.experts.") for name in calibration)
