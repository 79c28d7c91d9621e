"""`Monitor.laws` says which laws a training is held against, and why not; what is broken by design can be declared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hookstats

LAWS = ["bias", "cross_entropy", "optimizer", "step", "replica", "reduction", "identity", "adjoint"]
TENSORS = ("output", "grad_output", "param_grad", "param_sample", "update_sample", "outside_update", "optimizer_law")
TENSORS += ("token_weights",)


def laws(
    path: Path | None,
    optimizer: Any = torch.optim.AdamW,
    options: Any = None,
    loss: Any = cross_entropy,
    given: Any = lambda loss: {"loss": loss},
    steps: int = 3,
    **attached: Any,
) -> tuple[Any, list[Any]]:
    """Train some steps and return the warnings and findings; path: the recording's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5, bias=False))
    own = optimizer(model.parameters(), 1e-2)
    sinks = [] if path is None else [hookstats.record(path, on_finding=None)]
    options = hookstats.Options() if options is None else options
    with hookstats.attach(model, every=1, sinks=sinks, options=options, **({"tensors": TENSORS} | attached)) as monitor:
        for step in range(steps):
            x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
            value = loss(model(x), x.argmax(1) % 5)
            value.backward()
            own.step()
            own.zero_grad()
            monitor.step(**given(value))
        said = monitor.laws()
        found = [] if path is None else monitor.check()
    return said, found


def test_each_law_says_where_it_is_applied_or_why_not(tmp_path: Path) -> None:
    said, found = laws(tmp_path)
    assert found == []
    assert list(said) == LAWS
    assert [law.name for law in said.values() if law.is_applied] == ["bias", "cross_entropy", "optimizer", "step"]
    assert said["bias"].where == "1 layer with a bias"
    assert said["cross_entropy"].where == "logits of 1 forwards, 32 tokens"
    assert said["optimizer"].where == said["step"].where == "3 parameters"
    assert "process_group" in said["replica"].where
    assert said["reduction"].where == "needs 'reduction' among the tensors"
    lines = str(said).splitlines()
    assert lines[0].split() == ["law", "applied", "where,", "or", "why", "not"]
    assert [line.split()[:2] for line in lines[1:3]] == [["bias", "yes"], ["cross_entropy", "yes"]]


@pytest.mark.parametrize(
    ("why", "how"),
    [
        ("the loss was not given", {"given": lambda loss: {}}),
        ("is not the mean over tokens", {"given": lambda loss: {"loss": 10 * loss}}),
        ("no plain cross entropy", {"loss": lambda x, y: cross_entropy(x, y, label_smoothing=0.1)}),
        ("needs 'grad_output' among the tensors", {"tensors": ("output", "param_grad")}),
        ("declared as broken by design", {"options": hookstats.Options(laws={"cross_entropy": False})}),
        ("no measured step has arrived", {"steps": 0}),
    ],
)
def test_why_a_cross_entropy_is_not_judged(tmp_path: Path, why: str, how: dict[str, Any]) -> None:
    law = laws(tmp_path, **how)[0]["cross_entropy"]
    assert not law.is_applied
    assert why in law.where


def test_an_optimizer_that_is_not_known_is_named_and_without_a_recording_nothing_judges(tmp_path: Path) -> None:
    said, _ = laws(tmp_path, torch.optim.RMSprop)
    assert said["optimizer"].where == "3 parameters: RMSprop is none of SGD, Adam, AdamW"
    said, _ = laws(None)
    assert {law.is_applied for law in said.values()} == {False}
    assert "hookstats.record" in said["bias"].where


def test_a_law_that_is_declared_is_not_judged(tmp_path: Path) -> None:
    how = {"loss": lambda x, y: 3 * cross_entropy(x, y), "given": lambda loss: {"loss": loss / 3}}
    (found,) = laws(tmp_path / "a", **how)[1]
    assert found.rule == "cross-entropy-gradient"
    assert found.value == pytest.approx(3, rel=1e-3)
    assert found.severity == "critical"
    declared = hookstats.Options(laws={"cross_entropy": False})
    assert laws(tmp_path / "b", options=declared, **how)[1] == []
    assert [each.rule for each in hookstats.load(tmp_path / "a").judge()] == ["cross-entropy-gradient"]
    again = hookstats.load(tmp_path / "b")
    assert again.judge() == []
    assert [each.rule for each in again.judge([hookstats.rules.cross_entropy_gradient])] == ["cross-entropy-gradient"]
