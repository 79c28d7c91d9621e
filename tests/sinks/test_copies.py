"""Sinks that are open, pickled and copied: a copy begins anew, and takes nothing from the one that it is of."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from tests.snapshots import snapshot

X = torch.ones(2, 3)
copies = pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])


@copies
def test_a_copy_of_a_recording_that_is_open_can_begin_in_its_turn(copied: Callable[[Any], Any], tmp_path: Path) -> None:
    layer, recording = nn.Linear(4, 3), hookstats.record(tmp_path / "run")
    with hookstats.attach(layer, "*", every=1, sinks=[recording]) as monitor:
        monitor.step()
        other = copied(recording)
        monitor.step()
    with hookstats.attach(layer, "*", every=1, sinks=[other]) as monitor:
        monitor.step(2)
    run = hookstats.load(tmp_path / "run")
    assert run.steps == [0, 1, 2]
    assert [each["ended"] for each in run.attempts] == ["closed", "closed"]


@copies
def test_a_copy_of_a_sink_of_json_lines_has_a_file_of_its_own(copied: Callable[[Any], Any], tmp_path: Path) -> None:
    sink, path = hookstats.sinks.JsonLines(tmp_path / "lines", statistics="mean"), tmp_path / "lines"
    sink(snapshot(0, {"a": X}))
    other = copied(sink)
    other.close()
    assert other.spec() == sink.spec()
    sink(snapshot(1, {"a": X}))  # into its file still
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1]


@copies
def test_a_copy_of_a_sink_of_tensorboard_begins_an_event_file(copied: Callable[[Any], Any], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    sink = hookstats.sinks.TensorBoard(tmp_path)
    sink(snapshot(0, {"a": X}))
    other = copied(sink)
    assert other.spec() == sink.spec()
    other(snapshot(1, {"a": X}))
    assert len(list(tmp_path.iterdir())) == 2
    sink.close()
    other.close()
