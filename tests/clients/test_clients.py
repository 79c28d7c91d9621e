"""One of the trainers, in each run of the tests, and how the others are cut. All of them: make clients."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.clients import __main__ as clients
from tests.clients.run import ADDED, cut


def test_a_trainer_from_the_registry_is_recorded_and_trains_the_same_bits() -> None:
    bare, watched = clients.ran_both("lstm_words")  # which imports torch alone
    assert bare["digest"] == watched["digest"]
    assert watched["warnings"] == []
    assert watched["findings"] == []
    assert watched["steps"] == 4
    assert watched["report"] > 100_000
    assert 0 < watched["added"] <= 4


def test_each_trainer_is_listed_and_without_the_added_lines_knows_nothing_of_hookstats() -> None:
    files = {path.stem: path for path in (clients.HERE / "trainers").glob("*_*.py") if path.stem != "__init__"}
    assert files.keys() == clients.TRAINERS.keys()
    for path in files.values():
        source = path.read_text()
        bare, added = cut(source)
        compile(bare, path, "exec")
        assert added == source.count(f"  {ADDED}\n") > 0
        assert "import hookstats" not in bare
        assert "monitor" not in bare


def test_the_page_has_the_table_of_the_last_run_of_all() -> None:
    kept = json.loads((clients.ROOT / "benchmarks" / "results" / "clients.json").read_text())
    assert kept["trainers"].keys() == clients.TRAINERS.keys()
    assert all(clients.weights_of(each) != clients.DIFFER for each in kept["trainers"].values())
    assert clients.table(kept["trainers"]) in (clients.ROOT / "docs" / "clients.md").read_text()


def test_the_difference_of_two_trainings_is_the_largest_of_all_ranks_and_tensors() -> None:
    one = {"weights": [{"a": np.array([4.0, 1.0]), "b": np.zeros(2)}, {"a": np.array([2.0, -2.0]), "b": np.ones(2)}]}
    other = {"weights": [{"a": np.array([4.0, 1.5]), "b": np.zeros(2)}, {"a": np.array([2.0, -1.5]), "b": np.ones(2)}]}
    assert clients.difference(one, one) == 0
    assert clients.difference(one, other) == 0.25
    other["weights"][0]["b"][1] = np.nan
    assert np.isnan(clients.difference(one, other))


@pytest.mark.parametrize(
    ("trained", "said"),
    [
        ({"is_identical": True}, "identical"),
        ({"is_identical": True, "difference": 0.0}, "identical"),
        ({"is_identical": False, "difference": 3e-6}, "agree to rounding: 3e-06"),
        ({"is_identical": False, "difference": 3e-3}, clients.DIFFER),
        ({"is_identical": False, "difference": float("nan")}, clients.DIFFER),
        ({"is_identical": False}, clients.DIFFER),
    ],
    ids=["eager", "compiled to the same bits", "compiled", "compiled to others", "not a number", "eager to others"],
)
def test_only_what_is_compiled_may_differ_and_by_rounding_alone(trained: dict[str, object], said: str) -> None:
    assert clients.weights_of(trained) == said
