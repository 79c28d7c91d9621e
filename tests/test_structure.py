"""The rooms and who may know whom, read from the imports; and what a build says of itself."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

import hookstats
from hookstats import _native
from tests.conftest import DTYPES, ROOT

PACKAGE = ROOT / "hookstats"
# Each room, and the rooms that it may import. Downwards only.
MAY_IMPORT: dict[str, set[str]] = {
    "fields": set(),
    "select": set(),
    "stages": set(),
    "snapshot": {"fields"},
    "_native": {"fields", "_C"},
    "state": {"_native", "fields", "snapshot"},
    "telling": set(),
    "masks": {"_native", "stages", "state", "telling"},
    "hooks": {"_native", "fields", "masks", "select", "stages", "state", "telling"},
    "scaling": {"snapshot"},
    "overhead": {"_native", "state"},
    "params": {"_native", "fields", "scaling", "select", "state"},
    "drain": {"_native", "fields", "snapshot", "state"},
    "arguments": {"_native", "fields", "select", "snapshot"},
    "monitor": {"arguments", "drain", "fields", "hooks", "overhead", "params", "scaling", "select"}
    | {"snapshot", "state"},
    "attaching": {"_native", "arguments", "drain", "fields", "hooks", "monitor", "params", "scaling", "select"}
    | {"snapshot", "stages", "state"},
    "edit": {"_native", "select", "stages"},
    "pictures": set(),
    "capture": {"_native", "pictures", "select", "stages", "telling"},
    "gradient": set(),
    "explain": {"select", "stages"},
    "__init__": {"_native", "attaching", "capture", "edit", "explain", "fields", "gradient", "monitor", "overhead"}
    | {"snapshot"},
    "demo": {"__init__"},
}
WITHOUT_TORCH = {"fields", "snapshot", "telling"}


def imports(path: Path) -> set[str]:
    """Modules imported at any depth; of hookstats, the room alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found |= {f"hookstats.{a.name}" for a in node.names} if module == "hookstats" else {module}
    return found


def test_internal_imports_go_downwards_only() -> None:
    rooms = {path.stem for path in PACKAGE.glob("*.py")}
    assert rooms == set(MAY_IMPORT)
    for path in PACKAGE.glob("*.py"):
        inner = {name.removeprefix("hookstats.") for name in imports(path) if name.startswith("hookstats.")}
        inner = {name if name in rooms | {"_C"} else "__init__" for name in inner}
        inner |= {"__init__"} if "hookstats" in imports(path) else set()
        assert inner <= MAY_IMPORT[path.stem], path.name
        top = {name.split(".")[0] for name in imports(path)}
        assert path.stem not in WITHOUT_TORCH or "torch" not in top, path.name


def test_only_native_names_torch_ops_and_the_extension() -> None:
    for path in PACKAGE.glob("*.py"):
        if path.stem != "_native":
            assert "torch.ops" not in path.read_text()
            assert "hookstats._C" not in imports(path)


def test_kernels_know_nothing_of_torch() -> None:
    for path in [*ROOT.glob("csrc/*.h"), *ROOT.glob("csrc/cpu/*"), *ROOT.glob("csrc/cuda/*")]:
        text = path.read_text()
        includes = [line for line in text.splitlines() if line.startswith("#include")]
        if path.name not in ("ops.h", "times.h"):
            assert not any("torch" in line or "ATen" in line or "c10" in line for line in includes), path


def test_kernels_never_ask_how_many_multiprocessors_there_are() -> None:
    """So the shape alone decides how work is split, and results are the same on every GPU of one kind of arithmetic."""
    for path in ROOT.glob("csrc/cuda/*"):
        text = path.read_text()
        assert not any(word in text for word in ("DeviceProp", "DeviceGetAttribute", "Occupancy", "smid", "nsmid")), (
            path
        )


def test_build_info_says_what_was_built() -> None:
    info = hookstats.build_info()
    assert info["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert (info["cuda"] is not None) == _native.HAS_CUDA == bool(info["architectures"])
    assert info["dtypes"] == [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    assert info["fields"][:3] == ["count", "mean", "m2"]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=os.environ | environment
    )


def test_importing_hookstats_does_not_import_the_compiler() -> None:
    done = python(
        "import hookstats, sys; print([name for name in ('torch._dynamo', 'matplotlib') if name in sys.modules])"
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_a_build_for_another_torch_is_refused_in_one_line(tmp_path: Path) -> None:
    package = tmp_path / "hookstats"
    package.mkdir()
    for path in PACKAGE.glob("*.py"):
        (package / path.name).symlink_to(path)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import hookstats"
    assert "hookstats is not built" in python(code).stderr.splitlines()[-1]
    (package / "_built.json").write_text(json.dumps({"torch": "2.1.0+cu118", "cuda": None, "architectures": []}))
    last = python(code).stderr.splitlines()[-1]
    assert "built for torch 2.1.0+cu118, but torch" in last
    assert "--no-build-isolation --force-reinstall" in last


def test_a_build_without_torch_is_refused_in_one_line() -> None:
    done = python("import sys, runpy; sys.modules['torch'] = None; runpy.run_path('setup.py')")
    assert done.returncode == 1
    assert "torch was not found while building" in done.stderr
    assert "pip install --no-build-isolation ." in done.stderr
    assert "Traceback" not in done.stderr
