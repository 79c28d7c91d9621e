"""Faults that are put into the code one at a time, each of which the tests named beside it must notice.

python -m tests.mutations [WORDS]: all of them, or those whose name or file contains one of the words. The tables are
csrc.py and rooms.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault. In C++ the text is an expression, or whole statements that declare nothing: all faults are compiled into
    one build, which an environment variable switches."""

    name: str
    file: str
    text: str  # as it stands in the file, once
    replacement: str
    tests: str  # arguments of pytest


def misplaced(mutant: Mutant, root: Path) -> str | None:
    """Return the row's error; None where its text stands in its file exactly once, and its tests are there."""
    if mutant.file.startswith("csrc/") and (
        mutant.text.startswith(("const ", "auto ")) or (mutant.text.startswith("if ") and mutant.text[-1] != ";")
    ):
        return f"{mutant.file}: {mutant.name}: expected an expression or whole statements, got {mutant.text}"
    files = [root / each for each in re.findall(r"tests/[\w/]+\.py", mutant.tests)]
    text = "cuda_on_cpu " + "".join(path.read_text() for path in files if path.is_file())
    words = set(re.findall(r"\w+", mutant.tests.partition(" -k ")[2])) - {"and", "or", "not"}
    if gone := [*(path for path in files if not path.is_file()), *(word for word in words if word not in text)]:
        return f"{mutant.file}: {mutant.name}: its tests have no {gone[0]}"
    found = (root / mutant.file).read_text().count(mutant.text)
    return None if found == 1 else f"{mutant.file}: {mutant.name}: expected once, found {found} times: {mutant.text}"
