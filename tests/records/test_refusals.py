"""Tests of refusals: what cannot be recorded, or is not there, gets an error and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hookstats


def test_a_recording_that_is_in_use_is_refused_and_goes_on_as_it_was(tmp_path: Path) -> None:
    recording, other, net = hookstats.record(tmp_path / "run"), hookstats.record(tmp_path / "other"), nn.Linear(4, 4)
    with hookstats.attach(net, every=1, sinks=recording) as monitor:
        with pytest.raises(RuntimeError, match=r"got .* twice"):
            hookstats.attach(net, sinks=[other, recording])
        assert len(net._forward_hooks) == 1
        net(torch.randn(2, 4)).sum().backward()
        monitor.step(7)
    assert hookstats.load(tmp_path / "run").steps == [7]
    with pytest.raises(ValueError, match="expected a recorded step, got none"):
        hookstats.load(tmp_path / "other")


@pytest.mark.parametrize("under", ["", "run", "run/deeper"])
def test_a_file_where_a_directory_was_expected_is_told(tmp_path: Path, under: str) -> None:
    file = tmp_path / "a_file"
    file.write_text("mine")
    with pytest.raises(NotADirectoryError, match=r"record: expected a directory, or .* is a file"):
        hookstats.record(file / under).begin({"rank": 0})
    assert file.read_text() == "mine"
