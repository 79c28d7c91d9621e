"""Adds a section for each rule to the page rules.md of the site: a hook of mkdocs."""

from __future__ import annotations

from typing import Any

from hookstats.rules import book


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return markdown + "\n" + book.markdown() if page.file.src_uri == "rules.md" else markdown
