"""Wrong arguments for every parameter: each error names what was expected and what arrived."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats.rules import Rule, Step, rule

VALUES: dict[str, Any] = {
    "None": None, "0": 0, "-1": -1, "3.5": 3.5, "True": True, "x": "x", "''": "", "b'x'": b"x", "[]": [], "[x]": ["x"],
    "[1]": [1], "{}": {}, "{a}": {"a": 1}, "()": (), "object": object(), "nan": float("nan"), "inf": float("inf"),
    "10**30": 10**30, "type": type,
}  # fmt: skip
ANY = " ".join(VALUES)
BAD = list(VALUES.values())
SAID = ("expected", "matches nothing", "positional argument")  # the last is Python's, of what is called with too few

MODEL = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
Call = tuple[Callable[..., Any], dict[str, Any], dict[str, str]]
# A function, what it is given beside, and by argument which values it takes: none of the others.
FUNCTIONS: dict[str, Call] = {
    "attach": (
        hookstats.attach,
        {"model": MODEL},
        {"model": "", "modules": "None ''", "exclude": "None [] {} ()", "tensors": "", "channels": "True [] {} ()"}
        | {"histogram": "None", "every": "10**30 type", "rows": "", "budget": "None", "sinks": "[] ()"}
        | {"process_group": "None", "options": ""},
    ),
    "Options": (
        hookstats.Options,
        {},
        {"strict": "True", "memory_budget": "0 True 10**30", "training_only": "None True", "laws": "{}"}
        | {"attention_rows": "None 10**30", "identities": "None"},
    ),
    "Channels": (
        hookstats.Channels,
        {},
        {"which": "True x '' b'x' [] [x] [1] {} {a} ()", "every": "10**30", "group_size": "None {} {a}"}
        | {"dim": "None 0 -1 {} {a} 10**30"},
    ),
    "ExponentBins": (hookstats.ExponentBins, {}, {"per_channel": "True", "block": "None", "block_dim": "0 -1"}),
    "LinearBins": (
        hookstats.LinearBins,
        {"lo": 0.0, "hi": 1.0, "n": 4},
        {"lo": "0 -1", "hi": "3.5 True 10**30", "n": "", "per_channel": "True"},
    ),
    "Ranks": (hookstats.Ranks, {"group": 3}, {"placements": "None {} {a}", "spread": "True", "timeout": ""}),
    "Ranks of nobody": (hookstats.Ranks, {}, {"group": ANY.removeprefix("None ")}),
    "capture": (
        hookstats.capture,
        {"model": MODEL, "modules": "*"},
        {"model": "", "modules": "''", "exclude": "None [] {} ()"}
        | dict.fromkeys(("every", "items", "channels", "keep"), "10**30"),
    ),
    "edit": (
        hookstats.edit,
        {"model": MODEL, "modules": "*", "fn": torch.neg},
        {"model": "", "modules": "''", "fn": "type", "tensor": "", "exclude": "None [] {} ()", "after": "True"},
    ),
    "explain": (hookstats.explain, {"model": MODEL}, {"model": ""}),
    "sinks": (
        partial(hookstats.sinks.JsonLines, "build/never written"),
        {},
        {"statistics": "[] {} ()", "sites": "None x '' [] [x] {} {a} ()", "histograms": "True"},
    ),
    "probe": (
        hookstats.probe,
        {"model": MODEL, "batch": torch.ones(2, 8)},
        {"model": "", "batch": "", "batch_dim": "0", "causal": "None 0 True"},
    ),
    "measure": (
        hookstats.measure,
        {"tensor": torch.ones(3, 4)},
        {"tensor": "", "channel_dim": "None 0 -1 True", "histogram": "None", "channels": "True"},
    ),
    "softmax_rows": (hookstats.softmax_rows, {"logits": torch.ones(3, 4)}, {"logits": "", "top_k": "None"}),
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


def check(function: Callable[..., Any], given: dict[str, Any], accepted: dict[str, str]) -> None:
    for argument, values in accepted.items():
        taken = set()
        for value, bad in VALUES.items():
            made = refused(lambda: function(**given | {argument: bad}))  # noqa: B023
            if made is not None:
                taken.add(value)
            if hasattr(made, "__exit__"):
                made.__exit__(None, None, None)
        assert taken == set(values.split()), argument


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_wrong_argument_is_refused_with_what_was_expected_and_a_right_one_taken(name: str) -> None:
    function, given, accepted = FUNCTIONS[name]
    assert name.startswith("Ranks") or set(arguments(function)) == set(accepted)
    check(function, given, accepted)
    assert not any(module._forward_hooks for module in MODEL.modules())


def test_a_wrong_argument_of_a_recording_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    globs = "'' [] {} ()"
    accepted = {"rules": f"None x [x] {{a}} {globs}", "sinks": globs, "ring_bytes": "None 10**30", "every_rank": "True"}
    accepted |= {"on_finding": "None type", "escalate": "0 10**30"}
    assert set(arguments(hookstats.record)[1:]) == set(accepted)
    check(hookstats.record, {arguments(hookstats.record)[0]: tmp_path / "run"}, accepted)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hookstats.LinearBins(-3e38, 3e38, 5), "expected lo < hi and a finite range, in float32"),
        (lambda: hookstats.LinearBins(1, 1 + 1e-12, 5), "expected lo < hi"),
        (
            lambda: hookstats.ExponentBins(per_channel=True, block=32),
            "expected either block or per_channel=True, got both",
        ),
        (lambda: hookstats.attach(MODEL, lambda name, module: False), "selected none"),
        (
            lambda: hookstats.attach(nn.Conv2d(1, 1, 1), channels=hookstats.Channels(dim=4)),
            "expected -4 to 3 for '' .Conv2d, whose output has 4 dimensions.*got 4",
        ),
        (lambda: hookstats.softmax_rows(torch.zeros(())), "got a tensor of no dimensions"),
        (lambda: hookstats.softmax_rows(torch.zeros(4, 8), 8), "less than the 8 entries of a row; got 8"),
        (lambda: hookstats.softmax_rows(torch.zeros(4, 80), 17), "expected 1 to 16, .*; got 17"),
    ],
)
def test_what_is_wrong_together_is_told(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


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
            refused(lambda: monitor.tap(torch.ones(2), "tapped", bad))  # noqa: B023
            refused(lambda: monitor.clip_grad_norm_(bad, 1.0))  # noqa: B023
            refused(lambda: snapshot.select(tensors=bad))  # noqa: B023
            refused(lambda: snapshot.top_channels("abs_max", bad))  # noqa: B023
            for call in (snapshot.select, snapshot.from_dict, snapshot.top_channels, stats.quantile, stats.share_above):
                refused(lambda: call(bad))  # noqa: B023
            refused(lambda: hookstats.report.show(bad))  # noqa: B023
            refused(lambda: hookstats.report.show([snapshot], height=bad))  # noqa: B023
            refused(lambda: hookstats.compare(bad, snapshot))  # noqa: B023
            refused(lambda: hookstats.compare(bad, [snapshot]))  # noqa: B023
            refused(lambda: hookstats.compare(snapshot, snapshot, dtype=bad))  # noqa: B023
