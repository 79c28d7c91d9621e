"""The findings of a rank: ``findings.jsonl``, to which a line is appended for each."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hookstats.records.errors import tell_once
from hookstats.records.files import NO_LINK
from hookstats.rules import Finding

_NAME = "findings.jsonl"


def read_findings(folder: Path, begin: int = 0) -> tuple[list[Finding], int]:
    """Return what whole lines hold from a position on, and the position after them.

    What is no finding is left out, and said once.
    """
    path, found = folder / _NAME, []
    try:
        with open(path, "rb") as file:
            file.seek(begin)
            text = file.read()
    except FileNotFoundError:
        return [], begin
    whole = text[: text.rfind(b"\n") + 1]
    for line in whole.split(b"\n")[:-1]:
        try:
            found.append(Finding.from_json(json.loads(line)))
        except (ValueError, TypeError, RecursionError) as error:
            tell_once(path, f"{path}: expected a finding in each line, and one is left out; {str(error)[:300]}")
    return found, begin + len(whole)


class Findings:
    """The file, to be appended to; the same line of an attempt stands there once."""

    def __init__(self, folder: Path) -> None:
        descriptor = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND | NO_LINK, 0o666)
        self._file = open(descriptor, "ab+")  # noqa: SIM115, for as long as this process lives
        self._file.seek(0)
        text = self._file.read()
        self._file.truncate(text.rfind(b"\n") + 1)  # a line that is torn
        self._lines = set(text.splitlines())
        self.size = self._file.seek(0, os.SEEK_END)

    def add(self, found: list[Finding]) -> int:
        """Append what is new, and return the size of the file, which is that of whole lines."""
        lines = [json.dumps(finding.to_json()).encode() for finding in found]
        new = [line for line in lines if line not in self._lines]
        if new:
            self._lines.update(new)
            self._file.write(b"".join(line + b"\n" for line in new))
            self._file.flush()
            self.size = self._file.tell()
        return self.size
