"""Globs over names mean the same wherever they are given, and are refused in the same words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import hookstats
from hookstats import Site
from hookstats.numbers.selection import choose
from tests.plain import hearing


def attach(**arguments: Any) -> hookstats.Monitor:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return hookstats.attach(model, every=1, **arguments)


def snapshot() -> hookstats.Snapshot:
    with attach(tensors="output") as monitor:
        return monitor.snapshot()


def capture(globs: Any) -> Any:
    return hookstats.capture(nn.Sequential(nn.Linear(2, 2)), globs)


DOORS: dict[str, Callable[[Any], Any]] = {
    "modules": lambda globs: attach(modules=globs),
    "exclude": lambda globs: attach(exclude=globs),
    "channels": lambda globs: attach(channels=globs),
    "Channels.dim": lambda glob: attach(channels=hookstats.Channels(dim={glob: -1})),
    "Channels.group_size": lambda glob: attach(channels=hookstats.Channels(group_size={glob: 1})),
    "select: names": lambda globs: snapshot().select(globs),
    "capture": capture,
}


@pytest.mark.parametrize("door", DOORS)
def test_a_glob_that_matches_nothing_is_refused_in_the_same_words_everywhere(door: str) -> None:
    for glob in ("2*", "O", "[2]"):
        with pytest.raises(ValueError, match=r"the glob .* matches nothing; the names are .*'0'") as told:
            DOORS[door](glob)
        assert f": the glob {glob!r} matches" in str(told.value)


@pytest.mark.parametrize("door", [door for door in DOORS if not door.startswith("Channels.")])
def test_several_globs_are_each_looked_at_and_strings_alone_are_taken(door: str) -> None:
    with pytest.raises(ValueError, match=r": the globs '7', 'x\*' match nothing; the names are "):
        DOORS[door](["0", "7", "x*"])
    with pytest.raises(TypeError, match=r": expected globs over names, got 7"):
        DOORS[door](["0", 7])


def test_a_sink_says_the_same_when_the_first_step_comes(tmp_path: Path) -> None:
    sink = hookstats.sinks.JsonLines(tmp_path / "steps.jsonl", sites=["0", "7", "x*"])
    with hearing() as told:
        sink(snapshot())
    (text,) = told
    assert "sites: the globs '7', 'x*' match nothing; the names are '0', '1'" in text


def test_the_star_crosses_dots_the_empty_name_is_the_model_and_a_kind_takes_its_parts() -> None:
    known = [Site(*each) for each in (("", "output.0"), ("a.b", "output"), ("a.b", "grad_output"), ("A", "outputs"))]
    assert choose("f", known, "a*") == set(known[1:3])
    assert choose("f", known, "") == {known[0]}
    assert choose("f", known, "?") == {known[3]}
    assert choose("f", known, tensors="output") == {known[0], known[1]}
    assert choose("f", known, ["", "a*"], ("grad_output", "outputs")) == {known[2]}
    with pytest.raises(
        ValueError, match=r"f: tensors: expected some of output.0, output, grad_output, outputs; got 'x'"
    ):
        choose("f", known, tensors=["output", "x"])
    with pytest.raises(TypeError, match=r"f: tensors: expected some of .*; got 7"):
        choose("f", known, tensors=[7])  # type: ignore[list-item]
