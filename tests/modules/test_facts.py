"""Tests of what attach reports about a model that it has not seen run."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats.modules.facts import facts, find_hidden


def said(model: nn.Module, caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, "hookstats"), hookstats.attach(model):
        pass
    lines = [each.getMessage() for each in caplog.records if each.levelno == level]
    return [each for each in lines if not each.startswith("attached to")]


def layers(count: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(count)))


def test_of_a_plain_model_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert said(layers(), caplog, logging.INFO) == said(layers(), caplog, logging.WARNING) == []


def test_dtypes_frozen_parameters_evaluation_and_ties_are_facts(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"body": layers(), "head": layers(1), "norm": nn.Sequential(nn.BatchNorm1d(10))})
    model["body"][1].bfloat16()
    model["body"][0].requires_grad_(False)
    model["head"][0].weight = model["body"][3].weight
    model["norm"].eval()
    assert said(model, caplog, logging.INFO) == [
        "the model: parameters are 76.2 % float32, 23.8 % bfloat16; 23.8 % of 420 parameter values are frozen; "
        "in evaluation mode: norm; tied: body.3.weight = head.0.weight"
    ]
    model.eval()
    assert "in evaluation mode: (model);" in said(model, caplog, logging.INFO)[0]
    assert said(model, caplog, logging.WARNING) == []


def test_of_many_names_three_are_shown(caplog: pytest.LogCaptureFixture) -> None:
    model = layers(6)
    for each in list(model)[1:]:
        each.eval()
    assert said(model, caplog, logging.INFO) == ["the model: in evaluation mode: 1, 2, 3 and 2 others"]


class Holder(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 10)
        self.held = held


@pytest.mark.parametrize(
    ("held", "kind", "values"),
    [
        ([nn.Linear(10, 10), nn.Linear(10, 10)], "a list", "220"),
        ((nn.Linear(10, 10),), "a tuple", "110"),
        ({"a": nn.Linear(10, 10), "b": None}, "a dict", "110"),
        ([nn.Parameter(torch.zeros(7))], "a list", "7"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_requires_gradients_and_is_in_no_module_is_a_warning(
    held: Any, kind: str, values: str, caplog: pytest.LogCaptureFixture
) -> None:
    (line,) = said(nn.Sequential(Holder(held)), caplog, logging.WARNING)
    assert line.startswith(
        f"0.held, {kind}, has {values} values that require gradients and are in no module of the model"
    )
    assert "nn.ModuleList" in line


def test_what_is_frozen_or_elsewhere_in_the_model_may_be_held_anywhere(caplog: pytest.LogCaptureFixture) -> None:
    teacher, shared = layers().requires_grad_(False), nn.Linear(10, 10)
    kept = torch.zeros(3, requires_grad=True)  # as whoever makes adversarial examples does
    for held in ([teacher], [shared], shared.weight * 2, [1, "a", None], {"a": [shared]}, kept, [kept], iter([])):
        assert said(nn.Sequential(shared, Holder(held)), caplog, logging.WARNING) == []
    model = nn.Sequential(shared)
    model._others = [nn.Linear(3, 3)]  # type: ignore[assignment]
    assert said(model, caplog, logging.WARNING) == []


class FullyShardedDataParallel(nn.Module):
    """Keeps, as FSDP1 does, in a list what it makes of its module's parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module
        self.params = [nn.Parameter(torch.zeros(7))]


def test_a_wrapper_is_not_looked_at_and_in_no_name() -> None:
    model = FullyShardedDataParallel(nn.Sequential(Holder([nn.Linear(10, 10)])))
    model._fsdp_wrapped_module[0].eval()  # type: ignore[operator, index]
    assert [each[:7] for each in find_hidden(model)] == ["0.held,"]
    assert facts(model) == ["in evaluation mode: 0"]


def test_models_that_torch_has_changed_are_no_surprise(caplog: pytest.LogCaptureFixture) -> None:
    lazy = nn.Sequential(Holder([nn.LazyLinear(3)]))
    assert "has parameters that require gradients" in said(lazy, caplog, logging.WARNING)[0]
    for model in (nn.utils.parametrizations.weight_norm(nn.LSTM(3, 3), "weight_hh_l0"), torch.jit.script(layers())):
        assert said(model, caplog, logging.WARNING) == []
    knotted = nn.Sequential(nn.Sequential(nn.Linear(3, 3)))
    knotted[0].parent = knotted
    assert find_hidden(knotted) == facts(knotted) == []


def test_a_model_that_cannot_be_looked_at_is_attached_to(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: nn.Module) -> list[str]:
        raise RecursionError("too deep")

    monkeypatch.setattr("hookstats.attaching.find_hidden", fail)
    assert said(layers(), caplog, logging.INFO) == ["the model could not be looked at: RecursionError('too deep')"]
