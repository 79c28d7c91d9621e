"""The code of a page of docs/frameworks."""

from __future__ import annotations

from typing import Any

from tests.conftest import ROOT
from tests.docs import test_pages


def names_of_page(page: str) -> dict[str, Any]:
    """Run the code of docs/frameworks/PAGE.md and return its names."""
    known = test_pages.names()
    for block in test_pages.BLOCK.finditer((ROOT / "docs" / "frameworks" / f"{page}.md").read_text()):
        exec(compile(block["code"], page, "exec"), known)
    return known
