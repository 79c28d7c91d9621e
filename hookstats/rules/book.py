"""The book of rules: what each finds, what else looks like it, and what to do. It is written in their docstrings."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from difflib import get_close_matches
from typing import NamedTuple

from hookstats.rules.judging import defaults


class RulePage(NamedTuple):
    """The page of a rule. ``name``: of its findings. ``arguments``: with their defaults."""

    name: str
    of: str
    arguments: str
    paragraphs: list[str]

    def lines(self, width: int) -> Iterator[str]:
        """Yield the page as text, wrapped at `width` columns."""
        yield from textwrap.wrap(f"{self.name}: {self.paragraphs[0]}", width)
        for paragraph in [*self.paragraphs[1:], f"hookstats.rules.{self.of}({self.arguments})"]:
            yield ""
            yield from textwrap.wrap(paragraph, width, break_on_hyphens=False)


def pages() -> list[RulePage]:
    """Return the pages of all default rules, in their order."""
    found = []
    for rule in defaults():
        of, text = rule.function.__name__, inspect.getdoc(rule.function) or ""
        arguments = ", ".join(f"{key}={value!r}" for key, value in rule.arguments.items())
        paragraphs = [" ".join(each.split()) for each in text.replace("``", "`").split("\n\n")]
        looks = next(i for i, each in enumerate(paragraphs) if each.startswith("What else looks like it: "))
        paragraphs[looks : looks + 1] = re.split(r" (?=What to do: )", paragraphs[looks])
        found.append(RulePage(rule.name, of, arguments, paragraphs))
    return found


def page(name: str) -> RulePage:
    """Return the page of a rule, by the name of its findings or its function. ValueError for others, with near ones."""
    all_pages = pages()
    for each in all_pages:
        if name in (each.name, each.of):
            return each
    names = [each.name for each in all_pages]
    near = get_close_matches(name.lower().replace("_", "-"), names, cutoff=0.4) or names
    raise ValueError(f"expected the name of a rule, such as {', '.join(near[:3])}; got {name!r}")


def markdown() -> str:
    """Return the table of all rules and a section for each, as the site has them: docs/rules_sections.py."""
    rows, sections = ["| rule | finds |", "|---|---|"], []
    for each in pages():
        first, *others = each.paragraphs
        rows.append(f"| [{each.name}](#{each.name}) | {first.replace('|', chr(92) + '|')} |")
        lines = [f"### {each.name}", f"![A run with {each.name}, as the report shows it](rules/{each.name}.png)", first]
        lines += [
            re.sub(r"^(What else looks like it|What to do|False-positive guards):", r"**\1:**", p) for p in others
        ]
        lines.append(f"`hookstats.rules.{each.of}({each.arguments})`")
        sections.append(
            "\n\n".join("\n".join(textwrap.wrap(p, 128, break_on_hyphens=False, break_long_words=False)) for p in lines)
        )
    return "\n\n".join(["\n".join(rows), *sections]) + "\n"
