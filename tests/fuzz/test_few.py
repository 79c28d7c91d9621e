"""Some of the random tensors and trainings; and faults that these find."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from hookstats.numbers import fields
from tests.fuzz import trainings
from tests.fuzz.__main__ import main


def test_some_tensors_and_trainings(capsys: pytest.CaptureFixture[str]) -> None:
    """Holds what tests/watch does not hold by itself: microbatches, sums, several optimizers."""
    assert main(["--tensors", "400", "--trainings", "60", "--seed", "50000"]) == 0, capsys.readouterr().out
    assert "tensors: 400, 0 wrong" in capsys.readouterr().out


def test_a_wrong_statistic_is_found_and_its_seed_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finish = fields.Stats.rms._finish  # type: ignore[attr-defined]
    monkeypatch.setattr(fields.Stats.rms, "_finish", lambda state: finish(state) * 1.0001)
    assert main(["--tensors", "5", "--trainings", "0", "--seed", "7"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"tensors: seed (7|8|9|10|11):\n", out)
    assert "rms: expected" in out


def test_a_parameter_that_ends_otherwise_than_in_the_bare_training_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = trainings._train

    def disturbed(script: Any, seen: Any, snapshots: Any) -> nn.Module:
        model = train(script, seen, snapshots)
        with torch.no_grad():
            model.head.bias[0] += 1e-7 * (snapshots is not None)
        return model

    monkeypatch.setattr(trainings, "_train", disturbed)
    assert main(["--tensors", "0", "--trainings", "2", "--seed", "3"]) == 1
    assert "head.bias has other bits than in the bare training" in capsys.readouterr().out
