"""Wrong arguments for every parameter: each error names what was expected and what arrived."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats.rules import Rule, Step, rule

BAD = [None, 0, -1, 3.5, True, "x", "", b"x", [], ["x"], [1], {}, {"a": 1}, (), object(), float("nan"), float("inf")]
BAD += [10**30, type]
SAID = ("expected", "matches nothing", "positional argument")  # the last is Python's, of what is called with too few

MODEL = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "attach": (hookstats.attach, {"model": MODEL}),
    "Options": (hookstats.Options, {}),
    "Channels": (hookstats.Channels, {}),
    "ExponentBins": (hookstats.ExponentBins, {}),
    "LinearBins": (hookstats.LinearBins, {"lo": 0.0, "hi": 1.0, "n": 4}),
    "Ranks": (hookstats.Ranks, {}),
    "capture": (hookstats.capture, {"model": MODEL, "modules": "*"}),
    "explain": (hookstats.explain, {"model": MODEL}),
    "measure": (hookstats.measure, {"tensor": torch.ones(3, 4)}),
    "softmax_rows": (hookstats.softmax_rows, {"logits": torch.ones(3, 4)}),
}


def refused(call: Callable[[], Any]) -> Any:
    """Return a call's result, or None for an error of a wrong argument that says what was expected."""
    try:
        return call()
    except (TypeError, ValueError, IndexError) as error:
        if any(each in str(error) for each in SAID):
            return None
        raise


def arguments(function: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, each in inspect.signature(function).parameters.items() if each.kind in kinds]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_wrong_argument_is_told_with_what_was_expected(name: str) -> None:
    function, given = FUNCTIONS[name]
    for argument in arguments(function):
        for bad in BAD:
            made = refused(lambda: function(**given | {argument: bad}))  # noqa: B023
            if hasattr(made, "detach") and not isinstance(made, torch.Tensor):
                made.detach()


def test_a_wrong_argument_of_a_recording_is_told(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for argument in arguments(hookstats.record)[1:]:
        for bad in BAD:
            refused(lambda: hookstats.record(tmp_path, **{argument: bad}))  # noqa: B023


@pytest.mark.parametrize("judging", hookstats.rules.defaults(), ids=repr)
def test_a_wrong_threshold_or_window_of_a_rule_is_told(judging: Rule) -> None:
    for name, default in judging.arguments.items():
        for bad in BAD:
            made = refused(lambda: judging(**{name: bad}))  # noqa: B023
            if made is not None and not isinstance(default, str):
                assert isinstance(bad, (int, float)), name
                assert bad == bad, name
                assert isinstance(default, float) or (isinstance(bad, int) and bad >= 0), name
                assert not isinstance(bad, bool), name


def test_a_rule_of_ones_own_has_its_thresholds_checked_as_ours_are() -> None:
    @rule(of="output")
    def stricter(step: Step, limit: float = 0.5) -> None:
        pass

    assert stricter(limit=1).arguments == {"limit": 1}
    assert stricter.arguments == {"limit": 0.5}
    with pytest.raises(ValueError, match="stricter: limit: expected a number, got 'x'"):
        stricter(limit="x")
    with pytest.raises(TypeError, match="stricter: expected limit; got 'other'"):
        stricter(other=1)
    with pytest.raises(TypeError, match="positional argument"):
        stricter(0.5)  # type: ignore[call-arg]


def test_a_wrong_argument_of_what_was_measured_is_told() -> None:
    with hookstats.attach(MODEL) as monitor:
        MODEL(torch.ones(2, 8))
        snapshot = monitor.step()
        stats = snapshot["0", "output"]
        for bad in BAD:
            for call in (monitor.check, monitor.recorded, monitor.snapshot, monitor.ignore):
                refused(lambda: call(bad))  # noqa: B023
            for call in (snapshot.select, snapshot.from_dict, snapshot.top_channels, stats.quantile, stats.share_above):
                refused(lambda: call(bad))  # noqa: B023
            refused(lambda: hookstats.report.show(bad))  # noqa: B023
            refused(lambda: hookstats.report.show([snapshot], height=bad))  # noqa: B023
            refused(lambda: hookstats.compare(bad, snapshot))  # noqa: B023
            refused(lambda: hookstats.compare(bad, [snapshot]))  # noqa: B023
            refused(lambda: hookstats.compare(snapshot, snapshot, dtype=bad))  # noqa: B023
