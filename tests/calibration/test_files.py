"""Calibration.save and .load: nothing is lost, and what is another file or another model is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import nn

import hookstats
from hookstats.results import Calibration
from tests.calibration.small import calibrate_small, llama, mixtral, sentences


def calibrate_mixture() -> tuple[nn.Module, Calibration]:
    """With experts, some of which got few tokens; and a layer that is never called."""
    model = mixtral("eager")
    model.add_module("unused", nn.Linear(3, 2))
    return model, hookstats.calibrate(model, sentences(1))


def test_what_is_saved_is_read_bit_for_bit(tmp_path: Path) -> None:
    model, calibration = calibrate_mixture()
    calibration.save(tmp_path / "a.safetensors")
    for again in (
        Calibration.load(tmp_path / "a.safetensors"),
        Calibration.load(str(tmp_path / "a.safetensors"), model),
    ):
        assert list(again) == list(calibration)
        assert [stats.bits() for stats in again.values()] == [stats.bits() for stats in calibration.values()]
        assert again.groups == calibration.groups
        assert again.find_uncovered(20) == calibration.find_uncovered(20)
        assert again.table() == calibration.table()
        assert type(again["unused"].tokens) is int


def test_what_was_not_covered_is_kept(tmp_path: Path) -> None:
    calibration = hookstats.calibrate(mixtral("batched_mm"), sentences(1))
    calibration.save(tmp_path / "a.safetensors")
    again = Calibration.load(tmp_path / "a.safetensors")
    assert again.not_covered == calibration.not_covered
    assert len(again.not_covered) == 4


def test_scales_and_masks_of_a_loaded_calibration_are_the_same(tmp_path: Path) -> None:
    model, calibration = calibrate_mixture()
    calibration.save(tmp_path / "a.safetensors")
    again = Calibration.load(tmp_path / "a.safetensors", model)
    for mine, others in ((calibration.smoothquant(), again.smoothquant()), (calibration.wanda(), again.wanda())):
        assert list(mine) == list(others)
        assert all(torch.equal(mine[name], others[name]) for name in mine)
        assert any("experts.2.down_proj" in name for name in mine)


def test_a_file_has_what_others_read(tmp_path: Path) -> None:
    _, _, calibration = calibrate_small()
    calibration.save(tmp_path / "a.safetensors")
    arrays = load_file(tmp_path / "a.safetensors")
    name = "model.layers.0.mlp.down_proj"
    stats = calibration[name]
    for key, expected in {
        "input_abs_max": stats.abs_max,
        "input_mean": stats.mean,
        "input_abs_mean": stats.abs_mean,
        "input_l2_norm": stats.l2_norm,
        "amax": [stats.amax],
        "p99": [stats.quantile(0.99)],
        "p99.9": [stats.quantile(0.999)],
        "p99.99": [stats.quantile(0.9999)],
        "tokens": [640],
    }.items():
        np.testing.assert_array_equal(arrays[f"{name}.{key}"], expected)


def test_without_its_model_a_calibration_has_no_scales_and_no_masks(tmp_path: Path) -> None:
    _, _, calibration = calibrate_small()
    calibration.save(tmp_path / "a.safetensors")
    again = Calibration.load(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"smoothquant: expected the weights of 15 layers, got none of 'model"):
        again.smoothquant()
    with pytest.raises(ValueError, match=r"wanda: .* Calibration.load\(path, model\)"):
        again.wanda()


def test_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    hookstats.calibrate(nn.Sequential(nn.Linear(4, 2)), [torch.randn(3, 4)]).save(path)
    with pytest.raises(ValueError, match="expected a model with the layers of the file, got one without '0'"):
        Calibration.load(path, llama())
    with pytest.raises(ValueError, match="expected 4 input channels of '0', as in the file, got 5"):
        Calibration.load(path, nn.Sequential(nn.Linear(5, 2)))


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no tensors")
    save_file({"a": np.zeros(3)}, tmp_path / "weights")
    about = '{"version": 2, "names": [], "not_covered": [], "experts": {}}'
    save_file({"a": np.zeros(3)}, tmp_path / "newer", {"hookstats.calibration": about})
    save_file(
        {"a": np.zeros(3)},
        tmp_path / "less",
        {"hookstats.calibration": about.replace("2", "1").replace("[]", '["a"]', 1)},
    )
    for name in ("text", "weights", "less"):
        with pytest.raises(ValueError, match=r"expected a file that Calibration.save wrote, got another one"):
            Calibration.load(tmp_path / name)
    with pytest.raises(ValueError, match="newer: expected version 1, got 2"):
        Calibration.load(tmp_path / "newer")
    with pytest.raises(FileNotFoundError):
        Calibration.load(tmp_path / "missing")


def test_without_safetensors_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, calibration = calibrate_small()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"needs safetensors: pip install 'hookstats\[calibration\]'"):
        calibration.save(tmp_path / "a.safetensors")
    with pytest.raises(ImportError, match=r"pip install 'hookstats\[calibration\]'"):
        Calibration.load(tmp_path / "a.safetensors")
