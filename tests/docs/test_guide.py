"""The guide's code, run as it is printed, section by section."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.conftest import ROOT

GUIDE = ROOT / "docs" / "hooks.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def sections() -> dict[str, list[str]]:
    """Return by title the code of each block, with as many lines before it as the page has."""
    found: dict[str, list[str]] = {"": []}
    title = ""
    text = GUIDE.read_text()
    for line_number, line in enumerate(text.splitlines()):
        if line.startswith("## "):
            title = line[3:]
            found[title] = []
        if line.startswith("```python"):
            begin = sum(map(len, text.splitlines(keepends=True)[:line_number]))
            found[title].append("\n" * (line_number + 1) + BLOCK.match(text, begin)[1])  # type: ignore[index]
    return found


SECTIONS = sections()


@pytest.mark.parametrize("title", [title for title in SECTIONS if title])
def test_the_guides_code_does_what_it_says(title: str) -> None:
    blocks = SECTIONS[""] + SECTIONS[title]
    assert len(blocks) > 1, "a section without code"
    names: dict[str, Any] = {"__name__": "__main__"}
    with torch.random.fork_rng():
        for code in blocks:
            exec(compile(code, str(GUIDE), "exec"), names)
