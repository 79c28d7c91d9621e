"""The book of rules: its pages are the docstrings, the site has them, and `hookstats rule` prints them."""

from __future__ import annotations

import re
import runpy
from types import SimpleNamespace

import pytest

from hookstats.__main__ import main
from hookstats.rules import Rule, book, defaults
from tests.conftest import ROOT

PARTS = ["What else looks like it:", "What to do:", "False-positive guards:"]


@pytest.mark.parametrize(("page", "rule"), zip(book.pages(), defaults(), strict=True), ids=lambda each: each.name)
def test_a_page_has_its_parts_the_name_of_the_findings_and_all_arguments(page: book.RulePage, rule: Rule) -> None:
    assert page == book.page(page.name) == book.page(page.of)
    assert page.name == page.of.replace("_", "-") or page.of[0].isupper()
    starts = [next((i for i, each in enumerate(page.paragraphs) if each.startswith(part)), None) for part in PARTS[:2]]
    assert None not in starts
    assert starts == sorted(starts)  # type: ignore[type-var]
    prose = " ".join(page.paragraphs)
    assert "``" not in prose
    for name in rule.arguments:
        assert f"`{name}`" in prose, name


def test_the_site_has_a_section_for_each_each_with_its_picture() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="rules.md"))
    made = runpy.run_path(str(ROOT / "docs" / "rules_sections.py"))["on_page_markdown"]("Above", page=page, config={})
    assert made.startswith("Above\n| rule | finds |")
    assert re.findall("^### (.*)$", made, re.MULTILINE) == [page.name for page in book.pages()]
    for page in book.pages():
        assert f"(rules/{page.name}.png)" in made
        assert (ROOT / "docs" / "rules" / f"{page.name}.png").read_bytes()[:4] == b"\x89PNG"


def test_links_to_sections_of_rules_lead_to_rules() -> None:
    names = {page.name for page in book.pages()}
    own = {"each-rule", "what-a-jump-of-the-loss-means", "where-nan-began", "a-rule-of-your-own"}
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for anchor in re.findall(r"rules\.md#([\w-]+)", path.read_text()):
            assert anchor in names | own, f"{path.name}: {anchor}"


def test_the_command_prints_a_page_or_all_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rule", "dead-channels"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("dead-channels: A ReLU whose channels are 0 nearly always")
    assert "\n\nWhat to do: lower the learning rate" in printed
    assert "\n\nhookstats.rules.dead_channels(active=0.01, share=0.5" in printed
    assert all(len(line) <= 100 for line in printed.splitlines())
    assert main(["rule"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert [line.split()[0] for line in lines] == [page.name for page in book.pages()]


def test_a_name_that_no_rule_has_is_refused_with_those_that_are_near(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rule", "ded_chanels"]) == 2
    assert "expected the name of a rule, such as dead-channels" in capsys.readouterr().err
