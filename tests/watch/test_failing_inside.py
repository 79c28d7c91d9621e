"""Tests of failures inside hookstats, in attach or delivery: nothing is left behind, and no step ends."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats.watch import guards
from tests.plain import hearing


def test_an_attach_that_fails_leaves_no_hook() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].register_forward_hook = None  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError):
        hookstats.attach(model)
    assert not model[0]._forward_hooks


@pytest.mark.parametrize(
    "where", ["Parameters", "Routers", "_join_ranks", "Delivery", "Monitor", "_collect_settings", "_report"]
)
def test_whatever_fails_while_it_is_attached_leaves_no_hook_and_no_recording(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt(where)

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    threads, monitors = threading.active_count(), guards.now.monitors
    with monkeypatch.context() as patched:
        patched.setattr(f"hookstats.attaching.{where}", broken)
        with pytest.raises(KeyboardInterrupt):
            hookstats.attach(model, every=1, tensors=("output", "input"), sinks=hookstats.record(tmp_path / "run"))
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    assert (threading.active_count(), guards.now.monitors) == (threads, monitors)
    with hookstats.attach(model, every=1, sinks=hookstats.record(tmp_path / "run")) as monitor:  # nobody writes it
        model(torch.ones(2, 3))
        monitor.step()
    assert len(hookstats.load(tmp_path / "run")) == 1


@pytest.mark.parametrize(
    ("where", "what"),
    [("skipping.Skipping.list_step", "could not be delivered"), ("drain.Pending.finish", "could not be read")],
)
def test_a_step_that_cannot_be_delivered_is_told_once_and_ends_no_training(
    where: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> Any:
        raise ValueError("no such number")

    model = nn.Linear(3, 3)
    for strict in (False, True):
        monitor = hookstats.attach(model, every=1, options=hookstats.Options(strict=strict))
        monkeypatch.setattr(f"hookstats.watch.{where}", broken)
        with hearing() as told, pytest.raises(ValueError, match="no such number") if strict else nullcontext():
            for _ in range(2):
                model(torch.ones(2, 3))
                assert monitor.step() is None
        assert [text for text in told if f"{what}: ValueError('no such number')" in text] == told
        assert len(told) == 1 - strict
        monkeypatch.undo()
        model(torch.ones(2, 3))
        assert monitor.step() is not None
        monitor.detach()


@pytest.mark.parametrize("where", ["skipping.Skipping.list_step", "drain.Pending.finish"])
def test_a_step_that_nobody_closed_and_cannot_be_delivered_is_told_at_detach(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> Any:
        raise ValueError("no such number")

    for strict in (False, True):
        model, handed = nn.Linear(3, 3), list[hookstats.Snapshot]()
        monitor = hookstats.attach(model, sinks=handed.append, options=hookstats.Options(strict=strict))
        model(torch.ones(2, 3))
        monkeypatch.setattr(f"hookstats.watch.{where}", broken)
        with hearing() as told, pytest.raises(ValueError, match="no such number") if strict else nullcontext():
            assert monitor.detach() == []
        assert [text for text in told if "was measured, but could not be" in text] == told
        assert (len(told), handed) == (1 - strict, [])
        monkeypatch.undo()
