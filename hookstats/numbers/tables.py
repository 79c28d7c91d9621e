"""Rows of words as a table: of text, or of HTML for notebooks. Names come from somebody else's model."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_MOST = 60  # rows in a notebook; more make it slow, and nobody reads them there
_LONGEST = 200  # characters of a cell


def align_columns(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Columns under each other: the first `left` to the left, the others to the right; a rule under the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = "  ".join(f"{{:{'<' if i < left else '>'}{width}}}" for i, width in enumerate(widths)).format
    lines = [line(*row) for row in rows]
    lines.insert(1, "-" * (sum(widths) + 2 * len(widths) - 2))
    return lines


def html(caption: str, rows: Sequence[Sequence[str]], left: int, below: Sequence[str] = ()) -> str:
    """The first of them as the head; at most 60 others, and below them how many there are. All text is escaped."""

    def cells(row: Sequence[str], tag: str) -> str:
        sides = ["left" if i < left else "right" for i in range(len(row))]
        texts = map(_cell, row)
        return "".join(f'<{tag} style="text-align:{s}">{text}</{tag}>' for s, text in zip(sides, texts, strict=True))

    head, *body = rows
    shown = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in body[:_MOST])
    more = [f"{len(body) - _MOST} more rows"] if len(body) > _MOST else []
    notes = "".join(f"<div>{_cell(text)}</div>" for text in [*more, *below])
    table = f"<table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>{shown}</tbody></table>" if body else ""
    return f"<div><b>{_cell(caption)}</b>{table}{notes}</div>"


def _cell(text: str) -> str:
    """Return a cell without characters that change how others are shown, such as bidirectional marks."""
    cut = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return escape("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut))
