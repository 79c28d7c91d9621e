"""The rooms of the package, as their imports have them. `python -m tests.rooms` prints how large each is."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hookstats"
WORDED = ("benchmarks", "examples", "tests")  # folders whose docstrings are held to the package's rules


def name_of(path: Path) -> str:
    """The module's name behind "hookstats."; of a package, the package's."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def room_of(name: str) -> str:
    """A folder, or a file beside the folders."""
    return name.split(".")[0]


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Modules that a file imports, at any depth, also by name."""
    known = {f"hookstats.{name}" for name in [*FILES, "_native._C"]}
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & known
            found |= submodules or {node.module}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "import_module":
            found |= {each.value for each in node.args if isinstance(each, ast.Constant)}
    return frozenset(found)


def inner(path: Path) -> set[str]:
    """List the imports from hookstats, without its name; "__init__" where public names are imported."""
    names = {"hookstats.__init__" if name == "hookstats" else name for name in imports(path)}
    return {name.removeprefix("hookstats.") for name in names if name.startswith("hookstats.")}


def floors(needs: Mapping[str, Iterable[str]]) -> dict[str, int]:
    """Return 0 for a room that needs no other, else one more than the highest of these. ValueError for a circle."""
    found: dict[str, int] = {}
    while waiting := [room for room in needs if room not in found]:
        free = [room for room in waiting if found.keys() >= {other for other in needs[room] if other in needs}]
        if not free:
            raise ValueError(f"expected no circle, got one among {', '.join(waiting)}")
        found |= {room: 1 + max((found[other] for other in needs[room] if other in needs), default=-1) for room in free}
    return found


def needed() -> dict[str, set[str]]:
    """Return for each room the others that it imports."""
    found: dict[str, set[str]] = {room_of(name): set() for name in FILES}
    for name, path in FILES.items():
        found[room_of(name)] |= {room_of(other) for other in inner(path)} & found.keys() - {room_of(name)}
    return found


def lines_in(paths: Iterable[Path]) -> int:
    """The lines of these files together."""
    return sum(len(path.read_text().splitlines()) for path in paths)


CLAUSE = re.compile(r"(As|Because|How|If|Of|So|That|Those|To|What|When|Where|Whether|Which|Who|Whose)\b")
DEFINITION = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def clauses() -> list[str]:
    """List the docstrings that begin with a clause instead of a verb or a noun: file, line and first line."""
    found = []
    for path in [*FILES.values(), *(path for folder in WORDED for path in sorted((ROOT / folder).rglob("*.py")))]:
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, DEFINITION) else None
            if text and CLAUSE.match(text):
                found.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}")
    return found


def doubled_classes() -> dict[str, list[str]]:
    """Return names that several classes of the package have, and in which files."""
    found: dict[str, list[str]] = {}
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(name)
    return {name: files for name, files in found.items() if len(files) > 1}


def main() -> None:
    """Print a line for each room, the lowest floor first: its floor, lines, files and the lines of its tests."""
    floor_of, tests = floors(needed()), ROOT / "tests"
    print(f"{'room':<16}{'floor':>6}{'files':>7}{'lines':>8}{'tests':>8}")
    for room in sorted(floor_of, key=lambda each: (floor_of[each], each)):
        files = [path for name, path in FILES.items() if room_of(name) == room]
        of_tests = lines_in((tests / room).rglob("*.py")) or ""
        print(f"{room:<16}{floor_of[room]:>6}{len(files):>7}{lines_in(files):>8}{of_tests:>8}")
    code = [path for kind in ("*.h", "*.cpp", "*.cu") for path in (ROOT / "csrc").rglob(kind)]
    print(f"{'all of Python':<16}{'':>6}{len(FILES):>7}{lines_in(FILES.values()):>8}{lines_in(tests.rglob('*.py')):>8}")
    print(f"{'csrc':<16}{'':>6}{len(code):>7}{lines_in(code):>8}")
    print(f"{'docs':<16}{'':>6}{'':>7}{lines_in((ROOT / 'docs').rglob('*.md')):>8}")
    print(f"docstrings that begin with a clause: {len(clauses())}")


if __name__ == "__main__":
    main()
