"""The guide's code, run as it is printed, section by section."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT

GUIDE = ROOT / "docs" / "hooks.md"
BLOCK = re.compile(r"^```(python[^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def sections() -> dict[str, list[tuple[str, str]]]:
    """By title, the code blocks: what is behind the opening quotes, and the code with as many lines before it."""
    found: dict[str, list[tuple[str, str]]] = {"": []}
    title = ""
    text = GUIDE.read_text()
    for line_number, line in enumerate(text.splitlines()):
        if line.startswith("## "):
            title = line[3:]
            found[title] = []
        if line.startswith("```python"):
            kind, code = BLOCK.match(text, sum(map(len, text.splitlines(keepends=True)[:line_number]))).groups()  # type: ignore[union-attr]
            found[title].append((kind, "\n" * (line_number + 1) + code))
    return found


SECTIONS = sections()


@pytest.mark.parametrize("title", [title for title in SECTIONS if title])
def test_the_guides_code_does_what_it_says(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = SECTIONS[""] + SECTIONS[title]
    assert len(blocks) > 1, "a section without code"
    if any(kind == "python demo" for kind, _ in blocks):
        for name in ("matplotlib", "sklearn", "tqdm"):
            pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    with torch.random.fork_rng():
        for _, code in blocks:
            exec(compile(code, str(GUIDE), "exec"), names)
    for picture in tmp_path.glob("*.png"):
        assert (GUIDE.parent / picture.name).exists()
        assert picture.stat().st_size < 150_000


def test_every_line_of_contents_has_its_section() -> None:
    text = GUIDE.read_text()
    anchors = [re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in SECTIONS if title]
    assert re.findall(r"\]\(#([^)]+)\)", text) == anchors
    for path in re.findall(r"\]\(([^)#]+\.png)\)", text):
        assert (GUIDE.parent / path).exists(), path
