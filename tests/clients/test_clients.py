"""One of the trainers, in each run of the tests, and how the others are cut. All of them: make clients."""

from __future__ import annotations

import json

from tests.clients import __main__ as clients
from tests.clients.run import ADDED, cut


def test_a_trainer_from_the_registry_is_recorded_and_trains_the_same_bits() -> None:
    bare, watched = clients.ran_both("peft_lora")
    assert bare["digest"] == watched["digest"]
    assert watched["warnings"] == []
    assert watched["findings"] == []
    assert watched["steps"] == 3
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
    assert all(each["is_identical"] for each in kept["trainers"].values())
    assert clients.table(kept["trainers"]) in (clients.ROOT / "docs" / "clients.md").read_text()
