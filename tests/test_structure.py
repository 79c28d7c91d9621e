"""The rooms and who may know whom, read from the imports; and what a build says of itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hookstats
from hookstats import _native
from tests import order
from tests.conftest import DTYPES, ROOT
from tests.mutations import csrc, laws, misplaced, pages, rooms, tools
from tests.rooms import FILES, PACKAGE, clauses, doubled_classes, floors, imports, inner, needed, room_of

# Each room, and the rooms that it may import: downwards only. A room is a folder, or a file beside the folders.
MAY_IMPORT: dict[str, set[str]] = {
    "numbers": set(),
    "modules": {"numbers"},
    "_warn": set(),
    "_locks": set(),
    "_words": set(),
    "_figure": set(),
    "_lazy": set(),
    "sinks": {"_locks", "_warn", "numbers"},
    "_native": {"_warn", "numbers"},
    "cluster": {"_native", "_warn", "modules", "numbers"},
    "watch": {"_native", "_warn", "cluster", "modules", "numbers"},
    "language": {"_native", "_warn", "modules", "numbers", "watch"},
    "attaching": {"_native", "cluster", "identities", "language", "modules", "numbers", "watch"},
    "calibration": {"attaching", "modules", "numbers", "watch"},
    "presets": {"language", "modules", "watch"},
    "identities": {"_native", "modules", "numbers", "tools", "watch"},
    "tools": {"_figure", "_native", "_warn", "modules", "numbers"},
    "rules": {"numbers"},
    "comparing": {"numbers", "records"},
    "records": {"_locks", "_warn", "_words", "numbers", "rules", "sinks"},
    "report": {"_figure", "comparing", "numbers", "records", "rules"},
    "results": {"_lazy", "calibration", "cluster", "comparing", "identities", "numbers"}
    | {"records", "rules", "tools", "watch"},
    "__init__": {
        "_lazy",
        "_native",
        "calibration",
        "cluster",
        "comparing",
        "identities",
        "numbers",
        "presets",
        "records",
        "report",
        "results",
        "rules",
        "sinks",
    }
    | {"attaching", "tools", "watch"},
    "integrations": {"__init__"},
    "terminal": {"_locks", "numbers", "records", "rules"},
    "serve": {"numbers", "records", "report", "rules", "terminal"},
    "doctor": {"__init__", "_native"},
    "__main__": {"__init__", "doctor", "records", "report", "rules", "serve", "terminal"},
}
WITHOUT_TORCH = {
    "__main__",
    "comparing",
    "numbers",
    "records",
    "report",
    "rules",
    "serve",
    "sinks",
    "terminal",
    "_lazy",
    "_locks",
    "_warn",
    "_words",
    "results",
    "__init__",
}


def test_rooms_import_downwards_only() -> None:
    assert {room_of(name) for name in FILES} == set(MAY_IMPORT)
    for name, path in FILES.items():
        room = room_of(name)
        assert {room_of(other) for other in inner(path)} - {room} <= MAY_IMPORT[room], name
        top = {other.split(".")[0] for other in imports(path)}
        assert room not in WITHOUT_TORCH or "torch" not in top, name


def test_no_files_import_each_other_in_a_circle() -> None:
    waiting = {name: inner(path) - {name} for name, path in FILES.items()}
    while waiting:
        free = {name for name, needed in waiting.items() if not needed & set(waiting)}
        assert free, f"a circle among {sorted(waiting)}"
        waiting = {name: needed for name, needed in waiting.items() if name not in free}


def test_no_rooms_import_each_other_in_a_circle() -> None:
    assert min(floors(needed()).values()) == 0
    with pytest.raises(ValueError, match="expected no circle, got one among a, b"):
        floors({"a": {"b"}, "b": {"a"}, "c": set()})


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    assert clauses() == []


def test_no_two_classes_have_one_name_but_the_callbacks_of_two_trainers() -> None:
    files = ["integrations.lightning", "integrations.transformers"]
    assert doubled_classes() == {"HookStats": files}


def test_one_file_names_torch_ops_and_one_the_extension() -> None:
    assert [name for name, path in FILES.items() if "torch.ops" in path.read_text()] == ["_native.operators"]
    assert [name for name, path in FILES.items() if "_native._C" in inner(path)] == ["_native"]


def test_kernels_know_nothing_of_torch() -> None:
    others = ("ops.h", "stable.h", "tensors.h", "now.h", "hook.h", "slots.h")  # of the operators and the hook
    for path in [*ROOT.glob("csrc/*.h"), *ROOT.glob("csrc/cpu/*"), *ROOT.glob("csrc/cuda/*")]:
        text = path.read_text()
        includes = [line for line in text.splitlines() if line.startswith("#include")]
        if path.name not in others:
            assert not any("torch" in line or "ATen" in line or "c10" in line for line in includes), path


def test_one_place_asks_how_many_multiprocessors_there_are_and_one_cuts_work_by_it() -> None:
    """Work is split by the shape and the model of the GPU alone, by nothing of a single run."""
    asks = {"DeviceProp", "MultiProcessor", "Occupancy", ".multiprocessors"}
    found = {path.name for path in ROOT.glob("csrc/cuda/*") if any(word in path.read_text() for word in asks)}
    assert found == {"device.h", "accumulate.h"}
    assert not any("smid" in path.read_text() for path in ROOT.glob("csrc/cuda/*"))


def test_build_info_says_what_was_built() -> None:
    info = hookstats.build_info()
    if _native.WITHOUT_GLUE:
        assert info["torch"] is None
        assert info["without_glue"] == _native.WITHOUT_GLUE
    else:
        assert info["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert (info["cuda"] is not None) == _native.HAS_CUDA == bool(info["architectures"])
    assert info["dtypes"] == [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    assert info["fields"][:3] == ["count", "mean", "m2"]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=os.environ | environment
    )


def test_what_needs_numpy_alone_does_not_import_torch_and_what_attaches_not_the_compiler() -> None:
    done = python(
        "import hookstats, sys; hookstats.Snapshot, hookstats.LinearBins, hookstats.rules.defaults()\n"
        "print([name for name in ('torch', 'pandas') if name in sys.modules])\n"
        "hookstats.attach, hookstats.edit, hookstats.capture\n"
        "print([name for name in ('torch._dynamo', 'matplotlib') if name in sys.modules])"
    )
    assert done.stdout.splitlines()[-2:] == ["[]", "[]"], done.stderr


def test_every_public_name_is_there_and_another_one_is_refused() -> None:
    assert all(getattr(hookstats, name) is not None for name in hookstats.__all__)
    assert all(getattr(hookstats.results, name) is not None for name in hookstats.results.__all__)
    assert not set(hookstats.__all__) & set(hookstats.results.__all__)
    assert dir(hookstats) == sorted(hookstats.__all__)
    with pytest.raises(AttributeError, match="no attribute 'attatch'; expected one of Channels"):
        hookstats.attatch  # noqa: B018


def test_the_page_of_the_api_names_all_that_is_public() -> None:
    named = set(re.findall(r"\w+", (ROOT / "docs" / "api.md").read_text()))
    rules = [each.function.__name__ for each in hookstats.rules.defaults()]
    public = {*hookstats.__all__, *hookstats.results.__all__, *hookstats.sinks.__all__, *rules} - {"__version__"}
    assert not public - named


def test_sources_that_are_not_built_are_refused_in_one_line(tmp_path: Path) -> None:
    package = tmp_path / "hookstats"
    package.mkdir()
    for path in PACKAGE.iterdir():
        if (path.is_dir() and path.name != "_glue") or path.suffix == ".py":
            (package / path.name).symlink_to(path)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import hookstats; hookstats.attach"
    last = python(code).stderr.splitlines()[-1]
    assert "hookstats is not built" in last
    assert "--no-build-isolation" in last


def test_every_mutant_is_found_where_it_is_put_in() -> None:
    assert not [
        line
        for mutants in (csrc, rooms, pages, laws, tools)
        for each in mutants.MUTANTS
        if (line := misplaced(each, ROOT))
    ]


def test_the_lists_of_tests_name_what_is_there_and_the_quick_one_every_room() -> None:
    tests = ROOT / "tests"
    quick = [Path(line.split("::")[0]) for line in (tests / "quick.txt").read_text().splitlines() if line[0] != "-"]
    assert [path for path in quick if not (ROOT / path).is_file()] == []
    assert [file for file in order.SECONDS if not (tests / file).is_file()] == []
    rooms_of_tests = {path.parent for path in tests.glob("*/test_*.py")}
    assert rooms_of_tests - {ROOT / path.parent for path in quick} == {tests / "cuda_on_cpu", tests / "gpu"}
