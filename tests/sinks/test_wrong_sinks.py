"""Tests of sinks that are none: attach refuses them, rather than failing at the first step, or never."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import hookstats
from hookstats import Snapshot
from hookstats.sinks import JsonLines, TensorBoard


async def later(snapshot: Snapshot) -> None: ...


def one_by_one(snapshot: Snapshot) -> Iterator[Snapshot]:
    yield snapshot


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([TensorBoard], r"got the class TensorBoard: give an instance of it, TensorBoard\(...\)"),
        (JsonLines, "got the class JsonLines"),
        ([list], "got the class list"),
        ([hookstats.load], r"got the function load: give what it returns, load\(...\)"),
        ([None], "got None: where a function is to be called with each Snapshot, give the function"),
        (None, "got None"),
        ("runs/a", r"got 'runs/a': a directory is recorded into by hookstats\.record\('runs/a'\)"),
        (Path("runs/a"), r"a directory is recorded into by hookstats\.record\('runs/a'\)"),
        (["runs/a"], r"hookstats\.record\('runs/a'\)"),
        ([hookstats.sinks], "got <module 'hookstats.sinks'"),
        ({"board": print}, "got {'board': "),
        ([later], "whose call alone does nothing"),
        ([one_by_one], "whose call alone does nothing"),
        ([lambda: None], "cannot be called with one argument: too many positional arguments"),
        ([lambda step, snapshot: None], "cannot be called with one argument: missing a required argument: 'snapshot'"),
        ([7], "got 7"),
    ],
)
def test_what_is_no_sink_is_refused_at_attach_and_leaves_no_hooks(given: Any, said: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"sinks: expected callables Snapshot -> None, or hookstats.record.*" + said):
        hookstats.attach(model, sinks=given)
    assert not model._forward_hooks


def test_a_recording_is_given_not_its_class_nor_its_function(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    recording = hookstats.record(tmp_path / "run")
    for given, named in ((type(recording), "the class "), (hookstats.record, "the function record")):
        with pytest.raises(TypeError, match=re.escape(f"got {named}")):
            hookstats.attach(nn.Linear(2, 2), sinks=[given])
    hookstats.attach(nn.Linear(2, 2), sinks=recording).detach()
    assert (tmp_path / "run").exists()


class Sink:
    """One that can be iterated over, too."""

    def __call__(self, snapshot: Snapshot, extra: int = 0) -> None: ...

    def __iter__(self) -> Iterator[int]:
        return iter([1])


@pytest.mark.parametrize(
    "given",
    [(), [], [].append, [deque().append, print], partial(print, "step"), Sink(), lambda *them: None, iter([print])],
)
def test_whatever_can_be_called_with_a_snapshot_is_a_sink(given: Any) -> None:
    hookstats.attach(nn.Linear(2, 2), sinks=given).detach()
